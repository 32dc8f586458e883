"""Values as source text: arguments, annotations and functions, and the globals that the text needs to mean the same.
The layout of a whole function is in `source.py`.
"""

from __future__ import annotations

import builtins
import enum
import math
import types
import typing
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.errors import GraphError
from torchgraft.ir.guards import is_guard
from torchgraft.ir.names import STANDARD_GLOBALS, Namespace
from torchgraft.ir.node import Node
from torchgraft.ir.printing import qualified_name, type_text

# typing.List[int] reports `list` as its origin, but prints, and is written, as typing.List.
_TYPING_NAMES: dict[Any, Any] = {
    list: typing.List,  # noqa: UP006
    dict: typing.Dict,  # noqa: UP006
    set: typing.Set,  # noqa: UP006
    frozenset: typing.FrozenSet,  # noqa: UP006
    tuple: typing.Tuple,  # noqa: UP006
}


class SourceGlobals:
    """Chooses how each object is written, and collects what has to be a global for it.

    What lies under `torch` is written by its path, after checking that the path leads to this very object; everything else
    gets a global of its own.
    """

    def __init__(self, names: Namespace, parameters: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.values: dict[str, Any] = {}
        self._names = names
        self._texts: dict[int, str] = {}
        self._kept: list[Any] = []  # keeps ids in `_texts` from being reused
        self._parameters = parameters
        # Standard names that an input of the function hides; what would be written with them gets a global of its own.
        self.shadowed = STANDARD_GLOBALS.keys() & parameters
        for name, value in STANDARD_GLOBALS.items():
            self.values[name] = value
            names.create_name(name, value)

    def add(self, wish: str, value: Any) -> str:
        """The text for `value`, with a global named like `wish` if it needs one."""
        text = self._texts.get(id(value))
        if text is None:
            text = self._place(wish, value)
            self._texts[id(value)] = text
            self._kept.append(value)
        return text

    def function(self, function: Callable[..., Any]) -> str:
        """The text that calls for a function."""
        text = self._texts.get(id(function))
        if text is not None:
            return text
        # Guards are in every captured program, and read better by their bare names.
        return self.add(function.__name__ if is_guard(function) else qualified_name(function), function)

    def _place(self, wish: str, value: Any) -> str:
        if value is torch.device:
            return "device"
        if (
            "torch" not in self.shadowed
            and wish.startswith("torch.")
            and not wish.startswith("torch.Tensor.")
            and _resolve_torch(wish) is value
        ):
            return wish
        name = wish.replace(".", "_")
        if name in self.values and self.values[name] is value:
            return name
        name = self._names.create_name(name, value if getattr(builtins, name, None) is value else None)
        self.values[name] = value
        return name

    # ---- values ----

    def text(self, value: Any) -> str:
        """An argument as source."""
        if self.shadowed and type(value) in _WRITTEN_WITH_GLOBALS:
            return self._by_representation(value)
        writer = _WRITERS.get(type(value))
        if writer is not None:
            return writer(value)
        return self._unusual(value)

    def default(self, value: Any) -> str:
        """The default of an input, which may be anything."""
        return self._by_representation(value) if isinstance(value, torch.Tensor) else self.text(value)

    def _unusual(self, value: Any) -> str:
        if isinstance(value, Node):
            return value._name
        if isinstance(value, tuple):
            return self._tuple(value)
        if isinstance(value, list):
            return f"[{', '.join([self.text(item) for item in value])}]"
        if isinstance(value, dict):
            return "{" + ", ".join([f"{self.text(key)}: {self.text(item)}" for key, item in value.items()]) + "}"
        if isinstance(value, slice):
            callee = "slice" if "slice" not in self._parameters else self.add("slice", slice)
            return f"{callee}({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if isinstance(value, enum.Enum) and value.name is not None and value.name.isidentifier():
            return f"{self.add(type(value).__name__, type(value))}.{value.name}"
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
            return self.function(value)
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
            return self.function(value) if not isinstance(value, type) else self.add(type_text(value), value)
        if isinstance(value, torch.Tensor):
            raise GraphError(
                f"cannot write a tensor of shape {tuple(value.shape)} into code: a tensor cannot be an argument; "
                "keep it as an attribute of the module and fetch it with get_attr"
            )
        return self._by_representation(value)

    def _tuple(self, value: tuple[Any, ...]) -> str:
        items = ", ".join([self.text(item) for item in value])
        if hasattr(value, "_fields"):
            return f"{self.add(type_text(type(value)), type(value))}({items})"
        return f"({items},)" if len(value) == 1 else f"({items})"

    def _by_representation(self, value: Any) -> str:
        """A global for whatever has no literal: its repr need not be Python, and need not mean the same."""
        return self.add(f"_constant_{type(value).__name__.lower()}", value)

    # ---- annotations ----

    def annotation(self, annotation: Any) -> str:
        """A type as source."""
        if annotation == ():
            return "()"
        if isinstance(annotation, str):
            return repr(annotation)
        if isinstance(annotation, types.UnionType):
            return "|".join([self.annotation(item) for item in typing.get_args(annotation)])
        origin = getattr(annotation, "__origin__", None)
        if origin is not None:
            if isinstance(annotation, typing._GenericAlias):  # type: ignore[attr-defined]
                origin = _TYPING_NAMES.get(origin, origin)
            text = self.add(type_text(origin), origin)
            parameters = [self.annotation(item) for item in typing.get_args(annotation)]
            return f"{text}[{','.join(parameters)}]" if parameters else text
        if annotation is None or annotation is type(None):
            return "NoneType" if annotation is not None else "None"
        if annotation is ...:
            return "..."
        if isinstance(annotation, (int, float)):
            return repr(annotation)
        return self.add(type_text(annotation), annotation)


def _complex_text(value: complex) -> str:
    # repr loses the sign of zero, and writes infj.
    plain = all(math.isfinite(part) and (part != 0 or math.copysign(1, part) > 0) for part in (value.real, value.imag))
    return repr(value) if plain else f"complex({value.real!r}, {value.imag!r})"


_WRITTEN_WITH_GLOBALS = frozenset({float, complex, torch.dtype, torch.memory_format, torch.layout, torch.device})
_BY_REPR = (int, float, bool, str, bytes, range, type(None), type(...), torch.dtype, torch.memory_format, torch.layout)
_WRITERS: dict[type, Callable[[Any], str]] = {
    Node: lambda node: node._name,
    complex: _complex_text,
    **dict.fromkeys((*_BY_REPR, torch.device), repr),  # inf and nan are globals of every generated function
}


def _resolve_torch(path: str) -> Any:
    value: Any = torch
    for part in path.split(".")[1:]:
        value = getattr(value, part, None)
    return getattr(value, "__torchgraft_original__", value)  # another thread may be tracing
