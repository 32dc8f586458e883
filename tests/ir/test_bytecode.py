"""Quick looks at bytecode say what reading all instructions says."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType

import pytest
import torch

from torchgraft.ir import bytecode
from torchgraft.ir.bytecode import global_names, instructions, may_contain

_counter = 0


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _codes_of(module: object) -> list[CodeType]:
    functions = [value for value in vars(module).values() if isinstance(value, FunctionType)]
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    functions += [value for cls in classes for value in vars(cls).values() if isinstance(value, FunctionType)]
    return [code for function in functions for code in _codes(function.__code__)]


def _expected(code: CodeType) -> list[tuple[str, bool, int]]:
    wanted = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
    found = [item for item in dis.get_instructions(code) if item.opname in wanted]
    return [(item.argval, item.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"), item.offset) for item in found]


@pytest.mark.parametrize("module", [ast, dis, inspect, torch.nn.functional, torch.overrides, bytecode], ids=repr)
def test_they_agree_with_dis(module: object) -> None:
    codes = _codes_of(module)
    assert codes
    for code in codes:
        assert [tuple(item) for item in global_names(code)] == _expected(code)
        names = {item.opname for item in dis.get_instructions(code)}
        assert may_contain(code, "IS_OP") or "IS_OP" not in names
        assert [item.offset for item in instructions(code)] == [
            item.offset for item in dis.get_instructions(code) if item.opname != "CACHE"
        ]


def test_more_names_than_fit_into_a_byte() -> None:
    text = (
        "def many():\n" + "".join(f"    name_{number}.x\n" for number in range(700)) + "    global last\n    last = 1\n"
    )
    scope: dict[str, FunctionType] = {}
    exec(textwrap.dedent(text), scope)
    found = global_names(scope["many"].__code__)
    assert [item.name for item in found] == [*[f"name_{number}" for number in range(700)], "last"]
    assert [item.is_assigned for item in found] == [False] * 700 + [True]


def test_a_variable_that_is_deleted() -> None:
    def forget() -> None:
        global _counter
        del _counter

    assert [(item.name, item.is_assigned) for item in global_names(forget.__code__)] == [("_counter", True)]


def test_instructions_are_read_once() -> None:
    code = test_a_variable_that_is_deleted.__code__
    assert instructions(code) is instructions(code)
