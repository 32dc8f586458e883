"""Calls that wait for somebody else, each with the two calls that start it and wait for it: torch's and a user's own.
Where the two go in a program is decided in `overlap_remote_calls.py`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torchgraft.analysis.effects.declared import is_declared_pure
from torchgraft.analysis.effects.findings import Effects
from torchgraft.capturing.patching.remote_calls import fetch_reference, wait_for_future, wait_for_work
from torchgraft.capturing.patching.wrapping import recorded_leaf
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute


@dataclass(frozen=True)
class Blocking:
    """A function that waits, what starts the same and returns at once, and what waits for that and returns the result.

    `writes` names the parameters whose tensors are written into; nobody may look at them meanwhile. Calls that are `in_order`
    (collectives: every process must make them in the same order) are started in the order in which they were written.
    `options` are given to `start` besides.

    >>> import time
    >>> Blocking(time.sleep, start=time.sleep, wait=print).in_order
    False
    """

    function: Callable[..., Any]
    start: Callable[..., Any]
    wait: Callable[[Any], Any]
    writes: tuple[str, ...] = ()
    in_order: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    returns_result: bool = True

    def arguments(self, node: Node) -> dict[str, Any]:
        """The arguments of a call by the names of the parameters."""
        bound = inspect.signature(self.function).bind(*node.args, **node.kwargs)
        return dict(bound.arguments)

    def effects(self, node: Node) -> Effects:
        """What a call does to the memory of this process."""
        given = self.arguments(node) if self.writes else {}
        written = [leaf for name in self.writes for leaf in _nodes_in(given.get(name))]
        return Effects(writes=frozenset(written), shares=frozenset(node.all_input_nodes))


_own: dict[Any, Blocking] = {}


def blocking(
    *, start: Callable[..., Any], wait: Callable[[Any], Any], writes: Iterable[str] = (), in_order: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare that a function waits for somebody else, and what starts the same and waits for it; a decorator.

    The function becomes one call in captured programs, and the pass `overlap-remote-calls` may put a call of `start` (with the
    same arguments) early and a call of `wait` (with what `start` returned) late in its place. So the declaration says, too, that
    several calls may be in flight at once, and that a call only computes its result, or writes into the arguments in `writes`.

    >>> import torch, torchgraft
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> pool = ThreadPoolExecutor(2)
    >>> def start_fetch(key):
    ...     return pool.submit(torch.full, (2,), key)
    >>> def wait_fetch(started):
    ...     return started.result()
    >>> @torchgraft.schedule.blocking(start=start_fetch, wait=wait_fetch)
    ... def fetch(key):
    ...     return wait_fetch(start_fetch(key))
    >>> program = torchgraft.capture(lambda x: x.sin() + fetch(3.0), torch.zeros(2))
    >>> torchgraft.schedule.OverlapRemoteCalls()(program).changes
    1
    >>> [node.name for node in program.graph.nodes if node.op == "call_function"][-3:]
    ['start_fetch', 'wait_fetch', 'add']
    """
    for role, function in (("start", start), ("wait", wait)):
        if not callable(function):
            raise TypeError(f"blocking(): expected a function for '{role}', got {type(function).__name__}")

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        names = tuple(writes)
        if unknown := [name for name in names if name not in inspect.signature(function).parameters]:
            raise TypeError(f"blocking(): {function.__name__} has no parameter {', '.join(map(repr, unknown))}")
        _own[function] = Blocking(function, start, wait, names, in_order)
        return recorded_leaf(function, always=True)

    return declare


def find_blocking(node: Node) -> tuple[Blocking | None, str]:
    """How a call that waits can be taken apart; or None, with the reason if it waits and cannot be."""
    if node.op != "call_function":
        return None, ""
    try:
        found = _own.get(node.target) or _of_torch().get(node.target)
    except TypeError:  # a callable object that cannot be a key
        return None, ""
    if found is None:
        return None, ""
    given = found.arguments(node)
    if given.get("async_op"):
        return None, ""
    if not found.returns_result and node._users:
        return None, "what it returns is used, and the call that does not wait returns nothing of the kind"
    if "func" in given and not is_declared_pure(called := _constant(node, given["func"])):
        name = getattr(called, "__name__", "the function")
        return None, f"{name} may have effects on the other side; mark it with torchgraft.pure if it only computes"
    return found, ""


def half_calls(graph: Graph) -> dict[Node, bool]:
    """The calls that start something elsewhere, or wait for what such a call started; whether each is a wait.

    They do nothing in this process but return a value. Collectives that were started are not among them.
    """
    remote = vars(sys.modules.get("torch.distributed.rpc.api", object))
    asking = {remote[name] for name in ("remote", "rpc_async") if name in remote}
    pairs = {found.start: found.wait for found in _own.values() if not found.writes}
    pairs[start_fetching] = wait_for_future
    found: dict[Node, bool] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, FunctionType):
            continue
        started = node.args[0] if node.args else None
        if isinstance(started, Node) and found.get(started) is False:
            if node.target is pairs.get(started.target, wait_for_future):
                found[node] = True
        elif node.target in pairs:
            found[node] = False
        elif node.target in asking:
            given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
            if is_declared_pure(_constant(node, given.get("func"))):
                found[node] = False
    return found


def start_fetching(reference: Any, timeout: float = -1.0) -> Any:
    """Ask the owner of a remote reference for its value, without waiting for it."""
    return sys.modules["torch.distributed.rpc"].rpc_async(reference.owner(), _value_of, (reference,), timeout=timeout)


def _value_of(reference: Any) -> Any:
    return reference.local_value()


# The parameters that collectives write into.
_WRITTEN = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce", "scatter"), ("tensor",)),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), ("output_tensor",)),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single"), ("output",)),
    "all_reduce_coalesced": ("tensors",),
    "all_gather": ("tensor_list",),
    "gather": ("gather_list",),
    "all_to_all": ("output_tensor_list",),
}  # fmt: skip


def _of_torch() -> dict[Any, Blocking]:
    """Those of torch.distributed, as far as it is loaded."""
    return _table("torch.distributed.distributed_c10d" in sys.modules, "torch.distributed.rpc.api" in sys.modules)


@functools.cache
def _table(has_collectives: bool, has_remote_calls: bool) -> dict[Any, Blocking]:
    found: list[Blocking] = []
    if has_collectives:
        collectives = vars(sys.modules["torch.distributed.distributed_c10d"])
        for name, writes in _WRITTEN.items():
            if function := collectives.get(name):
                found.append(Blocking(function, function, wait_for_work, writes, True, (("async_op", True),), False))
        for name in ("send", "recv"):
            if name in collectives:
                written = ("tensor",) if name == "recv" else ()
                found.append(
                    Blocking(collectives[name], collectives[f"i{name}"], wait_for_work, written, True, (), False)
                )
    if has_remote_calls:
        calls = sys.modules["torch.distributed.rpc.api"]
        if hasattr(calls, "rpc_sync"):
            found.append(Blocking(calls.rpc_sync, calls.rpc_async, wait_for_future))
        found.append(Blocking(fetch_reference, start_fetching, wait_for_future))
    return {item.function: item for item in found}


def _constant(node: Node, value: Any) -> Any:
    """A constant argument; a program keeps those that are no literals in attributes."""
    if isinstance(value, Node) and value.op == "get_attr" and node.graph.owning_module is not None:
        return find_attribute(node.graph.owning_module, value.target)[0]
    return value


def _nodes_in(value: Any) -> list[Node]:
    if isinstance(value, Node):
        return [value]
    return [node for item in value for node in _nodes_in(item)] if isinstance(value, list | tuple) else []
