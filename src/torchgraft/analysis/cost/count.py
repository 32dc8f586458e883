"""`cost`: runs a program on fake tensors and adds up what each operator does, for the node that it runs for.
What an operator does is said in `formulas.py` and `elementwise.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchgraft.analysis.cost import elementwise
from torchgraft.analysis.cost.elementwise import is_view
from torchgraft.analysis.cost.formulas import formula_of_call
from torchgraft.analysis.cost.report import Cost, ModuleCost, NodeCost, Work
from torchgraft.analysis.dry_run import DryRun, program_of
from torchgraft.analysis.schemas import schema_parameters
from torchgraft.codegen.calling import example_inputs
from torchgraft.ir.node import Node
from torchgraft.ir.printing import target_text
from torchgraft.ir.verify import find_attribute


def cost(
    program: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool = True,
    causal_aware: bool = True,
    compute: bool = False,
) -> Cost:
    """What running a program on such inputs costs, forward and backward, without computing anything.

    A model that is no program yet is captured first, on fake tensors; tensors on the meta device will do as inputs. FLOPs count
    two for a multiply-add and one for any other arithmetic on an element; MACs count multiply-adds. Operators without a formula
    are listed in `unknown`. Causal attention counts the pairs that are not masked, unless `causal_aware` is False. `compute` runs
    it on copies of the real tensors instead, for a program whose shapes depend on values.

    >>> result = cost(torch.nn.Linear(100, 10), torch.empty(8, 100, device="meta"))
    >>> result.forward.flops, result.forward.macs, result.parameters
    (16000, 8000, 1010)
    """
    values, keywords = example_inputs(args, kwargs)
    with torch.set_grad_enabled(backward):
        run = DryRun(program_of(program, values, keywords, compute), values, keywords, compute=compute)
        counter = _Counter(run, causal_aware)
        run.forward()
        if backward:
            run.backward()
    return counter.result()


class _Counter:
    """Adds up the work of operators by node and phase."""

    def __init__(self, run: DryRun, causal_aware: bool) -> None:
        self.run, self.program, self.place = run, run.program, run.place
        run.tell(self.operator)
        run.node_done = self.node_done
        self.causal_aware = causal_aware
        self.work: dict[tuple[Node | None, bool], Work] = defaultdict(Work)
        self.operators: dict[tuple[Node | None, bool], dict[str, Work]] = defaultdict(lambda: defaultdict(Work))
        self.unknown: dict[Node | None, list[str]] = defaultdict(list)
        self.shapes: dict[Node, Any] = {}
        # Nodes whose target has a formula of its own: their operators count bytes only.
        self.whole = {node for node in self.program.graph.nodes if self._formula(node) is not None}

    def _formula(self, node: Node) -> Any:
        target = node._target
        if node._op == "call_module":
            target = type(find_attribute(self.program, target)[0])
        return formula_of_call(node._op, target)

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        node, backward = self.place.node, self.place.backward
        name = str(getattr(func, "overloadpacket", func))
        work: tuple[int, int] | None = (0, 0)
        if node not in self.whole or backward:
            work = elementwise.work_of(func, args, kwargs, result, self.causal_aware)
        if work is None:
            self.unknown[node].append(name)
            work = 0, 0
        self._add(name, Work(*work, *traffic(func, args, kwargs, result)))

    def _add(self, name: str, work: Work) -> None:
        key = self.place.node, self.place.backward
        self.work[key] += work
        self.operators[key][name] += work

    def node_done(self, node: Node, result: Any) -> None:
        self.shapes[node] = _shape(result)
        if node in self.whole:
            args, kwargs = self.run.fetch_args_kwargs_from_env(node)
            work = elementwise.counted(self._formula(node), args, kwargs, result)
            self._add(target_text(node._target), Work(*work))

    # ---- the answer ----

    def result(self) -> Cost:
        nodes = tuple(self._node_cost(node) for node in self.program.graph.nodes)
        forward = sum((self.work[key] for key in list(self.work) if not key[1]), Work())
        backward = sum((self.work[key] for key in list(self.work) if key[1]), Work())
        unknown: dict[str, list[str]] = defaultdict(list)
        for node, names in self.unknown.items():
            for name in names:
                unknown[name].append("(between nodes)" if node is None else node.name)
        whole = _count({id(parameter): parameter for parameter in self.program.parameters()}.values())
        return Cost(
            type(self.program).__name__,
            nodes,
            self._module_costs(),
            whole,
            forward,
            backward,
            {name: tuple(places) for name, places in unknown.items()},
        )

    def _node_cost(self, node: Node) -> NodeCost:
        operators = {}
        for name in {**self.operators[node, False], **self.operators[node, True]}:
            operators[name] = self.operators[node, False][name], self.operators[node, True][name]
        stack = module_paths(node)
        return NodeCost(
            node.name,
            node.op,
            target_text(node.target),
            stack[-1] if stack else "",
            self.shapes.get(node),
            _count(parameters_of(node, self.program)),
            self.work[node, False],
            self.work[node, True],
            operators,
            tuple(dict.fromkeys(self.unknown.get(node, ()))),
        )

    def _module_costs(self) -> dict[str, ModuleCost]:
        types: dict[str, str] = {"": type(self.program).__name__}
        members: dict[str, list[Node]] = {"": []}
        for node in self.program.graph.nodes:
            stack = node.meta.get("nn_module_stack") or {}
            types |= {
                path: getattr(kind, "__name__", str(kind)).rpartition(".")[2] for path, kind in stack.values() if path
            }
            for path in dict.fromkeys(["", *module_paths(node)]):
                members.setdefault(path, []).append(node)
        return {path: self._module_cost(path, types.get(path, ""), nodes) for path, nodes in members.items()}

    def _module_cost(self, path: str, kind: str, nodes: list[Node]) -> ModuleCost:
        parameters = {id(item): item for node in nodes for item in parameters_of(node, self.program)}
        if not path:
            parameters = {id(item): item for item in self.program.parameters()}
        if not kind and path:
            kind = type(find_attribute(self.program, path)[0]).__name__
        forward = sum((self.work[node, False] for node in nodes), Work())
        backward = sum((self.work[node, True] for node in nodes), Work())
        if not path:
            forward, backward = forward + self.work[None, False], backward + self.work[None, True]
        return ModuleCost(path, kind, _count(parameters.values()), forward, backward, len(nodes))


def parameters_of(node: Node, root: torch.nn.Module | None) -> list[torch.nn.Parameter]:
    """The parameters that a node fetches, or those of the module that it calls."""
    if root is None or node._op not in ("call_module", "get_attr"):
        return []
    value, _ = find_attribute(root, node._target)
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    return [value] if isinstance(value, torch.nn.Parameter) else []


def module_paths(node: Node) -> list[str]:
    """The modules around a node, outermost first, with the one that it calls."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path]
    if node._op == "call_module" and node._target not in paths:
        paths.append(node._target)
    return paths


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    if isinstance(value, (tuple, list)):  # a class of tuples (PackedSequence) takes nothing but tensors
        return (tuple if isinstance(value, tuple) else list)(map(_shape, value))
    return {key: _shape(item) for key, item in value.items()} if isinstance(value, dict) else None


def _count(parameters: Iterable[Any]) -> int:
    return sum(parameter.numel() for parameter in parameters)


# ---- bytes ----


_FETCHES_ROWS = frozenset({"embedding", "index", "index_select", "gather", "_embedding_bag", "masked_select", "take"})
_PUTS_ROWS = frozenset({"index_put", "index_put_", "scatter", "scatter_", "scatter_add_", "index_add_", "index_copy_"})
_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "set_"})
# Memory that is not written yet, and what torch calls unsafe: views that are declared to be none.
_MAKES_NOTHING = ("empty", "new_empty", "unsafe_", "_unsafe_view", "lift_fresh")


def traffic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """Bytes read and written by one call.

    >>> x = torch.ones(2, 3)
    >>> traffic(torch.ops.aten.add.Tensor, (x, x[0]), {}, x + x[0])
    (36, 24)
    """
    packet = getattr(func, "overloadpacket", func)
    name = getattr(packet, "__name__", str(func))
    if is_view(func) or name.startswith(_MAKES_NOTHING):
        return 0, 0
    tensors = list(_arguments(func, args, kwargs))
    written = [tensor for tensor, is_written in tensors if is_written]
    memory = {id(tensor) for tensor, _ in tensors}
    made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and id(leaf) not in memory]
    if name in _PUTS_ROWS:
        rows = [tensor for tensor, _ in tensors[1:]]
        moved = sum(map(distinct_bytes, rows))
        return moved, max(map(distinct_bytes, rows), default=0) + sum(map(distinct_bytes, made))
    if name in _FETCHES_ROWS:
        read = [*made[:1], *[tensor for tensor, _ in tensors[1:]]]
    else:
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and name.endswith("_")
        blind = name in _OVERWRITES or draws or name.endswith("_like") or "out" in kwargs
        read = [tensor for tensor, is_written in tensors if not (blind and (is_written or name.endswith("_like")))]
    return sum(map(distinct_bytes, read)), sum(map(distinct_bytes, [*written, *made]))


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Every tensor among the arguments, and whether the operator writes it."""
    parameters = schema_parameters(func) if isinstance(func, torch._ops.OpOverload) else ()
    written = {parameter.name for parameter in parameters if parameter.written}
    names = [parameter.name for parameter in parameters] + [""] * max(0, len(args) - len(parameters))
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield leaf, name in written


def distinct_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor's elements, those that an expanded dimension repeats counted once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.itemsize
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return int(count) * tensor.itemsize
