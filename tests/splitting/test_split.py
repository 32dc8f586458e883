"""`split`: what goes where, and why; hostile programs (shared weights, buffers, guards, regions, tuples, nothing to split)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchgraft
from torchgraft.ir import guards
from torchgraft.splitting import Size, Stages, Supported, split
from torchgraft.zoo.resnet import resnet18


def test_report() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(torch.relu(torch.sin(x)) + 1)

    found = split(torchgraft.symbolic_trace(program), by=lambda node: node.name != "relu" or "no kernel")
    text = str(found)
    assert text.splitlines()[0] == "3 parts, 4 nodes"
    assert "submod_1: 1 node, not supported\n  takes sin; gives relu\n" in text
    assert "  relu: not supported: no kernel; needs the value of 'sin' of the part before  (test_split.py:" in text
    assert [part.supported for part in found.parts] == [True, False, True]
    assert found.part_of("add").name == "submod_2"
    with pytest.raises(torchgraft.GraphError, match="no part has a node 'x'"):
        found.part_of("x")


def test_the_largest_regions_are_not_cut_by_side_branches() -> None:
    """Two supported branches around an unsupported one: the first can run before, the last after; nothing runs in between."""

    def program(x: torch.Tensor) -> torch.Tensor:
        left = torch.sin(torch.sin(x))
        middle = torch.relu(x)
        right = torch.sin(torch.sin(x + 1))
        return torch.sin(left + middle) + right

    found = split(torchgraft.symbolic_trace(program), by=lambda node: node.name != "relu")
    assert [part.supported for part in found.parts] in ([False, True], [True, False, True])
    assert sum(part.supported is True for part in found.parts) == 1


def test_islands_are_given_back() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(torch.sin(torch.relu(x)))
        return torch.relu(torch.sin(torch.cos(torch.sin(x))))

    module = torchgraft.symbolic_trace(program)
    found = split(module, by=lambda node: node.name != "relu" and "relu" not in node.name, min_size=2)
    assert [part.supported for part in found.parts] == [False, True, False]
    assert found.part_of("sin").supported is False
    assert found.reasons["sin"].startswith("supported, but given back: its part would have 1 of at least 2 nodes")
    assert torch.equal(found.module(torch.ones(2)), program(torch.ones(2)))


def test_a_small_region_waits_for_a_later_one() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        a = torch.sin(x)
        b = torch.relu(torch.sin(torch.sin(torch.relu(x))))
        return torch.cos(torch.cos(a) + b)

    found = split(torchgraft.symbolic_trace(program), by=lambda node: "relu" not in node.name, min_size=3)
    assert sum(part.supported is True for part in found.parts) == 1
    assert found.part_of("cos").supported is True
    assert torch.equal(found.module(torch.ones(2)), program(torch.ones(2)))


def test_results_are_taken_apart_where_they_are_made() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        first, second = torch.split(x, 2)
        first = torch.relu(first)
        return torch.sin(first) + second

    found = split(torchgraft.symbolic_trace(program), by=Size(3))
    assert found.part_of("getitem_1") is found.part_of("split")
    named = split(
        torchgraft.symbolic_trace(lambda x: torch.sort(torch.sin(x)).values + 1), by=lambda node: node.name != "sort"
    )
    assert named.part_of("getattr_1") is named.part_of("sort")
    assert found.reasons["getitem_1"] == "goes with 'split': it takes the result apart"
    x = torch.randn(4)
    assert torch.equal(found.module(x), program(x))


class State(nn.Module):
    """Everything that has to find its home."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.shift = nn.Parameter(torch.zeros(4))
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("secret", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x) * self.scale
        self.count.add_(1)
        x = self.norm(self.two(x)) + self.shift
        x = functional.dropout(x, 0.5, self.training)
        x = self.one(x) * self.scale * self.secret
        return x + self.count + self.norm.running_mean


@pytest.mark.parametrize(
    "by",
    [Size(1), Size(3), Size(100), Stages(3), lambda node: node.op == "call_module"],
    ids=lambda by: getattr(by, "__name__", str(by)),
)
@pytest.mark.parametrize("training", [True, False])
def test_state_finds_its_home(by: Any, training: bool) -> None:
    model = State().train(training)
    module = torchgraft.symbolic_trace(model)
    found = split(module, by=by)
    x = torch.randn(5, 4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    results, gradients, states = [], [], []
    for run in (model, found.module):
        model.load_state_dict(state)
        model.zero_grad()
        torch.manual_seed(0)
        results.append(run(x))
        results[-1].sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(states[0], states[1])
    assert len(list(found.module.parameters())) == len(list(model.parameters()))
    assert sum("secret" in name for name in found.module.state_dict()) == 0


def test_training_mode_reaches_the_parts() -> None:
    model = State()
    found = split(torchgraft.symbolic_trace(model), by=Size(2))
    x = torch.randn(5, 4)
    found.module.eval()
    model.eval()
    expected = model(x)
    model.count.sub_(1)
    torch.testing.assert_close(found.module(x), expected)


def test_a_moved_module_keeps_one_tensor_in_one_place() -> None:
    """A buffer in two parts would become two buffers when the module is moved, and a write would reach only one."""
    found = split(torchgraft.symbolic_trace(State()), by=Size(1)).module.double()
    x = torch.randn(5, 4, dtype=torch.float64)
    model = State().double()
    model.load_state_dict(
        {name: found.get_parameter(name) if False else value for name, value in model.state_dict().items()}
    )
    before = [value for name, value in found.state_dict().items() if "count" in name]
    assert len(before) == 1
    found(x)
    assert before[0].item() == 1


def test_shared_weights_are_said() -> None:
    found = split(torchgraft.symbolic_trace(State()), by=Size(2))
    assert list(found.shared()) == ["one"]
    assert "weights of 'one' are shared by submod_0 and submod_" in str(found)
    first, last = found.shared()["one"][0], found.shared()["one"][-1]
    assert found.module.get_submodule(f"{first}.one") is found.module.get_submodule(f"{last}.one")


def test_guards_go_with_what_they_check() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.sin(x)
            z = torch.cos(y)
            if y.sum() > 0:
                return torch.relu(z)
            return z

    model = Model()
    module = torchgraft.capture(model, (torch.ones(3),))
    assert module.guards
    found = split(module, by=Size(2))
    x = torch.ones(3)
    torch.testing.assert_close(found.module(x), model(x))
    with pytest.raises(torchgraft.GuardError):
        found.module(-x)
    assert [node.target for node in found.module.graph.nodes][:2] == ["x", guards.check_inputs]
    for part in found.parts:
        for node in part.module.graph.nodes:
            if guards.is_guard(node.target):
                assert all(source.op != "placeholder" for source in node.all_input_nodes)


@pytest.mark.parametrize("level", ["module", "function", "aten", "core_aten"])
def test_every_level_of_capture(level: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)).eval()
    x = torch.randn(2, 1, 5, 5)
    module = torchgraft.capture(model, (x,), level=level)
    for by in (Size(1), Size(2), lambda node: "relu" not in node.name):
        found = split(module, by=by)
        torch.testing.assert_close(found.module(x), model(x))
        assert len(list(found.module.parameters())) == len(list(module.parameters()))
    # Core ATen has another operator for the other mode; at all other levels the mode flows into the call.
    if level == "core_aten":
        with pytest.raises(
            torchgraft.GuardError, match="lowered in evaluation mode, and the module is now in training mode"
        ):
            found.module.train()(x)
    else:
        torch.testing.assert_close(found.module.train()(x), model.train()(x))


def test_regions_are_opened_again() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        with torch.no_grad():
            y = torch.cos(y)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = y @ y
                y = torch.relu(y)
            y = y + x
        return y * x

    found = split(torchgraft.symbolic_trace(program), by=Size(1))
    assert len(found.parts) == 6
    assert "with torch.no_grad():" in found.parts[1].module.code
    assert found.parts[2].module.code.count("with ") == 2
    x = torch.randn(3, 3, requires_grad=True)
    expected, result = program(x), found.module(x)
    assert torch.equal(expected, result)
    assert torch.equal(*[torch.autograd.grad(value.sum(), x)[0] for value in (expected, result)])


def test_stages_of_a_resnet_are_balanced() -> None:
    model = resnet18().eval()
    module = torchgraft.symbolic_trace(model)
    found = split(module, by=Stages(4))
    costs = [part.cost or 0 for part in found.parts]
    heaviest = max(
        sum(p.numel() * 4 for p in layer.parameters()) for layer in model.modules() if isinstance(layer, nn.Conv2d)
    )
    assert max(costs) <= sum(costs) / 4 + heaviest
    assert [len(part.outputs) for part in found.parts[:-1]] == [1, 1, 1] or max(
        len(p.outputs) for p in found.parts
    ) <= 2
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(found.module(x), model(x), rtol=0, atol=0)


def test_cost_function_of_the_user() -> None:
    module = torchgraft.symbolic_trace(lambda x: torch.cos(torch.cos(torch.cos(torch.sin(x)))))
    found = split(module, by=Stages(2, cost=lambda node: 3.0 if node.name == "sin" else 1.0))
    assert [part.nodes for part in found.parts] == [("sin",), ("cos", "cos_1", "cos_2")]
    assert [part.cost for part in found.parts] == [3.0, 3.0]
    assert found.reasons["sin"] == "stage 1 of 2, which has 50% of the cost; this node 3"


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf")])
def test_impossible_costs(bad: float) -> None:
    module = torchgraft.symbolic_trace(lambda x: torch.cos(torch.sin(x)))
    with pytest.raises(torchgraft.GraphError, match="the cost of node 'sin' is"):
        split(module, by=Stages(2, cost=lambda node: bad))


def test_wrong_requests() -> None:
    module = torchgraft.symbolic_trace(lambda x: torch.cos(torch.sin(x)))
    with pytest.raises(torchgraft.GraphError, match="cannot split into 3 stages: the program has 2 pieces"):
        split(module, by=Stages(3))
    with pytest.raises(torchgraft.GraphError, match="parts of 0 nodes"):
        split(module, by=Size(0))
    with pytest.raises(torchgraft.GraphError, match="cannot split by 4"):
        split(module, by=4)  # type: ignore[arg-type]
    with pytest.raises(torchgraft.GraphError, match="cannot split a Linear"):
        split(nn.Linear(1, 1), by=Size(1))  # type: ignore[arg-type]


def test_nothing_to_split() -> None:
    module = torchgraft.symbolic_trace(lambda x: x)
    for by in (Size(1), Stages(1), Supported(lambda node: True)):
        found = split(module, by=by)
        assert found.parts == () and found.module(5) == 5


def test_an_unknown_call_is_passed_by_nothing() -> None:
    log: list[str] = []

    def note(text: str) -> None:
        log.append(text)

    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.sin, (x,))
    graph.call_function(note, ("between",))
    second = graph.call_function(torch.cos, (first,))
    graph.output(second)
    found = split(torchgraft.GraphModule(nn.Module(), graph), by=lambda node: node.target is not note)
    assert [part.nodes for part in found.parts] == [("sin",), ("note",), ("cos",)]
    found.module(torch.ones(1))
    assert log == ["between"]


def test_what_stays_in_the_outer_program_has_a_reason_too() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = torch.sin(x)
        return torch.cos(y) if x.dim() == 2 else y

    program = torchgraft.capture(function, (torch.ones(2, 2),))
    found = split(program, by=Size(1))
    calls = [node for node in program.graph.nodes if node.op.startswith("call_")]
    assert {node.name for node in calls} == set(found.reasons)
    nodes = sum(len(part.nodes) for part in found.parts)
    assert str(found).splitlines()[0] == f"{len(found.parts)} parts, {nodes} nodes"
    outside = [name for name, reason in found.reasons.items() if reason.endswith("in the outer program")]
    assert outside
    with pytest.raises(torchgraft.GraphError, match="checks inputs or the model's mode"):
        found.part_of(outside[0])
