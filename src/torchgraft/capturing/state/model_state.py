"""The one keeper of what capturing puts back: the attributes of a model and what they hold, its tensors, and random states.
Writes that a symbolic trace can refuse before they happen are refused here, too; nothing outside of the model is kept.
"""

from __future__ import annotations

import array
import contextlib
import dis
import functools
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from operator import eq, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, NoReturn

import torch

from torchgraft.capturing.state.leftovers import Left, is_equal, left_in
from torchgraft.capturing.state.tensor_state import TensorState
from torchgraft.errors import TraceError
from torchgraft.ir.graph import Graph
from torchgraft.ir.modules import is_from_torch, paths_of_modules
from torchgraft.ir.origin import SourceLine, at, current_source_line, user_frame
from torchgraft.ir.origin import source_line as line_of
from torchgraft.ir.structures import slots_of

# What every module has. Most of it changes by assigning attributes, which is refused before it happens; the tables do not.
_STANDARD = frozenset(torch.nn.Module().__dict__)
_TABLE_NAMES = (
    "_parameters", "_buffers", "_modules",
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_hooks",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_pre_hooks",
)  # fmt: skip
_tables = itemgetter(*_TABLE_NAMES)
# How far into what a model holds is looked: a trainer, and all that it knows, may be among it.
_DEEPEST = 8
# Exactly these: a class of somebody's own may do anything when it is asked for an item.
_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
_NOT_LOOKED_INTO = (torch.Tensor, torch.nn.Module, type, ModuleType, Graph, *_FUNCTIONS)
_MISSING = object()


class _Kept(NamedTuple):
    """Something whose state is in no attribute, with that state: how it is read, written and compared."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    before: Any

    def is_changed(self) -> bool:
        return not self.same(self.read(), self.before)


class ModelState:
    """A snapshot of a model: the attributes of every module whose forward was entered, the tables of all its modules, what the
    lists, dicts, sets and plain objects among their attributes hold, and (in `tensors`) its tensors and random states."""

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
        self._states: list[tuple[torch.nn.Module, str, _Kept]] = []
        self._iterators: list[tuple[str, Any]] = []
        seen: set[int] = set()
        # Modules of torch.nn keep no notes of their own, and there are many of them.
        users_own = {cls for cls in set(map(type, paths)) if not is_from_torch(cls)}
        for module in paths:
            if type(module) in users_own and not module.__dict__.keys() <= _STANDARD:
                for name, value in module.__dict__.items():
                    if name not in _STANDARD and type(value) not in _PLAIN:
                        self._keep(module, name, value, seen, 0)

    @functools.cached_property
    def tensors(self) -> TensorState:
        """The tensors of the model and the random states, as they are when this is first asked for."""
        return TensorState(self.paths)

    def _watch_tables(self, modules: list[torch.nn.Module]) -> None:
        # There are a thousand tables, most of them empty; copying them one by one would take as long as half the trace.
        self._table_owners = modules
        self._tables = list(chain.from_iterable(map(_tables, map(vars, modules))))
        self._filled = list(filter(None, self._tables))
        # What all of them hold, one after the other.
        self._sizes = list(map(len, self._filled))
        self._keys = list(chain.from_iterable(self._filled))
        self._values = _values(self._filled)

    def _keep(self, module: torch.nn.Module, name: str, value: Any, seen: set[int], depth: int) -> None:
        """Keep what a value holds, which is (inside) the attribute `name` of a module."""
        if id(value) in seen or depth > _DEEPEST or isinstance(value, _NOT_LOOKED_INTO):
            return
        seen.add(id(value))
        kind: Any = type(value)
        if _is_iterator(kind):
            self._iterators.append((name, value))
            return
        kept = _kept(value)
        if kept is not None:
            self._states.append((module, name, kept))
            if not isinstance(kept.before, list):  # else it holds what is in its slots
                return
        content = value if kind in _CONTAINERS else getattr(value, "__dict__", None)
        if content is not None and type(content) in _CONTAINERS:
            self._contents.append((module, name, content, content.copy()))
        for item in _items(value, content):
            if type(item) not in _PLAIN:
                self._keep(module, name, item, seen, depth + 1)

    def refuse_generators(self) -> None:
        """Raise if the model holds something that can be read only once."""
        for name, value in self._iterators:
            raise TraceError(
                f"cannot capture a model with a {type(value).__name__} in its attribute '{name}'\n"
                "Running the model would take from it, and that cannot be undone.\n"
                "Keep a list or a number instead."
            )

    def watch(self, module: torch.nn.Module) -> None:
        """Remember the attributes of a module as they are now."""
        if module not in self._attributes:
            self._attributes[module] = module.__dict__.copy()

    def ids_in_tables(self) -> frozenset[int]:
        """The identities of what was in the tables of the modules at first: parameters, buffers, modules and hooks."""
        if self._ids_in_tables is None:
            self._ids_in_tables = frozenset(map(id, self._values))
        return self._ids_in_tables

    def refuse_new_hooks(self, module: torch.nn.Module) -> None:
        """Raise if a module has hooks that it did not have at first."""
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            if any(id(hook) not in self.ids_in_tables() for hook in vars(module).get(name, {}).values()):
                self._refuse(f"{self._name_of(module)}.{name}", current_source_line())

    # ---- writes that are refused before they happen ----

    def is_change(self, module: torch.nn.Module, name: str, value: Any) -> bool:
        """Whether an attribute would be changed; writing the value that is there already is no change."""
        tables = (module.__dict__, module._parameters, module._buffers, module._modules)
        return not any(name in table and is_equal(value, table[name]) for table in tables)

    def before_write(self, module: torch.nn.Module, name: str, value: Any, tracer: Any) -> None:
        """Refuse an attribute to be changed."""
        if module not in self.paths:
            return
        if _writer() is tracer:
            self.let_edit(module)
        elif self.is_change(module, name, value):
            self._refuse(f"{self._name_of(module)}.{name}", current_source_line())

    def let_edit(self, module: torch.nn.Module) -> None:
        """An overridden method of the tracer edits a module on purpose."""
        self._edited.add(module)
        self._attributes.pop(module, None)
        self._contents = [entry for entry in self._contents if entry[0] is not module]
        self._states = [entry for entry in self._states if entry[0] is not module]

    def before_tensor_write(self, tensor: torch.Tensor, path: str, name: str, value: Any, tracer: Any) -> None:
        """Refuse an attribute of a tensor of the model to be changed, unless it has that value already."""
        if _writer() is not tracer and not (name in tensor.__dict__ and is_equal(value, tensor.__dict__[name])):
            self._refuse(f"self.{path}.{name}", current_source_line())

    # ---- putting back ----

    def left(self, attributes: Any = None, contents: Any = None) -> list[Left]:
        """What is not as it was."""
        found: list[Left] = []
        for module, before in self._changed_attributes() if attributes is None else attributes:
            found += left_in(module, None, module.__dict__, before)
        for module, name, container, content in self._changed_contents() if contents is None else contents:
            found += left_in(module, name, container, content)
        return found + [Left(module, name) for module, name, kept in self._states if kept.is_changed()]

    def restore(self) -> list[tuple[torch.nn.Module, str]]:
        """Put the attributes back and return what had been changed: modules, and the names of attributes."""
        attributes, contents = list(self._changed_attributes()), list(self._changed_contents())
        left = self.left(attributes, contents)
        for module, before in attributes:
            module.__dict__.clear()
            module.__dict__.update(before)
        for module, name, container, content in contents:
            if name == "_buffers":
                module._non_persistent_buffers_set.intersection_update(content)
            _put_content_back(container, content)
        for _, _, kept in self._states:
            if kept.is_changed():
                kept.write(kept.before)
        return list(dict.fromkeys([(item.module, item.name) for item in left]))

    def restore_all(self) -> None:
        """Put everything back: attributes, tensors and random states."""
        self.restore()
        self.tensors.restore()
        self.tensors.restore_libraries()

    def _changed_attributes(self) -> Iterator[tuple[torch.nn.Module, dict[str, Any]]]:
        for module, before in self._attributes.items():
            now = module.__dict__
            if len(now) != len(before) or not all(map(is_, now.values(), before.values())):
                yield module, before

    def _changed_contents(self) -> Iterator[tuple[torch.nn.Module, str, Any, Any]]:
        yield from self._changed_tables()
        for entry in self._contents:
            if not _same_content(entry[2], entry[3]):
                yield entry

    def _changed_tables(self) -> Iterator[tuple[torch.nn.Module, str, Any, Any]]:
        """The tables that are not as they were, in the form of `_contents`."""
        filled = list(filter(None, self._tables))
        if _are_same(filled, self._filled) and _are_same(_values(filled), self._values):
            return
        entries = zip(self._keys, self._values, strict=True)
        before = {id(table): dict(islice(entries, n)) for table, n in zip(self._filled, self._sizes, strict=True)}
        owners = ((module, name) for module in self._table_owners for name in _TABLE_NAMES)
        for (module, name), table in zip(owners, self._tables, strict=True):
            content = before.get(id(table), {})
            if module not in self._edited and not _same_content(table, content):
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
            f"{at(line)}, and the traced program would not do that again when it runs; "
            "keep the value in a buffer and write it in place (self.buffer.copy_(value)), return it as an output, "
            "or keep the module as a leaf (Tracer.is_leaf_module). The model is left as it was"
        )


@contextlib.contextmanager
def kept_state(model: Any) -> Iterator[None]:
    """What runs change of a model and of random states is put back."""
    root = model if isinstance(model, torch.nn.Module) else torch.nn.Module()
    state = ModelState(paths_of_modules(root))
    for module in state.paths:
        state.watch(module)
    state.tensors  # noqa: B018 (as they are before the first run)
    try:
        yield
    finally:
        state.restore_all()


_PLAIN = frozenset(
    {int, float, bool, str, bytes, complex, type(None)}
    | {torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device}
)  # fmt: skip


def _kept(value: Any) -> _Kept | None:
    """How to put back something whose state is in no attribute: a generator of random numbers, an array, slots."""
    if isinstance(value, random.Random):
        return _Kept(value.getstate, value.setstate, eq, value.getstate())
    if isinstance(value, torch.Generator):
        return _Kept(value.get_state, value.set_state, torch.equal, value.get_state())
    if isinstance(value, (bytearray, array.array)):
        return _Kept(lambda: value[:], functools.partial(value.__setitem__, slice(None)), eq, value[:])
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        same = lambda now, before: now.tobytes() == before.tobytes()  # noqa: E731 (NaN is the same as itself here)
        return _Kept(value.copy, functools.partial(numpy.copyto, value), same, value.copy())
    if numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        source = value.bit_generator if isinstance(value, numpy.random.Generator) else value._bit_generator
        same = lambda now, before: repr(now) == repr(before)  # noqa: E731 (a state has arrays in it)
        return _Kept(lambda: source.state, functools.partial(setattr, source, "state"), same, source.state)
    names = slots_of(value)
    if not names or isinstance(value, tuple):
        return None

    def read() -> list[Any]:
        return [getattr(value, name, _MISSING) for name in names]

    def write(items: list[Any]) -> None:
        for name, item in zip(names, items, strict=True):
            object.__delattr__(value, name) if item is _MISSING else object.__setattr__(value, name, item)

    return _Kept(read, write, _are_same, read())


def _items(value: Any, content: Any) -> list[Any]:
    """What a container or an object holds."""
    if isinstance(value, tuple):
        return list(tuple.__iter__(value))  # a class of somebody's own may not like to be asked for its length
    inside = [] if content is None else list(content.values() if isinstance(content, dict) else content)
    return inside + [getattr(value, name, None) for name in slots_of(value)]


def _values(tables: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, tables)))


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _same_content(container: Any, content: Any) -> bool:
    """Whether a container holds what its copy holds, the same objects in the same order."""
    if len(container) != len(content):
        return False
    if not isinstance(container, dict):
        return container == content if isinstance(container, set) else all(map(is_, container, content))
    return all(map(is_, container.values(), content.values())) and all(map(is_, container, content))


def _put_content_back(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content) if isinstance(container, (list, deque)) else container.update(content)


@functools.cache
def _is_iterator(cls: Any) -> bool:
    return hasattr(cls, "__next__")


def _writer() -> Any:
    """The `self` of the user's function that is running."""
    frame = user_frame()
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
