"""Compute once what a program computes twice: the same call of the same values.
What may not be merged (random draws, written memory, two results that the caller gets) is known to `analysis/aliases.py`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.analysis.effects import effects_of
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node, map_arg
from torchgraft.ir.verify import find_attribute
from torchgraft.passes.definition import Pass

_SAFE_KEYS = frozenset({str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.memory_format})


@dataclass(frozen=True)
class MergeCommon(Pass):
    """Merge equal calls. Random draws, values that are written, and values made in different regions stay apart.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x.sin() * x.sin() + torch.rand(2) * torch.rand(2))
    >>> MergeCommon()(program).changes
    1
    """

    def run(self, module: GraphModule) -> int:
        """Merge, and return how many nodes went."""
        graph = module.graph
        memory = Aliases(graph)
        regions = memory.region
        first_of: dict[Any, Node] = {}
        outliving: set[Node] = set()  # first calls that stand for one whose result the caller gets
        merged: dict[Node, Node] = {}  # and the call that takes its place
        for node in graph.nodes:
            if merged:
                _use_instead(node, merged)
            if node._op in ("placeholder", "output"):
                continue
            try:
                key = (regions[node], node._op, node._target, _key(node._args), _key(node._kwargs))
                first = first_of.setdefault(key, node)
            except TypeError:  # something in the call cannot be compared
                continue
            if first is node or not memory.is_pure(node):
                continue
            position = memory.position[node]
            if memory.has_writes and memory.is_touched_between(node, memory.position[first], position):
                # From here on there is another value to be equal to.
                first_of[key] = node
            elif _is_mergeable(memory, first, node, memory.outlives(first) or first in outliving):
                if memory.outlives(node):
                    outliving.add(first)
                merged[node] = first
        for node in reversed(merged):
            graph.erase_node(node)
        return len(merged)


def _use_instead(user: Node, merged: dict[Node, Node]) -> None:
    """Exchange all merged inputs of a call at once: one with thousands of them (a `cat`) is written anew for each change."""
    sources = [source for source in user._inputs if source in merged]
    if sources:
        for source in sources:
            user.graph._notify_replace(source, merged[source], user)
        user.args = map_arg(user._args, lambda source: merged.get(source, source))
        user.kwargs = map_arg(user._kwargs, lambda source: merged.get(source, source))


def _is_mergeable(memory: Aliases, first: Node, node: Node, first_outlives: bool) -> bool:
    if node._op == "get_attr":
        return True  # one object, however often it is fetched
    if node._meta and "recomputes" in node._meta:
        return False  # computed again so that it need not be kept
    if first_outlives and memory.outlives(node):
        return False  # the caller gets two tensors, and may write one of them
    if memory.has_writes and (memory.is_written(first) or memory.is_written(node)):
        return False
    return node._op != "call_module" or _is_pure_in_both_modes(memory.root, node)


def _is_pure_in_both_modes(root: torch.nn.Module | None, node: Node) -> bool:
    """Whether a module call stays pure when the program is switched to the other mode, as that of a dropout does not."""
    module = None if root is None else find_attribute(root, node._target)[0]
    if not isinstance(module, torch.nn.Module):
        return False
    holder = torch.nn.Module()
    holder._modules["module"] = _in_other_mode(module)
    graph = Graph(owning_module=holder)
    inputs = {source: graph.placeholder(source._name) for source in node._inputs}
    call = graph.node_copy(node, inputs.__getitem__)
    call.target = "module"
    return not effects_of(call)


def _in_other_mode(module: torch.nn.Module) -> torch.nn.Module:
    """A stand-in over the same tensors, switched over; the module itself may be in use by somebody else."""
    result = copy.copy(module)
    result.__dict__ = dict(module.__dict__)
    result.training = not module.training
    result._modules = {
        name: None if child is None else _in_other_mode(child) for name, child in module._modules.items()
    }
    return result


def _key(value: Any) -> Any:
    """An argument tree as a key that tells apart what computes differently: 1 from 1.0 and True, 0.0 from -0.0."""
    cls = type(value)
    if cls is Node or cls in _SAFE_KEYS:
        return value
    if isinstance(value, (tuple, list)):
        return (cls, *[item if type(item) is Node else _key(item) for item in value])
    if isinstance(value, dict):
        return (dict, *[(key, _key(item)) for key, item in sorted(value.items())]) if value else ()
    if cls is slice:
        return (slice, _key(value.start), _key(value.stop), _key(value.step))
    if cls is float or cls is complex:
        return cls, repr(value)
    if isinstance(value, torch.Tensor):
        return torch.Tensor, id(value)
    return cls, value
