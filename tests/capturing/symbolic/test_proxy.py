"""Proxies: what is recorded when a traced value is used, and what it refuses.
Behaviour common with torch.fx is examined in tests/compatibility/test_proxy.py.
"""

import copy
import operator

import numpy
import pytest
import torch
from torch import nn

import torchgraft as fx
from torchgraft.capturing.symbolic.proxy import ARITHMETIC, COMPARISONS, UNARY, find_proxy


def recorded(function) -> list:
    graph = fx.Tracer().trace(function)
    return [(node.op, node.target) for node in graph.nodes if node.op not in ("placeholder", "output")]


class TestOperators:
    @pytest.mark.parametrize("name", ARITHMETIC + COMPARISONS)
    def test_on_the_left(self, name: str) -> None:
        function = getattr(operator, name)
        assert recorded(lambda x: function(x, 2)) == [("call_function", function)]

    @pytest.mark.parametrize("name", ARITHMETIC)
    def test_on_the_right(self, name: str) -> None:
        function = getattr(operator, name)
        graph = fx.Tracer().trace(lambda x: function(2, x))
        x, node, _ = graph.nodes
        assert (node.target, node.args) == (function, (2, x))

    @pytest.mark.parametrize("name", UNARY)
    def test_on_one(self, name: str) -> None:
        function = getattr(operator, name)
        assert [target for _, target in recorded(lambda x: function(x))] in ([function], [abs])

    @pytest.mark.parametrize("name", ARITHMETIC)
    def test_in_place_on_an_input(self, name: str) -> None:
        function = getattr(operator, f"i{name.strip('_')}")
        assert recorded(lambda x: function(x, 2)) == [("call_function", function)]

    def test_items(self) -> None:
        def forward(x):
            x[0] = x[1]
            del x["k"]
            return x

        assert [target for _, target in recorded(forward)] == [operator.getitem, operator.setitem, operator.delitem]


class TestAttributes:
    def test_a_method_call_fetches_nothing(self) -> None:
        assert recorded(lambda x: x.relu()) == [("call_method", "relu")]

    def test_an_attribute_is_fetched_when_it_is_used(self) -> None:
        assert recorded(lambda x: x.shape) == [("call_function", getattr)]

    def test_an_attribute_that_nobody_uses_is_not_fetched(self) -> None:
        assert recorded(lambda x: (x.shape, x)[1]) == []

    def test_one_attribute_object_is_fetched_once(self) -> None:
        def forward(x):
            shape = x.shape
            return shape[0], shape[1]

        assert [target for _, target in recorded(forward)] == [getattr, operator.getitem, operator.getitem]

    def test_calling_a_traced_value(self) -> None:
        assert recorded(lambda f: f(1)) == [("call_method", "__call__")]

    @pytest.mark.parametrize("name", ["data", "grad", "requires_grad", "real", "imag"])
    def test_writing_an_attribute_of_a_tensor_is_recorded(self, name: str) -> None:
        def forward(x):
            setattr(x, name, 3)
            return x

        assert recorded(forward) == [("call_function", setattr)]

    def test_writing_data_changes_the_callers_tensor(self) -> None:
        def forward(x):
            x.data = x * 2
            return x + 1

        value = torch.ones(2)
        assert torch.equal(fx.symbolic_trace(forward)(value), torch.full((2,), 3.0))
        assert torch.equal(value, torch.full((2,), 2.0))


class TestTorchFunctions:
    @pytest.mark.parametrize(
        ("function", "expected"),
        [
            (lambda x: torch.relu(x), ("call_function", torch.relu)),
            (lambda x: nn.functional.relu(x), ("call_function", nn.functional.relu)),
            (lambda x: torch.cat([x, x]), ("call_function", torch.cat)),
            (lambda x: torch.ops.aten.relu(x), ("call_function", torch.ops.aten.relu)),
            (lambda x: torch.ones(2).add(x), ("call_method", "add")),
        ],
    )
    def test_how_a_call_is_recorded(self, function, expected) -> None:
        assert recorded(function)[-1] == expected

    def test_a_torch_call_without_any_proxy_is_not_ours(self) -> None:
        assert fx.Proxy.__torch_function__(torch.relu, (), (torch.ones(1),)) is NotImplemented


REFUSED = {
    "bool": (lambda x: bool(x), "branch on"),
    "if": (lambda x: 1 if x > 0 else 2, "branch on"),
    "and": (lambda x: x and 1, "branch on"),
    "len": (lambda x: len(x), r"len\(\)"),
    "for": (lambda x: [item for item in x], "iterate over"),  # noqa: C416
    "star": (lambda x: torch.cat([*x]), "iterate over"),
    "int": (lambda x: int(x), "an int"),
    "float": (lambda x: float(x), "a float"),
    "complex": (lambda x: complex(x), "a complex number"),
    "range": (lambda x: range(x), "an index or a range"),
    "index": (lambda x: [1, 2][x], "an index"),
    "in": (lambda x: 3 in x, "search with `in`"),
    "starred unpacking": (lambda x: star(x), "iterate over"),
}


def star(x):
    first, *rest = x
    return first


class TestRefusals:
    @pytest.mark.parametrize(("function", "words"), REFUSED.values(), ids=REFUSED)
    def test_what_a_traced_value_cannot_do(self, function, words: str) -> None:
        with pytest.raises(fx.TraceError, match=words) as caught:
            fx.symbolic_trace(function)
        message = str(caught.value)
        assert message.startswith("cannot ")
        assert f"{__file__}:" in message
        assert "leaf" in message

    def test_numpy(self) -> None:
        try:
            fx.symbolic_trace(lambda x: numpy.asarray(x))
        except fx.TraceError as error:
            assert "hand to numpy" in str(error)

    def test_the_origin_of_the_value_is_named(self) -> None:
        def forward(x):
            total = x.sum()
            if total > 0:
                return x

        with pytest.raises(fx.TraceError) as caught:
            fx.symbolic_trace(forward)
        message = str(caught.value)
        assert "node 'gt'" in message
        assert '"if total > 0:"' in message
        assert "%gt" in message

    def test_an_input_is_called_one(self) -> None:
        with pytest.raises(fx.TraceError, match="the value is an input of the program"):
            fx.symbolic_trace(lambda x: int(x))

    @pytest.mark.parametrize(
        ("function", "kind"),
        [(lambda x: int(x), TypeError), (lambda x: bool(x), ValueError), (lambda x: len(x), RuntimeError)],
    )
    def test_kinds_of_errors_that_callers_of_torch_fx_catch(self, function, kind) -> None:
        with pytest.raises(kind):
            fx.symbolic_trace(function)


class TestUnpacking:
    def test_into_names(self) -> None:
        def forward(x):
            a, b, c = x
            return a + b + c

        assert fx.symbolic_trace(forward)((1, 2, 3)) == 6

    def test_into_many_names(self) -> None:
        """More than 255 need a second byte in Python's instruction."""
        text = ", ".join(f"a{number}" for number in range(300))
        scope: dict = {}
        exec(f"def forward(x):\n    {text} = x\n    return a0 + a299", scope)
        assert fx.symbolic_trace(scope["forward"])(list(range(300))) == 299

    def test_nested(self) -> None:
        def forward(x):
            (a, b), c = x
            return a + b + c

        assert fx.symbolic_trace(forward)(((1, 2), 3)) == 6


class TestProxyItself:
    def test_a_proxy_of_a_bare_node_appends_to_its_graph(self) -> None:
        graph = fx.Graph()
        result = torch.relu(fx.Proxy(graph.placeholder("x"))) + 1
        assert [node.name for node in graph.nodes] == ["x", "relu", "add"]
        assert repr(result) == "Proxy(add)"

    def test_deepcopy_in_the_program_is_recorded(self) -> None:
        program = fx.symbolic_trace(lambda x: (copy.deepcopy(x), x))
        value = [1]
        clone, same = program(value)
        assert clone == value
        assert clone is not value

    def test_deepcopy_after_the_trace_is_none(self) -> None:
        proxy = fx.Proxy(fx.Graph().placeholder("x"))
        assert copy.deepcopy([proxy])[0] is proxy

    def test_proxies_hash_by_identity(self) -> None:
        graph = fx.Graph()
        first, second = fx.Proxy(graph.placeholder("x")), fx.Proxy(graph.placeholder("y"))
        assert len({first: 1, second: 2}) == 2

    def test_find_proxy(self) -> None:
        proxy = fx.Proxy(fx.Graph().placeholder("x"))
        assert find_proxy((1, [2, {"k": slice(None, proxy)}])) is proxy
        assert find_proxy((1, [2, {"k": slice(None, 3)}], "text")) is None


class TestParameterProxy:
    def test_questions_about_shapes_are_answered(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(2, 3))

            def forward(self, x):
                weight = self.weight
                answers.append(
                    (
                        weight.shape,
                        weight.size(0),
                        weight.dim(),
                        weight.ndim,
                        weight.numel(),
                        weight.nelement(),
                        len(weight),
                    )
                )
                return x * weight if weight.shape[0] == 2 else x

        answers: list = []
        model = Model()
        graph = fx.Tracer(param_shapes_constant=True).trace(model)
        assert answers == [(torch.Size([2, 3]), 2, 2, 2, 6, 6, 2)]
        assert torch.equal(fx.GraphModule(model, graph)(2), torch.full((2, 3), 2.0))


class Pair(metaclass=fx.ProxyableClassMeta):
    def __init__(self, first, second) -> None:
        self.first, self.second = first, second

    def total(self):
        return self.first + self.second


class TestProxyableClasses:
    def test_making_one_of_traced_values_is_a_node(self) -> None:
        program = fx.symbolic_trace(lambda x, y: Pair(x, y).total())
        assert Pair in [node.target for node in program.graph.nodes]
        assert program(1, 2) == 3

    def test_making_one_of_plain_values_is_not(self) -> None:
        program = fx.symbolic_trace(lambda x: x + Pair(1, 2).total())
        assert program(1) == 4
        assert len(program.graph.nodes) == 3


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x if x.grad is None else x + x.grad,
        lambda x: x if x.grad_fn else x + 1,
        lambda x: x if x._base is not None else x + 1,
        lambda x: x if torch.relu(x).grad_fn is None else x + 1,
    ],
)
def test_a_history_that_is_asked_for_is_refused(model) -> None:
    with pytest.raises(fx.TraceError, match=r"(?s)cannot ask for the .*test_proxy.py.*torchgraft.capture"):
        fx.symbolic_trace(model)
