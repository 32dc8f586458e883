"""The syntax tree of a function, found from its code object.
What the tree means is read in `statements.py` and `expressions.py`.
"""

from __future__ import annotations

import ast
import dis
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
    # The block starts with the function; its code may carry another name (torch renames that of its decorators).
    is_lambda = code.co_name == "<lambda>"
    trees = [tree for tree in ast.walk(module) if isinstance(tree, ast.Lambda if is_lambda else ast.FunctionDef)]
    # A file edited after import, or two lambdas on a line: the tree in hand might be another function's.
    if not trees or (is_lambda and len(trees) != 1):
        return None
    tree = trees[0]
    name = tree.name if isinstance(tree, ast.FunctionDef) else "<lambda>"
    twins = [twin for twin in _nested_codes(compiled) if twin.co_name == name]
    if not twins or _fingerprint(twins[0]) != _fingerprint(code):
        return None
    ast.increment_lineno(tree, first_line - 1)
    return tree


def _nested_codes(code: CodeType) -> list[CodeType]:
    result = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            result.append(constant)
            result += _nested_codes(constant)
    return result


def _fingerprint(code: CodeType) -> tuple[object, ...]:
    """What stays the same when a function is compiled again outside its class and its enclosing functions."""
    names = {_MANGLED.sub("", name) for name in (*code.co_names, *code.co_freevars)} - {"__class__"}
    numbers = sorted(repr(constant) for constant in code.co_consts if isinstance(constant, int | float))
    stores = sorted(
        (instruction.opname, instruction.argrepr if instruction.opname == "BINARY_OP" else "")
        for instruction in dis.get_instructions(code)
        if instruction.opname in _STORES
    )
    nested = [_fingerprint(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    shape = code.co_varnames, code.co_argcount, code.co_flags & 0x2C
    return *shape, frozenset(names), tuple(numbers), tuple(stores), tuple(nested)


_STORES = frozenset(
    {"BINARY_OP", "STORE_SUBSCR", "STORE_SLICE", "STORE_ATTR", "DELETE_SUBSCR", "DELETE_ATTR", "STORE_GLOBAL"}
)
