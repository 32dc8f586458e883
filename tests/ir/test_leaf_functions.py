"""The marks that `wrap` leaves on functions.
What a trace does with them is in tests/capturing/patching/test_wrapping.py.
"""

import pytest

import torchgraft as fx
from torchgraft.ir import leaf_functions


@fx.wrap
def decorated(x):
    return x


def named(x):
    return x


fx.wrap("named")
fx.wrap("defined_later")
fx.wrap("len")


def defined_later(x):
    return x


def marks() -> list[str]:
    return [name for scope, name in leaf_functions.marked_functions() if scope is globals()]


def test_functions_names_and_builtins_can_be_marked() -> None:
    assert marks() == ["decorated", "named", "defined_later", "len"]


def test_a_marked_function_is_itself() -> None:
    assert decorated.__name__ == "decorated"
    assert decorated(3) == 3


def test_marking_twice_is_one_mark() -> None:
    before = len(marks())
    leaf_functions._mark(globals(), "named")
    assert len(marks()) == before


def test_wrap_inside_a_function_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="top level of a module"):
        fx.wrap("named")


@pytest.mark.parametrize("value", [3, None, ["named"]])
def test_only_functions_and_names_can_be_marked(value) -> None:
    with pytest.raises(fx.TraceError, match="(?s)a callable or string name.*given " + type(value).__name__):
        fx.wrap(value)


def test_a_callable_that_is_no_plain_function_must_be_given_by_name() -> None:
    with pytest.raises(fx.TraceError, match="no plain function; give its name as a string"):
        fx.wrap(len)


def test_marks_in_generated_code_live_with_its_namespace() -> None:
    scope = {leaf_functions.GENERATED: True}
    before = len(leaf_functions.marked_functions())
    leaf_functions._mark(scope, "leaf")
    assert leaf_functions.marks_in(scope) == ["leaf"]
    assert len(leaf_functions.marked_functions()) == before
    assert leaf_functions.marks_in({}) == []
