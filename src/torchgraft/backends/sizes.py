"""Programs for one size: what a program asks of shapes becomes constants, and one compiled program is kept for each size in use.
Backends whose compiled code takes any size do without this; guards on other things than sizes stay in the program.
"""

from __future__ import annotations

import copy
import operator
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.analysis.comparison import tensors_in
from torchgraft.analysis.dry_run import DryRun
from torchgraft.backends.calls import call_key, call_text
from torchgraft.backends.variants import log
from torchgraft.capturing.state.tensor_state import kept_draws
from torchgraft.codegen.calling import copied_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GuardError
from torchgraft.ir.guards import check_length, is_guard
from torchgraft.ir.node import Node, map_arg
from torchgraft.passes.layer_calls import is_metadata_read
from torchgraft.passes.remove_dead_code import RemoveDeadCode
from torchgraft.results.tables import seconds_text

_TENSORS = frozenset({torch.Tensor})
_KNOWN = frozenset({torch.Tensor, int, float, bool, str, type(None)})
# Inputs that are the same in every call for which a program is kept; 0.0 and -0.0 have one key.
_IN_THE_KEY = frozenset({int, bool, str, type(None), torch.dtype, torch.device})
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)


class OneForEachSize:
    """Runs the program that was compiled for the sizes of a call; `make` compiles one. At most `most` are kept."""

    def __init__(self, name: str, make: Callable[[tuple[Any, ...], dict[str, Any]], Any], most: int) -> None:
        self.name, self.make, self.most = name, make, most
        self.found: dict[Any, Any] = {}
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run; a size that was not seen yet is compiled first."""
        key = size_key(args, kwargs)
        compiled = self.found.get(key)
        if compiled is None:
            compiled = self._new(key, args, kwargs)
        return compiled.run(*args, **kwargs)

    def _new_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for the sizes of a call, without running it."""
        self._new(size_key(args, kwargs), args, kwargs)

    def _new(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            compiled = self.found.get(key)
            if compiled is not None:
                return compiled
            begin = time.perf_counter()
            with kept_draws():
                compiled = self.make(args, kwargs)
            kept = dict(self.found)
            while len(kept) >= self.most:
                kept.pop(next(iter(kept)))
                log.info("%s: the program of the oldest size goes", self.name)
            kept[key] = compiled
            self.found = kept
        took = seconds_text(time.perf_counter() - begin)
        log.info("%s: compiled for %s in %s", self.name, call_text(args, kwargs), took)
        return compiled


def size_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call looks like, with the sizes of all tensors: those in objects, too. Programs check
    the dtypes of tensors that they are given themselves."""
    if not kwargs and _TENSORS.issuperset(map(type, args)):
        return tuple([tensor.shape for tensor in args])
    key = call_key(args, kwargs, False)
    if _KNOWN.issuperset(map(type, args)) and _KNOWN.issuperset(map(type, kwargs.values())):
        return key
    return key, tuple([(tensor.shape, tensor.dtype) for tensor in tensors_in((args, kwargs))])


def for_one_size(body: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphModule:
    """A copy of a program in which all that follows from the sizes of its inputs, and from whole numbers given, is constant.

    >>> import torchgraft
    >>> program = torchgraft.capture(lambda x: x.view(x.shape[0], -1) * 2, torch.ones(2, 3, 4))
    >>> [node.name for node in for_one_size(program, (torch.ones(2, 3, 4),), {}).graph.nodes]
    ['x', 'guard', 'view', 'mul', 'output']
    """
    result = GraphModule(body, copy.deepcopy(body.graph), type(body).__name__)
    values, tensors, are_static = _values(result, args, kwargs)
    fixed: dict[Node, Any] = {}
    for node in list(result.graph.nodes):
        known = [source for source in node._inputs if source in fixed]
        if known:
            node.args = map_arg(node.args, lambda item: fixed.get(item, item))
            node.kwargs = map_arg(node.kwargs, lambda item: fixed.get(item, item))
        if node._op == "placeholder" and node in values and type(values[node]) in _IN_THE_KEY:
            fixed[node] = values[node]
        if node._op in ("placeholder", "get_attr", "output"):
            continue
        if node._op == "call_function" and is_guard(node._target):
            if known and not node._inputs:
                node._target(*node._args, **node._kwargs)
                result.graph.erase_node(node)
            elif are_static and node._target is check_length:  # so many pieces as the sizes say, which held just now
                result.graph.erase_node(node)
        elif node._target is torch._assert and node._args[0] is True and not node._users:
            result.graph.erase_node(node)
        elif node in values and (is_metadata_read(node) or (known and not node._inputs)):
            fixed[node] = values[node]
    _leave_out_nothings(result, tensors)
    _compute_plainly(result, {node: tensor.dtype for node, tensor in tensors.items()})
    RemoveDeadCode().run(result)
    return result


def _leave_out_nothings(program: GraphModule, tensors: dict[Node, torch.Tensor]) -> None:
    """Calls that return the very tensor that they are given (`to` its own dtype), and empty tensors in a concatenation (a cache
    that was never filled), for which converters have no words."""
    memory = Aliases(program.graph)
    for node in list(program.graph.nodes):
        first = node._args[0] if node._op in ("call_method", "call_function") and node._args else None
        if isinstance(first, Node) and first in tensors and tensors.get(node) is tensors[first]:
            if not memory.effects.get(node):
                node.replace_all_uses_with(first)
                program.graph.erase_node(node)
        elif node._target in _CONCATENATIONS and node in tensors and isinstance(first, (tuple, list)):
            kept = [item for item in first if not _is_nothing(tensors.get(item), tensors[node])]
            if kept and len(kept) < len(first):
                node.args = (kept, *node._args[1:])


_CONCATENATIONS = frozenset({torch.cat, torch.concat, torch.concatenate, torch.ops.aten.cat.default})


def _is_nothing(tensor: torch.Tensor | None, whole: torch.Tensor) -> bool:
    """torch lets a tensor of no elements and one dimension be concatenated to tensors of any; its dtype counts."""
    return tensor is not None and tensor.shape == (0,) and whole.dim() > 1 and tensor.dtype == whole.dtype


def _compute_plainly(program: GraphModule, dtypes: dict[Node, torch.dtype]) -> None:
    """`x += y` becomes `x + y` where only this node uses `x`, which the program has made, and both have one dtype."""
    memory = Aliases(program.graph)
    for node in program.graph.nodes:
        plain = _PLAIN_FORMS.get(node._target) if node._op in ("call_method", "call_function") else None
        if plain is None or len(node._args) != 2 or node._kwargs:
            continue
        target, other = node._args
        if not isinstance(target, Node) or target not in dtypes or list(target._users) != [node] or target is other:
            continue
        if target._op in ("placeholder", "get_attr") or not memory.is_fresh(target):
            continue
        is_same = dtypes.get(other) == dtypes[target] if isinstance(other, Node) else dtypes[target].is_floating_point
        if is_same and memory.region[target] is memory.region[node]:
            node.target = plain


_PLAIN_FORMS: dict[Any, Any] = {
    operator.iadd: operator.add, operator.imul: operator.mul, operator.isub: operator.sub,
    "add_": "add", "mul_": "mul", "sub_": "sub",
}  # fmt: skip


def _values(
    program: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[Node, Any], dict[Node, torch.Tensor], bool]:
    """The values of the nodes that are no tensors; the tensors, mostly without data; whether all follows from sizes alone."""
    found: dict[Node, Any] = {}
    tensors: dict[Node, torch.Tensor] = {}

    def note(node: Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors[node] = value
        elif isinstance(value, torch.Size):
            found[node] = tuple(value)
        elif isinstance(value, _PLAIN) or (type(value) is tuple and all(type(item) is int for item in value)):
            found[node] = value

    try:
        # Copies, because a program may write into objects that it is given (a cache).
        DryRun(program, *copied_inputs(args, kwargs), node_done=note, compute=False).forward()
        return found, tensors, True
    except GuardError:
        raise
    except Exception:  # from here on shapes depend on values: what was noted until then does not
        return found, tensors, False
