"""Tracer: leaves, parameters and buffers, constants, modules as arguments, tidying, and the trace as a whole.
Behaviour common with torch.fx is examined in tests/compatibility/test_tracer.py.
"""

import copy

import pytest
import torch
from torch import nn

import torchgraft as fx


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = nn.Sequential(Block(), nn.ReLU())

    def forward(self, x):
        return self.second(self.first(x))


def call_paths(graph: fx.Graph) -> list[str]:
    return [node.target for node in graph.find_nodes(op="call_module")]


class TestLeaves:
    def test_modules_of_torch_are_leaves_and_sequential_is_not(self) -> None:
        assert call_paths(fx.Tracer().trace(Model())) == ["first.linear", "second.0.linear", "second.1"]

    def test_the_choice_is_the_users(self) -> None:
        class Keep(fx.Tracer):
            def is_leaf_module(self, m, module_qualified_name):
                asked.append(module_qualified_name)
                return isinstance(m, Block)

        asked: list[str] = []
        graph = Keep().trace(nn.Sequential(Block(), Block()))
        assert call_paths(graph) == ["0", "1"]
        assert asked == ["0", "1"]

    @pytest.mark.parametrize("name", ["is_leaf_module", "call_module", "create_proxy", "create_node", "getattr"])
    def test_a_class_that_is_mixed_in_has_its_say(self, name) -> None:
        asked = []

        def method(self, *args, **kwargs):
            asked.append(name)
            return getattr(super(Mixin, self), name)(*args, **kwargs)

        Mixin = type("Mixin", (), {name: method})
        Mixed = type("Mixed", (Mixin, fx.Tracer), {})
        graph = Mixed().trace(nn.Sequential(Block(), Block()))
        assert call_paths(graph) == ["0.linear", "1.linear"]
        assert len(asked) >= 2

    def test_a_module_that_is_not_part_of_the_model_is_refused_with_the_line(self) -> None:
        stray = nn.Linear(2, 2)
        with pytest.raises(
            NameError, match="(?s)module is not installed as a submodule.*Linear.*assign it to an attribute"
        ) as caught:
            fx.symbolic_trace(lambda x: stray(x))
        assert __file__ in str(caught.value)

    def test_a_module_under_two_names_is_called_by_the_first(self) -> None:
        class Shared(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = self.b = nn.Linear(2, 2)

            def forward(self, x):
                return self.b(self.a(x))

        program = fx.symbolic_trace(Shared())
        assert call_paths(program.graph) == ["a", "a"]


class TestParameters:
    def test_a_parameter_is_fetched_once_where_it_is_first_used(self) -> None:
        class Using(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(2))

            def forward(self, x):
                return x * self.weight + self.weight

        graph = fx.Tracer().trace(Using())
        assert [node.name for node in graph.nodes] == ["x", "weight", "mul", "add", "output"]

    def test_buffers_are_proxied_on_request(self) -> None:
        class Buffers(fx.Tracer):
            proxy_buffer_attributes = True

        class Using(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("buffer", torch.ones(2))

            def forward(self, x):
                kinds.append(isinstance(self.buffer, fx.Proxy))
                return x + self.buffer

        kinds: list[bool] = []
        Buffers().trace(Using()), fx.Tracer().trace(Using())
        assert kinds == [True, False]

    def test_an_overridden_getattr_may_hand_out_the_real_one(self) -> None:
        class Real(fx.Tracer):
            def getattr(self, attr, attr_val, parameter_proxy_cache):
                return attr_val

        class Using(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(2))

            def forward(self, x):
                return x * 2 if self.weight.sum() > 0 else x

        assert len(Real().trace(Using()).nodes) == 3

    def test_tensors_that_are_plain_attributes(self) -> None:
        class Plain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Module()
                self.inner.table = torch.ones(2)

            def forward(self, x):
                return x + self.inner.table

        graph = fx.Tracer().trace(Plain())
        assert [node.target for node in graph.find_nodes(op="get_attr")] == ["inner.table"]


class TestArguments:
    def test_a_module_as_an_argument_is_fetched(self) -> None:
        class Passing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.ReLU()

            def forward(self, x):
                return x.apply(self.inner)

        graph = fx.Tracer().trace(Passing())
        assert [node.target for node in graph.find_nodes(op="get_attr")] == ["inner"]

    def test_fresh_names_avoid_those_of_the_model(self) -> None:
        class Named(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self._tensor_constant0 = torch.ones(2)

            def forward(self, x):
                return x + outside + self._tensor_constant0

        outside = torch.zeros(2)
        program = fx.symbolic_trace(Named())
        assert [node.target for node in program.graph.find_nodes(op="get_attr")] == [
            "_tensor_constant1",
            "_tensor_constant0",
        ]
        assert torch.equal(program(torch.zeros(2)), torch.ones(2))


class TestTrace:
    def test_a_tracer_can_be_used_again(self) -> None:
        tracer = fx.Tracer()
        first, second = tracer.trace(Model()), tracer.trace(Block())
        assert first is not second
        assert call_paths(second) == ["linear"]

    def test_after_a_failure_too(self) -> None:
        tracer = fx.Tracer()
        with pytest.raises(fx.TraceError):
            tracer.trace(lambda x: 1 if x else 2)
        assert len(tracer.trace(lambda x: torch.relu(x)).nodes) == 3

    def test_another_method(self) -> None:
        class Encoder(nn.Module):
            def encode(self, x):
                return x + 1

            def forward(self, x):
                return x - 1

        class Encoding(fx.Tracer):
            traced_func_name = "encode"

        graph = Encoding().trace(Encoder())
        assert fx.GraphModule(Encoder(), graph)(1) == 2
        Encoding.traced_func_name = "gone"
        with pytest.raises(fx.TraceError, match="traced_func_name=gone doesn't exist in Encoder"):
            Encoding().trace(Encoder())

    def test_a_bound_method_of_a_module(self) -> None:
        class Encoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(2, 2)

            def encode(self, x):
                return self.linear(x) + 1

        model = Encoder()
        program = fx.symbolic_trace(model.encode)
        assert torch.equal(program(torch.ones(2)), model.encode(torch.ones(2)))

    def test_something_else_is_refused(self) -> None:
        with pytest.raises(fx.TraceError, match="cannot trace 3\n  give an nn.Module, a function or a bound method"):
            fx.symbolic_trace(3)

    def test_an_error_of_the_model_passes_through(self) -> None:
        def forward(x):
            raise KeyError("its own")

        with pytest.raises(KeyError, match="its own"):
            fx.symbolic_trace(forward)

    def test_a_program_can_be_captured_again(self) -> None:
        model = Model()
        first = fx.symbolic_trace(model)
        second = fx.symbolic_trace(first)
        assert second.code == first.code
        assert torch.equal(second(torch.ones(2)), model(torch.ones(2)))

    def test_what_a_trace_finds_is_well_formed(self) -> None:
        fx.symbolic_trace(Model()).graph.lint()

    def test_no_result_and_structured_results(self) -> None:
        assert fx.symbolic_trace(lambda x: None)(1) is None
        assert fx.symbolic_trace(lambda x: {"a": [x, (x, 2)]})(1) == {"a": [1, (1, 2)]}

    def test_a_tracer_can_be_copied(self) -> None:
        tracer = fx.Tracer()
        tracer.trace(Block())
        clone = copy.deepcopy(tracer)
        assert str(clone.graph) == str(tracer.graph)
        assert len(clone.trace(lambda x: torch.relu(x)).nodes) == 3

    def test_scopes_by_name(self) -> None:
        tracer = fx.Tracer()
        tracer.trace(Model())
        assert tracer.node_name_to_scope["relu"] == ("first", Block)
        assert tracer.node_name_to_scope["first_linear"] == ("first.linear", nn.Linear)
        assert tracer.node_name_to_scope["x"] == ("", None)

    def test_gradients_flow(self) -> None:
        model = Model()
        program = fx.symbolic_trace(model)
        program(torch.ones(2)).sum().backward()
        ours = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        model(torch.ones(2)).sum().backward()
        assert all(torch.equal(one, parameter.grad) for one, parameter in zip(ours, model.parameters(), strict=True))
