"""Globals of generated code as `import` lines, for code that is to run in another process.
Which globals the code of a program needs is decided in `values.py`; where the lines are written is the business of `folder.py`.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchgraft.ir.arguments import map_aggregate
from torchgraft.ir.graph import Graph
from torchgraft.ir.names import STANDARD_GLOBALS
from torchgraft.ir.printing import qualified_name

_STANDARD_IMPORTS = {
    "inf": "from math import inf",
    "nan": "from math import nan",
    "NoneType": "from types import NoneType",
    "torch": "import torch",
    "device": "from torch import device",
    "fx_pytree": "from torchgraft.ir import pytree as fx_pytree",
    "pytree": "from torch.utils import _pytree as pytree",
}
_DEFINITIONS = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def import_lines(name: str, value: Any) -> list[str] | None:
    """Lines after which `name` is `value` in any process, or None if it cannot be imported.

    >>> import math
    >>> import_lines("math_sqrt", math.sqrt), import_lines("square", lambda x: x * x)
    (['from math import sqrt as math_sqrt'], None)
    """
    if name in _STANDARD_IMPORTS and STANDARD_GLOBALS[name] is value:
        return [_STANDARD_IMPORTS[name]]
    for path in _dotted_names(value):
        found = _locate(path, value)
        if found is None:
            continue
        module, attributes = found
        if not attributes:
            return [f"import {module} as {name}"]
        first, *rest = attributes
        lines = [f"from {module} import {first}" if first == name else f"from {module} import {first} as {name}"]
        return lines + [f"{name} = {'.'.join([name, *rest])}"] * bool(rest)
    return None


def is_code(value: Any) -> bool:
    """Whether a global is a function, class or module: pickling a copy of it is no substitute for importing it."""
    return isinstance(value, _DEFINITIONS)


def registration_import(operator: Any) -> str | None:
    """The line that registers an operator of another library with torch, as far as torch knows where it came from."""
    namespace = str(operator).partition(".")[0]
    name = "::".join(str(operator).split(".")[:2])
    try:
        from torch._library.custom_ops import OPDEFS

        home = OPDEFS[name]._init_fn.__module__
    except (ImportError, KeyError, AttributeError):
        home = namespace
    if home == "__main__" or home.partition(".")[0] == "torch" or home not in sys.modules:
        return None
    return f"import {home}"


def operators_of(graph: Graph) -> list[Any]:
    """Every operator that a graph calls or passes on."""
    found: dict[Any, None] = {}
    for node in graph.nodes:
        map_aggregate(
            (node.target, node.args, dict(node.kwargs)),
            lambda leaf: found.setdefault(leaf) if isinstance(leaf, _OPERATORS) else None,
        )
    return list(found)


def _dotted_names(value: Any) -> Iterator[str]:
    """Where a value says it can be found, the most public name first."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    home = getattr(value, "__module__", None)
    owner = getattr(value, "__self__", None)
    if isinstance(value, types.ModuleType):
        yield value.__name__
    if isinstance(owner, type):
        yield f"{owner.__module__}.{owner.__qualname__}.{value.__name__}"
    if isinstance(home, str) and isinstance(name, str):
        if home.startswith("torchgraft."):
            yield f"torchgraft.{name}"
        yield f"{home}.{name}"
    if callable(value):
        yield from _attempt(qualified_name, value)
    yield from _attempt(repr, value)  # types of typing


def _attempt(describe: Callable[[Any], str], value: Any) -> Iterator[str]:
    try:
        text = describe(value)
    except Exception:  # a user's __repr__ may raise anything
        return
    if re.fullmatch(r"\w+(\.\w+)+", text):
        yield text


def _locate(path: str, value: Any) -> tuple[str, list[str]] | None:
    """The module and the attributes that lead to `value`, or None if the path leads elsewhere."""
    parts = path.split(".")
    if parts[0] == "__main__" or "<locals>" in parts:
        return None
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        found: Any = _imported(module)
        if found is None:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        is_method = isinstance(value, types.MethodType | types.BuiltinMethodType)  # made anew each time it is looked up
        return (module, parts[length:]) if found is value or (is_method and found == value) else None
    return None


def _imported(module: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
