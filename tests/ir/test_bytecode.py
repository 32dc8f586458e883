"""Quick looks at bytecode say what reading all instructions says."""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

import pytest
import torch

from torchgraft.ir import bytecode
from torchgraft.ir.bytecode import instructions, may_contain


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


@pytest.mark.parametrize("module", [ast, dis, inspect, torch.nn.functional, torch.overrides, bytecode], ids=repr)
def test_they_agree_with_dis(module: object) -> None:
    codes = _codes_of(module)
    assert codes
    for code in codes:
        names = {item.opname for item in dis.get_instructions(code)}
        assert may_contain(code, "IS_OP") or "IS_OP" not in names
        assert [item.offset for item in instructions(code)] == [
            item.offset for item in dis.get_instructions(code) if item.opname != "CACHE"
        ]


def test_instructions_are_read_once() -> None:
    code = test_they_agree_with_dis.__code__
    assert instructions(code) is instructions(code)
