"""Stages of a program, one after the other in one process: they compute what the program computes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchgraft import zoo
from torchgraft.distributed import pipeline
from torchgraft.errors import GraphError, GuardError
from torchgraft.splitting import parameter_bytes
from torchgraft.splitting.balance import balanced_cuts, reach_within


def run_stages(plan: Any, *tensors: Any, **constants: Any) -> Any:
    plan.stages[0].constants = constants
    for stage in plan.stages:
        tensors = stage(*tensors)
    return plan.result_of(tensors)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.one, self.two = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        y = self.one(x).relu() + self.shift
        z = self.two(y) + x - self.shift
        return z @ self.embedding.weight.t(), {"rows": z.reshape(x.shape[0], 2, 2)}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_skips_tied_weights_buffers_and_structures(stages: int) -> None:
    model = Tied()
    plan = pipeline(model, torch.tensor([1, 2]), stages=stages)
    ids = torch.tensor([3, 4, 5])
    logits, more = run_stages(plan, ids)
    expected, other = model(ids)
    assert torch.equal(logits, expected)
    assert torch.equal(more["rows"], other["rows"])
    names = {name for one in plan.names for name in one.values()}
    assert names == {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    if stages > 1:
        assert list(plan.tied()) == ["embedding.weight"]
        assert plan.tied()["embedding.weight"][0] == 0
    # The weights are those of the model, not copies.
    held = {id(parameter) for stage in plan.stages for parameter in stage.parameters()}
    assert held == {id(parameter) for parameter in model.parameters()}


@pytest.mark.parametrize("name", ["mlp", "resnet18", "transformer", "deep_recommender"])
@pytest.mark.parametrize("cost", ["flops", "simulated", "measured", parameter_bytes])
def test_models_of_the_zoo(name: str, cost: Any) -> None:
    model, example = zoo.create(name).eval(), zoo.example_inputs(name)
    plan = pipeline(model, example, stages=3, cost=cost)
    assert torch.equal(run_stages(plan, *example), model(*example))
    assert len(plan.rows()) == 3
    assert "in 3 stages" in str(plan)


def test_modes_reach_the_stages() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    plan = pipeline(model, torch.randn(3, 4), stages=2)
    assert all(stage.training for stage in plan.stages)
    before = model[1].running_mean.clone()
    pipeline(model, torch.randn(3, 4), stages=2)
    assert torch.equal(model[1].running_mean, before)  # planning computes nothing


def test_numbers_travel_as_numbers() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any, factor: float) -> Any:
            rows = x.shape[0]
            y = self.two(torch.relu(self.one(x)))
            return y.reshape(rows * 2, 2) * factor

    model = Counting()
    plan = pipeline(model, (torch.randn(3, 4), 2.0), stages=2, cost=parameter_bytes)
    assert plan.constants == {"factor"}
    x = torch.randn(5, 4)
    assert torch.equal(run_stages(plan, x, factor=2.0), model(x, 2.0))


def test_guards_hold_in_their_stage() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            y = self.one(x)
            if y.sum() > 1e9:
                return y
            return self.two(y)

    model = Branching()
    plan = pipeline(model, torch.randn(3, 4), stages=2)
    x = torch.randn(3, 4)
    assert torch.equal(run_stages(plan, x), model(x))
    with torch.no_grad():
        model.one.bias.fill_(1e12)
    with pytest.raises(GuardError):
        run_stages(plan, x)


def test_wrong_requests() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    with pytest.raises(GraphError, match="cannot split into 9 stages"):
        pipeline(model, x, stages=9)
    with pytest.raises(GraphError, match="no cost is called 'magic'"):
        pipeline(model, x, stages=2, cost="magic")
    with pytest.raises(GraphError, match="'_0' alone takes 80 B of weights, more than the limit of 10 B"):
        pipeline(model, x, stages=2, memory_limit=10)
    three = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(GraphError, match="the whole has 240 B\n  ask for 3 stages or more"):
        pipeline(three, x, stages=2, memory_limit=100)
    with pytest.raises(GraphError, match="the program has no input 'mask'"):
        pipeline(model, x, stages=2, constants=["mask"])
    plan = pipeline(model, x, stages=2)
    with pytest.raises(GraphError, match="no schedule is called 'fast'"):
        plan.schedule("fast", microbatches=2)
    with pytest.raises(GraphError, match="torch.distributed is not initialized"):
        plan.schedule("gpipe", microbatches=2)
    with pytest.raises(GraphError, match="2 stages cannot be shared by 3 processes"):
        plan.of_rank(0, 3)


def test_work_is_balanced_within_a_limit_of_memory() -> None:
    class Uneven(nn.Module):
        """Wide layers that do little, and narrow ones that do much, one of them twice."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(100, 8)
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])
            self.head = nn.Linear(8, 100)

        def forward(self, ids: Any) -> Any:
            x = self.words(ids)
            for layer in [*self.layers, self.layers[-1]]:
                x = layer(x).tanh()
            return self.head(x)

    model, ids = Uneven(), torch.randint(0, 100, (3, 7))
    work = {"words": 1.0, "head": 20.0}

    def cost(node: Any) -> float:
        return work.get(str(node.target).split(".")[0], 10.0)

    free = pipeline(model, ids, stages=3, cost=cost)
    assert max(free.parameter_bytes) > 3700
    within = pipeline(model, ids, stages=3, cost=cost, memory_limit=3700)
    assert max(within.parameter_bytes) <= 3700
    assert max(within.costs) >= max(free.costs)
    assert torch.equal(run_stages(within, ids), model(ids))


@settings(max_examples=100, deadline=None)
@given(
    items=st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 5))), min_size=2, max_size=8),
    count=st.integers(1, 4),
    limit=st.integers(4, 20),
)
def test_cuts_within_a_limit_are_the_best(items: Any, count: int, limit: int) -> None:
    weights = [weight for weight, _ in items]
    sizes = [{key: key + 1 for key in keys} for _, keys in items]
    count = min(count, len(items))

    def stretches(cuts: Any) -> list[range]:
        return [range(start, end) for start, end in itertools.pairwise([0, *cuts, len(items)])]

    def fits(stretch: range) -> bool:
        return sum({key: size for place in stretch for key, size in sizes[place].items()}.values()) <= limit

    def heaviest(cuts: Any) -> int:
        return max(sum(weights[place] for place in stretch) for stretch in stretches(cuts))

    every = [
        cuts for cuts in itertools.combinations(range(1, len(items)), count - 1) if all(map(fits, stretches(cuts)))
    ]
    reach = reach_within(sizes, limit)
    if every:
        for crossing in (None, [place * 7 % 5 for place in range(len(items) + 1)]):
            cuts = balanced_cuts(weights, count, crossing, reach)
            assert all(map(fits, stretches(cuts)))
            assert heaviest(cuts) == min(map(heaviest, every))


def test_a_device_that_a_later_stage_needs() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            kind = x.device
            y = self.one(x)
            return self.two(y).to(kind)

    x = torch.randn(2, 4)
    plan = pipeline(Odd(), x, stages=2)
    assert torch.equal(run_stages(plan, x), plan.program(x))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), stages=st.integers(1, 5))
def test_random_chains_with_skips(seed: int, stages: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(6)])
            self.picks = torch.randint(0, 100, (6, 2), generator=generator).tolist()

        def forward(self, x: Any) -> Any:
            values = [x]
            for layer, (first, second) in zip(self.layers, self.picks, strict=True):
                values.append(layer(values[first % len(values)]) + values[second % len(values)])
            return values[-1], values[len(values) // 2]

    model = Model()
    x = torch.randn(2, 3)
    plan = pipeline(model, x, stages=stages)
    for ours, theirs in zip(run_stages(plan, x), model(x), strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_sent_to_another_process_is_in_one_piece() -> None:
    class Turned(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).t()

    model, x = Turned(4, 6), torch.randn(3, 4)
    (stage,) = pipeline(model, x, stages=1).stages
    assert not stage(x)[0].is_contiguous()
    stage.sends = True
    assert stage(x)[0].is_contiguous() and torch.equal(stage(x)[0], model(x))
