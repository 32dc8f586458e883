"""Specialising inputs while tracing: concrete_args with plain values, nested structures and PH.

Ordinary signatures are examined in test_tracing_functions.
"""

import copy
from collections import namedtuple
from types import ModuleType

import pytest
import torch
from torch import nn

Size = namedtuple("Size", ["height", "width"])


def test_branch_on_a_specialised_bool(fx: ModuleType) -> None:
    def f(a, b):
        if b == True:  # noqa: E712
            return a
        else:
            return a * 2

    traced = fx.symbolic_trace(f, concrete_args={"b": False})
    assert traced(3, False) == 6


def test_another_value_than_the_specialised_one_is_noticed(fx: ModuleType) -> None:
    def f(a, b):
        return a if b else a * 2

    traced = fx.symbolic_trace(f, concrete_args={"b": False})
    with pytest.raises(AssertionError, match="b has been specialized to have value False"):
        traced(3, True)


def test_specialised_numbers_and_strings_are_noticed_too(fx: ModuleType) -> None:
    def f(x, times, mode):
        for _ in range(times):
            x = x + 1
        return x if mode == "plain" else -x

    traced = fx.symbolic_trace(f, concrete_args={"times": 3, "mode": "plain"})
    assert traced(1, 3, "plain") == 4
    with pytest.raises(AssertionError, match="times"):
        traced(1, 4, "plain")
    with pytest.raises(AssertionError, match="mode"):
        traced(1, 3, "other")


def test_specialised_none(fx: ModuleType) -> None:
    def f(x, bias=None):
        return x if bias is None else x + bias

    traced = fx.symbolic_trace(f, concrete_args={"bias": None})
    assert traced(3) == 3
    assert traced(3, None) == 3
    with pytest.raises(AssertionError, match="bias has been specialized to have value None"):
        traced(3, 1)


def test_module_with_an_optional_input(fx: ModuleType) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x, mask=None, scale=True):
            x = self.linear(x)
            if mask is not None:
                x = x * mask
            return x * 2 if scale else x

    model = Masked()
    traced = fx.symbolic_trace(model, concrete_args={"mask": None, "scale": True})
    x = torch.rand(1, 2)
    assert torch.equal(traced(x), model(x))


def test_specialised_parameter_keeps_its_place_in_the_signature(fx: ModuleType) -> None:
    def f(a, b, c):
        return a + c if b else c

    traced = fx.symbolic_trace(f, concrete_args={"b": True})
    assert traced(1, True, 10) == 11


def test_dictionary_of_placeholders(fx: ModuleType) -> None:
    def f(x):
        out = 0
        for v in x.values():
            out += v
        return out

    traced = fx.symbolic_trace(f, concrete_args={"x": {"a": fx.PH, "b": fx.PH, "c": fx.PH}})
    assert traced({"a": 1, "b": 2, "c": 4}) == 7


def test_flattened_inputs_become_numbered_placeholders(fx: ModuleType) -> None:
    def f(x, y):
        return x[0] + x[1] + y

    traced = fx.symbolic_trace(f, concrete_args={"x": [fx.PH, fx.PH]})
    assert [node.target for node in traced.graph.find_nodes(op="placeholder")] == ["x_1", "x_2", "y"]
    assert traced([1, 2], 3) == 6


def test_nested_structure_with_placeholders_and_constants(fx: ModuleType) -> None:
    def f(batch, flag):
        image, (first, second) = batch["image"], batch["pair"]
        return {"out": [image + first, second]} if flag else None

    structure = {"image": fx.PH, "pair": (fx.PH, fx.PH)}
    traced = fx.symbolic_trace(f, concrete_args={"batch": structure, "flag": True})
    assert traced({"image": 1, "pair": (10, 5)}, True) == {"out": [11, 5]}


def test_constant_inside_a_structure(fx: ModuleType) -> None:
    def f(options):
        return options["x"] * 2 if options["double"] else options["x"]

    traced = fx.symbolic_trace(f, concrete_args={"options": {"x": fx.PH, "double": True}})
    assert traced({"x": 4, "double": True}) == 8
    with pytest.raises(AssertionError, match="specialized"):
        traced({"x": 4, "double": False})


def test_named_tuple_input(fx: ModuleType) -> None:
    def f(size):
        return size.height * size.width

    traced = fx.symbolic_trace(f, concrete_args={"size": Size(fx.PH, fx.PH)})
    assert traced(Size(3, 4)) == 12


def test_result_structure_survives_flattening(fx: ModuleType) -> None:
    def f(pair):
        a, b = pair
        return {"sum": a + b, "parts": (a, [b])}

    traced = fx.symbolic_trace(f, concrete_args={"pair": (fx.PH, fx.PH)})
    assert traced((1, 2)) == {"sum": 3, "parts": (1, [2])}


def test_graph_processes_inputs_and_outputs(fx: ModuleType) -> None:
    def f(pair):
        a, b = pair
        return {"sum": a + b}

    traced = fx.symbolic_trace(f, concrete_args={"pair": (fx.PH, fx.PH)})
    assert list(traced.graph.process_inputs((1, 2))) == [1, 2]
    assert traced.graph.process_outputs([3]) == {"sum": 3}


def test_interpreter_takes_the_structured_inputs(fx: ModuleType) -> None:
    def f(pair):
        a, b = pair
        return {"sum": a + b}

    traced = fx.symbolic_trace(f, concrete_args={"pair": (fx.PH, fx.PH)})
    assert fx.Interpreter(traced).run((1, 2)) == {"sum": 3}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_deepcopy_keeps_the_structure(fx: ModuleType) -> None:

    def f(pair):
        a, b = pair
        return [a + b]

    traced = fx.symbolic_trace(f, concrete_args={"pair": (fx.PH, fx.PH)})
    assert copy.deepcopy(traced)((1, 2)) == [3]


def test_transformer_keeps_the_structure(fx: ModuleType) -> None:
    def f(pair):
        a, b = pair
        return [a + b]

    traced = fx.symbolic_trace(f, concrete_args={"pair": (fx.PH, fx.PH)})
    assert fx.Transformer(traced).transform()((1, 2)) == [3]


def test_graph_of_flattened_inputs_can_be_edited(fx: ModuleType) -> None:
    def f(pair):
        a, b = pair
        return torch.relu(a) + b

    traced = fx.symbolic_trace(f, concrete_args={"pair": (fx.PH, fx.PH)})
    (relu,) = traced.graph.find_nodes(op="call_function", target=torch.relu)
    relu.target = torch.neg
    traced.recompile()
    assert traced((torch.tensor(2.0), 1)).item() == -1.0


def test_tracer_takes_concrete_args_too(fx: ModuleType) -> None:
    def f(x, flag):
        return x if flag else -x

    tracer = fx.Tracer()
    graph = tracer.trace(f, concrete_args={"flag": False})
    assert fx.GraphModule(tracer.root, graph)(3, False) == -3


def test_concrete_args_as_a_tuple_cover_the_parameters_in_order(fx: ModuleType) -> None:
    def f(x, flag):
        return x if flag else -x

    tracer = fx.Tracer()
    graph = tracer.trace(f, concrete_args=(fx.PH, False))
    assert fx.GraphModule(tracer.root, graph)(3, False) == -3


def test_concrete_args_tuple_of_the_wrong_length_is_refused(fx: ModuleType) -> None:
    def f(x, flag):
        return x

    with pytest.raises(RuntimeError, match="2 arguments but got 1"):
        fx.Tracer().trace(f, concrete_args=(fx.PH,))


def test_placeholder_marker_prints_as_ph(fx: ModuleType) -> None:
    assert repr(fx.PH) == "PH"
