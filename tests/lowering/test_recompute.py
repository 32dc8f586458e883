"""Budgets of memory for what the backward needs: the same results and gradients, bit for bit, from fewer bytes that are kept."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchgraft
from torchgraft import zoo
from torchgraft.errors import GraphError, PassError
from torchgraft.lowering.minimum_cut import Network
from torchgraft.lowering.recompute import _chosen, _Values
from torchgraft.passes import MergeCommon, Pipeline, Recompute


def loss_of(y: Any) -> Any:
    return (y[0] if isinstance(y, tuple) else y).square().mean()


def small() -> tuple[nn.Module, Any]:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(144, 5), nn.GELU()), torch.randn(2, 3, 8, 8)


def from_zoo(name: str) -> tuple[nn.Module, Any]:
    return zoo.create(name), zoo.example_inputs(name)


def least_of(error: Any) -> int:
    found = re.search(r"\((\d+) bytes\) must be kept", str(error.value))
    assert found is not None
    return int(found[1])


def kept_for_real(programs: Any, args: Any) -> int:
    primals = [tensor.detach() for tensor in programs.primals(*args)]
    values = programs.forward(*primals)
    entries = programs.forward.graph.output_node().meta["entries"]
    saved = [v for e, v in zip(entries, values, strict=True) if e.kind == "saved" and isinstance(v, torch.Tensor)]
    there = {tensor.untyped_storage()._cdata for tensor in primals}
    memory = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    return sum(size for key, size in memory.items() if key not in there)


def stepped(programs: Any, args: Any) -> Any:
    torch.manual_seed(3)
    return programs.run(*args)


def same(one: Any, other: Any) -> bool:
    pairs = [(one.gradients[name], other.gradients[name]) for name in one.gradients]
    return torch.equal(one.results, other.results) and all(a is b is None or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", ["small", "mlp", "resnet18", "transformer", "deep_recommender"])
def test_the_same_from_fewer_bytes(name: str) -> None:
    torch.manual_seed(0)
    model, example = small() if name == "small" else from_zoo(name)
    args = example if isinstance(example, tuple) else (example,)
    plain = torchgraft.capture_training(copy.deepcopy(model), args, loss=loss_of)
    assert plain.saved_bytes == kept_for_real(plain, args)
    expected = stepped(plain, args)
    with pytest.raises(GraphError) as error:
        torchgraft.capture_training(model, args, loss=loss_of, memory_budget=-1)
    least = least_of(error)
    for budget in (plain.saved_bytes, (plain.saved_bytes * 3 + least) // 4, (plain.saved_bytes + least) // 2, least):
        programs = torchgraft.capture_training(copy.deepcopy(model), args, loss=loss_of, memory_budget=budget)
        assert programs.saved_bytes == kept_for_real(programs, args) <= budget
        assert same(stepped(programs, args), expected)
        draws = [
            node
            for node in programs.joint.graph.nodes
            if "bernoulli" in str(node.target) or "dropout" in str(node.target)
        ]
        assert all("recomputes" not in node.meta for node in draws)


def test_buffers_are_written_once() -> None:
    model, x = small()
    again = copy.deepcopy(model)
    torchgraft.capture_training(model, x, loss=loss_of).run(x)
    programs = torchgraft.capture_training(again, x, loss=loss_of, memory_budget=1300)
    programs.run(x)
    assert any(node.meta.get("recomputes") == "native_batch_norm" for node in programs.joint.graph.nodes)
    assert all(map(torch.equal, model.buffers(), again.buffers()))


def test_other_batches() -> None:
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.GELU())])
    plain = torchgraft.capture_training(model, torch.randn(4, 8), loss=loss_of)
    programs = torchgraft.capture_training(model, torch.randn(4, 8), loss=loss_of, memory_budget=plain.saved_bytes // 2)
    x = torch.randn(7, 8)
    assert same(programs.run(x), plain.run(x))


class Written(nn.Module):
    """Values that are written after they were used, and copies of them."""

    def forward(self, x: Any, w: Any) -> Any:
        y = (x * w).sin()
        z = y.clone().cos()
        z[0] = 0.0
        u = (z * w).cos()
        b = torch.zeros_like(u)
        b.add_(u)
        c = b.tanh()
        b.mul_(2.0)
        return (c * w).sigmoid() + b.sin()


def test_what_is_written_is_not_repeated() -> None:
    x, w = torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)
    plain = torchgraft.capture_training(Written(), (x, w), loss=loss_of)
    expected = plain.run(x, w)
    with pytest.raises(GraphError) as error:
        torchgraft.capture_training(Written(), (x, w), loss=loss_of, memory_budget=-1)
    for budget in range(least_of(error), plain.saved_bytes, 64):
        programs = torchgraft.capture_training(Written(), (x, w), loss=loss_of, memory_budget=budget)
        assert same(programs.run(x, w), expected)
        assert kept_for_real(programs, (x, w)) <= budget


def test_the_pass() -> None:
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Sigmoid())])
    joint = torchgraft.capture(model, torch.randn(2, 8), level="joint")
    names = [node.name for node in joint.graph.nodes]
    assert Recompute()(joint).changes == 0
    Pipeline("recompute{memory_budget=130}, merge-common, remove-dead-code")(joint)
    again = [node for node in joint.graph.nodes if "recomputes" in node.meta]
    assert again
    assert all(node.meta["recomputes"] in names for node in again)
    assert Recompute(memory_budget=130)(joint).changes == 0
    with pytest.raises(PassError, match="memory_budget is a number of bytes, not -1"):
        Recompute(memory_budget=-1)(joint)
    with pytest.raises(PassError, match="it is no program of forward and backward; make one with"):
        Recompute(memory_budget=100)(torchgraft.symbolic_trace(model))


def test_merging_does_not_undo_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    joint = torchgraft.capture(model, torch.randn(2, 8), level="joint")
    count = Recompute(memory_budget=100)(joint).changes
    MergeCommon()(joint)
    assert sum("recomputes" in node.meta for node in joint.graph.nodes) == count


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_small_programs_beside_every_choice(seed: int) -> None:
    """The least number of bytes is the least there is, and more memory is never worse."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, 100, (6, 3), generator=generator).tolist()

    def model(x: Any, w: Any) -> Any:
        values = [x * w]
        for first, second, kind in picks:
            a, b = values[first % len(values)], values[second % len(values)]
            made = [a.exp(), a * b, torch.cat([a, b])[: a.shape[0]].sin(), a.sum(0, keepdim=True) + b, (a @ b.t()) @ a]
            values.append(made[kind % 5])
        return values[-1] + values[-2]

    args = torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator).requires_grad_()
    joint = torchgraft.capture(lambda *args: loss_of(model(*args)), args, level="joint")
    values = _Values(joint)
    kept = [node for node in values.work if values.can_be_kept(node)]
    every = (
        [values.choice(c) for n in range(len(kept) + 1) for c in itertools.combinations(kept, n)]
        if len(kept) < 12
        else []
    )
    least = values.cut(40)
    assert not every or least.bytes == min(choice.bytes for choice in every)
    work = None
    for budget in range(least.bytes, values.direct.bytes + 1, 48):
        found = _chosen(values, budget)
        assert found.bytes <= budget
        assert work is None or found.work <= work * 1.5
        work = found.work
        best = min((choice.work for choice in every if choice.bytes <= budget), default=None)
        assert best is None or found.work >= best


def test_cuts_of_random_networks() -> None:
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        arcs = torch.randint(0, 6, (12, 2), generator=generator).tolist()
        sizes = torch.randint(0, 9, (12,), generator=generator).tolist()
        network = Network(6)
        for (start, end), size in zip(arcs, sizes, strict=True):
            network.join(start, end, size)

        def weight(side: Any, arcs: Any = arcs, sizes: Any = sizes) -> int:
            pairs = zip(arcs, sizes, strict=True)
            return sum(size for (start, end), size in pairs if start in side and end not in side)

        found = network.side_of(0, 5)
        sides = [{0, *rest} for count in range(5) for rest in itertools.combinations(range(1, 5), count)]
        assert weight(found) == min(map(weight, sides))
