"""Names: which identifiers a graph may use, and how a wished name becomes a free one.
The rules are torch.fx's (`relu`, `relu_1`, `relu_2`; no keyword, no builtin), so that generated code reads the same.
"""

from __future__ import annotations

import builtins
import keyword
import math
import re
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.ir import pytree as fx_pytree
from torchgraft.ir.guards import is_guard

# Names that generated code can rely on; nothing else may take them.
STANDARD_GLOBALS: dict[str, Any] = {
    "inf": math.inf,
    "nan": math.nan,
    "NoneType": type(None),
    "torch": torch,
    "device": torch.device,
    "fx_pytree": fx_pytree,
    "pytree": pytree,
}

_RESERVED: dict[str, Any] = {
    **dict.fromkeys(keyword.kwlist, object()),
    **vars(builtins),
    **STANDARD_GLOBALS,
}
_NOT_IN_IDENTIFIERS = re.compile("[^0-9a-zA-Z_]+")
_NUMBERED = re.compile(r"(.*?)_(\d+)", re.DOTALL)
_CAMEL_HUMP = re.compile(r"(?<=[a-z])([A-Z])")

# A wished name parsed once: (identifier, base, number or None, whether it is reserved). Programs use few wishes, many times.
_Parsed = tuple[str, str, int | None, bool]
_parsed: dict[str, _Parsed] = {}


def _parse(wish: str) -> _Parsed:
    identifier = _NOT_IN_IDENTIFIERS.sub("_", wish) or "_unnamed"
    if identifier[0].isdigit():
        identifier = f"_{identifier}"
    numbered = _NUMBERED.fullmatch(identifier)
    result: _Parsed
    if numbered and numbered[1]:
        result = identifier, numbered[1], int(numbered[2]), identifier in _RESERVED
    else:
        result = identifier, identifier, None, identifier in _RESERVED
    if len(_parsed) > 100_000:
        _parsed.clear()
    _parsed[wish] = result
    return result


def snake_case(text: str) -> str:
    """`GlobalPool` becomes `global_pool`, as torch.fx names its nodes.

    >>> snake_case("GlobalPool")
    'global_pool'
    """
    return _CAMEL_HUMP.sub(r"_\1", text).lower()


_wishes: dict[Any, str] = {}


def wish_of(target: Any) -> str:
    """The name that the node of a call would like to have.

    >>> wish_of(torch.Tensor.__add__), wish_of("layer1.0")
    ('add', 'layer1.0')
    """
    try:
        wish = _wishes.get(target)
    except TypeError:  # a callable object that cannot be a key
        return snake_case(getattr(target, "__name__", type(target).__name__))
    if wish is None:
        text = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)
        if is_guard(target):
            text = "guard"
        if text.startswith("__") and text.endswith("__"):
            text = text[2:-2]
        wish = snake_case(text)
        if len(_wishes) > 20_000:
            _wishes.clear()
        _wishes[target] = wish
    return wish


def is_legal_name(name: str) -> bool:
    """Whether generated code may bind `name` as a local variable."""
    return name.isidentifier() and name not in _RESERVED


class Namespace:
    """Hands out unique identifiers.

    >>> names = Namespace()
    >>> [names.create_name(wish) for wish in ("relu", "relu", "layer1.0", "len")]
    ['relu', 'relu_1', 'layer1_0', 'len_1']
    """

    __slots__ = ("_counts", "_object_names", "_used")

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._counts: dict[str, int] = {}
        self._object_names: dict[Any, str] = {}

    def create_name(self, candidate: str, obj: Any = None) -> str:
        """A free name as close to `candidate` as possible; the same object keeps the name it got first."""
        if obj is not None and obj in self._object_names:
            return self._object_names[obj]
        name, base, number, reserved = _parsed.get(candidate) or _parse(candidate)
        used = self._used
        if obj is None and not reserved and name not in used:
            used.add(name)
            if number is not None:
                self._counts[base] = number
            return name
        if number is None or name in used:
            number = self._counts.get(base, 0)
            if reserved and (obj is None or _RESERVED[name] is not obj):
                number += 1
                name = f"{base}_{number}"
        while name in used:
            number += 1
            name = f"{base}_{number}"
        used.add(name)
        self._counts[base] = number
        if obj is not None:
            self._object_names[obj] = name
        return name

    def is_used(self, name: str) -> bool:
        """Whether `name` was handed out."""
        return name in self._used

    def copy(self) -> Namespace:
        """An independent namespace in which the same names are taken (objects are not carried over)."""
        result = Namespace()
        result._used = set(self._used)
        result._counts = dict(self._counts)
        return result
