"""Autocast around operators that have its casts among them: they run without it; calls that stay calls, under what it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node

if TYPE_CHECKING:
    from torchgraft.lowering.recorder import Recorder

Casts = tuple[tuple[str, torch.dtype], ...]
_DEVICES = ("cpu", "cuda")


def active_casts() -> Casts:
    """The kinds of devices on which torch casts the arguments of operators by itself, with the dtype.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     active_casts()
    (('cpu', torch.bfloat16),)
    """
    return tuple(
        [(device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device)]
    )


class WithoutAutocast:
    """The region of a program that switches autocast off, where it was on when the program was lowered.

    At level "aten" there is none: the casts are not among its operators.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.has_casts = recorder.decompositions is not None
        self._entered = [self._enter(device, enabled=False) for device, _ in self._casts()]

    def _casts(self) -> Casts:
        return active_casts() if self.has_casts else ()

    def _enter(self, device: str, **options: Any) -> Node:
        return self._recorder.create_node("call_function", enter_context, (torch.autocast, device), options, "autocast")

    def _leave(self, entered: list[Node]) -> None:
        for node in reversed(entered):
            self._recorder.create_node("call_function", exit_context, (node,), {})

    def close(self) -> None:
        """End the region: the results follow."""
        self._leave(self._entered)

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """While active, the nodes that are written run under the autocast that is on now."""
        entered = [self._enter(device, dtype=dtype) for device, dtype in self._casts()]
        yield
        self._leave(entered)


def is_autocast(node: Node) -> bool:
    """Whether a node begins or ends a region of autocast."""
    if node.target is exit_context and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.target is enter_context and node.args[0] is torch.autocast


def regions_without(graph: Graph) -> set[Node]:
    """The nodes that begin and end the regions that switch autocast off."""
    entered = [node for node in graph.find_nodes(op="call_function", target=enter_context) if is_autocast(node)]
    entered = [node for node in entered if node.kwargs.get("enabled") is False]
    return {*entered, *[user for node in entered for user in node._users]}
