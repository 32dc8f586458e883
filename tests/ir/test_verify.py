"""Verifying: rule 5 of the IR, every problem is reported and not only the first; and what each problem is called.
That bad edits are refused when they are made is in test_node.py.
"""

import operator

import pytest
import torch
from torch import nn

import torchgraft as fx
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.verify import find_attribute, find_problems


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = 3.0

    def forward(self, x):
        return torch.relu(self.linear(x)) * self.linear.weight


@pytest.fixture
def module() -> fx.GraphModule:
    return fx.symbolic_trace(Model())


def node_named(module: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in module.graph.nodes if node.name == name)


def test_a_good_graph_has_no_problems(module: fx.GraphModule) -> None:
    assert find_problems(module.graph) == []
    assert module.graph.lint() is None


def test_an_empty_graph_has_no_problems() -> None:
    fx.Graph().lint()


def test_a_graph_without_an_output_has_no_problems() -> None:
    graph = fx.Graph()
    graph.call_function(torch.relu, (graph.placeholder("x"),))
    graph.lint()


class TestRule5EveryProblem:
    def test_all_are_listed_and_counted(self, module: fx.GraphModule) -> None:
        node_named(module, "linear").prepend(node_named(module, "relu"))
        node_named(module, "linear").target = "gone"
        node_named(module, "mul")._target = "not a function"
        node_named(module, "output").args = ()
        with pytest.raises(fx.GraphError) as caught:
            module.graph.lint()
        message = str(caught.value)
        assert message.startswith("the graph is not well formed, 4 problems:\n  - ")
        for words in (
            "'relu' uses 'linear' before it has been defined",
            "'linear' references nonexistent attribute 'gone'",
            "'mul' calls 'not a function', which is not callable",
            "the output must have exactly one argument, not 0",
        ):
            assert words in message

    def test_one_is_counted_as_one(self, module: fx.GraphModule) -> None:
        node_named(module, "linear").target = "gone"
        with pytest.raises(fx.GraphError, match="not well formed, 1 problem:\n"):
            module.graph.lint()


class TestProblems:
    def problems(self, graph: fx.Graph) -> str:
        return "\n".join(find_problems(graph))

    def test_use_before_definition_says_how_to_mend_it(self, module: fx.GraphModule) -> None:
        node_named(module, "mul").append(node_named(module, "relu"))
        assert "'mul' uses 'relu' before it has been defined! Move one of them" in self.problems(module.graph)

    def test_a_node_that_uses_itself(self, module: fx.GraphModule) -> None:
        relu = node_named(module, "relu")
        relu.args = (relu,)
        assert "node 'relu' uses itself" in self.problems(module.graph)

    def test_a_cycle(self, module: fx.GraphModule) -> None:
        node_named(module, "linear").args = (node_named(module, "mul"),)
        assert "'linear' uses 'mul' before it has been defined" in self.problems(module.graph)

    @pytest.mark.parametrize("op", ["call_module", "get_attr"])
    def test_a_missing_attribute_is_an_attribute_error_too(self, module: fx.GraphModule, op: str) -> None:
        module.graph.find_nodes(op=op)[0].target = "linear.gone.deeper"
        with pytest.raises(AttributeError, match="attribute 'linear.gone.deeper': 'linear' has no attribute 'gone'"):
            module.graph.lint()

    def test_something_that_is_no_module_is_called(self, module: fx.GraphModule) -> None:
        module.scale = 3.0
        node_named(module, "linear").target = "scale"
        assert "calls 'scale', which does not reference an nn.Module: it is a float; use get_attr" in self.problems(
            module.graph
        )

    def test_a_submodule_that_is_none(self, module: fx.GraphModule) -> None:
        module.linear = None
        assert "'linear', which does not reference an nn.Module: it is a NoneType" in self.problems(module.graph)

    def test_without_an_owner_attributes_are_not_looked_for(self, module: fx.GraphModule) -> None:
        node_named(module, "linear").target = "gone"
        module.graph.owning_module = None
        module.graph.lint()

    def test_targets_that_do_not_suit_the_opcode(self, module: fx.GraphModule) -> None:
        node_named(module, "relu").op = "call_module"
        assert "'relu' has opcode call_module, so its target must be a string" in self.problems(module.graph)
        node_named(module, "relu").op = "call_method"
        assert "'relu' must name a method and have the object" in self.problems(module.graph)

    def test_a_method_without_its_object(self, module: fx.GraphModule) -> None:
        relu = node_named(module, "relu")
        relu.op, relu.target, relu.args = "call_method", "relu", ()
        assert "'relu' must name a method and have the object as its first argument" in self.problems(module.graph)

    def test_an_unknown_opcode(self, module: fx.GraphModule) -> None:
        node_named(module, "relu")._op = "call"
        assert "'relu' has the unknown opcode 'call'" in self.problems(module.graph)

    def test_an_input_with_two_defaults(self, module: fx.GraphModule) -> None:
        node_named(module, "x").args = (1, 2)
        assert "input 'x' has 2 arguments; only a default value" in self.problems(module.graph)

    def test_something_after_the_output(self, module: fx.GraphModule) -> None:
        module.graph.call_function(torch.neg, (node_named(module, "x"),))
        assert "the output is not the last node: 'neg' comes after it" in self.problems(module.graph)

    def test_two_outputs(self, module: fx.GraphModule) -> None:
        module.graph.output(None)
        assert "there are 2 outputs; a program returns once" in self.problems(module.graph)

    def test_two_outputs_apart(self, module: fx.GraphModule) -> None:
        with module.graph.inserting_before(node_named(module, "relu")):
            module.graph.output(None)
        assert self.problems(module.graph)

    def test_an_output_that_is_used(self, module: fx.GraphModule) -> None:
        module.graph.call_function(torch.neg, (node_named(module, "output"),))
        assert "the output is used by neg" in self.problems(module.graph)

    def test_a_name_twice(self, module: fx.GraphModule) -> None:
        node_named(module, "relu")._name = "x"
        assert "the name 'x' is used by more than one node" in self.problems(module.graph)

    def test_inputs_and_users_out_of_step(self, module: fx.GraphModule) -> None:
        node_named(module, "linear").users.clear()
        assert "'relu' uses 'linear' but is not among its users; report this as a bug" in self.problems(module.graph)

    def test_an_erased_or_foreign_input_smuggled_in(self, module: fx.GraphModule) -> None:
        relu = node_named(module, "relu")
        relu._inputs = (fx.Graph().placeholder("elsewhere"),)
        assert "uses 'elsewhere', which does not belong to this Graph" in self.problems(module.graph)
        dead = module.graph.call_function(operator.neg, (1,))
        module.graph.erase_node(dead)
        relu._inputs = (dead,)
        assert "uses 'neg', which was erased" in self.problems(module.graph)

    def test_two_inputs_of_one_name(self) -> None:
        graph = fx.Graph()
        graph.placeholder("x"), graph.placeholder("x")
        graph.output(None)
        assert self.problems(graph)


class TestRegions:
    def region(self) -> tuple[fx.Graph, fx.Node, fx.Node, fx.Node, fx.Node]:
        graph = fx.Graph()
        outer = graph.call_function(enter_context, (torch.no_grad,), name="outer")
        inner = graph.call_function(enter_context, (torch.enable_grad,), name="inner")
        leave_inner = graph.call_function(exit_context, (inner,), name="leave_inner")
        leave_outer = graph.call_function(exit_context, (outer,), name="leave_outer")
        graph.output(None)
        return graph, outer, inner, leave_inner, leave_outer

    def test_nested_regions_are_fine(self) -> None:
        self.region()[0].lint()

    def test_a_region_never_closed(self) -> None:
        graph, *_, leave_outer = self.region()
        graph.erase_node(leave_outer)
        assert find_problems(graph) == [
            "the context opened by 'outer' is never closed; close it with a call of exit_context"
        ]

    def test_regions_that_cross(self) -> None:
        graph, _, _, leave_inner, leave_outer = self.region()
        leave_inner.prepend(leave_outer)
        assert "node 'leave_outer' does not close the innermost open context; move it" in find_problems(graph)

    def test_a_region_closed_twice(self) -> None:
        graph, outer, *_ = self.region()
        with graph.inserting_before(graph.output_node()):
            graph.call_function(exit_context, (outer,), name="again")
        assert find_problems(graph) == ["node 'again' does not close the innermost open context; move it"]


def test_find_attribute() -> None:
    model = Model()
    assert find_attribute(model, "linear.weight") == (model.linear.weight, None)
    assert find_attribute(model, "scale") == (3.0, None)
    assert find_attribute(model, "gone") == (None, "Model has no attribute 'gone'")
    assert find_attribute(model, "linear.gone") == (None, "'linear' has no attribute 'gone'")
