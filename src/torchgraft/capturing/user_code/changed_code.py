"""Functions with other code: compiled anew from their files with parts of the syntax tree replaced, for the time of a capture.
What is replaced, and by what, is said in `mode_statements.py` and `plain_numbers.py`; lending the code is up to `CodePatch`.
"""

from __future__ import annotations
import __future__

import ast
import functools
import linecache
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, ClassVar

from torchgraft.capturing.patching.active import CodePatch
from torchgraft.ir.origin import is_user_code

_FUTURES = functools.reduce(
    int.__or__, [getattr(__future__, name).compiler_flag for name in __future__.all_feature_names]
)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


class Change(ast.NodeTransformer):
    """What is to be different in the function that begins at a line; `places` has what calls of such texts are to call.

    A text stands in the tree for a function, and is replaced by it among the constants of the code: so nothing has to be
    added to the namespace of the user's file.
    """

    places: ClassVar[dict[str, Callable[..., Any]]]

    def __init__(self, line: int) -> None:
        self.found = False
        self.is_within = False
        self._line = line

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """A function: only the one that begins at the line changes."""
        outer, self.is_within = self.is_within, self.is_within or first_line(node) == self._line
        self.generic_visit(node)
        self.is_within = outer
        return node


def changed_patch(function: FunctionType, change: type[Change]) -> CodePatch | None:
    """A patch that lends a function its code with a change; None where there is nothing to change, or no text."""
    changed = _changed(function, change)
    if changed is None:
        return None
    patch = CodePatch(function)
    scope, defaults, closure = function.__globals__, function.__defaults__, function.__closure__
    patch.lend(FunctionType(changed, scope, function.__name__, defaults, closure))
    return patch


def _changed(function: FunctionType, change: type[Change]) -> CodeType | None:
    """The code of a function with a change, or None where there is nothing to change, or its text is not what runs."""
    code = function.__code__
    if not is_user_code(code) and not function.__module__.startswith("torch.nn."):
        return None
    lines = linecache.getlines(code.co_filename, function.__globals__)
    found = _statements(code, _without_others(lines, code.co_firstlineno)) or _statements(code, lines)
    if found is None:
        return None
    around, statement = found
    visitor = change(code.co_firstlineno)
    changed = ast.fix_missing_locations(visitor.visit(statement))
    result = _compiled([*around, changed], code) if visitor.found else None
    return None if result is None else _with_functions(result, visitor.places)


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _statements(code: CodeType, lines: list[str]) -> tuple[list[ast.stmt], ast.stmt] | None:
    """What is around the definitions in a text, and the definition that a code comes from; None if the text is not its."""
    tree = _tree_of(code.co_filename, lines)
    statement = next((item for item in tree.body if _is_inside(code.co_firstlineno, item)), None) if tree else None
    if tree is None or statement is None:
        return None
    # What is imported makes a difference to the code; what else is defined in the file makes none.
    around = [item for item in tree.body if not isinstance(item, _DEFINITIONS)]
    statement = _alone(statement, code.co_firstlineno)
    # The file may have been changed since it was imported, or the code by a tool: then the text says nothing.
    return (around, statement) if _is_same(_compiled([*around, statement], code), code) else None


def _without_others(lines: list[str], line: int) -> list[str]:
    """A file with empty lines for all definitions but the one around a line, because parsing takes most of the time. Where a
    text over several lines leads astray, what is left is no Python, or not what runs."""
    result = ["\n"] * len(lines)
    start, is_definition, is_decorated = 0, False, False
    for place, text in enumerate([*lines, "end"]):
        begins_definition = text.startswith(("class ", "def ", "async def "))
        is_decorator = text[:1] == "@"
        if (begins_definition or is_decorator or text[:1].isidentifier()) and not is_decorated:
            if not is_definition or start < line <= place:
                result[start:place] = lines[start:place]
            start, is_definition = place, begins_definition or is_decorator
        is_decorated = (is_decorated or is_decorator) and not begins_definition
    return result


def _tree_of(file: str, lines: list[str]) -> ast.Module | None:
    try:
        return ast.parse("".join(lines), file)
    except (SyntaxError, ValueError, RecursionError):  # no Python, such as a cell of a notebook with commands in it
        return None


def _is_inside(line: int, statement: ast.stmt) -> bool:
    return isinstance(statement, _DEFINITIONS) and first_line(statement) <= line <= (statement.end_lineno or 0)


def _alone(statement: ast.stmt, line: int) -> ast.stmt:
    """A class without anything in it but the definition around a line; all else takes long to copy and to compile."""
    if not isinstance(statement, ast.ClassDef):
        return statement
    inner = [_alone(item, line) for item in statement.body if _is_inside(line, item)]
    alone = ast.ClassDef(statement.name, [], [], inner or statement.body, [])
    if hasattr(statement, "type_params"):  # Python 3.12 and later
        alone.type_params = statement.type_params  # type: ignore[attr-defined]
    return ast.copy_location(alone, statement)


def first_line(definition: Any) -> int:
    """The line where a definition begins, with its decorators; a code object says that one too."""
    return min([definition.lineno, *[item.lineno for item in definition.decorator_list]])


def _compiled(body: list[ast.stmt], code: CodeType) -> CodeType | None:
    """The code of a function, compiled from some statements of its file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of a text that is called
        whole = compile(ast.Module(body, []), code.co_filename, "exec", code.co_flags & _FUTURES, dont_inherit=True)
    found = [item for item in codes_in(whole) if _place(item) == _place(code)]
    return found[0] if len(found) == 1 else None


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


_COMPARED = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_flags")


def _is_same(compiled: CodeType | None, running: CodeType) -> bool:
    if compiled is None or any(getattr(compiled, name) != getattr(running, name) for name in _COMPARED):
        return False
    pairs = list(zip(compiled.co_consts, running.co_consts, strict=False))
    return len(compiled.co_consts) == len(running.co_consts) and all(
        _is_same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else type(a) is type(b) and a == b
        for a, b in pairs
    )


def _with_functions(code: CodeType, places: dict[str, Callable[..., Any]]) -> CodeType:
    """The code with functions in their places, in the functions inside it too."""
    constants = [
        _with_functions(item, places)
        if isinstance(item, CodeType)
        else places.get(item, item)
        if isinstance(item, str)
        else item
        for item in code.co_consts
    ]
    return code.replace(co_consts=tuple(constants))
