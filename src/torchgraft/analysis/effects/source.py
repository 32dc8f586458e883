"""The syntax tree of a function, found from its code object.
What the tree means is read in `statements.py` and `expressions.py`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from types import CodeType

FunctionTree = ast.FunctionDef | ast.Lambda

_MANGLED = re.compile(r"^_[A-Za-z0-9]\w*?(?=__\w)")


@functools.lru_cache(maxsize=8192)
def function_tree(code: CodeType) -> FunctionTree | None:
    """The tree of the function that `code` was compiled from, or None where its source is not to be had."""
    try:
        text = inspect.getsource(code)
    except (OSError, TypeError, IndexError, SyntaxError):
        return None
    first_line = code.co_firstlineno
    if text[:1].isspace():
        text = "if True:\n" + text
        first_line -= 1
    try:
        module = ast.parse(text)
        compiled = compile(module, code.co_filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    wanted = ast.Lambda if code.co_name == "<lambda>" else ast.FunctionDef
    trees = [tree for tree in ast.walk(module) if isinstance(tree, wanted) and _is_called(tree, code.co_name)]
    twins = [twin for twin in _nested_codes(compiled) if twin.co_name == code.co_name]
    # A file edited after import, or two lambdas on a line: the tree in hand might be another function's.
    if wanted is ast.Lambda and len(trees) != 1:
        return None
    if not trees or not twins or _fingerprint(twins[0]) != _fingerprint(code):
        return None
    tree = trees[0]
    assert isinstance(tree, FunctionTree)
    ast.increment_lineno(tree, first_line - 1)
    return tree


def _is_called(tree: ast.AST, name: str) -> bool:
    return not isinstance(tree, ast.FunctionDef) or tree.name == name


def _nested_codes(code: CodeType) -> list[CodeType]:
    result = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            result.append(constant)
            result += _nested_codes(constant)
    return result


def _fingerprint(code: CodeType) -> tuple[object, ...]:
    names = {_MANGLED.sub("", name) for name in (*code.co_names, *code.co_freevars)}
    numbers = sorted(repr(constant) for constant in code.co_consts if isinstance(constant, int | float))
    return code.co_varnames, code.co_argcount, code.co_flags & 0x2C, frozenset(names - {"__class__"}), tuple(numbers)
