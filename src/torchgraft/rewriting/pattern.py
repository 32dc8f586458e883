"""What a caller gives as a pattern or replacement (`Program`), and a pattern made ready for matching: every pattern node
becomes a small template that is compared without looking back at the pattern's graph. How templates are compared with a
program is said in `matching.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchgraft.capturing.symbolic.tracer import symbolic_trace
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraphError
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute


@dataclass(slots=True, eq=False)
class Wildcard:
    """An input of the pattern: matches any node or any literal, the same one wherever it is used."""

    index: int


@dataclass(slots=True, eq=False)
class Literal:
    """A value written in the pattern."""

    value: Any


@dataclass(slots=True, eq=False)
class Sequence:
    """A list or tuple; torch.fx lets each stand for the other, and so do we."""

    items: tuple[Any, ...]
    holds_nodes: bool


@dataclass(slots=True, eq=False)
class Mapping:
    """A dict with nodes in it, compared by key."""

    items: dict[Any, Any]


@dataclass(slots=True, eq=False)
class Slice:
    """A slice with nodes in it, compared by start, stop and step."""

    items: tuple[Any, ...]


class Operation:
    """A node of the pattern that computes something."""

    __slots__ = (
        *("attribute", "index", "is_plain", "keywords", "node"),
        *("op", "positional", "schema", "target", "user_count"),
    )

    def __init__(self, node: Node, index: int, user_count: int | None, attribute: type | None) -> None:
        self.node = node
        self.index = index
        self.op = node.op
        self.target = node.target
        # How many users the matched node must have; None where the value leaves the pattern and anybody may use it.
        self.user_count = user_count
        self.positional: tuple[Any, ...] = ()
        self.keywords: dict[str, Any] = {}
        # Only overloads have a schema that says which positional argument and which keyword are the same thing.
        is_overload = self.op == "call_function" and isinstance(self.target, torch._ops.OpOverload)
        self.schema = tuple(self.target._schema.arguments) if is_overload else None
        # The type of a tensor attribute: any tensor of that type matches, as in torch.fx, whatever its name and its
        # value. None: the target itself must be the same.
        self.attribute = attribute
        # Whether a call with as many positional arguments and no others is compared argument by argument.
        self.is_plain = False


class Pattern:
    """The templates of one pattern graph.

    `operations` are in the pattern's order. `sinks` are those that nothing in the pattern uses: matching starts at
    them and walks from users to inputs, where every step has one way to go. `nodes` are in the order of that walk,
    and a template's index is the place of its node there; `cones` says which indices are reached from each sink.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        nodes = list(program.graph.nodes)
        if not nodes or nodes[-1].op != "output":
            raise GraphError(
                "cannot match an empty pattern: its graph has no output node; let the pattern compute something and "
                "return it"
            )
        self.output = nodes.pop()
        self.returned = self.output.all_input_nodes
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        calls = [node for node in nodes if node.op != "placeholder"]
        self._check(calls)
        self.anchors = self._find_anchors(calls)
        self.nodes = _walk(self.anchors)
        self.size = len(self.nodes)
        self._index = {node: index for index, node in enumerate(self.nodes)}
        self.wildcards = [Wildcard(self._index[node]) for node in self.placeholders]
        self._template_of: dict[Node, Any] = dict(zip(self.placeholders, self.wildcards, strict=True))
        self.operations = [self._operation(node) for node in calls]
        self.templates = [self._template_of[node] for node in self.nodes]
        self.sinks = [self._template_of[node] for node in self.anchors]
        self.cones = [[self._index[node] for node in _walk([anchor])] for anchor in self.anchors]
        # Nothing but the last value leaves the pattern, so the replacement can stand exactly where that value was made.
        self.is_simple = len(self.anchors) == 1 and self.anchors == self.returned

    def _check(self, calls: list[Node]) -> None:
        if not calls:
            raise GraphError(
                "cannot match a pattern without operations: it only returns its inputs or constants, so it would match "
                "everywhere; let the pattern call at least one function, method or module"
            )
        for node in self.placeholders:
            if all(user is self.output for user in node._users):
                raise GraphError(_unbound_input(node))
        for node in calls:
            if not node._users and not has_effect(node):
                raise GraphError(
                    f"cannot match a pattern with dead code: nothing uses node '{node.name}'; return its value or "
                    "take it out of the pattern"
                )

    def _find_anchors(self, calls: list[Node]) -> list[Node]:
        """The nodes that no other call uses: first those that are returned, then those called only for their effect."""
        sinks = {node for node in calls if all(user is self.output for user in node._users)}
        return [node for node in self.returned if node in sinks] + [node for node in calls if not node._users]

    def _operation(self, node: Node) -> Operation:
        value = self.program.attribute(node.target) if node.op == "get_attr" else None
        attribute = type(value) if isinstance(value, torch.Tensor) else None
        user_count = None if self.output in node._users else len(node._users)
        operation = Operation(node, self._index[node], user_count, attribute)
        operation.positional = tuple([self._template(item) for item in node.args])
        operation.keywords = {key: self._template(item) for key, item in node.kwargs.items()}
        kinds = {type(template) for template in operation.positional}
        operation.is_plain = attribute is None and not operation.keywords and kinds <= {Wildcard, Operation, Literal}
        self._template_of[node] = operation
        return operation

    def _template(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self._template_of[value]
        if isinstance(value, list | tuple):
            items = tuple([self._template(item) for item in value])
            return Sequence(items, any(map(_holds_nodes, items)))
        if isinstance(value, dict):
            entries = {key: self._template(item) for key, item in value.items()}
            return Mapping(entries) if any(map(_holds_nodes, entries.values())) else Literal(value)
        if isinstance(value, slice):
            items = tuple([self._template(item) for item in (value.start, value.stop, value.step)])
            return Slice(items) if any(map(_holds_nodes, items)) else Literal(value)
        return Literal(value)


def _walk(starts: list[Node]) -> list[Node]:
    """The starts and all their inputs, each node before its own inputs, in the order in which torch.fx meets them."""
    seen: dict[Node, None] = {}
    pending = starts[::-1]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen[node] = None
            pending.extend(reversed(node.all_input_nodes))
    return list(seen)


def has_effect(node: Node) -> bool:
    """Whether a call does more than return a value; drawing random numbers is not counted."""
    return node.op not in ("placeholder", "output") and node.is_impure(impure_random=False)


def _holds_nodes(template: Any) -> bool:
    return isinstance(template, Wildcard | Operation | Mapping | Slice) or getattr(template, "holds_nodes", False)


def _unbound_input(node: Node) -> str:
    if node._users:
        return (
            f"cannot match a pattern that returns its input '{node.target}' without computing with it: the input would "
            "match every value of the program; take it out of the pattern"
        )
    return (
        f"cannot match a pattern with an unused input: nothing uses '{node.target}', so it would be bound to no value; "
        "take it out of the pattern's parameters"
    )


# ---- programs ----


ProgramLike = Callable[..., Any] | torch.nn.Module | Graph

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()


@dataclass(slots=True, eq=False)
class Program:
    """A graph together with the module its `get_attr` and `call_module` targets name, if there is one.

    The module is held here because a graph does not keep its owner alive.
    """

    graph: Graph
    module: torch.nn.Module | None

    @classmethod
    def to_edit(cls, program: Any) -> Program:
        """A program in which patterns are replaced, in place."""
        if not isinstance(program, GraphModule):
            raise GraphError(
                f"cannot rewrite a {type(program).__name__}: patterns are replaced in a GraphModule; capture the model first, "
                "for example with symbolic_trace()"
            )
        return cls(program.graph, program)

    @classmethod
    def of(cls, subject: ProgramLike, role: str) -> Program:
        """Trace what is not traced yet; `role` says in errors what the subject was given as."""
        if isinstance(subject, GraphModule):
            return cls(subject.graph, subject)
        if isinstance(subject, Graph):
            return cls(subject, subject.owning_module)
        if callable(subject):
            traced = symbolic_trace(subject)
            return cls(traced.graph, traced)
        raise GraphError(
            f"cannot use {subject!r} as a {role}: it is {type(subject).__name__}; give a function, a torch.nn.Module, "
            "a GraphModule or a Graph"
        )

    def attribute(self, target: str) -> Any:
        """The module, parameter, buffer or constant that a target names, or MISSING."""
        if self.module is not None:
            value, problem = find_attribute(self.module, target)
            if problem is None:
                return value
        return self.graph._constants.get(target, MISSING)

    def is_constant(self, target: str) -> bool:
        """Whether a target names a value that tracing met and gave a name of its own choice."""
        return target in self.graph._constants

    def attribute_targets(self) -> list[tuple[Node, str]]:
        """The nodes that name something on the module, and what they name."""
        return [(node, node.target) for node in self.graph.nodes if node.op in ("get_attr", "call_module")]
