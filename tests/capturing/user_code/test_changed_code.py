"""Functions compiled anew from their files with a change, wherever in a file they stand."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from torchgraft.capturing.user_code import changed_code
from torchgraft.capturing.user_code.changed_code import Change, changed_patch


class Doubled(Change):
    """Turns the number 21 into 42."""

    places: ClassVar[dict[str, Callable[..., Any]]] = {}

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if self.is_within and node.value == 21:
            self.found = True
            return ast.copy_location(ast.Constant(42), node)
        return node


FILE = '''
"""A file with a text
class Fake: not a class
over several lines."""
import functools as tools
import math


def keep(function):
    return function


@keep
@tools.lru_cache(
    maxsize=None,
)
def decorated():
    return 21


class Plain:
    number = 21

    def method(self):
        return math.floor(21) + self.__private()

    def __private(self):
        return 0

    @keep
    def with_decorator(self):
        def inner():
            return 21

        return inner()

    class Within:
        def method(self):
            return 21


if math.pi > 3:

    def conditional():
        return 21


class WithText:
    def method(self):
        text = """
def fake():
    return 21
"""
        return text and 21


async def later():
    return 21


def last(): return 21
'''


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = Path(tmp_path_factory.mktemp("changed")) / "some_file.py"
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location("some_file", path)
    assert spec is not None and spec.loader is not None
    result = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(result)
    return result


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "decorated": lambda module: module.decorated.__wrapped__,
    "method": lambda module: module.Plain.method,
    "with decorator": lambda module: module.Plain.with_decorator,
    "class in a class": lambda module: module.Plain.Within.method,
    "text at the margin": lambda module: module.WithText.method,
    "one line": lambda module: module.last,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_changed_and_put_back(module: ModuleType, name: str) -> None:
    function = FUNCTIONS[name](module)
    owner = {"method": module.Plain(), "with decorator": module.Plain(), "class in a class": module.Plain.Within()}
    owner["text at the margin"] = module.WithText()
    args = [owner[name]] if name in owner else []
    patch = changed_patch(function, Doubled)
    assert patch is not None
    assert function(*args) == 21
    patch.acquire()
    try:
        assert function(*args) == 42
    finally:
        patch.release()
    assert function(*args) == 21


def test_most_of_a_file_is_not_read(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    parse = ast.parse
    monkeypatch.setattr(changed_code.ast, "parse", lambda text, *rest: read.append(text) or parse(text, *rest))
    assert changed_patch(module.Plain.method, Doubled) is not None
    assert len(read) == 1 and "def last" not in read[0] and "import math" in read[0]
    assert read[0].count("\n") == FILE.count("\n")


def test_nothing_to_change(module: ModuleType) -> None:
    assert changed_patch(module.keep, Doubled) is None


def test_a_definition_within_a_statement_is_left_alone(module: ModuleType) -> None:
    assert changed_patch(module.conditional, Doubled) is None


def test_a_file_that_is_not_what_runs(module: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "other_file.py"
    path.write_text("def function():\n    return 21\n")
    scope: dict[str, Any] = {"__name__": "other_file"}
    exec(compile("def function():\n    return 21 + len('')\n", str(path), "exec"), scope)
    assert changed_patch(scope["function"], Doubled) is None
