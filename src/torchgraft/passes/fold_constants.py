"""Compute once, while the program is being made ready, what would come out the same in every run.
Where a constant may be kept in the place of a computation is known to `analysis/aliases.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchgraft.analysis.aliases import Aliases
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.node import Node, map_arg
from torchgraft.ir.verify import find_attribute
from torchgraft.passes.attributes import References
from torchgraft.passes.definition import Pass

_PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.memory_format)
_GRAD_MODES = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Replace what depends on constants alone by its value, if that has at most `max_bytes` bytes.

    Parameters and buffers are no constants: they are trained, loaded and moved. With `freeze` they are, and the program no
    longer follows changes of them. What is written, drawn at random or handed to the caller stays computed.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x * torch.arange(4.0).sqrt())
    >>> FoldConstants()(program).changes, [node.op for node in program.graph.nodes]
    (2, ['placeholder', 'get_attr', 'call_function', 'output'])
    """

    max_bytes: int = 1 << 20
    freeze: bool = False

    def run(self, module: GraphModule) -> int:
        """Fold, and return how many computations went."""
        return _Folder(module, self.max_bytes, self.freeze).fold()


def fold_values(module: GraphModule, nodes: Collection[Node]) -> int:
    """Compute the values of some nodes once, where nothing but constants, parameters and buffers goes into them; how many
    computations went. The program no longer follows changes of those."""
    return _Folder(module, math.inf, True, nodes).fold()


class _Folder:
    """The constants of one program: their values, and which of them are kept. With `only`, they are those nodes."""

    def __init__(
        self, module: GraphModule, max_bytes: float, freeze: bool, only: Collection[Node] | None = None
    ) -> None:
        self.module = module
        self.graph = module.graph
        self.max_bytes = max_bytes
        self.freeze = freeze
        self.memory = Aliases(self.graph)
        # The value of every constant node, and whether it was made from attributes of the module.
        self.values: dict[Node, Any] = {}
        self._from_attributes: dict[Node, bool] = {}
        self.only = only
        needed = set(self.graph.nodes if only is None else only)
        if only is not None:
            for node in reversed(self.graph.nodes):
                if node in needed:
                    needed.update(node._inputs)
        with torch.no_grad():
            for node in self.graph.nodes:
                if node in needed:
                    self._evaluate(node)

    def _evaluate(self, node: Node) -> None:
        if node._op in ("placeholder", "output"):
            return
        if node._op == "get_attr":
            value = find_attribute(self.module, node._target)[0]
            if self._is_constant_attribute(node, value):
                # A view of a parameter asks for gradients even where none are recorded.
                self.values[node] = value.detach() if self.freeze else value
                self._from_attributes[node] = True
            return
        values = self.values
        for source in node._inputs:
            if source not in values:
                return
        if not self._may_fold(node):
            return
        args = map_arg(node._args, values.__getitem__)
        kwargs = map_arg(node._kwargs, values.__getitem__)
        if not self._fits(node, args, kwargs):
            return
        try:
            value = _call(node, args, kwargs)
        except Exception:  # what raises in every run must go on raising, in the run
            return
        # What takes nothing and returns no tensor asks for a setting (torch.is_grad_enabled()), which may change.
        is_setting = not node._inputs and not isinstance(value, torch.Tensor)
        if not is_setting and _bytes(value) <= self.max_bytes and not _needs_gradient(value):
            values[node] = value
            self._from_attributes[node] = any(self._from_attributes[source] for source in node._inputs)

    def _is_constant_attribute(self, node: Node, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            is_constant = self.freeze or node._target in self.graph._constants
            return is_constant and not (self.memory.has_writes and self.memory.is_state_written(value))
        # Whether a module is in training mode, and other switches of the user's, may change at any time.
        return False

    def _may_fold(self, node: Node) -> bool:
        if node._op not in ("call_function", "call_method") or not self.memory.is_pure(node):
            return False
        region = self.memory.region[node]
        while region is not None:
            if region._args[0] not in _GRAD_MODES:
                return False
            region = self.memory.region[region]
        return not (self.memory.has_writes and self.memory.is_written(node))

    def _fits(self, node: Node, args: Any, kwargs: Any) -> bool:
        """Whether the value is small enough, found out without making it where it might be huge."""
        if _largest(args, kwargs) * 16 <= self.max_bytes:
            return True
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return _bytes(_call(node, args, kwargs)) <= self.max_bytes
        except Exception:  # not every operator can be asked
            return False

    # ---- editing ----

    def fold(self) -> int:
        """Put values in the place of computations, and return how many of these went."""
        if not self.values:
            return 0
        references = References(self.module)
        folded = 0
        for node in reversed(self.graph.nodes):
            if node not in self.values or node._op == "get_attr":
                continue
            # Constants used by constants only have lost their users by now.
            wanted = self.only is None or node in self.only
            if node._users and not (wanted and self._keep_value(node, references)):
                del self.values[node]
                continue
            self.graph.erase_node(node)
            folded += 1
        for node in list(self.values):
            if (
                node._op == "get_attr"
                and not node._erased
                and not node._users
                and node._target in self.graph._constants
            ):
                self.graph.erase_node(node)
                references.change(node._target, -1)
                references.drop_unused(node._target)
        return folded

    def _keep_value(self, node: Node, references: References) -> bool:
        """Let the users of a node have its value; False where that is not possible."""
        value = self.values[node]
        if _is_plain(value):
            node.replace_all_uses_with(value)
            return True
        if not isinstance(value, torch.Tensor) or self.memory.outlives(node):
            return False  # a caller who writes into what it was given must not change the next run
        name = references.free_name("_folded")
        if self._from_attributes[node]:
            self.module.register_buffer(name, value.detach(), persistent=False)
        else:
            # Made from no attribute: it stays on its device and of its type, as it would if it were made anew.
            self.module.__dict__[name] = value
        self.graph._constants[name] = value
        with self.graph.inserting_before(node):
            fetched = self.graph.create_node("get_attr", name)
        fetched._origin, fetched._meta = node._origin, node._meta
        references.change(name, 1)
        node.replace_all_uses_with(fetched)
        return True


def _call(node: Node, args: Any, kwargs: Any) -> Any:
    if node._op == "call_method":
        return getattr(args[0], node._target)(*args[1:], **kwargs)
    return node._target(*args, **kwargs)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return type(value) in _PLAIN and not (isinstance(value, float) and not math.isfinite(value))


def _bytes(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() if value.layout is torch.strided else math.inf
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes, value))
    return 0 if isinstance(value, _PLAIN) else math.inf


def _needs_gradient(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_needs_gradient, value))
    return isinstance(value, torch.Tensor) and value.requires_grad


def _largest(*values: Any) -> float:
    """More elements than any result can have, for operators that combine elements and sizes however they like."""
    result = 1.0
    for value in values:
        if isinstance(value, (tuple, list)):
            result *= _largest(*value)
        elif isinstance(value, dict):
            result *= _largest(*value.values())
        elif isinstance(value, torch.Tensor):
            # One element may be a size.
            result *= max(value.numel(), 1) if value.numel() > 1 or value.is_floating_point() else math.inf
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            result *= abs(value) + 1 if math.isfinite(value) else 1
    return result
