"""Runs on fake tensors: the operators told, to which node gradients belong, guards, and what cannot be run."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchgraft
from torchgraft.analysis.dry_run import DryRun, program_of
from torchgraft.codegen.calling import placeholder_values
from torchgraft.errors import GraftError


def operators(program: torchgraft.GraphModule, *args: object) -> dict[tuple[str, bool], Counter[str]]:
    found: dict[tuple[str, bool], Counter[str]] = {}

    def watch(func: object, *details: object) -> None:
        place = (run.place.node.name if run.place.node else "", run.place.backward)
        found.setdefault(place, Counter())[str(func)] += 1

    run = DryRun(program, args)
    run.tell(watch)
    run.forward()
    run.backward()
    return found


def test_gradients_belong_to_the_node_they_are_of() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ weight).sum()

    x, weight = torch.ones(2, 3), torch.ones(3, 4, requires_grad=True)
    found = operators(torchgraft.symbolic_trace(function), x, weight)
    assert found["matmul", False]["aten.mm.default"] == 1
    assert found["matmul", True]["aten.mm.default"] == 1  # x needs no gradient
    assert "aten.threshold_backward.default" in found["relu", True]
    assert weight.grad is None


def test_gradients_written_in_place_belong_to_the_write() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[0] = x[1].exp()
        return y

    program = torchgraft.capture(function, (torch.ones(2, 3),))
    found = operators(program, torch.ones(2, 3, requires_grad=True))
    backward = {node for node, is_backward in found if is_backward}
    assert any("setitem" in node for node in backward), backward


def test_nothing_is_computed_drawn_or_written() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    state, version = torch.get_rng_state(), model[1].running_mean._version
    run = DryRun(torchgraft.symbolic_trace(model), (torch.full((2, 3), float("nan")),))
    run.forward()
    run.backward(accumulate=True)
    assert torch.equal(state, torch.get_rng_state())
    assert model[1].num_batches_tracked == 0 and model[1].running_mean._version == version
    assert all(parameter.grad is None for parameter in model.parameters())


def test_operators_are_taken_apart_in_inference_mode_too() -> None:
    program = torchgraft.symbolic_trace(nn.Linear(3, 4))
    found: list[str] = []
    with torch.inference_mode():
        run = DryRun(program, (torch.ones(2, 3),))
        run.tell(lambda func, *details: found.append(str(func)))
        run.forward()
    assert "aten.addmm.default" in found


def test_a_guard_on_values_is_taken_to_hold() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if (x.sum() > 0).item():
            return x.exp()
        return x

    program = torchgraft.capture(function, (torch.ones(3),))
    assert DryRun(program, (-torch.ones(3),)).forward().shape == (3,)


def test_a_result_that_depends_on_values_is_refused_with_its_line() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        chosen = torch.nonzero(x)
        return chosen + 1

    program = torchgraft.symbolic_trace(function)
    with pytest.raises(GraftError, match=r"(?s)node 'nonzero' without computing.*chosen = torch.nonzero\(x\)"):
        DryRun(program, (torch.ones(3),)).forward()


def test_a_model_that_reads_values_is_captured_for_real() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(x) if bool(x.sum() > 0) else x

    program = program_of(Reads(), (torch.ones(3),))
    assert any(node.target is F.relu for node in program.graph.nodes)


def test_a_model_is_captured_without_computing() -> None:
    class Huge(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x).relu()

    with torch.device("meta"):
        x = torch.empty(200_000, 200_000)
    assert DryRun(program_of(Huge(), (x,)), (x,)).forward().shape == (200_000, 200_000)


class Everywhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, batch: Any = None, *rest: torch.Tensor, scale: float = 1.0, **named: Any) -> Any:
        y = self.linear(x)
        if batch is not None:
            y = y + batch["bias"][0]
        for factor in (*rest, *named.values()):
            y = y * factor
        return {"result": y * scale}


BATCH = {"bias": [torch.ones(4)]}


@pytest.mark.parametrize(
    "args, kwargs, operations",
    [
        ((torch.ones(2, 3),), {}, 1),
        ((torch.ones(2, 3), BATCH), {}, 2),
        ((torch.ones(2, 3), BATCH, torch.ones(4)), {"scale": 2.0}, 3),
        ((), {"x": torch.ones(2, 3)}, 1),
        ((torch.ones(2, 3),), {"batch": BATCH, "extra": torch.ones(1)}, 3),
    ],
)
def test_arguments_find_their_place(args: Any, kwargs: Any, operations: int) -> None:
    model = Everywhere()
    assert torchgraft.cost(model, args, kwargs=kwargs, backward=False).forward.flops == 48 + 8 * operations
    assert torchgraft.memory(model, args, kwargs=kwargs).peak > 0
    program = torchgraft.capture(model, args, kwargs)
    assert DryRun(program, args, kwargs).forward()["result"].shape == (2, 4)


def test_arguments_that_do_not_fit_are_refused_as_python_does() -> None:
    program = torchgraft.symbolic_trace(lambda x, y, z=3: x + y + z)
    assert list(placeholder_values(program, (1,), {"y": 2}).values()) == [1, 2, 3]
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        placeholder_values(program, (1,))
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        placeholder_values(program, (1, 2), {"unknown": 2})


def test_other_results_than_tensors_have_no_gradient() -> None:
    program = torchgraft.symbolic_trace(lambda x: {"a": (x.shape[0], None), "b": x.argmax()})
    run = DryRun(program, (torch.ones(3, requires_grad=True),))
    run.forward()
    assert run.backward() is False


def test_a_real_run_works_on_copies() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    x = torch.ones(4, 3, requires_grad=True)
    state, version = torch.get_rng_state(), model[1].running_mean._version
    run = DryRun(torchgraft.symbolic_trace(model), (x,), compute=True)
    assert run.forward().shape == (4, 3)
    run.backward(accumulate=True)
    assert torch.equal(state, torch.get_rng_state()) and model[1].running_mean._version == version
    assert x.grad is None and all(parameter.grad is None for parameter in model.parameters())


def test_a_program_whose_shapes_depend_on_values_is_counted_by_computing() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0] * 2

    x = torch.tensor([1.0, -1.0, 2.0])
    with pytest.raises(GraftError, match="give compute=True to run on real tensors"):
        torchgraft.cost(torchgraft.symbolic_trace(function), x)
    assert torchgraft.cost(function, x, compute=True).forward.flops == 3 + 2
    assert torchgraft.memory(function, x, compute=True).peak > 0


def test_a_condition_on_symbolic_sizes_holds() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 7:
            return x.exp()
        return x

    program = torchgraft.capture(function, (torch.ones(3, 2),))
    found = torchgraft.symbolic_shapes(program, {"x": ("n", 2)}, torch.ones(3, 2))
    assert found["exp"] == ("n", 2)


def test_a_gradient_that_cannot_be_run_names_its_node() -> None:
    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("there is none")

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(NoGradient.apply(torch.sin(x)))

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="there is none") as error:
        torchgraft.cost(function, x)
    (note,) = error.value.__notes__
    assert "the gradient of node 'no_gradient' at " in note and "NoGradient.apply(torch.sin(x))" in note
    assert torchgraft.cost(function, x, backward=False).forward.flops > 0


def test_a_check_of_a_value_inside_a_part_of_a_program_is_taken_to_hold() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        if (y.sum() > 0).item():
            y = y @ y
        return y + 1

    program = torchgraft.capture(model, torch.ones(4, 4))
    parts = torchgraft.split(program, torchgraft.Stages(2))
    whole = torchgraft.cost(program, torch.ones(4, 4)).forward.flops
    assert whole > 0 and torchgraft.cost(parts.module, torch.ones(4, 4)).forward.flops == whole


class ReadsValues(nn.Module):
    def forward(self, x):
        return x.reshape(int(x.sum()), -1)


@pytest.mark.parametrize("look", [torchgraft.simulate, torchgraft.memory, torchgraft.cost])
def test_values_that_the_meta_device_does_not_hold_are_said(look):
    with pytest.raises(GraftError) as error:
        look(ReadsValues(), torch.empty(4, 4, device="meta"))
    assert "values of a tensor" in str(error.value) and '"return x.reshape(int(x.sum()), -1)"' in str(error.value)
