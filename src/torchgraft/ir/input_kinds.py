"""What an input has to look like, written with strings, numbers and tuples alone, so that every code generator can spell it.
The guard that compares the inputs of a call with it is `check_inputs` in `guards.py`.

    "tensor"                      a plain tensor, without attributes of its own
    "int", "float"                a number of that type, of any value
    "any"                         not looked at here
    None, True, 3, torch.int64    this value; a text is ("=", "same")
    ("tuple", first, ...)         a tuple of these, a list likewise
    {"name": part}                a dict with these keys, in this order
    ("object", "package.Class", ((name, part), ...))   an object of this class with these attributes or items
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchgraft.ir.structures import attributes_of

# Where a value differs: the path to it, what is expected, and what was found, in words.
Misfit = tuple[str, str, str]
_NUMBERS = {"int": int, "float": float}
_CONTAINERS = {"tuple": tuple, "list": list}


def class_name(kind: type) -> str:
    """The full name of a class, by which guards know it.

    >>> class_name(int), class_name(torch.Tensor)
    ('int', 'torch.Tensor')
    """
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def is_instance(value: Any, name: str) -> bool:
    """`isinstance` with the full name of a class.

    >>> is_instance(True, "int"), is_instance(torch.ones(2), "int")
    (True, False)
    """
    if name == "torch.Tensor":
        return isinstance(value, torch.Tensor)
    # The class itself is asked first: compilers cannot go through the bases of Python's own.
    return class_name(type(value)) == name or any(class_name(kind) == name for kind in type(value).__mro__)


def object_kind(kind: type, parts: dict[Any, Any]) -> tuple[Any, ...]:
    """The description of an object by its class and its attributes or items."""
    return "object", class_name(kind), tuple(parts.items())


def misfit(expected: Any, found: Any, path: str) -> Misfit | None:
    """Where a value differs from its description."""
    if isinstance(expected, str):
        if expected == "tensor":
            return misfit_of_tensor(found, path)
        if expected == "any" or type(found) is _NUMBERS[expected]:
            return None
        return path, f"a number of type {expected}", in_words(found)
    if isinstance(expected, dict):
        return _misfit_of_parts(dict, expected, found, path)
    if not isinstance(expected, tuple):
        return _misfit_of_value(expected, found, path)
    if expected[0] == "=":
        return _misfit_of_value(expected[1], found, path)
    if expected[0] == "object":
        if class_name(type(found)) != expected[1]:
            return path, f"a {expected[1].rpartition('.')[2]}", in_words(found)
        return _compared_parts(dict(expected[2]), parts_of(found), path)
    return _misfit_of_parts(_CONTAINERS[expected[0]], dict(enumerate(expected[1:])), found, path)


def _misfit_of_value(expected: Any, found: Any, path: str) -> Misfit | None:
    same = found is expected or (type(found) is type(expected) and found == expected)
    return None if same else (path, repr(expected), in_words(found))


def _misfit_of_parts(kind: type, expected: dict[Any, Any], found: Any, path: str) -> Misfit | None:
    # An interpreter gives the immutable containers of a graph, which are subclasses of Python's own.
    is_kind = type(found) is kind or (type(found).__module__ == "torchgraft.ir.arguments" and isinstance(found, kind))
    if not is_kind:
        return path, f"a {kind.__name__}", in_words(found)
    return _compared_parts(expected, parts_of(found), path)


def _compared_parts(expected: dict[Any, Any], found: dict[Any, Any], path: str) -> Misfit | None:
    if list(expected) != list(found):
        return path, f"something with {len(expected)} parts {list(expected)}", f"one with {len(found)} {list(found)}"
    for key, part in expected.items():
        problem = misfit(part, found[key], f"{path}[{key!r}]")
        if problem is not None:
            return problem
    return None


def misfit_of_tensor(found: Any, path: str) -> Misfit | None:
    """A plain tensor is expected: none of a class of its own, which may be asked for, and without attributes."""
    if not isinstance(found, torch.Tensor) or not (is_plain(type(found)) or stands_in(type(found))):
        return path, "a tensor", in_words(found)
    if torch.compiler.is_compiling():  # whose tensors are its own, and cannot be asked for their __dict__
        return None
    attributes = list(tensor_attributes(found))
    return (path, "a tensor without attributes", f"one with the attribute '{attributes[0]}'") if attributes else None


def is_plain(kind: type) -> bool:
    """Whether a class of tensors is torch's own."""
    return kind is torch.Tensor or kind is torch.nn.Parameter


def stands_in(kind: type) -> bool:
    """Whether tensors of a class answer every operator themselves: fake tensors, say."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def tensor_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What somebody has written onto a tensor; names with an underscore are for libraries.

    >>> x = torch.ones(2)
    >>> x.label = "cat"
    >>> tensor_attributes(x)
    {'label': 'cat'}
    """
    if not tensor.__dict__ or stands_in(type(tensor)):
        return {}
    return {name: value for name, value in tensor.__dict__.items() if not name.startswith("_")}


def parts_of(value: Any) -> dict[Any, Any]:
    """The items of a container or the attributes of an object."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    return tensor_attributes(value) if isinstance(value, torch.Tensor) else attributes_of(value)


def in_words(value: Any) -> str:
    """A value in the words of a message."""
    if isinstance(value, torch.Tensor):
        return "a tensor" if type(value) is torch.Tensor else f"a tensor of the class {type(value).__name__}"
    if isinstance(value, (int, float, str, bool, type(None))):
        return repr(value)
    return f"a {type(value).__name__}"


def fixed_values(expected: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The inputs, and parts of inputs, that must have a certain value and not only be of some kind."""
    if isinstance(expected, str):
        return
    if isinstance(expected, dict):
        for name, part in expected.items():
            yield from fixed_values(part, f"{path}[{name!r}]" if path else name)
    elif not isinstance(expected, tuple):
        yield path, expected
    elif expected[0] == "=":
        yield path, expected[1]
    else:
        parts = expected[2] if expected[0] == "object" else enumerate(expected[1:])
        for key, part in parts:
            yield from fixed_values(part, f"{path}[{key!r}]")


def is_parameter(value: Any) -> bool:
    """Whether a tensor is a parameter; a function of its own, because code that torch.fx writes cannot name a class."""
    return isinstance(value, torch.nn.Parameter)
