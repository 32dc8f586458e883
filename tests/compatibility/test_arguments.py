"""What may stand as an argument in a graph: every plain value, structure and torch constant that a call can carry.

How inputs are specialised is told in test_concrete_args.
"""

import enum
import operator
from types import ModuleType

import pytest
import torch
from torch import nn

from tests.compatibility.programs import Mode, Pair, Point


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def only_call(graph, target):
    (node,) = graph.find_nodes(op="call_function", target=target)
    return node


def take_anything(*args, **kwargs):
    return args[0]


def trace_call(fx: ModuleType, *arguments, **keywords):
    """The node that records ``take_anything(x, *arguments, **keywords)`` with x a traced input."""
    tracer = fx.Tracer(autowrap_functions=(take_anything,))
    graph = tracer.trace(lambda x: take_anything(x, *arguments, **keywords))
    module = fx.GraphModule(tracer.root, graph)
    return only_call(graph, take_anything), module


@pytest.mark.parametrize(
    "value",
    [
        True,
        3,
        2.5,
        1 + 2j,
        "text with 'quotes' and \\ and \n",
        None,
        ...,
        float("inf"),
        torch.float16,
        torch.device("cpu"),
        torch.strided,
        torch.channels_last,
        Mode.FAST,
        Level.HIGH,
        torch.ops.aten.relu.default,
        (1, (2, [3, {"four": 4}])),
        [],
        (),
        {},
        slice(1, None, 2),
        range(3),
        torch.Size([1, 2]),
    ],
    ids=repr,
)
def test_constant_is_kept_and_runs(fx: ModuleType, value: object) -> None:
    node, module = trace_call(fx, value, key=value)
    assert node.args[1] == value
    assert node.kwargs["key"] == value
    assert module(7) == 7


def test_nan_is_kept_and_runs(fx: ModuleType) -> None:
    _, module = trace_call(fx, float("nan"))
    assert module(7) == 7


def test_enum_member_arrives_as_itself(fx: ModuleType) -> None:
    tracer = fx.Tracer(autowrap_functions=(choose,))
    graph = tracer.trace(lambda x: choose(x, Mode.EXACT))
    assert only_call(graph, choose).args[1] is Mode.EXACT
    assert fx.GraphModule(tracer.root, graph)(5) is Mode.EXACT


def choose(x, mode):
    return mode


def test_dtype_and_device_arguments_of_torch_calls(fx: ModuleType) -> None:
    def forward(x):
        return x.to(torch.float64).to(device=torch.device("cpu"), dtype=torch.float16)

    traced = fx.symbolic_trace(forward)
    assert traced(torch.ones(1)).dtype is torch.float16
    first, second = traced.graph.find_nodes(op="call_method")
    assert first.args[1] is torch.float64
    assert second.kwargs == {"device": torch.device("cpu"), "dtype": torch.float16}


def test_slices_may_hold_traced_values(fx: ModuleType) -> None:
    def forward(x, n):
        return x[:, 1:n, ..., None]

    traced = fx.symbolic_trace(forward)
    x, n = traced.graph.find_nodes(op="placeholder")
    getitem = only_call(traced.graph, operator.getitem)
    assert getitem.args == (x, (slice(None, None, None), slice(1, n, None), ..., None))
    assert getitem.all_input_nodes == [x, n]
    data = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(traced(data, 3), forward(data, 3))


def test_named_tuple_argument_becomes_a_construction(fx: ModuleType) -> None:
    tracer = fx.Tracer(autowrap_functions=(norm_of_point,))
    graph = tracer.trace(lambda a, b: norm_of_point(Point(a, b)))
    construction = only_call(graph, Point)
    a, b = graph.find_nodes(op="placeholder")
    assert construction.args == (a, b)
    assert only_call(graph, norm_of_point).args == (construction,)
    assert fx.GraphModule(tracer.root, graph)(3, 4) == 25


def norm_of_point(point):
    return point.x * point.x + point.y * point.y


def test_named_tuple_may_be_returned(fx: ModuleType) -> None:
    def forward(a, b):
        return Point(a + b, a - b)

    answer = fx.symbolic_trace(forward)(3, 1)
    assert isinstance(answer, Point)
    assert answer == Point(4, 2)


def test_dataclass_argument_becomes_a_construction(fx: ModuleType) -> None:
    tracer = fx.Tracer(autowrap_functions=(sum_of_pair,))
    graph = tracer.trace(lambda a, b: sum_of_pair(a, Pair(left=a, right=b)))
    construction = only_call(graph, Pair)
    a, b = graph.find_nodes(op="placeholder")
    assert construction.args == ()
    assert construction.kwargs == {"left": a, "right": b}
    assert only_call(graph, sum_of_pair).args == (a, construction)
    assert fx.GraphModule(tracer.root, graph)(3, 4) == 10


def sum_of_pair(x, pair):
    return x + pair.left + pair.right


def test_dataclass_may_be_returned(fx: ModuleType) -> None:
    def forward(a):
        return Pair(a, a + 1)

    answer = fx.symbolic_trace(forward)(1)
    assert isinstance(answer, Pair)
    assert (answer.left, answer.right) == (1, 2)


def test_dictionary_keys_other_than_strings(fx: ModuleType) -> None:
    def forward(x):
        return {1: x, (2, 3): x + 1}

    assert fx.symbolic_trace(forward)(5) == {1: 5, (2, 3): 6}


def test_traced_value_as_dictionary_key_is_refused(fx: ModuleType) -> None:
    def forward(x):
        return {x: 1}

    with pytest.raises(RuntimeError, match="(?i)key"):
        fx.symbolic_trace(forward)


def test_traced_value_hidden_in_a_dictionary_key_is_refused(fx: ModuleType) -> None:
    def forward(x):
        return {(1, x): 1}

    with pytest.raises(RuntimeError, match="(?i)key"):
        fx.symbolic_trace(forward)


def test_unknown_objects_are_refused(fx: ModuleType) -> None:
    class Unknown:
        pass

    def forward(x):
        return x + Unknown()

    with pytest.raises(NotImplementedError, match="Unknown"):
        fx.symbolic_trace(forward)


def test_object_with_its_own_lowering(fx: ModuleType) -> None:
    class Scaled:
        def __init__(self, proxy, factor) -> None:
            self.proxy = proxy
            self.factor = factor

        def __fx_create_arg__(self, tracer):
            return tracer.create_node("call_function", operator.mul, (tracer.create_arg(self.proxy), self.factor), {})

    def forward(x):
        return torch.relu(x) + Scaled(x, 3)

    traced = fx.symbolic_trace(forward)
    assert only_call(traced.graph, operator.mul).args[1] == 3
    assert torch.equal(traced(torch.tensor(2.0)), torch.tensor(8.0))


def test_foreign_parameter_is_refused(fx: ModuleType) -> None:
    stranger = nn.Parameter(torch.ones(1))

    class Borrowing(nn.Module):
        def forward(self, x):
            return x + stranger

    with pytest.raises(NameError, match="parameter"):
        fx.symbolic_trace(Borrowing())


def test_torch_size_built_from_traced_sizes_inside_a_call(fx: ModuleType) -> None:
    def forward(x):
        return x.reshape((x.shape[0], -1)) + torch.zeros(1)

    traced = fx.symbolic_trace(forward)
    x = torch.ones(2, 3, 4)
    assert torch.equal(traced(x), forward(x))


def test_submodule_as_an_argument_is_fetched(fx: ModuleType) -> None:
    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            return take_anything(x, self.inner)

    tracer = fx.Tracer(autowrap_functions=(take_anything,))
    graph = tracer.trace(Passing())
    assert [node.target for node in graph.find_nodes(op="get_attr")] == ["inner"]


def test_proxyable_class_construction_is_recorded(port) -> None:
    program = port("""
        import torch
        import torch.fx

        class TensorPair(metaclass=torch.fx.ProxyableClassMeta):
            def __init__(self, left, right):
                self.left, self.right = left, right

            def add(self, other):
                l = self.left + other.left
                r = self.right + other.right
                return TensorPair(l, r)

            def mul(self, other):
                l = self.left * other.left
                r = self.right * other.right
                return TensorPair(l, r)

        def use_tensor_pair_ctor(x: TensorPair, y: torch.Tensor):
            s = x.add(TensorPair(y, y))
            return s.mul(x)

        x = TensorPair(torch.randn(5, 3), torch.randn(5, 3))
        y = torch.randn(5, 3)
        ref_out = use_tensor_pair_ctor(x, y)

        traced = torch.fx.symbolic_trace(use_tensor_pair_ctor)
        out = traced(x, y)
    """)
    assert torch.equal(program.out.left, program.ref_out.left)
    assert torch.equal(program.out.right, program.ref_out.right)
    assert [node.target for node in program.traced.graph.nodes] == [
        "x", "y", program.TensorPair, "add", "mul", "output",
    ]  # fmt: skip
    assert [node.name for node in program.traced.graph.nodes][2] == "tensor_pair"


def test_proxyable_class_instance_without_traced_values_is_a_constant(port) -> None:
    program = port("""
        import torch.fx

        class Scale(metaclass=torch.fx.ProxyableClassMeta):
            def __init__(self, factor):
                self.factor = factor

        class Holder:
            pass

        def apply(x, scale):
            return x * scale.factor

        torch.fx.wrap("apply")

        def forward(x):
            return apply(x, Scale(4))

        traced = torch.fx.symbolic_trace(forward)
    """)
    assert program.traced(2) == 8
    assert len(program.traced.graph.find_nodes(op="get_attr")) == 1
