"""Questions that a model asks Python about a traced value, and that cannot be recorded: its class, an attribute, its text.
The likeliest answer is given and a guard left behind, so that the program raises where it would not have been true; what has no
likely answer is refused. What is done with a value is recorded in `proxy.py`.
"""

from __future__ import annotations

import abc
import ast
import dis
import inspect
import linecache
import os
import sys
import sysconfig
import textwrap
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.ir.guards import check_kind, check_value
from torchgraft.ir.input_kinds import class_name, is_instance
from torchgraft.ir.node import Node
from torchgraft.ir.origin import asked_once, current_source_line, is_user_code
from torchgraft.ir.value_classes import is_surely_of_class, likely_class

if TYPE_CHECKING:
    from torchgraft.capturing.symbolic.proxy import Proxy

_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_TENSOR_ATTRIBUTES = frozenset(dir(torch.Tensor))
# Python functions that hand on a question.
_ASK_FOR_OTHERS = frozenset(
    id(function.__code__)
    for function in (
        torch.is_tensor,
        abc.ABCMeta.__instancecheck__,
        type(torch.nn.Parameter).__instancecheck__,
    )
)


class Questions:
    """What has been asked about the values of one trace."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._guarded: set[tuple[Node, Any]] = set()

    def class_of(self, proxy: Proxy) -> type:
        """What `isinstance` finds. Only the model is told; the tracer and its parts know a proxy when they see one."""
        # torch looks at the classes of its arguments all the time, so the quick question comes first.
        frame: FrameType | None = sys._getframe(3)
        if (
            frame is not None and id(frame.f_code) in _ASK_FOR_OTHERS
        ):  # by identity: the hash of a code object is computed from all of it
            frame = frame.f_back
        if frame is None or not _is_asking_for_class(frame.f_code, frame.f_lasti) or self._asker(4) is None:
            return type(proxy)
        for asked in _asked_classes(frame):
            self._guard_class(proxy.node, asked)
        kind = likely_class(proxy.node)
        if not is_surely_of_class(proxy.node, self._tracer.root):
            self._guard(proxy.node, kind, check_kind, (class_name(kind), proxy.node.name))
        return kind

    def _guard_class(self, node: Node, kind: Any) -> None:
        """An input may be of a class of its own, and be asked for just that."""
        is_tensors = isinstance(kind, type) and issubclass(kind, torch.Tensor) and kind is not torch.Tensor
        if is_tensors and node._op == "placeholder":
            found = self._tracer.create_node("call_function", is_instance, (node, class_name(kind)), {})
            self._guard(found, kind, check_value, (False, f"isinstance('{node.name}', {kind.__name__})"))

    def has_attribute(self, proxy: Proxy, name: str) -> bool:
        """Whether a value has an attribute: tensors have theirs, and reading any other is tried when the program runs. But
        where the model asks first (`hasattr`, `getattr` with a default), a tensor has no other."""
        frame = self._asker(4)
        if frame is None or name in _TENSOR_ATTRIBUTES or not _is_asking_for_attribute(frame):
            return True
        node = proxy.node
        found = self._tracer.create_node("call_function", hasattr, (node, name), {})
        self._guard(found, name, check_value, (False, f"'{node.name}' has an attribute '{name}'"))
        return False

    def may_be_key(self, proxy: Proxy) -> bool:
        """Whether a value may be looked up by its identity: tensors are, numbers are not, except in `functools.cache`, where
        a function is called that might as well not have been remembered."""
        if likely_class(proxy.node) is torch.Tensor:
            return True
        frame = self._asker(4)
        return frame is None or hasattr(called_function(frame), "cache_info")

    def may_be_text(self) -> bool:
        """Whether the text of a value that is being made is for people to read, and decides nothing."""
        frame = self._asker(5)
        return frame is None or _is_for_people(frame.f_code, frame.f_lineno)

    def _asker(self, depth: int) -> FrameType | None:
        """The frame of the model that asks, or None if somebody else does. `depth` counts the frames of our own."""
        frame: FrameType | None = sys._getframe(depth)
        while frame is not None and id(frame.f_code) in _ASK_FOR_OTHERS:
            frame = frame.f_back
        if frame is None or self._tracer._switching or not is_user_code(frame.f_code):
            return None
        if frame.f_code.co_filename.startswith(_STANDARD_LIBRARY) or self._is_tracers(frame):
            return None
        return frame

    def _is_tracers(self, frame: FrameType | None) -> bool:
        """Whether a method of a user's tracer is running, and not the model: it is nearer than any forward."""
        while frame is not None:
            owner = frame.f_locals.get("self")
            if owner is self._tracer:
                return is_user_code(frame.f_code)
            if isinstance(owner, torch.nn.Module):
                return False
            frame = frame.f_back
        return False

    def _guard(self, node: Node, key: Any, check: Any, details: tuple[Any, ...]) -> None:
        if (node, key) not in self._guarded:
            self._guarded.add((node, key))
            where = str(current_source_line() or "an unknown line")
            self._tracer.create_node("call_function", check, (node, *details, where), {})


@asked_once
def _is_asking_for_class(code: CodeType, instruction: int) -> bool:
    """Not torch's own functions, which look at the classes of their arguments to find out how they are given."""
    if not is_user_code(code):
        return False
    if dis.opname[code.co_code[instruction]] in ("LOAD_ATTR", "MATCH_CLASS"):
        return True
    if not _has_source(code):  # typed into an interpreter: which call it is is not known, only what may be called
        is_call = dis.opname[code.co_code[instruction]].startswith("CALL")
        return is_call and not {"isinstance", "is_tensor"}.isdisjoint(code.co_names)
    call = _running_call(code, instruction)
    name = call.func if call is not None else None
    return getattr(name, "id", None) == "isinstance" or getattr(name, "attr", getattr(name, "id", None)) == "is_tensor"


def _asked_classes(frame: FrameType) -> list[Any]:
    """The values of the names in the second argument of a call of isinstance."""
    call = _running_call(frame.f_code, frame.f_lasti)
    if call is None or len(call.args) != 2:
        return []
    names = [item for item in ast.walk(call.args[1]) if isinstance(item, (ast.Name, ast.Attribute))]
    return [_value_of(name, frame) for name in names]


def _is_asking_for_attribute(frame: FrameType) -> bool:
    call = _running_call(frame.f_code, frame.f_lasti)
    if call is None or not isinstance(call.func, ast.Name):
        return False
    return call.func.id == "hasattr" or (call.func.id == "getattr" and len(call.args) == 3)


def called_function(frame: FrameType) -> Any:
    """The function that is being called, where it is written as a name or an attribute of one."""
    call = _running_call(frame.f_code, frame.f_lasti)
    return None if call is None else _value_of(call.func, frame)


def _value_of(expression: Any, frame: FrameType) -> Any:
    """The value of a name, or of an attribute of one."""
    names: list[str] = []
    while isinstance(expression, ast.Attribute):
        names.append(expression.attr)
        expression = expression.value
    if not isinstance(expression, ast.Name):
        return None
    value = frame.f_locals.get(expression.id, frame.f_globals.get(expression.id))
    for name in reversed(names):
        value = inspect.getattr_static(value, name, None) if isinstance(value, type) else getattr(value, name, None)
    return value


def _has_source(code: CodeType) -> bool:
    return bool(linecache.getline(code.co_filename, code.co_firstlineno))


@asked_once
def _running_call(code: CodeType, instruction: int) -> ast.Call | None:
    """The call that an instruction makes, as it is written, where the source can be found."""
    line, last, column, end = list(code.co_positions())[instruction // 2]
    if line is None or last is None or column is None or end is None:
        return None
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(line, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][column:]
    try:
        expression = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return expression if isinstance(expression, ast.Call) else None


@asked_once
def _is_for_people(code: CodeType, line: int) -> bool:
    """Whether a line raises, or calls something and drops the result (prints, logs, warns)."""
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return True  # nothing is known, and a text is harmless more often than not
    number = line - max(first, 1) + 1
    around = [
        item
        for item in ast.walk(tree)
        if isinstance(item, ast.stmt) and item.lineno <= number <= (item.end_lineno or 0)
    ]
    innermost = min(around, key=lambda item: (item.end_lineno or 0) - item.lineno, default=None)
    is_call = isinstance(innermost, ast.Expr) and isinstance(innermost.value, ast.Call)
    return is_call or isinstance(innermost, ast.Raise)  # the text of an assertion is only made where it has failed
