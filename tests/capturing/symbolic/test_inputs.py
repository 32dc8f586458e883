"""Inputs of a traced function: placeholders, defaults, variable arguments, concrete arguments and structures.
Behaviour common with torch.fx is examined in tests/compatibility/test_concrete_args.py.
"""

import enum
import functools
import inspect

import pytest
import torch
from torch import nn

import torchgraft as fx
from torchgraft.capturing.symbolic.inputs import PH, PHBase


def placeholders(program: fx.GraphModule) -> list[tuple]:
    return [(node.target, node.args, node.type) for node in program.graph.nodes if node.op == "placeholder"]


class TestSignatures:
    def test_names_defaults_and_annotations(self) -> None:
        def forward(x: torch.Tensor, y: int = 3, z=None):
            return x + y

        program = fx.symbolic_trace(forward)
        assert placeholders(program) == [("x", (), torch.Tensor), ("y", (3,), int), ("z", (None,), None)]
        assert program(1) == 4
        assert program(1, y=5, z=7) == 6

    def test_the_return_annotation(self) -> None:
        def forward(x) -> torch.Tensor:
            return x

        assert fx.symbolic_trace(forward).graph.output_node().type is torch.Tensor

    def test_keyword_only(self) -> None:
        def forward(x, *, scale=2):
            return x * scale

        program = fx.symbolic_trace(forward)
        assert program(3) == 6
        assert program(3, scale=3) == 9

    def test_positional_only(self) -> None:
        def forward(x, /, y):
            return x - y

        assert fx.symbolic_trace(forward)(3, 1) == 2

    def test_variable_arguments(self) -> None:
        def forward(x, *args, scale=2, **options):
            return x + args[0] * scale + options["k"]

        program = fx.symbolic_trace(forward)
        assert [target for target, _, _ in placeholders(program)] == ["x", "*args", "scale", "**options"]
        assert program(1, 2, scale=3, k=4) == forward(1, 2, scale=3, k=4)

    def test_variable_arguments_of_a_method(self) -> None:
        class Model(nn.Module):
            def forward(self, x, *args, **options):
                return x + args[1] + options["k"]

        assert fx.symbolic_trace(Model())(1, 2, 3, k=4) == 8

    def test_a_decorated_forward(self) -> None:
        def decorate(function):
            @functools.wraps(function)
            def wrapper(self, *args, **kwargs):
                return function(self, *args, **kwargs) + 1

            return wrapper

        class Model(nn.Module):
            @decorate
            def forward(self, x, y=2):
                return x * y

        program = fx.symbolic_trace(Model())
        assert [target for target, _, _ in placeholders(program)] == ["x", "y"]
        assert program(3) == 7
        assert program(3, y=3) == 10

    def test_a_decorated_forward_with_options_takes_none(self) -> None:
        def decorate(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                return function(*args, **kwargs)

            return wrapper

        class Model(nn.Module):
            @decorate
            def forward(self, x, **options):
                return x * 2

        program = fx.symbolic_trace(Model())
        assert program(3) == 6
        with pytest.raises(TypeError):
            program(3, k=1)

    def test_partials(self) -> None:
        def forward(x, y, z=3):
            return x + y * z

        program = fx.symbolic_trace(functools.partial(forward, y=2))
        assert program(1) == 7

    def test_callable_objects_and_bound_methods(self) -> None:
        class Thing:
            def __call__(self, x):
                return x + 1

            def method(self, x):
                return x + 2

        assert fx.symbolic_trace(Thing())(1) == 2
        assert fx.symbolic_trace(Thing().method)(1) == 3

    def test_a_function_of_c_is_refused(self) -> None:
        with pytest.raises(fx.TraceError, match="implemented in C or has no signature; wrap it in a Python function"):
            fx.symbolic_trace(torch.relu)

    def test_self_must_be_named(self) -> None:
        class Model(nn.Module):
            def forward(*args):
                return args[1]

        with pytest.raises(fx.TraceError, match=r"``self`` argument cannot be part of \*args"):
            fx.symbolic_trace(Model())

    def test_the_programs_signature_is_the_functions(self) -> None:
        def forward(x: int, y: int = 3):
            return x + y

        signature = inspect.signature(fx.symbolic_trace(forward).forward)
        assert [(p.name, p.default) for p in signature.parameters.values()] == [
            ("x", inspect.Parameter.empty),
            ("y", 3),
        ]

    def test_a_tensor_as_a_default(self) -> None:
        ones = torch.ones(2)

        def forward(x, weight=ones):
            return x + weight

        program = fx.symbolic_trace(forward)
        assert torch.equal(program(torch.ones(2)), torch.full((2,), 2.0))
        assert torch.equal(program(torch.ones(2), torch.zeros(2)), torch.ones(2))

    def test_a_function_as_a_default(self) -> None:
        def forward(x, activation=torch.relu, scale=1.0):
            return x * scale

        assert fx.symbolic_trace(forward)(1) == 1


class TestConcreteArguments:
    def test_a_value_is_fixed_and_checked(self) -> None:
        def forward(x, flag):
            return x + 1 if flag else x - 1

        program = fx.symbolic_trace(forward, concrete_args={"flag": True})
        assert program(1, True) == 2
        with pytest.raises(AssertionError, match="flag has been specialized to have value True"):
            program(1, False)

    @pytest.mark.parametrize("value", [3, 2.5, "s", torch.float16, None, False])
    def test_kinds_of_values(self, value) -> None:
        program = fx.symbolic_trace(lambda x, option: x, concrete_args={"option": value})
        assert program(1, value) == 1
        with pytest.raises(AssertionError):
            program(1, "another")

    def test_the_check_is_no_dead_code(self) -> None:
        program = fx.symbolic_trace(lambda x, a, b: x, concrete_args={"a": 1, "b": None})
        program.graph.eliminate_dead_code()
        with pytest.raises(AssertionError):
            program(1, 2, None)
        with pytest.raises(AssertionError):
            program(1, 1, 3)

    def test_what_cannot_be_compared_is_warned_about(self) -> None:
        with pytest.warns(UserWarning, match="option.*type object are not compared"):
            fx.symbolic_trace(lambda x, option: x, concrete_args={"option": object()})

    def test_names_are_checked(self) -> None:
        with pytest.warns(UserWarning, match="names 'flg', which is ignored: the parameters are 'x', 'flag'"):
            fx.symbolic_trace(lambda x, flag: x, concrete_args={"flg": True})

    def test_a_tuple_must_have_one_for_each(self) -> None:
        with pytest.raises(fx.TraceError, match="expected 2 arguments but got 1 concrete"):
            fx.Tracer().trace(lambda x, flag: x, concrete_args=(PH,))

    def test_structures_are_taken_apart_and_put_together(self) -> None:
        def forward(x, pair):
            return {"sum": x["a"] + x["b"][0], "pair": (pair[0] * 2, [pair[1]])}

        program = fx.symbolic_trace(forward, concrete_args={"x": {"a": PH, "b": [PH]}, "pair": (PH, PH)})
        assert program({"a": 1, "b": [2]}, (3, 4)) == forward({"a": 1, "b": [2]}, (3, 4))

    def test_a_constant_inside_a_structure_is_checked(self) -> None:
        program = fx.symbolic_trace(lambda x: x["a"] * x["n"], concrete_args={"x": {"a": PH, "n": 3}})
        assert program({"a": 2, "n": 3}) == 6
        with pytest.raises(AssertionError, match="specialized to have value 3"):
            program({"a": 2, "n": 4})

    def test_another_structure_is_refused(self) -> None:
        program = fx.symbolic_trace(lambda x: x["a"], concrete_args={"x": {"a": PH}})
        with pytest.raises(ValueError, match="structure"):
            program([1])

    def test_marks_on_a_placeholder_reach_its_node(self) -> None:
        place = PHBase()
        place.note = 7
        graph = fx.Tracer().trace(lambda x: x[0], concrete_args={"x": (place,)})
        assert next(iter(graph.nodes)).note == 7
        assert repr(PH) == repr(place) == "PH"


class TestParametersNamedSelf:
    def test_in_a_plain_function(self) -> None:
        def function(self, x, *, scale=2):
            return self * scale + x

        program = fx.symbolic_trace(function)
        assert program(torch.ones(1), 3) == 5
        assert program(torch.ones(1), 3, scale=4) == 7

    def test_with_structures(self) -> None:
        program = fx.symbolic_trace(
            lambda self, x: self["a"] + x[0], concrete_args={"self": {"a": fx.PH}, "x": [fx.PH]}
        )
        assert program({"a": torch.ones(1)}, [1]) == 2


class Inner(nn.Module):
    def forward(self, x, mask=None):
        return x if mask is None else x * mask


class Outer(nn.Module):
    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.inner, self.by_name = Inner(), by_name

    def forward(self, x, mask=None):
        return (self.inner(x, mask=mask) if self.by_name else self.inner(x, mask)) + 1


@pytest.mark.parametrize("by_name", [False, True])
def test_an_optional_input_that_a_submodule_asks_about_must_be_given(by_name) -> None:
    program = fx.symbolic_trace(Outer(by_name))
    assert program(torch.ones(1), torch.full((1,), 3.0)) == 4
    with pytest.raises(fx.GuardError, match="'mask'.*None"):
        program(torch.ones(1))


MISSING = object()


class Mode(enum.Enum):
    FAST = 1


def test_a_sentinel_as_a_default_is_refused_where_it_is_asked_for() -> None:
    def model(x, scale=MISSING):
        return x if scale is MISSING else x * scale

    with pytest.raises(
        fx.TraceError, match=r"cannot trace a comparison of the argument 'scale' with its default\n  at "
    ):
        fx.symbolic_trace(model)


def test_an_enumeration_that_is_asked_for_is_checked() -> None:
    program = fx.symbolic_trace(lambda x, mode: x if mode is Mode.FAST else x * 2)
    assert program(torch.ones(1), 3) == 2
    with pytest.raises(fx.GuardError, match="'mode' is"):
        program(torch.ones(1), Mode.FAST)
