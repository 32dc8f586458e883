"""Pipelines in two and four real processes: outputs, gradients and buffers are those of one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from torch import nn

from tests.schedule.processes import run_processes
from torchgraft.distributed import pipeline
from torchgraft.errors import GraphError

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MICROBATCHES = 4


class Skipping(nn.Module):
    """Connections that skip stages, tied weights, buffers, a number that flows, several inputs, a structure as result."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(8)])
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, ids: Any, extra: Any, factor: float = 2.0) -> Any:
        x = first = self.embedding(ids) + extra
        count = x.shape[0]
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + (first * self.scale if number % 3 == 2 else x)
        x = self.norm(x) * factor
        return {"logits": x @ self.embedding.weight.t(), "hidden": x.reshape(count, 2, 4)}


def loss_of(result: Any, target: Any) -> Any:
    return nn.functional.cross_entropy(result["logits"], target) + result["hidden"].square().mean()


def made() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = Skipping().double()
    ids, extra, target = torch.randint(0, 12, (16,)), torch.randn(16, 8).double(), torch.randint(0, 12, (16,))
    return model, (ids, extra), target


def _trained(rank: int, count: int, ways: list[tuple[str, int]]) -> Any:
    distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=120))
    answers = [_one_step(kind, stages) for kind, stages in ways]
    distributed.barrier()
    distributed.destroy_process_group()
    return answers


def _one_step(kind: str, stages: int) -> Any:
    model, inputs, target = made()
    example = tuple(value[:4] for value in inputs)
    plan = pipeline(model, example, stages=stages)
    run = plan.schedule(kind, microbatches=MICROBATCHES, loss=loss_of)
    result, losses = run.step(*inputs, target=target)
    gradients = {}
    buffers = {}
    for number in run.numbers:
        stage, names = plan.stages[number], plan.names[number]
        for path, parameter in stage.named_parameters(remove_duplicate=False):
            gradients[names[path]] = None if parameter.grad is None else parameter.grad.clone()
        for path, buffer in stage.named_buffers():
            buffers[names[path]] = buffer.clone()
    logits = None if result is None else result["logits"].detach()
    return gradients, buffers, logits, [loss.detach() for loss in losses]


def expected() -> tuple[nn.Module, Any, Any]:
    model, inputs, target = made()
    results, losses = [], []
    for chunk, wanted in zip(
        zip(*[value.chunk(MICROBATCHES) for value in inputs], strict=True), target.chunk(MICROBATCHES), strict=True
    ):
        result = model(*chunk)
        loss = loss_of(result, wanted)
        loss.backward()
        results.append(result["logits"].detach())
        losses.append(loss.detach())
    for parameter in model.parameters():
        parameter.grad /= MICROBATCHES  # type: ignore[operator]
    return model, torch.cat(results), losses


@pytest.mark.parametrize(
    ("count", "ways"), [(2, [("gpipe", 2), ("1f1b", 2), ("interleaved", 4)]), (4, [("gpipe", 4), ("1f1b", 4)])]
)
def test_training_is_that_of_one_process(count: int, ways: list[tuple[str, int]]) -> None:
    found = run_processes(_trained, count, ways)
    assert not any(isinstance(answer, str) for answer in found), "\n".join(map(str, found))
    model, logits, losses = expected()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for way in range(len(ways)):
        seen = set()
        for gradients, others, result, found_losses in [answers[way] for answers in found]:
            for name, gradient in gradients.items():
                seen.add(name)
                torch.testing.assert_close(gradient, parameters[name].grad, rtol=1e-13, atol=1e-15)
            for name, buffer in others.items():
                torch.testing.assert_close(buffer, buffers[name], rtol=0, atol=0)
            if result is not None:
                assert torch.equal(result, logits)
                assert all(map(torch.equal, found_losses, losses))
        assert seen == set(parameters)


class Asking(nn.Module):
    """Inputs in a structure, with a number in it, and a branch on a value in the second half."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, inputs: Any, scale: Any, **more: Any) -> Any:
        x = inputs["x"] * inputs["times"]
        for layer in self.layers:
            x = layer(x) * scale
        if x.abs().sum() > 1e6:
            return {"result": x}
        return {"result": x + more["shift"]}


def _asked(rank: int, count: int) -> Any:
    distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model, x, shift, scale = Asking(), torch.randn(8, 8), torch.randn(8, 8), torch.tensor(2.0)
    answers: list[Any] = []
    example: Any = (({"x": x[:2], "times": 3}, scale), {"shift": shift[:2]})
    with pytest.raises(GraphError, match="process 1 has cut another program than process 0"):
        pipeline(
            model,
            *example,
            stages=count,
            cost=lambda node: float(node.name in (f"layers_{2 * rank}", f"layers_{2 * rank + 1}")),
        ).schedule("gpipe", microbatches=4)
    plan = pipeline(model, *example, stages=count, cost="measured")
    result, _ = plan.schedule("1f1b", microbatches=4).step({"x": x, "times": 3}, scale, shift=shift)
    answers.append(plan.costs)
    answers.append(
        None
        if result is None
        else torch.equal(result["result"], model({"x": x, "times": 3}, scale, shift=shift)["result"])
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = pipeline(model, *example, stages=count)
        result, _ = plan.schedule("gpipe", microbatches=4).step({"x": x, "times": 3}, scale, shift=shift)
        expected = torch.cat(
            [
                model({"x": part, "times": 3}, scale, shift=more)["result"]
                for part, more in zip(x.chunk(4), shift.chunk(4), strict=True)
            ]
        )
    answers.append(None if result is None else torch.equal(result["result"], expected))
    plan = pipeline(model, *example, stages=count)
    try:
        plan.schedule("gpipe", microbatches=4).step({"x": x * 1e9, "times": 3}, scale, shift=shift)
    except Exception as error:
        answers += [type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])]
    return answers


def test_structures_autocast_measured_costs_and_a_guard_in_a_later_stage() -> None:
    first, last = run_processes(_asked, 2)
    assert not isinstance(first, str) and not isinstance(last, str), f"{first}\n{last}"
    assert first[0] == last[0]
    assert last[1:3] == [True, True]
    assert last[3] == "GuardError"
    assert "test_pipeline_processes.py" in last[4] and "if x.abs().sum() > 1e6:" in last[4]
    assert "this was a step of stage 1 of 2" in last[4]
    assert "this was a step of stage 0 of 2" in first[4]
