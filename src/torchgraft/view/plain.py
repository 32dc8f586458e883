"""Argument trees as plain data (numbers, texts, lists, dicts) that JSON can hold and that needs no torch to be read, and back.
`readable` and `argument_text` are for people, and cannot be read back.

What JSON has no word for is a dict with one key that says what it is: `{"tuple": [1, 2]}`, `{"dtype": "float32"}`. The use of
another node's value is `{"input": key}`, where `key` is that of the edge it comes by.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.analysis.effects.calls import is_node
from torchgraft.errors import GraphError
from torchgraft.ir.copying import import_object
from torchgraft.ir.node import Node
from torchgraft.ir.printing import DTYPE_LETTERS, qualified_name, target_text, type_text
from torchgraft.results.shown import plain
from torchgraft.results.tables import shortened

_TORCH_WORDS: dict[type, str] = {torch.dtype: "dtype", torch.memory_format: "memory_format", torch.layout: "layout"}


def encode(value: Any, use: Callable[[Node], Any]) -> Any:
    """A value as plain data; `use` says what is written for a node.

    >>> encode((1, [torch.float32], slice(None, 3)), lambda node: None)
    {'tuple': [1, [{'dtype': 'float32'}], {'slice': [None, 3, None]}]}
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, Node):
        return use(value)
    if isinstance(value, list):
        return [encode(item, use) for item in value]
    if isinstance(value, tuple):
        return _encode_tuple(value, use)
    if isinstance(value, dict):
        return {"dict": [[encode(key, use), encode(item, use)] for key, item in value.items()]}
    if kind in _TORCH_WORDS:
        return {_TORCH_WORDS[kind]: str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(value)}
    if isinstance(value, slice):
        return {"slice": [encode(item, use) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if value is Ellipsis:
        return {"ellipsis": True}
    if kind is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, enum.Enum):
        return {"enum": [type_text(kind), value.name]}
    return _encode_function(value)


def _encode_tuple(value: tuple[Any, ...], use: Callable[[Node], Any]) -> Any:
    items = [encode(item, use) for item in value]
    if isinstance(value, torch.Size):
        return {"size": items}
    if hasattr(value, "_fields"):
        return {"namedtuple": [type_text(type(value)), *items]}
    return {"tuple": items}


def _encode_function(value: Any) -> Any:
    if callable(value):
        try:
            path = type_text(value) if isinstance(value, type) else qualified_name(value)
        except GraphError:
            path = ""
        if is_at(path, value):
            return {"function": path}
    return {"object": short_text(value)}


def is_at(path: str, value: Any) -> bool:
    """Whether a dotted path leads to this very object, and not to another of the same name.

    >>> is_at("torch.relu", torch.relu), is_at("torch.relu", torch.tanh), is_at("nowhere.relu", torch.relu)
    (True, False, False)
    """
    try:
        return bool(path) and bool(import_object(path) == value)
    except (ImportError, AttributeError, ValueError):
        return False


def short_text(value: Any) -> str:
    """A value on one short line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # somebody else's code
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 120 else f"{text[:117]}..."


def decode(value: Any, use: Callable[[Any], Any]) -> Any:
    """What `encode` made plain, live again; `use` gives the node for the key of an edge. Raises ValueError where it cannot.

    >>> decode({"tuple": [1, {"slice": [None, 3, None]}]}, lambda key: None)
    (1, slice(None, 3, None))
    """
    if isinstance(value, list):
        return [decode(item, use) for item in value]
    if isinstance(value, tuple):
        return tuple([decode(item, use) for item in value])
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(
            f"a dict must have one key that says what it is ({', '.join(_DECODERS)}), not {short_text(value)}"
        )
    ((word, content),) = value.items()
    if word == "input":
        return use(content)
    decoder = _DECODERS.get(word)
    if decoder is None:
        raise ValueError(f"{word!r} is no word for a value; known are input, {', '.join(_DECODERS)}")
    try:
        return decoder(content if word == "object" else decode(content, use))
    except (TypeError, AttributeError, ImportError, KeyError, RuntimeError) as error:
        raise ValueError(f"{short_text(value)} is no {word}: {error}") from error


def uses_in(value: Any) -> list[Any]:
    """The keys of all edges that an encoded tree refers to, in order."""
    if isinstance(value, (list, tuple)):
        return [key for item in value for key in uses_in(item)]
    if isinstance(value, dict):
        if list(value) == ["input"]:
            return [value["input"]]
        return [key for item in value.values() for key in uses_in(item)]
    return []


def _torch_word(name: str) -> Any:
    return getattr(torch, name)


def _refuse_object(text: str) -> Any:
    raise ValueError(
        f"the value {text} cannot be written as plain data\ngive the original program, which still holds it"
    )


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "size": torch.Size,
    "namedtuple": lambda items: import_object(items[0])(*items[1:]),
    "dict": dict,
    "float": float,
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "dtype": _torch_word,
    "memory_format": _torch_word,
    "layout": _torch_word,
    "device": torch.device,
    "slice": lambda parts: slice(*parts),
    "range": lambda parts: range(*parts),
    "ellipsis": lambda _: ...,
    "enum": lambda parts: import_object(parts[0])[parts[1]],
    "function": import_object,
    "object": _refuse_object,
}


def readable(value: Any) -> Any:
    """A value for people and JSON: nodes are `%name`, tuples are lists, what has no literal is its text.

    >>> readable((1, torch.float32, slice(0, 2)))
    [1, 'torch.float32', 'slice(0, 2, None)']
    """
    return plain(value, _text_of)


def _text_of(value: Any) -> str:
    if isinstance(value, Node):
        return f"%{value.name}"
    is_function = callable(value) and not isinstance(value, torch.nn.Module)
    return target_text(value) if is_function else short_text(value)


# ---- for people ----


def argument_text(value: Any, longest: int = sys.maxsize, mark: str = "%") -> str:
    """An argument tree as text, never much longer than `longest` however large it is; `mark` stands before names of nodes.

    >>> argument_text((1, [torch.float32, "a"], slice(0, 2)))
    "(1, [torch.float32, 'a'], slice(0, 2, None))"
    """
    pieces: list[str] = []
    _write(value, pieces, [longest], mark)
    return shortened("".join(pieces), longest)


def _write(value: Any, pieces: list[str], left: list[int], mark: str) -> None:
    if left[0] <= 0:
        return
    opening, closing, items = "", "", None
    if is_node(value):
        text = f"{mark}{value.name}"
    elif isinstance(value, torch.Tensor):
        text = f"tensor {shape_text(value)}"
    elif isinstance(value, (list, tuple)):
        opening, closing = ("[", "]") if isinstance(value, list) else ("(", ",)" if len(value) == 1 else ")")
        items = [("", item) for item in value[: left[0]]]
    elif isinstance(value, dict):
        opening, closing = "{", "}"
        items = [(f"{key!r}: ", item) for key, item in list(value.items())[: left[0]]]
    elif isinstance(value, str):
        text = repr(value[: left[0] + 1])
    elif isinstance(value, slice):
        opening, closing = "slice(", ")"
        items = [("", value.start), ("", value.stop), ("", value.step)]
    elif callable(value):
        text = target_text(value)
        text = text if " at 0x" not in text else type(value).__name__
    else:
        text = _plain_text(value)
    if items is None:
        pieces.append(text)
        left[0] -= len(text)
        return
    pieces.append(opening)
    for place, (key, item) in enumerate(items):
        if left[0] <= 0:
            break
        pieces.append(f"{', ' if place else ''}{key}")
        left[0] -= 2 + len(key)
        _write(item, pieces, left, mark)
    pieces.append(closing)


def _plain_text(value: Any) -> str:
    """Without the address that Python puts into the text of most objects: a drawing is the same every time."""
    try:
        text = str(value)
    except Exception:  # the user's own class; a drawing must not fail for it
        return type(value).__name__
    return type(value).__name__ if " at 0x" in text else text


def shape_text(value: Any) -> str:
    """`1×64×56×56`, with the dtype behind it where it is not float32; "" for what has no shape.

    >>> shape_text(torch.ones(2, 3)), shape_text(torch.arange(4)), shape_text(torch.ones(())), shape_text(7)
    ('2×3', '4 i64', 'scalar', '')
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or not isinstance(dtype, torch.dtype):
        if isinstance(value, (tuple, list)) and value and not isinstance(value, torch.Size):
            texts = [text for text in map(shape_text, value[:4]) if text]
            more = " …" if len(value) > 2 and len(texts) > 2 else ""
            return ", ".join(texts[:2]) + more
        return ""
    sizes = "×".join(map(str, shape)) or "scalar"
    return sizes if dtype is torch.float32 else f"{sizes} {DTYPE_LETTERS.get(dtype, str(dtype).removeprefix('torch.'))}"
