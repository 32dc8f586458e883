"""TracerBase: how Python values become arguments, which are refused, and how asserts and mutations are treated.
The trace of whole models is in test_tracer.py.
"""

import dataclasses
import enum
from typing import NamedTuple

import pytest
import torch

import torchgraft as fx
from torchgraft.capturing.tracer_base import GraphAppendingTracer, Scope, ScopeContextManager, TracerBase
from torchgraft.ir.arguments import immutable_dict, immutable_list


class Pair(NamedTuple):
    first: object
    second: object


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Options:
    value: object
    scale: float = 1.0
    derived: int = dataclasses.field(default=3, init=False)


class Lowered:
    def __fx_create_arg__(self, tracer):
        return ("lowered", 3)


def identity(x):
    return x


@pytest.fixture
def tracer() -> TracerBase:
    return GraphAppendingTracer(fx.Graph())


class TestArguments:
    @pytest.mark.parametrize(
        "value",
        [
            1, 2.5, True, 2j, "s", b"b", None, ..., torch.float16, torch.device("cpu"), torch.channels_last, torch.strided,
            Color.RED, torch.ops.aten.add.Tensor, range(3), slice(1, 2), (), (1, (2,)), torch.Size([1]),
        ],
        ids=repr,
    )  # fmt: skip
    def test_plain_values_stay_as_they_are(self, tracer: TracerBase, value) -> None:
        result = tracer.create_arg(value)
        assert result == value
        assert type(result) is type(value)

    def test_containers_become_immutable(self, tracer: TracerBase) -> None:
        result = tracer.create_arg([1, {"k": [2]}])
        assert result == [1, {"k": [2]}]
        assert (type(result), type(result[1]), type(result[1]["k"])) == (immutable_list, immutable_dict, immutable_list)

    def test_traced_values_become_nodes(self, tracer: TracerBase) -> None:
        x = fx.Proxy(tracer.graph.placeholder("x"), tracer)
        assert tracer.create_arg((x, [x], {"k": x}, slice(x, None), Pair(x, 1))) == (
            x.node, [x.node], {"k": x.node}, slice(x.node, None), Pair(x.node, 1),
        )  # fmt: skip

    def test_a_class_may_lower_itself(self, tracer: TracerBase) -> None:
        assert tracer.create_arg([Lowered()]) == [("lowered", 3)]

    def test_a_dataclass_becomes_a_call_that_makes_it(self, tracer: TracerBase) -> None:
        x = fx.Proxy(tracer.graph.placeholder("x"), tracer)
        node = tracer.create_arg(Options(x, 2.0))
        assert (node.op, node.target, node.kwargs) == ("call_function", Options, {"value": x.node, "scale": 2.0})

    def test_other_objects_are_refused_with_the_line_and_the_remedy(self, tracer: TracerBase) -> None:
        with pytest.raises(
            NotImplementedError, match="(?s)argument of type: <class 'object'>.*__fx_create_arg__"
        ) as caught:
            tracer.create_arg(object())
        assert __file__ in str(caught.value)
        assert isinstance(caught.value, fx.TraceError)

    @pytest.mark.parametrize("key", [lambda x: x, lambda x: (x, 1)])
    def test_traced_values_as_keys_are_refused(self, tracer: TracerBase, key) -> None:
        x = fx.Proxy(tracer.graph.placeholder("x"), tracer)
        with pytest.raises(RuntimeError, match="Keys for dictionaries.*cannot contain a Node"):
            tracer.create_arg({key(x): 1})

    @pytest.mark.parametrize("key", [1, (1, 2), None, torch.float16])
    def test_other_keys_are_kept(self, tracer: TracerBase, key) -> None:
        assert tracer.create_arg({key: 1}) == {key: 1}


class TestNodes:
    def test_create_proxy_lowers_its_arguments(self, tracer: TracerBase) -> None:
        x = fx.Proxy(tracer.graph.placeholder("x"), tracer)
        proxy = tracer.create_proxy("call_function", torch.add, (x, [x]), {"alpha": x}, name="wish", type_expr=int)
        assert (proxy.node.args, proxy.node.kwargs) == ((x.node, [x.node]), {"alpha": x.node})
        assert (proxy.node.name, proxy.node.type) == ("wish", int)
        assert proxy.tracer is tracer

    def test_a_factory_may_make_the_proxy(self, tracer: TracerBase) -> None:
        result = tracer.create_proxy("call_function", torch.add, (), {}, proxy_factory_fn=lambda node: ("made", node))
        assert result[0] == "made"

    @pytest.mark.parametrize("method", ["create_node", "create_arg", "proxy"])
    def test_an_overridden_method_is_asked_for_every_call(self, method: str) -> None:
        calls = []

        class Noting(fx.Tracer):
            pass

        def noting(self, *args, **kwargs):
            calls.append(args)
            return getattr(fx.Tracer, method)(self, *args, **kwargs)

        setattr(Noting, method, noting)
        Mine = type("Mine", (Noting,), {method: noting})
        Mine().trace(lambda x: torch.relu(x) + 1)
        assert len(calls) >= 2

    def test_lines_are_recorded_or_not(self) -> None:
        class Without(fx.Tracer):
            record_stack_traces = False

        def forward(x):
            return torch.relu(x)

        assert [node.stack_trace is None for node in fx.Tracer().trace(forward).nodes][1] is False
        assert [node.stack_trace for node in Without().trace(forward).nodes] == [None] * 3


class Asserting(fx.Tracer):
    trace_asserts = True


def function_with_an_assert(message: str = ""):
    """Made from text, because pytest writes the asserts of its test files anew."""
    scope: dict = {}
    exec(f"def forward(x):\n    assert x.sum() > 0{message}\n    return x * 2", scope)
    return scope["forward"]


class TestAsserts:
    @pytest.mark.parametrize("message", ["", ", 'too small'"])
    def test_an_assert_becomes_a_check_in_the_program(self, message: str) -> None:
        program = fx.GraphModule(torch.nn.Module(), Asserting().trace(function_with_an_assert(message)))
        assert torch.equal(program(torch.ones(2)), torch.full((2,), 2.0))
        with pytest.raises(AssertionError):
            program(-torch.ones(2))

    def test_the_check_is_no_dead_code(self) -> None:
        graph = Asserting().trace(function_with_an_assert())
        before = len(graph.nodes)
        graph.eliminate_dead_code()
        assert len(graph.nodes) == before

    def test_a_branch_is_still_refused(self) -> None:
        def forward(x):
            if x.sum() > 0:
                return x

        with pytest.raises(fx.TraceError):
            Asserting().trace(forward)

    def test_by_default_an_assert_is_refused(self) -> None:
        with pytest.raises(fx.TraceError):
            fx.symbolic_trace(function_with_an_assert())


class TestMutableOperations:
    class Strict(fx.Tracer):
        check_mutable_operations = True

    def test_they_are_refused_on_request(self) -> None:
        with pytest.raises(fx.TraceError, match="(?s)mutable operation relu_.*out-of-place"):
            self.Strict().trace(lambda x: torch.relu_(x))

    def test_others_pass(self) -> None:
        assert len(self.Strict().trace(lambda x: torch.relu(x) + 1).nodes) == 4


class TestScopes:
    def test_a_scope_is_another_one_in_a_block(self) -> None:
        scope = Scope("a", int)
        with ScopeContextManager(scope, Scope("b", str)) as inner:
            assert (inner.module_path, inner.module_type) == ("b", str)
        assert (scope.module_path, scope.module_type) == ("a", int)

    def test_outside_of_any_module(self, tracer: TracerBase) -> None:
        assert (tracer.scope.module_path, tracer.scope.module_type) == ("", None)
        assert tracer.module_stack == {}
