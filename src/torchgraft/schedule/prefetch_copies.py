"""The pass `prefetch-copies`: copies to a device, and parameters kept on the CPU, are under way while something else is computed.
How a copy is started and awaited is in `copies.py`; the order is that of other calls that wait, made in `plan.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.analysis.effects import effects_of
from torchgraft.analysis.effects.findings import OUTSIDE
from torchgraft.analysis.shapes import tree_metadata
from torchgraft.errors import PassError
from torchgraft.ir.copying import inherit_origin
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node, map_arg
from torchgraft.ir.origin import at, source_of
from torchgraft.ir.verify import find_attribute
from torchgraft.passes.definition import Pass
from torchgraft.passes.layer_calls import parameter_of
from torchgraft.schedule.blocking import Blocking
from torchgraft.schedule.copies import copied, copies_on, start_copies, start_copy, wait_for_copies, wait_for_copy
from torchgraft.schedule.overlap_remote_calls import check_limit, take_apart
from torchgraft.schedule.plan import Limits
from torchgraft.splitting.order import may_do_anything

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule

_OWN = (copied, copies_on, start_copies, start_copy, wait_for_copies, wait_for_copy)


@dataclass(frozen=True)
class PrefetchCopies(Pass):
    """Start copies to a device ahead of what needs them; with a `device`, bring parameters that are kept on the CPU there, too.

    `x.to(device)` and `x.cuda()` become a start and a wait. With `device` every layer of a program that was captured at level
    "function" or lower gets its parameters and buffers by a copy of its own, which is started while the layers before it compute,
    and let go of after its last use: on the device are the parameters of `max_in_flight` layers and of the one that computes,
    and at most `max_bytes` are under way. To a CUDA device a stream of its own copies, from pinned memory; parameters
    that are pinned are not copied to pinned memory first. Results are the same, bit for bit.

    >>> import torch, torchgraft
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> program = torchgraft.capture(model, torch.ones(1, 2), level="function")
    >>> PrefetchCopies(device="meta")(program).changes
    2
    >>> program(torch.ones(1, 2, device="meta")).device
    device(type='meta')
    """

    device: str = ""
    max_in_flight: int = 2
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        check_limit(self)
        if not _is_device(self.device):
            raise ValueError(f"{self.name}: expected a device such as 'cuda' or 'cuda:1', got {self.device!r}")

    def run(self, module: GraphModule) -> int:
        """Take the copies apart and put the program in its new order; return how many copies there were."""
        calls = {_as_call(node, device): _ONE for node in list(module.graph.nodes) if (device := _target_of(node))}
        if self.device:
            calls.update(dict.fromkeys(_copy_parameters(module, self.device), _SEVERAL))
        if self.device or calls:
            take_apart(module, calls, Limits(self.max_in_flight, self.max_bytes))
        return len(calls)

    def notes(self, module: GraphModule) -> list[str]:
        """The tensors that stay on the CPU although there is a `device`, and why."""
        if not self.device:
            return []
        staying = _staying(module)
        return [
            f"{node.target} stays where it is{at(source_of(node))}: the program writes or returns it"
            for node in module.graph.nodes
            if node in staying
        ]


def _is_device(name: Any) -> bool:
    try:
        return isinstance(name, str | torch.device) and bool(torch.device(name or "cpu"))
    except RuntimeError:
        return False


_ONE = Blocking(copied, start_copy, wait_for_copy)
_SEVERAL = Blocking(copies_on, start_copies, wait_for_copies)


def _target_of(node: Node) -> Any:
    """The device that a copy goes to, as far as that is known and is not the CPU."""
    if node.op != "call_method" or node.target not in ("to", "cuda"):
        return None
    if node.target == "cuda":
        return "cuda" if len(node.args) == 1 and not node.kwargs else None
    device = node.kwargs.get("device", node.args[1] if len(node.args) > 1 else None)
    if isinstance(device, Node):
        is_device = device.target is getattr and device.args[1] == "device"
        return device if is_device else None
    if not isinstance(device, str | torch.device):
        return None
    return None if torch.device(device).type == "cpu" else str(device)


def _as_call(node: Node, device: Any) -> Node:
    """The same copy as a call of a function that can be taken apart."""
    rest = (device,) if node.target == "cuda" else node.args[1:]
    with node.graph.inserting_before(node):
        call = node.graph.create_node("call_function", copied, (device, node.args[0], *rest), node.kwargs)
    inherit_origin(call, node)
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)
    return call


def _copy_parameters(module: GraphModule, device: str) -> list[Node]:
    """Give every call a copy of the parameters and buffers that it reads; the calls that copy."""
    graph, staying, made = module.graph, _staying(module), []
    for node in list(graph.nodes):
        if node.op == "call_module" and any(True for _ in _tensors_below(module, node)):
            raise PassError(
                f"cannot keep the parameters of '{node.target}' on the CPU{at(source_of(node))}: it is one call of a module\n"
                'capture the program with level="function"'
            )
        if node.op not in ("call_function", "call_method") or is_guard(node.target) or node.target in _OWN:
            continue
        sources = [
            source for source in node.all_input_nodes if _tensor_of(source) is not None and source not in staying
        ]
        if not sources:
            continue
        if node.target is getattr:
            if node.args[1] == "device":
                _replace_value(node, torch.device(device))
            continue
        with graph.inserting_before(node):
            call = graph.create_node("call_function", copies_on, (device, *sources))
            parts = [graph.create_node("call_function", operator.getitem, (call, n)) for n in range(len(sources))]
        for source, part in zip(sources, parts, strict=True):
            inherit_origin(part, node)
            node.replace_input_with(source, part)
        inherit_origin(call, node)
        call.meta["tensor_meta"] = tree_metadata(tuple(_tensor_of(source) for source in sources))
        made.append(call)
    return made


def _replace_value(node: Node, value: Any) -> None:
    for user in [user for user in node._users if not is_guard(user.target)]:
        user.args = map_arg(user.args, lambda other: value if other is node else other)
        user.kwargs = map_arg(user.kwargs, lambda other: value if other is node else other)


def _tensor_of(node: Node) -> torch.Tensor | None:
    """The parameter, buffer or constant on the CPU that a node fetches."""
    module = node.graph.owning_module
    value = None if module is None else parameter_of(node, module)
    return value if value is not None and value.device.type == "cpu" else None


def _staying(module: GraphModule) -> set[Node]:
    """The tensors that somebody may write, or gets as a result, and so wants themselves and no copy."""
    aliases = Aliases(module.graph)
    # The memory of the module that each value may share.
    held: dict[Node, set[int]] = {}
    staying: set[int] = set()

    def of(places: Iterable[Any]) -> set[int]:
        found: set[int] = set()
        for place in places:
            if isinstance(place, Node):
                found |= held.get(place, set())
            elif place != OUTSIDE:
                value = find_attribute(module, place)[0]
                found |= {_memory(value)} if isinstance(value, torch.Tensor) else set()
        return found

    for node in module.graph.nodes:
        if (tensor := _tensor_of(node)) is not None:
            held[node] = {_memory(tensor)}
        elif node.op == "output":
            staying |= of(node.all_input_nodes)
        elif node.op.startswith("call") and not is_guard(node.target):
            held[node] = of(aliases.shares(node))
            effects = effects_of(node)
            staying |= of(effects.writes)
            if may_do_anything(effects) or (effects.writes and not aliases.writes_only_numbers(node)):
                staying |= of(node.all_input_nodes)
    return {node for node in module.graph.nodes if _tensor_of(node) is not None and held[node] & staying}


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors_below(module: GraphModule, node: Node) -> Any:
    layer = module.get_submodule(str(node.target))
    yield from layer.parameters()
    yield from layer.buffers()
