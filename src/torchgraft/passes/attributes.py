"""Putting modules and tensors of a pass's own making into a program, and taking out what nothing refers to any more.
Programs share modules with the model they were captured from, so nothing here writes into what may be the model's.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.codegen.attributes import place_attribute
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.modules import paths_around
from torchgraft.ir.verify import find_attribute


class References:
    """Which nodes of a program refer to which paths; kept right by whoever edits."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self._numbers: dict[str, int] = {}
        self._count: dict[str, int] = {}
        # How many references lie at or below a path.
        self._below: dict[str, int] = {}
        for node in module.graph.nodes:
            if node._op in ("call_module", "get_attr"):
                self.change(node._target, 1)

    def change(self, path: str, amount: int) -> None:
        """Note that there is one reference more or fewer."""
        self._count[path] = self._count.get(path, 0) + amount
        part = path
        while part:
            self._below[part] = self._below.get(part, 0) + amount
            part = part.rpartition(".")[0]

    def is_only_use(self, path: str) -> bool:
        """Whether one node alone refers to this path, to anything below it, or to a module around it."""
        return self._below.get(path, 0) <= 1 and not any(self._count.get(item, 0) for item in paths_around(path)[1:])

    def put(self, path: str, value: Any) -> str:
        """Place a value at `path` if that concerns nobody else, or else at a free path like it; return the path."""
        return self._put(path, value, self.is_only_use(path))

    def put_for_all(self, path: str, value: Any) -> str:
        """Place a value for every node that refers to `path`, or at a free path like it where the place is the model's."""
        return self._put(path, value, self._below.get(path, 0) == self._count.get(path, 0))

    def put_new(self, path: str, value: Any, persistent: bool = False) -> str:
        """Place a value where nothing is yet, as close to `path` as possible; a `persistent` tensor is in the state_dict."""
        holder, name = self._holder(path)
        return self._put(path, value, getattr(holder, name, None) is None, persistent)

    def _put(self, path: str, value: Any, is_free: bool, persistent: bool = False) -> str:
        holder, name = self._holder(path)
        if holder is None or not is_free:
            holder, name, path = self._free_place(path)
        _set(holder, name, value, persistent)
        return path

    def drop_unused(self, path: str) -> None:
        """Remove what is at a path if no node refers to it, and the containers that are empty then."""
        while path and not self._below.get(path, 0):
            holder, name = self._holder(path)
            if holder is None or not hasattr(holder, name):
                return
            delattr(holder, name)
            path = path.rpartition(".")[0]
            container = find_attribute(self.module, path)[0] if path else None
            if container is None or not is_own_container(container):
                return
            if container._modules or container._parameters or container._buffers:
                return

    def _holder(self, path: str) -> tuple[Any, str]:
        """The container at the end of a path, and the name in it; None where the container may be the model's own."""
        prefix, _, name = path.rpartition(".")
        holder: Any = self.module if not prefix else find_attribute(self.module, prefix)[0]
        is_own = holder is self.module or (holder is not None and is_own_container(holder))
        return (holder if is_own else None), name

    def _free_place(self, path: str) -> tuple[Any, str, str]:
        name = self.free_name(path.replace(".", "_"))
        return self.module, name, name

    def free_name(self, wish: str) -> str:
        """A name that the module has not yet, made of `wish` and a number."""
        number = self._numbers.get(wish, 0)
        while hasattr(self.module, f"{wish}_{number}"):
            number += 1
        self._numbers[wish] = number + 1
        return f"{wish}_{number}"


def is_own_container(module: Any) -> bool:
    """Whether a module is one of the empty ones that a program makes on the way to what it refers to."""
    return type(module) is torch.nn.Module


def _set(holder: torch.nn.Module, name: str, value: Any, persistent: bool) -> None:
    if isinstance(value, torch.nn.Module):
        holder._modules[name] = value
    elif isinstance(value, torch.nn.Parameter):
        holder._buffers.pop(name, None)  # a constant that was folded, say
        holder.register_parameter(name, value)
    else:
        place_attribute(holder, name, value, persistent)
