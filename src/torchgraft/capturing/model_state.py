"""What tracing must not change: the Python attributes of a model. Writes are refused before they happen, and what gets past
that (a list appended to, a `__dict__` edited) is found by comparing before and after, put back, and refused then.
Tensors need no watching, because calls that would write into them are recorded instead of run.
"""

from __future__ import annotations

import dis
import functools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_, itemgetter
from types import FrameType
from typing import Any, NoReturn

import torch

from torchgraft.capturing.hooks import FORWARD_TABLES
from torchgraft.capturing.leftovers import Left, left_in
from torchgraft.capturing.pictures import (
    DEEPEST,
    Picture,
    holdings,
    is_equal,
    only_memos_added,
    picture_of,
    picture_of_iterator,
    put_content_back,
    same_content,
)
from torchgraft.errors import TraceError
from torchgraft.ir.origin import SourceLine, current_source_line, is_user_code
from torchgraft.ir.origin import source_line as line_of

# What every module has. Most of it changes by assigning attributes, which is refused before it happens; the tables do not.
_STANDARD = frozenset(torch.nn.Module().__dict__)
_TABLE_NAMES = (
    "_parameters", "_buffers", "_modules",
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_hooks",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_pre_hooks",
)  # fmt: skip
_tables = itemgetter(*_TABLE_NAMES)


class ModelState:
    """A picture of a model's Python side: the attributes of every module whose forward was entered, the tables of all its
    modules, and what the lists, dicts, sets and plain objects among their attributes hold."""

    def __init__(self, paths: dict[torch.nn.Module, str]) -> None:
        self.paths = paths
        self._attributes: dict[torch.nn.Module, dict[str, Any]] = {}
        self._edited: set[torch.nn.Module] = set()
        self._ids_in_tables: frozenset[int] | None = None
        try:
            self._watch_tables(list(paths))
        except (AttributeError, KeyError, TypeError):  # a script module has its tables in C++
            self._watch_tables([module for module in paths if type(vars(module).get("_parameters")) is dict])
        # (module, name of its attribute, the container or the attributes of an object, a copy of it)
        self._contents: list[tuple[torch.nn.Module, str, Any, Any]] = []
        self._states: list[tuple[torch.nn.Module, str, Picture]] = []
        self._generators: list[tuple[str, Any]] = []
        # What had been changed when everything was put back.
        self.left: list[Left] = []
        seen: set[int] = set()
        for module in paths:
            # Modules of torch.nn keep no notes of their own, and there are many of them.
            if not is_from_torch(type(module)):  # type: ignore[arg-type]
                for name, value in module.__dict__.items():
                    if name not in _STANDARD and type(value) not in _PLAIN:
                        self._picture(module, name, module.__dict__, name, seen, 0)

    def _watch_tables(self, modules: list[torch.nn.Module]) -> None:
        # There are a thousand tables, most of them empty; picturing them one by one would take as long as half the trace.
        self._table_owners = modules
        self._tables = list(chain.from_iterable(map(_tables, map(vars, modules))))
        self._filled = list(filter(None, self._tables))
        self._copies = list(map(dict.copy, self._filled))

    def _picture(self, module: torch.nn.Module, name: str, holder: Any, key: Any, seen: set[int], depth: int) -> None:
        """Picture `holder[key]`, which is (inside) the attribute `name` of a module."""
        value = holder[key]
        if id(value) in seen or depth > DEEPEST:
            return
        content, pictures, held = holdings(value)
        if content is None and not pictures and not held:
            is_iterator = _is_iterator(type(value))  # type: ignore[arg-type]
            put = functools.partial(operator.setitem, holder, key)
            picture = picture_of_iterator(value, put) if is_iterator else picture_of(value)
            if picture is not None:
                self._states.append((module, name, picture))
            elif is_iterator:
                self._generators.append((name, value))
            return
        seen.add(id(value))
        self._states += [(module, name, picture) for picture in pictures]
        if content is not None:
            self._contents.append((module, name, content, content.copy()))
        for part in (content, held):
            inside: Any = (
                part if isinstance(part, (dict, list, deque)) else list(part or ())
            )  # nothing can be replaced there
            for inner, item in inside.items() if isinstance(inside, dict) else enumerate(inside):
                if type(item) not in _PLAIN:
                    self._picture(module, name, inside, inner, seen, depth + 1)

    def refuse_generators(self) -> None:
        """Raise if the model holds something that can be read only once, and not be copied."""
        for name, value in self._generators:
            raise TraceError(
                f"cannot capture a model with a {type(value).__name__} in its attribute '{name}': running it would take from "
                "it, and that cannot be undone; keep a list or a number instead"
            )

    def watch(self, module: torch.nn.Module) -> None:
        """Remember the attributes of a module as they are now."""
        if module not in self._attributes:
            self._attributes[module] = module.__dict__.copy()

    def ids_in_tables(self) -> frozenset[int]:
        """The identities of what was in the tables of the modules at first: parameters, buffers, modules and hooks."""
        if self._ids_in_tables is None:
            self._ids_in_tables = frozenset(map(id, _values(self._copies)))
        return self._ids_in_tables

    def refuse_new_hooks(self, module: torch.nn.Module) -> None:
        """Raise if a module has hooks that it did not have at first."""
        for name in FORWARD_TABLES:
            if any(id(hook) not in self.ids_in_tables() for hook in vars(module).get(name, {}).values()):
                self._refuse(f"{self._name_of(module)}.{name}", current_source_line())

    def before_write(self, module: torch.nn.Module, name: str, value: Any, tracer: Any) -> None:
        """Refuse an attribute to be changed; writing the value that is there already is no change."""
        if module not in self.paths:
            return
        if _writer() is tracer:  # an overridden method of the tracer edits the model on purpose
            self._edited.add(module)
            self._attributes.pop(module, None)
            self._contents = [entry for entry in self._contents if entry[0] is not module]
            self._states = [entry for entry in self._states if entry[0] is not module]
            return
        for table in (module.__dict__, module._parameters, module._buffers, module._modules):
            if name in table and is_equal(value, table[name]):
                return
        self._refuse(f"{self._name_of(module)}.{name}", current_source_line())

    def before_tensor_write(self, tensor: torch.Tensor, path: str, name: str, value: Any, tracer: Any) -> None:
        """Refuse an attribute of a tensor of the model to be changed, unless it has that value already."""
        if _writer() is not tracer and not (name in tensor.__dict__ and is_equal(value, tensor.__dict__[name])):
            self._refuse(f"self.{path}.{name}", current_source_line())

    def restore(self, is_memo: Callable[[Any], bool] = lambda value: False) -> list[tuple[torch.nn.Module, str]]:
        """Put everything back and return what had been changed, except for dicts to which only memos were added."""
        self.left.clear()
        for module, before in self._attributes.items():
            now = module.__dict__
            if len(now) == len(before) and all(map(is_, now.values(), before.values())):
                continue
            self.left += left_in(module, None, now, before)
            now.clear()
            now.update(before)
        for module, name, table, content in self._changed_tables():
            self.left += left_in(module, name, table, content)
            put_content_back(table, content)
        for module, name, container, content in self._contents:
            if same_content(container, content):
                continue
            if not only_memos_added(container, content, is_memo):
                self.left += left_in(module, name, container, content)
            put_content_back(container, content)
        for module, name, picture in self._states:
            if picture():
                self.left.append(Left(module, name))
        return list(dict.fromkeys([(item.module, item.name) for item in self.left]))

    def _changed_tables(self) -> Iterator[tuple[torch.nn.Module, str, Any, Any]]:
        """The tables that are not as they were, in the form of `_contents`."""
        filled = list(filter(None, self._tables))
        if _are_same(filled, self._filled) and _are_same(_values(filled), _values(self._copies)):
            return
        before = {id(table): copy for table, copy in zip(self._filled, self._copies, strict=True)}
        owners = ((module, name) for module in self._table_owners for name in _TABLE_NAMES)
        for (module, name), table in zip(owners, self._tables, strict=True):
            content = before.get(id(table), {})
            if module not in self._edited and not same_content(table, content):
                if name == "_buffers":
                    module._non_persistent_buffers_set.intersection_update(content)
                yield module, name, table, content

    def refuse_changes(self, changed: list[tuple[torch.nn.Module, str]]) -> None:
        """Raise if anything had been changed."""
        if changed:
            module, name = changed[0]
            self._refuse(f"{self._name_of(module)}.{name}", _writing_line(module, name))

    def _name_of(self, module: torch.nn.Module) -> str:
        return ".".join(filter(None, ["self", self.paths.get(module, "")]))

    def _refuse(self, what: str, line: SourceLine | None) -> NoReturn:
        raise TraceError(
            f"cannot trace a forward that changes the model: it writes {what}"
            f"{f' at {line}' if line else ''}, and the traced program would not do that again when it runs; "
            "keep the value in a buffer and write it in place (self.buffer.copy_(value)), return it as an output, "
            "or keep the module as a leaf (Tracer.is_leaf_module). The model is left as it was"
        )


_PLAIN = frozenset(
    {
        int,
        float,
        bool,
        str,
        bytes,
        complex,
        type(None),
        torch.Tensor,
        torch.nn.Parameter,
        torch.dtype,
        torch.device,
    }
)


def _values(tables: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, tables)))


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


@functools.cache
def is_from_torch(cls: Any) -> bool:
    """Whether a class of modules is one of torch.nn's."""
    return cls.__module__.startswith("torch.nn.")


@functools.cache
def _is_iterator(cls: Any) -> bool:
    return hasattr(cls, "__next__")


def _writer() -> Any:
    """The `self` of the user's function that is running."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_user_code(frame.f_code):
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("self")


def _writing_line(module: torch.nn.Module, name: str) -> SourceLine | None:
    """The line that most likely changed an attribute: the first in the class's own methods that mentions it."""
    functions = [value for cls in type(module).__mro__ for value in vars(cls).values() if hasattr(value, "__code__")]
    for function in sorted(functions, key=lambda item: item.__name__ == "__init__"):
        if not function.__module__.startswith("torch.nn"):
            for item in dis.get_instructions(function):
                if item.opname in ("STORE_ATTR", "LOAD_ATTR", "LOAD_METHOD") and item.argval == name:
                    return line_of(function.__code__, item.offset)
    return None
