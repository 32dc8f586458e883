"""`int(n)`, `float(n)` and `len(x)` during a watched run: Python's own give plain numbers, which would fix a size for good. So a
function in which one of them was asked about a symbolic number runs again with code that calls ours. What forces a number in
any other way (`range`, an index, a branch) becomes a guard.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import CodeType, FrameType, FunctionType, SimpleNamespace
from typing import Any, ClassVar

import torch

from torchgraft.capturing.flowing.sizes import combine, unwrapped, wrapped
from torchgraft.capturing.patching.active import CodePatch, active
from torchgraft.capturing.user_code.changed_code import changed_patch
from torchgraft.capturing.user_code.mode_statements import Choices
from torchgraft.ir.origin import user_frame


def _watching() -> bool:
    tracer = active.tracer
    return tracer is not None and tracer._runs_for_real and not tracer._switching and tracer.flow.sizes_are_symbolic


def _converted(kind: Callable[[Any], Any], value: Any) -> Any:
    number = unwrapped(value)
    if number is None:
        return kind(value)
    return value if type(number.value) is kind else wrapped(combine(kind, kind.__name__, number))


def _number_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and active.tracer.unwatched(value.numel) == 1:
        return value.item()
    return value


def as_int(value: Any) -> Any:
    """`int(value)`, symbolic where the value is."""
    return _converted(int, _number_of(value)) if _watching() else int(value)


def as_float(value: Any) -> Any:
    """`float(value)`, symbolic where the value is."""
    return _converted(float, _number_of(value)) if _watching() else float(value)


def length(value: Any) -> Any:
    """`len(value)`, symbolic for a tensor whose size is."""
    if _watching() and isinstance(value, torch.Tensor) and active.tracer.unwatched(value.dim):
        return value.shape[0]
    return len(value)


_OURS: dict[str, Callable[[Any], Any]] = {"int": as_int, "float": as_float, "len": length}


class _Calls(Choices):
    """Turns `int(A)` into a call of ours, and so on; choices by the mode too, because a function has one code at a time."""

    places: ClassVar = {**Choices.places, **{f"torchgraft's {name}": function for name, function in _OURS.items()}}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call."""
        self.generic_visit(node)
        is_ours = isinstance(node.func, ast.Name) and node.func.id in _OURS and len(node.args) == 1
        if not (self.is_within and is_ours and not node.keywords and not isinstance(node.args[0], ast.Starred)):
            return node
        self.found = True
        place = ast.copy_location(ast.Constant(f"torchgraft's {node.func.id}"), node.func)  # type: ignore[attr-defined]
        return ast.copy_location(ast.Call(place, node.args, []), node)


# By identity of the code: it, and the patches of the functions that have it. Also those for which there can be none.
_known: dict[int, tuple[CodeType, list[CodePatch]]] = {}


def number_patches() -> list[CodePatch]:
    """Patches of the functions in which symbolic numbers were asked to be plain ones."""
    return [patch for _, patches in _known.values() for patch in patches]


def asking_code(name: str) -> tuple[CodeType, dict[str, Any]] | None:
    """The code in which `int`, `float` or `len` is about to give a plain number, if it could call ours instead, and the names
    of its file."""
    frame = user_frame()
    if frame is None or name not in frame.f_code.co_names or not _is_pythons(name, frame):
        return None
    while frame.f_code.co_name.startswith("<") and frame.f_back and frame.f_code in frame.f_back.f_code.co_consts:
        frame = frame.f_back  # the function that a comprehension is written in
    return None if id(frame.f_code) in _known else (frame.f_code, frame.f_globals)


def _is_pythons(name: str, frame: FrameType) -> bool:
    """Whether a name means in a function what it means in Python."""
    return name not in frame.f_globals and name not in (*frame.f_code.co_varnames, *frame.f_code.co_freevars)


def call_ours(codes: Iterable[tuple[CodeType, dict[str, Any]]]) -> bool:
    """Have functions with these codes call ours in the runs to come; whether there are such functions."""
    found = False
    for code, names in codes:
        _known[id(code)] = code, []
        function = _named(code, names)
        patch = None if function is None else changed_patch(function, _Calls)
        if function is not None and patch is not None:
            found = True
            _known.setdefault(id(function.__code__), (function.__code__, []))[1].append(patch)
            _known[id(patch.lent)] = patch.lent, []  # what still asks there, asks in another way
    return found


def _named(code: CodeType, names: dict[str, Any]) -> FunctionType | None:
    """The function of a file, or the method of a class in it, that has a code."""
    value: Any = SimpleNamespace(**{key: item for key, item in names.items() if key.isidentifier()})
    for name in code.co_qualname.split("."):
        value = getattr(value, "__dict__", {}).get(name)
        value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    while value is not None and not (isinstance(value, FunctionType) and _is_at(value.__code__, code)):
        value = getattr(value, "__wrapped__", None)
    return value


def _is_at(one: CodeType, other: CodeType) -> bool:
    place = attrgetter("co_filename", "co_firstlineno", "co_name")
    return bool(place(one) == place(other))
