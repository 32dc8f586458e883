"""What tracing must not change: the Python attributes of a model, compared before and after, and put back.
Tensors need no watching, because calls that would write into them are recorded instead of run.
"""

from __future__ import annotations

import dis
from itertools import islice
from operator import is_
from typing import Any

import torch

from torchgraft.errors import TraceError
from torchgraft.ir.origin import SourceLine
from torchgraft.ir.origin import source_line as line_of

_CONTAINERS = frozenset({list, dict, set})
_STANDARD = list(torch.nn.Module().__dict__)


class ModelState:
    """A shallow picture of every module of a model: its attributes, its buffers, and what lists, dicts and sets hold."""

    def __init__(self, modules: dict[torch.nn.Module, str]) -> None:
        self._paths = modules
        self._attributes: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        self._contents: list[tuple[torch.nn.Module, str, Any, Any]] = []
        for module in modules:
            before = module.__dict__.copy()
            self._attributes.append((module, before))
            buffers = before["_buffers"]
            if buffers:
                self._contents.append((module, "_buffers", buffers, buffers.copy()))
            if len(before) > len(_STANDARD):
                for name, value in _own_attributes(before):
                    if type(value) in _CONTAINERS:
                        self._contents.append((module, name, value, value.copy()))

    def restore(self) -> list[tuple[torch.nn.Module, str]]:
        """Put everything back and return what had been changed."""
        changed: list[tuple[torch.nn.Module, str]] = []
        for module, before in self._attributes:
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
            if name == "_buffers":
                names = [key for key in container.keys() | content.keys() if container.get(key) is not content.get(key)]
                changed += [(module, key) for key in names]
            else:
                changed.append((module, name))
            if type(container) is list:
                container[:] = content
            else:
                container.clear()
                container.update(content)
        return changed

    def refuse(self, changed: list[tuple[torch.nn.Module, str]]) -> None:
        """Raise for attributes that a forward changed."""
        module, name = changed[0]
        path = ".".join(filter(None, ["self", self._paths.get(module, "")]))
        line = _writing_line(module, name)
        others = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise TraceError(
            f"cannot trace a forward that changes the model: it writes {path}.{name}{others}"
            f"{f' at {line}' if line else ''}; the traced program would not do it again when it runs. "
            "The model was put back as it was; keep the value in a buffer and write it in place, return it as an output, "
            "or keep the module as a leaf (Tracer.is_leaf_module)"
        )


def _own_attributes(attributes: dict[str, Any]) -> Any:
    """What is there beside the tables every module has; these come first, because Module.__init__ makes them first."""
    if next(islice(attributes, len(_STANDARD) - 1, None)) == _STANDARD[-1]:
        return islice(attributes.items(), len(_STANDARD), None)
    return [(name, value) for name, value in attributes.items() if name not in _STANDARD]


def _is_equal(now: Any, before: Any) -> bool:
    """Writing the value that was there already is no change; only plain values are compared."""
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
    """The line that most likely wrote an attribute: the first in the class's methods that stores to, or loads, that name."""
    functions = [value for cls in type(module).__mro__ for value in vars(cls).values() if hasattr(value, "__code__")]
    for opname in ("STORE_ATTR", "LOAD_ATTR"):
        for function in sorted(functions, key=lambda item: item.__name__ == "__init__"):
            if function.__module__.startswith("torch.nn"):
                continue
            for item in dis.get_instructions(function):
                if item.opname == opname and item.argval == name:
                    return line_of(function.__code__, item.offset)
    return None
