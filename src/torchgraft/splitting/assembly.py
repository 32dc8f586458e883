"""Putting the parts of a split program together: a module for each part, and the program that calls them in order.
Which node goes where is decided by the callers; here everything else finds its home.

- A value that another part uses is an output of the part that makes it and an input of the part that uses it.
- A module is shared by the parts that call it, as the same object. A tensor has one home: the module it belongs to where that
  is called as a whole, the part that uses it where only one does and the caller wishes it, else the outer program.
- A guard of an input or of the model's mode stays in the outer program; one of a computed value is a node like others.
- Anything else that is fetched (`self.training`) stays in the outer program, which is what `.train()` and `.eval()` reach.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch

from torchgraft.codegen.attributes import Adoption, place_attribute
from torchgraft.codegen.graph_module import _OWN_NAMES, GraphModule
from torchgraft.codegen.source import CodeGen, PyTreeCodeGen
from torchgraft.errors import GraphError
from torchgraft.ir.graph import Graph
from torchgraft.ir.modules import paths_around
from torchgraft.ir.node import Node, map_arg
from torchgraft.ir.verify import find_attribute
from torchgraft.splitting.order import Order


@dataclass
class Piece:
    """One part on its way to being a module: nodes, inputs and outputs are nodes of the program that is split."""

    label: Hashable
    name: str
    nodes: list[Node] = field(default_factory=list)
    inputs: dict[Node, None] = field(default_factory=dict)
    outputs: dict[Node, None] = field(default_factory=dict)
    # The nodes that make this part wait for another, each with the node it waits for.
    waits_for: dict[Hashable, tuple[Node, Node]] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    module: Any = None


@dataclass(frozen=True)
class Style:
    """How parts are written down; the defaults are those of torch.fx's split_module."""

    keep_node_names: bool = False
    keep_input_names: bool = True
    tuple_return: bool = False
    inner_tensors: bool = False
    fetch_late: bool = False
    graph_module_class: type[GraphModule] = GraphModule
    named_after_program: bool = False
    # Modules and tensors keep their paths in a part, and get no names without dots.
    keep_paths: bool = False


def cut(order: Order, label_of: Mapping[Node, Hashable], name_of: Mapping[Hashable, str]) -> dict[Hashable, Piece]:
    """The parts with their nodes, and with what they take from and give to one another; in the order of first appearance."""
    pieces: dict[Hashable, Piece] = {}
    for node in order.calls:
        label = label_of[node]
        if label not in pieces:
            pieces[label] = Piece(label, name_of[label])
        pieces[label].nodes.append(node)
    for node in order.calls:
        piece = pieces[label_of[node]]
        for source in dict.fromkeys([*node.all_input_nodes, *order.region_inputs(node)]):
            made_in = label_of.get(source)
            if source not in label_of or made_in != piece.label:
                piece.inputs[source] = None
            if source in label_of and made_in != piece.label:
                pieces[made_in].outputs[source] = None
    for node in order.nodes:
        if node.op == "output":
            for source in node.all_input_nodes:
                if source in label_of:
                    pieces[label_of[source]].outputs[source] = None
    return pieces


def bind(pieces: Iterable[Piece], label_of: Mapping[Node, Hashable], before: Callable[[Node], list[Node]]) -> None:
    """Note for every part which others it waits for, given what each node waits for."""
    for piece in pieces:
        piece.waits_for.clear()
        for node in piece.nodes:
            for earlier in before(node):
                if label_of[earlier] != piece.label:
                    piece.waits_for.setdefault(label_of[earlier], (node, earlier))


def call_order(
    pieces: dict[Hashable, Piece], label_of: Mapping[Node, Hashable], order: Order, keep_original: bool
) -> list[Piece]:
    """The parts in an order in which they can run; raises where each of several waits for another.

    Among those that could come next, torch.fx takes the one that became ready last; with `keep_original`, it is the one that
    comes first in the program. Values decide first: if the order is then that of the program, effects keep theirs as well, and
    need not be looked for.
    """
    bind(pieces.values(), label_of, order.values)
    result = _sorted(pieces, order, keep_original)
    places = [order.position[node] for piece in result for node in piece.nodes]
    if all(first < second for first, second in itertools.pairwise(places)):
        return result
    bind(pieces.values(), label_of, order.before)
    return _sorted(pieces, order, keep_original)


def _sorted(pieces: dict[Hashable, Piece], order: Order, keep_original: bool) -> list[Piece]:
    sorter = TopologicalSorter(dict.fromkeys(pieces, ()))  # known in the order of the program before who waits for whom
    for label, piece in pieces.items():
        sorter.add(label, *piece.waits_for)
    try:
        sorter.prepare()
    except CycleError as error:
        raise GraphError(_cycle_text(pieces, error.args[1], order)) from None
    rank = {label: number for number, label in enumerate(pieces)}
    ready: list[Hashable] = []
    result = []
    while sorter.is_active():
        ready += sorter.get_ready()
        label = min(ready, key=rank.__getitem__) if keep_original else ready[-1]
        ready.remove(label)
        result.append(pieces[label])
        sorter.done(label)
    return result


def _cycle_text(pieces: dict[Hashable, Piece], cycle: list[Hashable], order: Order) -> str:
    steps = []
    for label, other in itertools.pairwise(reversed(cycle)):
        node, earlier = pieces[label].waits_for[other]
        steps.append(f"{pieces[label].name} waits for {pieces[other].name} ('{node.name}' {order.why(earlier, node)})")
    return (
        f"cannot split: cycle exists between partitions! {'; '.join(steps)}; "
        "give one of these nodes to another part, or let split() choose the parts"
    )


def assemble(program: GraphModule, order: Order, pieces: list[Piece], style: Style) -> GraphModule:
    """The outer program that calls the parts in the order given; each piece gets its `module`."""
    return _Assembly(program, order, pieces, style).run()


class _Assembly:
    def __init__(self, program: GraphModule, order: Order, pieces: list[Piece], style: Style) -> None:
        self._program, self._order, self._pieces, self._style = program, order, pieces, style
        self._graph = Graph(tracer_cls=program.graph._tracer_cls)
        self._root = torch.nn.Module()
        self._root.training = program.training
        self._adoption = Adoption(program, self._root)
        # The place of every module that some part calls as a whole: part, and name there.
        self._homes: dict[str, str] = {}
        self._moved: dict[str, str] = {}
        self._values: dict[Node, Node] = {}
        self._inner = self._inner_attributes()

    def run(self) -> GraphModule:
        for piece in self._pieces:
            self._build(piece)
            self._root.add_module(piece.name, piece.module)
        for node in self._order.nodes:
            if node.op == "placeholder":
                target = node.name if self._style.keep_node_names else node.target
                new = self._graph.create_node("placeholder", target, node.args, None, None, node.type)
                self._values[node] = _like(node, new)
        needed = {source for piece in self._pieces for source in piece.inputs}
        for node in () if self._style.fetch_late else self._order.nodes:
            if node.op == "get_attr" and (node in needed or any(user.op == "output" for user in node._users)):
                self._value(node)
        for guard in self._order.outer_guards:
            _like(guard, self._graph.node_copy(guard, self._value))
        for piece in self._pieces:
            self._call(piece)
        output = self._order.nodes[-1]
        if output.op == "output":
            result = map_arg(output.args[0], self._value)
            _like(output, self._graph.create_node("output", "output", (result,), type_expr=output.type))
        self._graph._code_generator = copy.copy(self._program.graph._code_generator)
        name = [type(self._program).__name__] if self._style.named_after_program else []
        joined = self._style.graph_module_class(self._root, self._graph, *name)
        if type(self._graph._codegen) not in (CodeGen, PyTreeCodeGen):
            self._keep_modes(joined)
        joined.meta.update(self._program.meta)
        joined.meta["partition_names"] = {piece.name for piece in self._pieces}
        return joined

    def _keep_modes(self, joined: GraphModule) -> None:
        """Empty modules where the program has some, because how it is called may depend on the mode each is in."""
        for node in self._inner:
            for path in paths_around(node.target)[:0:-1]:
                owner = find_attribute(self._program, path)[0]
                if isinstance(owner, torch.nn.Module) and find_attribute(joined, path)[1] is not None:
                    empty = torch.nn.Module()
                    empty.training = owner.training
                    joined.add_submodule(path, empty)

    def _value(self, node: Node) -> Node:
        if node.op == "get_attr" and node not in self._values:
            new = self._graph.create_node("get_attr", self._home(node.target), type_expr=node.type)
            self._values[node] = _like(node, new)
        return self._values[node]

    def _call(self, piece: Piece) -> None:
        call = self._graph.call_module(piece.name, tuple([self._value(source) for source in piece.inputs]))
        if len(piece.outputs) == 1 and not self._style.tuple_return:
            self._values[next(iter(piece.outputs))] = call
            return
        for number, source in enumerate(piece.outputs):
            self._values[source] = self._graph.call_function(operator.getitem, (call, number))

    # ---- one part ----

    def _build(self, piece: Piece) -> None:
        graph, holder = Graph(tracer_cls=self._program.graph._tracer_cls), torch.nn.Module()
        holder.training = self._program.training
        values = self._inputs(piece, graph, holder)
        open_regions: list[Node] = []
        for node in piece.nodes:
            self._change_regions(open_regions, self._order.regions.get(node, ()), graph, values)
            target = self._place(piece, holder, node.target) if node.op == "call_module" else node.target
            name = node.name if self._style.keep_node_names else None
            args = map_arg(node.args, values.__getitem__)
            kwargs = map_arg(node.kwargs, values.__getitem__) if node.kwargs else None
            values[node] = _like(node, graph.create_node(node.op, target, args, kwargs, name, node.type))
        self._change_regions(open_regions, (), graph, values)
        results = tuple([values[node] for node in piece.outputs])
        graph.output(results[0] if len(results) == 1 and not self._style.tuple_return else results)
        piece.module = self._style.graph_module_class(holder, graph)

    def _inputs(self, piece: Piece, graph: Graph, holder: torch.nn.Module) -> dict[Node, Node]:
        """A placeholder for everything that comes from outside, then what is fetched inside the part."""
        values: dict[Node, Node] = {}
        fetched = [source for source in piece.inputs if source in self._inner]
        for source in fetched:
            del piece.inputs[source]
        for number, source in enumerate(piece.inputs):
            name = source.name if self._style.keep_input_names else f"arg_{number}"
            values[source] = _like(source, graph.create_node("placeholder", name, type_expr=source.type))
        for source in fetched:
            name = self._place(piece, holder, source.target)
            values[source] = _like(source, graph.create_node("get_attr", name, type_expr=source.type))
        return values

    def _change_regions(
        self, open_regions: list[Node], wanted: tuple[Node, ...], graph: Graph, values: dict[Node, Node]
    ) -> None:
        """Close and open regions until just the wanted ones are open."""
        shared = 0
        while shared < min(len(open_regions), len(wanted)) and open_regions[shared] is wanted[shared]:
            shared += 1
        while len(open_regions) > shared:
            mark = self._order.exits[open_regions.pop()]
            _like(mark, graph.create_node(mark.op, mark.target, map_arg(mark.args, values.__getitem__)))
        for enter in wanted[shared:]:
            args, kwargs = map_arg(enter.args, values.__getitem__), map_arg(enter.kwargs, values.__getitem__)
            values[enter] = _like(enter, graph.create_node(enter.op, enter.target, args, kwargs))
            open_regions.append(enter)

    # ---- attributes ----

    def _inner_attributes(self) -> set[Node]:
        """The fetches that are made inside parts: of modules, and of tensors that a single part uses."""
        called = {node.target for piece in self._pieces for node in piece.nodes if node.op == "call_module"}
        users: dict[str, set[Hashable]] = {}
        fetches: dict[str, list[Node]] = {}
        for node in self._order.nodes:
            if node.op == "get_attr":
                fetches.setdefault(node.target, []).append(node)
                if any(user.op == "output" for user in node._users):
                    users.setdefault(node.target, set()).add(None)
        for piece in self._pieces:
            for source in piece.inputs:
                if source.op == "get_attr":
                    users.setdefault(source.target, set()).add(piece.name)
        inner: set[Node] = set()
        for path, nodes in fetches.items():
            value = find_attribute(self._program, path)[0]
            is_own_tensor = isinstance(value, torch.Tensor) and called.isdisjoint(paths_around(path))
            has_one_user = len(users.get(path, ())) == 1 and None not in users[path]
            if isinstance(value, torch.nn.Module) or (self._style.inner_tensors and is_own_tensor and has_one_user):
                inner.update(nodes)
        return inner

    def _place(self, piece: Piece, holder: torch.nn.Module, path: str) -> str:
        """Make what the program has at `path` an attribute of the part, under that path or a name without dots."""
        name = piece.attributes.get(path)
        if name is not None:
            return name
        if self._style.keep_paths and path.partition(".")[0] not in _OWN_NAMES:
            Adoption(self._program, holder).adopt(path)
            name = path
        else:
            wish = name = path.replace(".", "_")
            number = 0
            while hasattr(holder, name) or name in _OWN_NAMES:
                number += 1
                name = f"{wish}_{number}"
            self._copy(path, holder, name)
        piece.attributes[path] = name
        if isinstance(find_attribute(holder, name)[0], torch.nn.Module):
            self._homes.setdefault(path, f"{piece.name}.{name}")
        return name

    def _copy(self, path: str, holder: torch.nn.Module, name: str) -> Any:
        value, problem = find_attribute(self._program, path)
        if problem is not None:
            raise GraphError(f"cannot split: the program refers to '{path}', but {problem}; add the attribute to it")
        container, _, last = path.rpartition(".")
        owner = find_attribute(self._program, container)[0] if container else self._program
        is_buffer = isinstance(owner, torch.nn.Module) and last in owner._buffers
        place_attribute(holder, name, value, is_buffer and last not in owner._non_persistent_buffers_set)
        return value

    def _home(self, path: str) -> str:
        """Where the outer program finds what the program had at `path`."""
        if path in self._moved:
            return self._moved[path]
        for parent in paths_around(path):
            if parent in self._homes:
                return self._homes[parent] + path[len(parent) :]
        if path.partition(".")[0] not in {piece.name for piece in self._pieces}:
            self._adoption.adopt(path)
            return path
        name = path.replace(".", "_") + "_outside"  # a part has taken the name
        self._copy(path, self._root, name)
        self._moved[path] = name
        return name


def _like(source: Node, new: Node) -> Node:
    """The new node, with the metadata of the one that it copies."""
    new._origin = source._origin
    new._meta = None if source._meta is None else dict(source._meta)
    return new
