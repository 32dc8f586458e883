"""What is used of AOTAutograd, which is no public interface; if a test fails on a new torch, `joint_trace.py` must change."""

import inspect

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

from torchgraft import BridgeError
from torchgraft.bridge.joint_trace import Role, SourceLines, trace_joint

X = torch.randn(2, 3)
WEIGHT = torch.ones(3, requires_grad=True)


def names(trace, op="placeholder"):
    return [node.name for node in trace.module.graph.nodes if node.op == op]


def test_the_function_that_traces_takes_what_it_is_given():
    parameters = list(inspect.signature(aot_export_joint_with_descriptors).parameters)
    assert parameters[:3] == ["stack", "mod", "args"]


def test_roles_of_inputs_and_outputs():
    trace = trace_joint(lambda w, x, b: [w * x, b + 1], [WEIGHT, X, torch.ones(3)])
    assert names(trace) == ["primals_1", "primals_2", "primals_3", "tangents_1"]
    assert trace.inputs == [Role("primal", 0), Role("primal", 1), Role("primal", 2), Role("tangent", 0)]
    assert trace.outputs == [Role("result", 0), Role("result", 1), Role("gradient", 0), None, None]


def test_writes_to_inputs_are_further_outputs():
    def function(w, x):
        x.add_(1)
        return [w * x]

    trace = trace_joint(function, [WEIGHT, X])
    assert trace.outputs == [Role("update", 1), Role("result", 0), Role("gradient", 0), None]
    operations = [node.target for node in trace.module.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.add.Tensor in operations and torch.ops.aten.add_.Tensor not in operations


def test_a_written_input_that_needs_a_gradient_has_a_tangent():
    def function(w, x):
        with torch.no_grad():
            w.mul_(2)
        return [w * x]

    trace = trace_joint(function, [WEIGHT, X])
    assert trace.inputs[2:] == [Role("update tangent", 0), Role("tangent", 0)]


def test_results_that_alias_have_no_tangent():
    def function(w, x):
        y = w * x
        return [y, y.t()]

    assert [role for role in trace_joint(function, [WEIGHT, X]).inputs if role.kind == "tangent"] == [
        Role("tangent", 0)
    ]


def test_without_gradients_there_are_no_tangents():
    assert all(role.kind == "primal" for role in trace_joint(lambda x: [x * 2], [X]).inputs)


def test_nothing_is_computed_and_nothing_drawn():
    state = torch.get_rng_state()
    seen = []

    def function(w, x):
        seen.append(type(x).__name__)
        return [w * torch.rand_like(x)]

    trace_joint(function, [WEIGHT, X])
    assert torch.equal(torch.get_rng_state(), state)
    assert "Tensor" not in seen


def test_every_node_knows_its_value_and_constants_too():
    constant = torch.randn(3)
    trace = trace_joint(lambda w, x: [w * x * constant], [WEIGHT, X])
    assert names(trace, "get_attr")
    assert all("val" in node.meta for node in trace.module.graph.nodes if node.op != "output")


def test_lines_and_modules():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x)

    outer = Outer()

    def function(x):
        with SourceLines(outer, lambda name, args: None):
            return [outer(x)]

    trace = trace_joint(function, [X.clone().requires_grad_()])
    by_target = {node.target: node for node in trace.module.graph.nodes}
    forward = by_target[torch.ops.aten.relu.default]
    backward = by_target[torch.ops.aten.threshold_backward.default]
    assert "return self.inner(x)" in forward.stack_trace
    assert backward.stack_trace == forward.stack_trace
    assert list(forward.meta["nn_module_stack"].values()) == [
        ("", Outer),
        ("inner", nn.Sequential),
        ("inner.1", nn.ReLU),
    ]


def test_calls_can_be_refused():
    def refuse(name, args):
        if name == "relu":
            raise BridgeError("no relu")

    def function(x):
        with SourceLines(nn.Module(), refuse):
            return [torch.relu(x)]

    with pytest.raises(BridgeError, match="no relu"):
        trace_joint(function, [X.clone().requires_grad_()])


def test_inputs_that_share_memory_and_are_written():
    base = torch.randn(6)

    def function(a, b, w):
        a.mul_(2)
        return [a * b.view(2, 3) * w]

    with pytest.raises((BridgeError, AssertionError)):
        trace_joint(function, [base.view(2, 3), base.view(3, 2), WEIGHT])
