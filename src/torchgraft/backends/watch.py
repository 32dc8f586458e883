"""Whether a model is still what it was when programs were made from it: its submodules, plain attributes and, where a program
has copies of them, its weights. What is done about a change is decided by who asks.

A look has to be cheap, because every call takes one, when nothing of this is in the processor's caches: it reads the counters
that Python keeps of writes to dicts, and torch of writes to tensors, and compares what dicts hold only where a counter has
moved. A write that torch does not count (through `.data`, or through memory shared with numpy) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import chain, compress
from operator import attrgetter, getitem, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from torchgraft.analysis.aliases import Aliases
from torchgraft.analysis.comparison import named_tensors_in
from torchgraft.analysis.surroundings import joined, modules_behind
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.choices import add_if
from torchgraft.ir.modules import is_from_torch
from torchgraft.ir.verify import find_attribute

# What torch.compile goes by; without it every look compares.
_tag: Any = getattr(torch._C._dynamo.guards, "dict_version", None)

_STANDARD = frozenset(torch.nn.Module().__dict__)
_CONTAINERS = frozenset({list, dict, set})
# Larger containers are data (a vocabulary, say), and comparing them with every call would be slow.
_MOST_ITEMS = 256
_version, _mode = attrgetter("_version"), attrgetter("training")
_pointer, _stride = torch.Tensor.data_ptr, torch.Tensor.stride


class Grown(str):
    """A change that models make themselves, too, when they are first asked for something: it is no reason to refuse a call."""

    __slots__ = ()


class Held(NamedTuple):
    """Something that a program may have been captured with and that another path of the model changes: how to look at it, and
    what it was."""

    what: str
    look: Callable[[], Any]
    before: Any

    def now(self) -> Held:
        """The same, with what it is at the moment."""
        return self._replace(before=self.look())

    def differs(self) -> bool:
        """Whether it is not what it was."""
        return _differs(self.look(), self.before)


class ModelWatch:
    """A snapshot of what a model is made of; `change` says what is different now.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> watch = ModelWatch(model, weights=True)
    >>> watch.change()
    >>> _ = model[0].weight.data_ptr(), torch.nn.init.zeros_(model[0].weight)
    >>> watch.change()
    "the values of '0.weight' have changed"
    """

    def __init__(self, model: Any, weights: bool = False) -> None:
        self._weights = weights
        if weights:
            _have_fused_steps_counted()
        self._attributes: list[tuple[str, Any, dict[str, Any], Any]] = []
        self._containers: list[tuple[str, Any, Any]] = []
        self._dicts: list[dict[str, Any]] = []
        self._hook_tables: list[Any] = []
        self._seen: set[int] = set()
        self._tables: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._values: list[Any] = []
        self._owners: list[str] = []
        self._modes: list[torch.nn.Module] = []
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._pointers: list[int] = []
        # Memory that is read in another order (`weight.data = weight.data.t()`) stays where it is and is not written.
        self._squares: list[torch.Tensor] = []
        self._strides: list[Any] = []
        self._tagged: list[dict[Any, Any]] = []
        self._empty: list[dict[Any, Any]] = []
        # Tensors that programs of the model write, by their identity.
        self.moving: dict[int, torch.Tensor] = {}
        self._tags: list[int] | None = None
        for name, root in modules_behind(model):
            for path, module in root.named_modules(prefix=name):
                self._watch(path, module, weights)
        self._note_sizes()
        self._hooks = list(chain.from_iterable(self._hook_tables))
        self._training = list(map(_mode, self._modes))

    def _watch(self, path: str, module: torch.nn.Module, weights: bool) -> None:
        self._dicts.append(module._modules)
        tables: list[Any] = [module._modules, module._parameters, module._buffers]
        # What is added to an empty table of a layer of torch, its code does not look at.
        self._tagged += [_state_of(module), *[table for table in tables if table or not is_from_torch(module)]]
        self._tagged += [table for table in (module._forward_pre_hooks, module._forward_hooks) if table]
        # A program that is not compiled calls modules of torch as they are.
        if weights or not is_from_torch(module):
            self._dicts += [module._parameters, module._buffers]
            self._watch_attributes(path, _state_of(module))
        self._dicts.append(_state_of(module))
        if weights:
            self._modes.append(module)
        self._hook_tables += [module._forward_pre_hooks, module._forward_hooks]
        for table in ("_modules", "_parameters", "_buffers") if weights else ("_modules",):
            for name, value in getattr(module, table).items():
                self._tables.append(getattr(module, table))
                self._keys.append(name)
                self._values.append(value)
                self._owners.append(path)
        if weights:
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None and (name != "num_batches_tracked" or not isinstance(module, _NormBase)):
                    self._watch_tensor(joined(path, name), tensor)  # that one is read in training mode alone

    def _watch_attributes(self, path: str, values: dict[str, Any]) -> None:
        """The attributes of a module or of an object that it holds (a configuration), and what is in the containers there."""
        names = [name for name in values if name not in _STANDARD and not isinstance(values[name], torch.Tensor)]
        if names:
            self._attributes.append((path, itemgetter(*names), values, itemgetter(*names)(values)))
        for name in [name for name in values if name not in _STANDARD]:
            value = values[name]
            if isinstance(value, torch.Tensor):
                if self._weights and type(value) is torch.Tensor:
                    self._tables.append(values)
                    self._keys.append(name)
                    self._values.append(value)
                    self._owners.append(path)
                    self._watch_tensor(joined(path, name), value)
            elif id(value) in self._seen:
                continue
            elif type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS:
                self._seen.add(id(value))
                self._containers.append((path, value, _copied(value, 3)))
                if self._weights:
                    for place, tensor in named_tensors_in(value, joined(path, name)):
                        self._watch_tensor(place, tensor)
            elif _is_record(value):
                self._seen.add(id(value))
                self._tagged.append(vars(value))
                self._watch_attributes(path, vars(value))

    def _watch_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """What is written into a tensor is a change; torch does not count writes into tensors of inference mode."""
        if id(tensor) in self._seen or tensor.is_inference() or isinstance(tensor, torch.nn.UninitializedParameter):
            return
        self._seen.add(id(tensor))
        self._names.append(name)
        self._tensors.append(tensor)
        self._versions.append(tensor._version)
        self._pointers.append(tensor.data_ptr())
        sizes = [size for size in tensor.shape if size > 1]
        if len(set(sizes)) < len(sizes):  # else another order is another shape
            self._squares.append(tensor)
            self._strides.append(tensor.stride())

    def _note_sizes(self) -> None:
        self._contents = [value for _, value, _ in self._containers]  # compared all at once
        self._copies = [before for _, _, before in self._containers]
        self._sizes, self._tags = list(map(len, self._dicts)), None
        both = [*self._tagged, *self._empty]
        # Whether dicts are still empty is much quicker to ask than for their counters.
        self._tagged, self._empty = [item for item in both if item], [item for item in both if not item]

    def settle(self) -> list[Held]:
        """Do not mind what a run of the model has just changed itself: its counters, its caches. What it was before."""
        changed: list[Held] = []
        entries, self._attributes = self._attributes, []
        for path, getter, values, before in entries:
            every = getter.__reduce__()[1]
            was = dict(zip(every, before if len(every) > 1 else (before,), strict=True))
            same = [name for name in every if name in values and not _differs(values[name], was[name])]
            changed += [
                Held(f"'{joined(path, name)}'", partial(values.get, name, Held), was[name])
                for name in every
                if name not in same
            ]
            if same:
                self._attributes.append((path, itemgetter(*same), values, itemgetter(*same)(values)))
        for entry in self._containers:
            if _differs(entry[1], entry[2]):
                changed.append(Held(f"a container of {_named(entry[0])}", partial(_copied, entry[1], 3), entry[2]))
        self._containers = [entry for entry in self._containers if not _differs(entry[1], entry[2])]
        for values, size in zip(self._dicts, self._sizes, strict=True):
            if len(values) != size:
                changed.append(Held("what attributes there are", partial(set, values), None))
        self._note_sizes()
        return changed

    def watch_program(self, program: GraphModule, body: GraphModule) -> dict[int, str]:
        """Mind changes of all tensors that a program of the model refers to: a function may use some that no module has. Their
        names, by identity. `body` is the program for the mode that the model is in, where norms do not count batches."""
        names: dict[int, str] = {}
        stay = {node.target for node in body.graph.find_nodes(op="get_attr")}
        for node in program.graph.find_nodes(op="get_attr"):
            if node.target not in stay and all(user._target is add_if for user in node._users):
                continue
            value = find_attribute(program, node.target)[0]
            if isinstance(value, torch.Tensor):
                self._watch_tensor(node.target, value)
                names[id(value)] = node.target
        return names

    def leave_out(self, lowered: GraphModule) -> set[int]:
        """Do not mind changes of the tensors that a lowered program writes itself, and of those that calls of which nobody knows
        what they do are given or have: which these are, by identity. What such a call does to others is a change."""
        memory = Aliases(lowered.graph)
        if not memory.has_writes:
            return set()
        own: set[int] = set()
        for node, effects in memory.effects.items():
            for item in (node, *node._inputs) if effects.unknown else ():
                value = find_attribute(lowered, item._target)[0] if item._op in ("call_module", "get_attr") else None
                if isinstance(value, torch.nn.Module):
                    own.update(map(id, chain(value.parameters(), value.buffers())))
                own.add(id(value))
        written = {
            id(tensor)
            for tensor in chain(self._tensors, self.moving.values())
            if id(tensor) in own or memory.is_known_to_be_written(tensor)
        }
        self.moving |= {id(tensor): tensor for tensor in self._tensors if id(tensor) in written}
        for tensors, names in (
            (self._squares, ("_squares", "_strides")),
            (self._tensors, ("_names", "_tensors", "_versions", "_pointers")),
        ):
            stay = [id(tensor) not in written for tensor in tensors]
            for name in names:
                setattr(self, name, list(compress(getattr(self, name), stay)))
        return written

    def change(self) -> str | None:
        """What has changed, in words; None for nothing."""
        if _tag is None:
            return self._what_was_set() or self._what_was_written()
        # Before they are compared, so that what another thread sets meanwhile is seen the next time.
        # Copying a list touches all that is in it, so the processor fetches it together and not one after another.
        tags = [RemovableHandle.next_id, *map(_tag, self._tagged.copy())]
        if tags != self._tags or any(self._empty.copy()):
            change = self._what_was_set()
            if change is not None:
                return change
            self._tags = tags
        return self._what_was_written()

    def _what_was_set(self) -> str | None:
        """An attribute, a table of a module or a hook that is not what it was."""
        for path, getter, values, before in self._attributes:
            try:
                if _differs(getter(values), before):
                    return f"an attribute of {_named(path)} was set"
            except KeyError:
                return f"an attribute of {_named(path)} was deleted"
        if list(map(len, self._dicts)) != self._sizes:
            return Grown("an attribute, tensor or submodule was added or removed")
        if list(chain.from_iterable(self._hook_tables)) != self._hooks:
            return Grown("a hook was added or removed")
        try:
            found = list(map(getitem, self._tables, self._keys))
        except KeyError:
            found = []
        if len(found) != len(self._values) or not all(map(is_, found, self._values)):
            entries = zip(self._owners, self._tables, self._keys, self._values, strict=True)
            path = next((path for path, table, key, value in entries if table.get(key) is not value), "")
            return f"a submodule or tensor of {_named(path)} was replaced"
        if self._modes and list(map(_mode, self._modes)) != self._training:
            return "a module was switched between training and evaluation"
        return None

    def _what_was_written(self) -> str | None:
        """A container or tensor that is the same object and holds something else."""
        if self._containers and _differs(self._contents, self._copies):
            for path, value, before in self._containers:
                if _differs(value, before):
                    return f"a container of {_named(path)} was changed"
        if self._tensors:
            # In this order, which is a little quicker where nothing of it is in the caches.
            pointers, versions = list(map(_pointer, self._tensors)), list(map(_version, self._tensors))
            strides = list(map(_stride, self._squares))
            if versions != self._versions or pointers != self._pointers or strides != self._strides:
                both = zip(self._tensors, versions, self._versions, pointers, self._pointers, strict=True)
                turned = zip(self._squares, strides, self._strides, strict=True)
                changed = [tensor for tensor, a, b, c, d in both if a != b or c != d]
                changed += [tensor for tensor, a, b in turned if a != b]
                name = next(
                    name for name, tensor in zip(self._names, self._tensors, strict=True) if tensor is changed[0]
                )
                return f"the values of '{name}' have changed"
        return None


@cache
def _have_fused_steps_counted() -> None:
    """torch does not count what its fused optimizers write (Adam, AdamW, SGD, Adagrad with `fused=True`): we tell it."""

    def count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if group.get("fused"):
                increment_version([tensor for tensor in group["params"] if tensor.grad is not None])

    count._torchdynamo_disable = True  # type: ignore[attr-defined]  # a compiled step calls it
    register_optimizer_step_post_hook(count)


def _state_of(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a module; for one that `adapt` or `lower` made, those of its model."""
    if type(module).__module__.startswith("torchgraft.backends."):
        model = module.__dict__.get("_model")
        return model.__dict__ if isinstance(model, torch.nn.Module) else {}
    return module.__dict__


def _differs(found: Any, before: Any) -> bool:
    """Whether two values differ; parts that are the same object are equal without being asked."""
    try:
        return bool(found != before)
    except Exception:  # tensors and arrays: another object, so another value
        return True


def _copied(value: Any, depth: int) -> Any:
    """A copy of nested containers, with the very objects that they hold."""
    if not depth or type(value) not in (*_CONTAINERS, tuple):
        return value
    if type(value) is dict:
        return {key: _copied(item, depth - 1) for key, item in value.items()}
    return type(value)([_copied(item, depth - 1) for item in value]) if type(value) is not set else set(value)


def _is_record(value: Any) -> bool:
    """Whether a value is an object of a Python class that holds values, as configurations do."""
    if isinstance(value, (torch.nn.Module, type)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "torchgraft", "builtins", "numpy", "threading")


def _named(path: str) -> str:
    return f"'{path}'" if path else "the model"
