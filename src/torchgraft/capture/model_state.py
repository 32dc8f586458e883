"""What tracing must not change: the Python attributes of a model. Writes are refused before they happen, and what gets past
that (a list appended to, a `__dict__` edited) is found by comparing before and after, put back, and refused then.
Tensors need no watching, because calls that would write into them are recorded instead of run.
"""

from __future__ import annotations

import dis
import sys
from operator import is_
from types import FrameType
from typing import Any, NoReturn

import torch

from torchgraft.errors import TraceError
from torchgraft.ir.origin import SourceLine, current_source_line, is_user_code
from torchgraft.ir.origin import source_line as line_of

_CONTAINERS = frozenset({list, dict, set})


class ModelState:
    """A shallow picture of every module whose forward was entered: its attributes, and what lists, dicts and sets hold."""

    def __init__(self, paths: dict[torch.nn.Module, str]) -> None:
        self._paths = paths
        self._attributes: dict[torch.nn.Module, dict[str, Any]] = {}
        self._contents: list[tuple[torch.nn.Module, str, Any, Any]] = []

    def watch(self, module: torch.nn.Module) -> None:
        """Remember a module as it is now."""
        if module in self._attributes:
            return
        self._attributes[module] = before = module.__dict__.copy()
        for name, value in before.items():
            if type(value) in _CONTAINERS and name != "_parameters" and name != "_non_persistent_buffers_set":
                self._contents.append((module, name, value, value.copy()))

    def before_write(self, module: torch.nn.Module, name: str, value: Any, tracer: Any) -> None:
        """Refuse an attribute to be changed; writing the value that is there already is no change."""
        if module not in self._paths:
            return
        if _writer() is tracer:  # an overridden method of the tracer edits the model on purpose
            self._attributes.pop(module, None)
            self._contents = [entry for entry in self._contents if entry[0] is not module]
            return
        for table in (module.__dict__, module._parameters, module._buffers, module._modules):
            if name in table and _is_equal(value, table[name]):
                return
        self._refuse(module, name, current_source_line())

    def restore(self) -> list[tuple[torch.nn.Module, str]]:
        """Put everything back and return what had been changed."""
        changed: list[tuple[torch.nn.Module, str]] = []
        for module, before in self._attributes.items():
            now = module.__dict__
            if len(now) == len(before) and all(map(is_, now.values(), before.values())):
                continue
            for name in now.keys() | before.keys():
                if name not in now or name not in before or not _is_equal(now[name], before[name]):
                    changed.append((module, name))
            now.clear()
            now.update(before)
        for module, name, container, content in self._contents:
            if _same_content(container, content):
                continue
            changed.append((module, name))
            if type(container) is list:
                container[:] = content
            else:
                container.clear()
                container.update(content)
        return changed

    def refuse_changes(self, changed: list[tuple[torch.nn.Module, str]]) -> None:
        """Raise if anything had been changed."""
        if changed:
            module, name = changed[0]
            self._refuse(module, name, _writing_line(module, name))

    def _refuse(self, module: torch.nn.Module, name: str, line: SourceLine | None) -> NoReturn:
        path = ".".join(filter(None, ["self", self._paths.get(module, "")]))
        raise TraceError(
            f"cannot trace a forward that changes the model: it writes {path}.{name}"
            f"{f' at {line}' if line else ''}, and the traced program would not do that again when it runs; "
            "keep the value in a buffer and write it in place (self.buffer.copy_(value)), return it as an output, "
            "or keep the module as a leaf (Tracer.is_leaf_module). The model is left as it was"
        )


def _writer() -> Any:
    """The `self` of the user's function that is running."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_user_code(frame.f_code):
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("self")


def _is_equal(now: Any, before: Any) -> bool:
    """Only plain values are compared by value."""
    if now is before:
        return True
    return type(now) is type(before) and isinstance(now, (int, float, str, bool, bytes)) and now == before


def _same_content(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if type(container) is list:
        return all(map(is_, container, content))
    if type(container) is set:
        return container == content
    return all(map(is_, container.values(), content.values())) and all(map(is_, container, content))


def _writing_line(module: torch.nn.Module, name: str) -> SourceLine | None:
    """The line that most likely changed an attribute: the first in the class's own methods that mentions it."""
    functions = [value for cls in type(module).__mro__ for value in vars(cls).values() if hasattr(value, "__code__")]
    for function in sorted(functions, key=lambda item: item.__name__ == "__init__"):
        if not function.__module__.startswith("torch.nn"):
            for item in dis.get_instructions(function):
                if item.opname in ("STORE_ATTR", "LOAD_ATTR", "LOAD_METHOD") and item.argval == name:
                    return line_of(function.__code__, item.offset)
    return None
