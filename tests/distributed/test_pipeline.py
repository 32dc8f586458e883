"""Stages of a program, one after the other in one process: they compute what the program computes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchgraft
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


class Steered(nn.Module):
    """What inputs and modes steer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any, doubled: bool = True) -> Any:
        y = self.one(x).relu()
        if doubled:
            y = y * 2
        if self.training:
            y = y + 1
        return self.two(y)


def test_guards_of_inputs_and_modes_hold_in_the_stages() -> None:
    model, x = Steered().eval(), torch.randn(3, 4)
    plan = pipeline(model, (x, True), stages=2)
    assert plan.constants == {"doubled"}
    assert torch.equal(run_stages(plan, x, doubled=True), model(x, True))
    with pytest.raises(GuardError, match="expected True for 'doubled', got False"):
        run_stages(plan, x, doubled=False)
    for stage in plan.stages:
        stage.train()
    with pytest.raises(GuardError, match="captured in evaluation mode and the module is now in training mode"):
        run_stages(plan, x, doubled=True)


@pytest.mark.parametrize("level", ["module", "function"])
def test_every_module_keeps_its_own_mode(level: str) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 4), nn.BatchNorm1d(4))
            self.last = Steered().eval()

        def forward(self, x: Any) -> Any:
            return self.last(nn.functional.dropout(self.inner(x), 0.5, self.last.training))

    torch.manual_seed(0)
    model, x = Frozen(), torch.randn(3, 4)
    expected_model = copy.deepcopy(model)
    modes = [module.training for module in model.modules()]
    plan = pipeline(torchgraft.capture(model, x, level=level), x, stages=3)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(run_stages(plan, x), expected_model(x))
    for name, buffer in expected_model.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name]), name
    for stage in plan.stages:
        stage.eval()
    assert torch.equal(run_stages(plan, x), expected_model.eval()(x))
    for stage in plan.stages:
        stage.train()
    with pytest.raises(GuardError, match="now in training mode"):
        run_stages(plan, x)


@pytest.mark.parametrize("cost", ["flops", "simulated", "measured"])
@pytest.mark.parametrize("gradients", [True, False])
def test_every_cost_leaves_everything_as_it_was(cost: str, gradients: bool) -> None:
    class Asking(nn.Module):
        """Asks whether gradients are on, writes its input and its buffers, and draws random numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: Any, *, factor: Any) -> Any:
            x.add_(1)
            y = nn.functional.dropout(self.norm(self.one(x)), 0.5)
            return self.two(y * 3 if torch.is_grad_enabled() else y) * factor

    model, x, factor = Asking(), torch.zeros(6, 4), torch.ones(6, 4)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with torch.set_grad_enabled(gradients):
        plan = pipeline(model, x, {"factor": factor}, stages=2, cost=cost)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(x, torch.zeros(6, 4))
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        reference = copy.deepcopy(model)
        torch.manual_seed(1)
        found = run_stages(plan, x.clone(), factor)
        torch.manual_seed(1)
        assert torch.equal(found, reference(x.clone(), factor=factor))
    with torch.set_grad_enabled(not gradients), pytest.raises(GuardError, match="is_grad_enabled"):
        run_stages(plan, x, factor)


def test_inputs_in_structures_are_divided_and_numbers_are_not() -> None:
    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, inputs: Any, scale: Any, **more: Any) -> Any:
            return self.two(self.one(inputs["x"]) * inputs["times"] * scale) + more["mask"]

    model, x, mask, scale = Structured(), torch.randn(3, 4), torch.randn(3, 4), torch.tensor(2.0)
    plan = pipeline(model, ({"x": x, "times": 3}, scale), {"mask": mask}, stages=2)
    assert plan.constants == {"scale"}
    assert [tuple(example.shape) for example in plan.examples[0]] == [(3, 4), (1,), (3, 4)]
    found = run_stages(plan, x, torch.tensor([3]), mask, scale=scale)
    assert torch.equal(found, model({"x": x, "times": 3}, scale, mask=mask))
    with pytest.raises(GraphError, match="'inputs' has tensors of one number beside batches"):
        pipeline(model, ({"x": x, "times": torch.tensor(3)}, scale), {"mask": mask}, stages=2)


def test_sizes_that_depend_on_values_within_a_stage() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 3)
            self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x: Any) -> Any:
            chosen, result = self.gate(x).argmax(-1), torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = torch.where(chosen == number)[0]
                result = result.index_add(0, rows, expert(x[rows]))
            return result

    torch.manual_seed(0)
    model = nn.Sequential(Experts(), nn.Linear(4, 4), Experts())
    plan = pipeline(model, torch.randn(9, 4), stages=2)
    x = torch.randn(9, 4)
    assert torch.equal(run_stages(plan, x), model(x))


def test_a_stage_sends_nothing_but_what_was_planned() -> None:
    plan = pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4), stages=2)
    plan.stages[0].sends = plan.examples[1]
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(GraphError) as caught:
        plan.stages[0](torch.randn(2, 4))
    assert str(caught.value).splitlines()[0] == (
        "'_0' goes to another stage as bfloat16 of (2, 4), and the pipeline was planned for float32 of (2, 4)"
    )


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
    stage.sends = ()
    assert stage(x)[0].is_contiguous() and torch.equal(stage(x)[0], model(x))


def test_stages_and_processes_that_cannot_be():
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(GraphError, match="expected a whole number of stages, got '2'"):
        pipeline(layers, torch.ones(1, 2), stages="2")
    plan = pipeline(layers, torch.ones(1, 2), stages=2)
    with pytest.raises(GraphError, match="there is no process 5 of 2: they are numbered from 0"):
        plan.of_rank(5, 2)
