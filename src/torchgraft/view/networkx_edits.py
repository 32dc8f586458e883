"""`from_networkx`: a program out of a graph that `to_networkx` made and somebody edited: renamed, rewired, removed, added to.
What is wrong with the edits is found before anything is made, and reported all at once.
"""

from __future__ import annotations

import copy
import numbers
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.codegen.source import CodeGen
from torchgraft.errors import GraphError
from torchgraft.ir.copying import import_object
from torchgraft.ir.graph import Graph
from torchgraft.ir.names import is_legal_name
from torchgraft.ir.node import OPCODES, Node
from torchgraft.ir.printing import target_text
from torchgraft.results.tables import count
from torchgraft.splitting.fusing import sorted_stably
from torchgraft.view.networkx_graph import import_networkx
from torchgraft.view.plain import decode, encode, short_text, uses_in

if TYPE_CHECKING:
    import networkx

# Notes about values, which are not true any more once an input of the node is another.
_VALUE_NOTES = ("val", "tensor_meta", "example_value")


def from_networkx(graph: networkx.MultiDiGraph, root: torch.nn.Module | dict[str, Any] | None = None) -> GraphModule:
    """The program that a graph of `to_networkx`, as it is now, describes.

    A node's id is its name, so `networkx.relabel_nodes` renames. An edge with key 0 gives the value for `{"input": 0}` in
    `args` or `kwargs` of the node it leads to; rewire by removing one and adding another with the same key. A new node needs
    `op` and `target` ("torch.neg" for a function); without `args` it takes the values of its edges in the order of their keys.
    `order` says where a node stands (a fraction is fine); a new one without it comes right after its inputs.

    `root` is the program that the graph was made from, or a model or dict with the parameters and submodules that it refers to.
    With the program, metadata and values that cannot be written as plain data come along as well.

    >>> import networkx, torchgraft
    >>> program = torchgraft.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
    >>> graph = torchgraft.to_networkx(program)
    >>> graph.add_node("negative", op="call_function", target="torch.neg")
    >>> graph.remove_edge("_0", "output", key=0)
    >>> graph.add_edges_from([("_0", "negative", 0), ("negative", "output", 0)])
    [0, 0]
    >>> from_networkx(graph, program)(torch.tensor([-1.0, 2.0]))
    tensor([-0., -2.])
    """
    networkx = import_networkx()
    if not isinstance(graph, networkx.MultiDiGraph):
        raise GraphError(
            f"cannot make a program of a {type(graph).__name__}: edges need keys that say which argument they are\n"
            "give a networkx.MultiDiGraph as to_networkx() makes it"
        )
    return _Assembly(graph, root).program()


class _Assembly:
    """One run of `from_networkx`."""

    def __init__(self, graph: networkx.MultiDiGraph, root: Any) -> None:
        self.graph = graph
        self.root = root
        self.original = root if isinstance(root, GraphModule) else None
        self.old_nodes: list[Node] = list(self.original.graph.nodes) if self.original is not None else []
        self.functions: dict[str, list[Any]] = {}
        for node in self.old_nodes:
            if node.op == "call_function":
                known = self.functions.setdefault(target_text(node.target), [])
                known += [] if node.target in known else [node.target]
        self.targets: dict[str, Any] = {}
        self.arguments: dict[str, tuple[list[Any], dict[str, Any]]] = {}
        self.sources: dict[str, dict[Any, str]] = {}
        self.problems: list[str] = []

    def program(self) -> GraphModule:
        for name, attributes in self.graph.nodes(data=True):
            self._read(name, attributes)
        self._check_whole()
        self._refuse()
        order = self._order()
        result = Graph()
        made: dict[str, Node] = {}
        for name in order:
            self._make(result, name, made)
        self._refuse()
        self._carry_calling_convention(result)
        module = self._module(result)
        self._check_effects(order, made)
        result.lint()
        return module

    def _refuse(self) -> None:
        if self.problems:
            lines = "\n".join(f"  - {text}" for text in self.problems)
            raise GraphError(f"cannot make a program of this graph, {count(len(self.problems), 'problem')}:\n{lines}")

    # ---- reading ----

    def _read(self, name: Any, attributes: dict[str, Any]) -> None:
        if not isinstance(name, str) or not name.isascii() or not is_legal_name(name):
            self.problems.append(f"{name!r} is no name that Python code can use; relabel the node")
            return
        op = attributes.get("op")
        if op not in OPCODES:
            found = "has no attribute 'op'" if op is None else f"has op {op!r}"
            self.problems.append(f"node '{name}' {found}; it must be one of {', '.join(OPCODES)}")
            return
        self._read_target(name, op, attributes)
        self._read_edges(name, attributes)
        order = attributes.get("order")
        if order is not None and (isinstance(order, bool) or not isinstance(order, numbers.Real)):
            self.problems.append(f"node '{name}' has order {order!r}; it must be a number")

    def _read_target(self, name: str, op: str, attributes: dict[str, Any]) -> None:
        target = attributes.get("target", "output" if op == "output" else None)
        if not isinstance(target, str) or not target:
            self.problems.append(f"node '{name}' has target {target!r}; it must be a text")
            return
        self.targets[name] = target
        if op != "call_function":
            return
        old = self._old(attributes)
        function = old.target if old is not None else self._function(name, target, attributes.get("importable"))
        if function is not None and not callable(function):
            self.problems.append(
                f"node '{name}' calls {target!r}, which is a {type(function).__name__}, not a function"
            )
        self.targets[name] = function

    def _function(self, name: str, target: str, importable: Any) -> Any:
        """The function of a new node: one that the original program calls, or one that can be imported."""
        known = self.functions.get(target, [])
        if len(known) == 1:
            return known[0]
        if known:
            self.problems.append(
                f"node '{name}' calls {target!r}, and the original program has {len(known)} such functions"
            )
            return None
        try:
            if importable is False:  # what is found by that name is another function
                raise ImportError
            return import_object(target)
        except (ImportError, AttributeError, ValueError):
            advice = "" if self.original is not None else ", or give the original program, which still holds it"
            self.problems.append(f"node '{name}' calls {target!r}, and nothing can be imported by that name{advice}")
            return None

    def _read_edges(self, name: str, attributes: dict[str, Any]) -> None:
        edges: dict[Any, str] = {}
        for source, _, key in self.graph.in_edges(name, keys=True):
            if key in edges:
                self.problems.append(
                    f"node '{name}' has two edges with key {key!r}, from '{edges[key]}' and '{source}'; an argument has one value"
                )
            edges[key] = source
        args, kwargs = attributes.get("args"), attributes.get("kwargs")
        kwargs = {} if kwargs is None else kwargs
        if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
            self.problems.append(
                f"node '{name}' has kwargs {short_text(kwargs)}; it must be a dict from names to values"
            )
            return
        named = uses_in(list(kwargs.values()))
        if args is None:
            args = [{"input": key} for key in sorted(edges, key=lambda key: (str(type(key)), key)) if key not in named]
        if not isinstance(args, (list, tuple)):
            self.problems.append(f"node '{name}' has args {short_text(args)}; it must be a list")
            return
        wanted = Counter([*uses_in(list(args)), *named])
        for key in wanted:
            if key not in edges:
                self.problems.append(self._missing_edge(name, key, attributes))
        for key, source in edges.items():
            if key not in wanted:
                self.problems.append(
                    f"the edge from '{source}' to '{name}' with key {key!r} is no argument of '{name}': its args and kwargs use "
                    f"{', '.join(map(repr, wanted)) or 'no keys'}; place it with {{'input': {key!r}}}, or remove it"
                )
        self.sources[name] = edges
        self.arguments[name] = list(args), kwargs

    def _missing_edge(self, name: str, key: Any, attributes: dict[str, Any]) -> str:
        text = f"node '{name}' has no value for {{'input': {key!r}}} in its arguments: no edge with key {key!r} leads to it"
        old = self._old(attributes)
        uses: list[Node] = []
        if old is not None and isinstance(key, int):
            encode((old.args, old.kwargs), uses.append)
        gone = [node.name for node in uses[key : key + 1] if node.name not in self.graph]
        if gone:
            text += f" ('{gone[0]}', which gave it, is no longer in the graph)"
        return f"{text}; add one with graph.add_edge(source, '{name}', key={key!r})"

    def _old(self, attributes: dict[str, Any]) -> Node | None:
        """The node of the original program that a node of the graph came from."""
        index = attributes.get("node_index")
        if type(index) is not int or not 0 <= index < len(self.old_nodes):
            return None
        old = self.old_nodes[index]
        return old if old.op == attributes.get("op") and target_text(old.target) == attributes.get("target") else None

    def _check_whole(self) -> None:
        outputs = [name for name, op in self.graph.nodes(data="op") if op == "output"]
        if len(outputs) != 1:
            found = f"{len(outputs)} ({', '.join(map(str, outputs))})" if outputs else "none"
            self.problems.append(f"a program has one node with op 'output', and this graph has {found}")
        for name in outputs:
            if self.graph.out_degree(name):
                users = ", ".join(f"'{user}'" for user in self.graph.successors(name))
                self.problems.append(f"the output '{name}' is used by {users}; nothing comes after the output")
        networkx = import_networkx()
        if networkx.is_directed_acyclic_graph(self.graph):
            return  # find_cycle alone would take quadratic time to see it
        parts = networkx.strongly_connected_components(self.graph)
        inside = next(part for part in parts if len(part) > 1 or self.graph.has_edge(*[*part] * 2))
        cycle = networkx.find_cycle(self.graph.subgraph(inside))
        names = " -> ".join([str(edge[0]) for edge in cycle] + [str(cycle[0][0])])
        self.problems.append(f"the edges go round in a circle: {names}; no node can be computed before itself")

    # ---- making ----

    def _order(self) -> list[str]:
        """A topological order that departs from the nodes' own `order` only where an edge demands it."""
        ranks = self._ranks()
        names = sorted(self.graph, key=lambda name: (ranks[name], name))
        return sorted_stably(names, {name: self.sources[name].values() for name in names})

    def _ranks(self) -> dict[str, tuple[float, int]]:
        given = {name: order for name, order in self.graph.nodes(data="order") if order is not None}
        inputs = [given[name] for name, op in self.graph.nodes(data="op") if op == "placeholder" and name in given]
        ranks: dict[str, tuple[float, int]] = {}
        for number, name in enumerate(import_networkx().topological_sort(self.graph)):
            op = self.graph.nodes[name]["op"]
            if op == "output":
                ranks[name] = float("inf"), number  # also behind what nothing leads from, such as a write in place
            elif name in given:
                ranks[name] = float(given[name]), -1
            elif op == "placeholder":
                ranks[name] = max(inputs, default=-1.0), number
            else:
                ranks[name] = max([ranks[source][0] for source in self.sources[name].values()], default=-1.0), number
        return ranks

    def _make(self, result: Graph, name: str, made: dict[str, Node]) -> None:
        attributes = self.graph.nodes[name]
        sources = self.sources[name]
        args, kwargs = self.arguments[name]
        old = self._old(attributes)
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        before: dict[Any, Any] = {} if old is None else {**dict(enumerate(old.args)), **old.kwargs}
        try:
            live = {
                key: _decoded(value, before.get(key), lambda edge: made[sources[edge]]) for key, value in values.items()
            }
        except ValueError as error:
            self.problems.append(f"node '{name}': {error}")
            live = {}
        live_args = tuple([live[place] for place in range(len(args)) if place in live])
        live_kwargs = {key: live[key] for key in kwargs if key in live}
        node = result.create_node(attributes["op"], self.targets[name], live_args, live_kwargs, name)
        made[name] = node
        _note_origin(node, attributes, old)
        if old is not None and self._is_changed(node, old):
            for key in _VALUE_NOTES:
                node.meta.pop(key, None)

    def _is_changed(self, node: Node, old: Node) -> bool:
        """Whether a node may compute another value than it did; asked in order, so notes on its inputs tell of all before."""
        now, then = node.all_input_nodes, old.all_input_nodes
        if len(now) != len(then):
            return True
        for new_input, old_input in zip(now, then, strict=True):
            came_from = self._old(self.graph.nodes[new_input.name])
            if came_from is not old_input or any(
                key in old_input.meta and key not in new_input.meta for key in _VALUE_NOTES
            ):
                return True
        strip = lambda _: None  # noqa: E731
        return encode((node.args, node.kwargs), strip) != encode((old.args, old.kwargs), strip)

    def _carry_calling_convention(self, result: Graph) -> None:
        if self.original is None:
            return
        codegen = self.original.graph._codegen
        before = [str(node.target) for node in self.old_nodes if node.op == "placeholder"]
        after = [str(node.target) for node in result.nodes if node.op == "placeholder"]
        if len(before) == len(after):
            result._codegen = copy.deepcopy(codegen)
        elif type(codegen) is not CodeGen:
            raise GraphError(
                f"cannot make a program of this graph: the original takes the inputs {', '.join(before)} in containers of its "
                f"own or checks them on every call, and now they are {', '.join(after) or 'none'}\ngive the model as root "
                "instead of the program to get one that takes its inputs one by one"
            )

    def _module(self, result: Graph) -> GraphModule:
        root = self.root if self.root is not None else torch.nn.Module()
        missing = [
            f"node '{node.name}' refers to '{node.target}', and no root was given; give the model or the original program"
            for node in result.nodes
            if node.op in ("get_attr", "call_module") and self.root is None
        ]
        self.problems += missing
        self._refuse()
        module = GraphModule(root, result, str(self.graph.graph.get("name") or "GraphModule"))
        if self.original is not None:
            module.meta.update(self.original.meta)
        return module

    def _check_effects(self, order: list[str], made: dict[str, Node]) -> None:
        """Refuse edits that moved a node past one that writes memory or the like: `order`, not edges, says what it sees."""
        latest = latest_impure = -1.0
        orders = dict(self.graph.nodes(data="order"))
        for name in order[:-1]:  # the output is always last
            place = orders[name]
            if place is None:
                continue
            if place < latest_impure or (place < latest and made[name].is_impure()):
                raise GraphError(
                    f"cannot make a program of this graph: its edges move node '{name}' behind nodes that came after it, and "
                    "one of them has effects beyond its result (it writes memory, draws a random number or checks something), so "
                    "their order matters\nsay it yourself by giving the moved nodes another 'order'"
                )
            latest = max(latest, place)
            if place > latest_impure and made[name].is_impure():
                latest_impure = place


def _decoded(value: Any, before: Any, use: Any) -> Any:
    """A live value; one that plain data cannot hold is taken from the original, if it stands there unchanged."""
    try:
        return decode(value, use)
    except ValueError:
        keys = iter(uses_in(value))
        if before is None or encode(before, lambda _: {"input": next(keys)}) != value:
            raise
        return before


def _note_origin(node: Node, attributes: dict[str, Any], old: Node | None) -> None:
    """Where a node came from: the original's metadata, or what the graph says of it."""
    if old is not None:
        node._origin = old._origin
        node._meta = None if old._meta is None else dict(old._meta)
        node._type = old._type
        return
    stack = attributes.get("module_stack")
    if isinstance(stack, (list, tuple)) and stack:
        node.meta["nn_module_stack"] = {path: (path, kind) for path, kind in stack}
    source = attributes.get("source")
    if isinstance(source, str) and ":" in source:
        file, _, line = source.rpartition(":")
        function, text = attributes.get("source_function") or "", attributes.get("source_text") or ""
        node.meta["stack_trace"] = f'  File "{file}", line {line}, in {function}\n    {text}\n'
    if attributes.get("op") == "placeholder" and attributes.get("origin_name") is not None:
        node.meta["origin_kind"], node.meta["origin_name"] = attributes.get("role"), attributes["origin_name"]
