"""Finding where a pattern occurs in a program, in time linear in the size of the program.
What a pattern is made of is said in `pattern.py`, where a replacement may stand in `placement.py`; nothing is edited
here.

Matching starts at the pattern's sinks and walks towards the inputs. A value has one producer, so each step has one
way to go: an attempt costs at most the size of the pattern, and ends at the first difference. A pattern with several
sinks is matched sink by sink, and the parts are joined by a look-up of the values that they share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from torchgraft.ir.arguments import leaves
from torchgraft.ir.node import Node
from torchgraft.rewriting.pattern import Literal, Mapping, Operation, Pattern, Program, Sequence, Wildcard

_UNBOUND: Any = type("Unbound", (), {"__repr__": lambda self: "<unbound>"})()

# Ways to complete a match from one starting node that are tried before giving up. Only patterns whose parts hang
# together loosely have more than a few, and trying all of them is what makes torch.fx's matcher exponential.
COMPLETIONS_TRIED = 64

# What every template is bound to, by the template's index.
Binding = list[Any]
# The templates that a sink shares with earlier ones, and the sink's matches by what those templates are bound to.
PartIndex = tuple[list[int], dict[Any, deque[Binding]]]


class InternalMatch:
    """One occurrence of a pattern, as match filters and replacement callbacks see it.

    `nodes_map` leads from pattern nodes (inputs included) to nodes of the program or, for inputs, to literals. The
    other views of it are made when somebody looks: programs have thousands of matches, and most are never looked at.
    """

    __slots__ = ("__dict__", "anchors", "nodes_map", "pattern")

    def __init__(self, pattern: Pattern, nodes_map: dict[Node, Any]) -> None:
        self.pattern = pattern
        self.anchors = pattern.anchors
        self.nodes_map = nodes_map

    @cached_property
    def placeholder_nodes(self) -> list[Any]:
        """What the pattern's inputs are bound to, in the order of its parameters."""
        return [self.nodes_map[node] for node in self.pattern.placeholders]

    @cached_property
    def returning_nodes(self) -> list[Any]:
        """The nodes whose values the pattern returns."""
        return [self.nodes_map[node] for node in self.pattern.returned]

    @cached_property
    def name_node_map(self) -> dict[str, Node]:
        """Empty, unless the pattern names its values; see `fx_passes.matching.SubgraphMatcherWithNameNodeMap`."""
        return {}

    def __repr__(self) -> str:
        return f"InternalMatch(anchors={self.anchors}, nodes_map={self.nodes_map})"


class SubgraphMatcher:
    """Finds the non-overlapping occurrences of a pattern.

    `comparisons` counts the nodes that were compared with one of the pattern, for those who want to see that it is
    linear.
    """

    # Whether what torch.fx passes over is passed over: `add(y, y)` for the pattern `add(a, b)`, and nodes of a pattern
    # inside of dicts and slices.
    narrow = True

    def __init__(self, pattern: Pattern, program: Program, ignore_literals: bool = False) -> None:
        self.pattern = pattern
        self.program = program
        self.ignore_literals = ignore_literals
        self.comparisons = 0
        self._operation_indices = [operation.index for operation in pattern.operations]
        self._claimed: set[Node] = set()

    def match(
        self,
        accept: Callable[[InternalMatch, list[Node]], bool] = lambda match, region: True,
        node_name_match: str = "",
    ) -> list[InternalMatch]:
        """Every occurrence that `accept` agrees to, in the order of the program; of two that overlap, the first.

        `accept` is given the match and the nodes that it would replace.
        """
        self._claimed = set()
        candidates = self._candidates(self.program.graph.nodes, node_name_match)
        if not all(candidates):
            return []
        parts = [self._index_parts(number, candidates[number]) for number in range(1, len(candidates))]
        if not all(found for _, found in parts):
            return []
        sink = self.pattern.sinks[0]
        matches = []
        for node in candidates[0]:
            if node in self._claimed:
                continue
            bindings = self._bindings(sink, node)
            for complete in bindings if not parts else self._complete_bindings(bindings, parts):
                region = [value for index in self._operation_indices if type(value := complete[index]) is Node]
                if not self._is_sound(complete, region):
                    continue
                match = InternalMatch(self.pattern, dict(zip(self.pattern.nodes, complete, strict=False)))
                if accept(match, region):
                    self._claimed.update(region)
                    matches.append(match)
                    break
        return matches

    def _complete_bindings(self, bindings: Iterable[Binding], parts: list[PartIndex]) -> Iterator[Binding]:
        for binding in bindings:
            yield from self._completions(binding, parts)

    def _bindings(self, sink: Operation, node: Node) -> Iterable[Binding]:
        """Every way in which the part of the pattern above one sink can be found at a node; here at most one."""
        binding = self._match_cone(sink, node)
        return () if binding is None else (binding,)

    def _candidates(self, nodes: Iterable[Node], node_name_match: str) -> list[list[Node]]:
        """For each sink, the nodes that could be it, found in one walk over the program."""
        sinks = self.pattern.sinks
        result: list[list[Node]] = [[] for _ in sinks]
        by_operation: dict[tuple[str, Any], list[int]] = {}
        for number, sink in enumerate(sinks):
            by_operation.setdefault((sink.op, None if sink.attribute else sink.target), []).append(number)
        any_attribute = ("get_attr", None) in by_operation
        # A node with fewer nodes before it than the sink has operations above it need not be tried.
        needed = [
            sum(type(self.pattern.templates[index]) is Operation for index in cone) for cone in self.pattern.cones
        ]
        for position, node in enumerate(nodes, 1):
            op = node.op
            numbers: Iterable[int] = by_operation.get((op, node.target), ())
            if any_attribute and op == "get_attr":
                numbers = [*numbers, *by_operation[("get_attr", None)]]
            if node_name_match and node_name_match in node.name and op not in ("placeholder", "output"):
                numbers = range(len(sinks))
            for number in numbers:
                if position >= needed[number]:
                    result[number].append(node)
        return result

    # ---- one sink: walk from users to inputs ----

    def _match_cone(self, sink: Operation, start: Node) -> Binding | None:
        """What every template reachable from `sink` is bound to if `sink` is `start`, or None where something
        differs.
        """
        binding: Binding = [_UNBOUND] * self.pattern.size
        binding[sink.index] = start
        pending = [(sink, start)]
        claimed = self._claimed
        while pending:
            operation, node = pending.pop()
            self.comparisons += 1
            # An ignored literal may be a value of the match, which then has more users; `_is_sound` looks at them.
            if (
                operation.user_count != len(node._users)
                and operation.user_count is not None
                and not self.ignore_literals
            ):
                return None
            pairs: Any
            if operation.is_plain and not node._kwargs and len(node._args) == len(operation.positional):
                pairs = zip(operation.positional, node._args, strict=True)
            else:
                pairs = self._argument_pairs(operation, node)
                if pairs is None:
                    return None
            for template, value in pairs:
                kind = type(template)
                if kind is Wildcard:
                    bound = binding[template.index]
                    if bound is _UNBOUND:
                        binding[template.index] = value
                    elif bound is not value and not same_spelling(bound, value):
                        return None
                elif kind is Operation:
                    bound = binding[template.index]
                    if (
                        bound is _UNBOUND
                        and type(value) is Node
                        and template.op == value._op
                        and (template.attribute is not None or template.target == value._target)
                        and value not in claimed
                    ):
                        binding[template.index] = value
                        pending.append((template, value))
                    elif bound is not value:
                        return None
                elif kind is Literal:
                    if not self.ignore_literals and not same_spelling(template.value, value):
                        return None
                elif not self._open_container(template, value, pairs):
                    return None
        return binding

    def _argument_pairs(self, operation: Operation, node: Node) -> list[tuple[Any, Any]] | None:
        """Templates beside the arguments they must fit, or None where there are others than the pattern wants."""
        if operation.attribute is not None and type(self.program.attribute(node.target)) is not operation.attribute:
            return None
        arguments, keywords, positional = node._args, node._kwargs, operation.positional
        if len(arguments) != len(positional) or (
            (keywords or operation.keywords) and list(keywords) != list(operation.keywords)  # torch.fx minds the order
        ):
            return self._schema_pairs(operation, node)
        pairs = list(zip(positional, arguments, strict=True))
        if keywords:
            pairs += [(template, keywords[key]) for key, template in operation.keywords.items()]
        return pairs

    def _schema_pairs(self, operation: Operation, node: Node) -> list[tuple[Any, Any]] | None:
        """The same for an overload, whose schema says what was left out and what is called by another way."""
        if operation.schema is None or operation.target is not node.target:
            return None
        pairs = []
        for position, argument in enumerate(operation.schema):
            template = _argument_at(argument, position, operation.positional, operation.keywords)
            value = _argument_at(argument, position, node.args, node.kwargs)
            if template is not _UNBOUND or value is not _UNBOUND:
                default = argument.default_value
                pairs.append(
                    (Literal(default) if template is _UNBOUND else template, default if value is _UNBOUND else value)
                )
        return pairs

    def _open_container(self, template: Any, value: Any, pairs: list[tuple[Any, Any]]) -> bool:
        """Add the items of a container to `pairs`, or say that the value is another kind of container."""
        if type(template) is Sequence:
            if not isinstance(value, list | tuple):
                return self.ignore_literals and not template.holds_nodes
            if len(value) != len(template.items):
                return False
            pairs.extend(zip(template.items, value, strict=True))
            return True
        if self.narrow and not self.ignore_literals:
            return False
        if type(template) is Mapping:
            if not isinstance(value, dict) or value.keys() != template.items.keys():
                return False
            pairs.extend([(item, value[key]) for key, item in template.items.items()])
            return True
        if not isinstance(value, slice):
            return False
        pairs.extend(zip(template.items, (value.start, value.stop, value.step), strict=True))
        return True

    # ---- several sinks: join the parts on the values they share ----

    def _index_parts(self, number: int, candidates: list[Node]) -> PartIndex:
        """All matches of one sink, by what they bind the templates to that earlier sinks reach as well."""
        pattern = self.pattern
        earlier = set().union(*pattern.cones[:number])
        shared = [index for index in pattern.cones[number] if index in earlier]
        parts: dict[Any, deque[Binding]] = {}
        for node in candidates:
            for part in self._bindings(pattern.sinks[number], node):
                parts.setdefault(_join_key(part, shared), deque()).append(part)
        return shared, parts

    def _completions(self, start: Binding, parts: list[PartIndex]) -> Iterator[Binding]:
        """`start` joined with every combination of matches of the other sinks that agrees with it, within reason."""
        patience = COMPLETIONS_TRIED * len(parts) + len(parts) ** 2
        partials = [start]
        choices = [self._choices(start, parts[0])]
        while choices:
            part = next(choices[-1], None)
            if part is None:
                choices.pop()
                partials.pop()
                continue
            patience -= 1
            if patience < 0:
                return
            joined = self._join(partials[-1], part)
            if joined is None:
                continue
            if len(choices) == len(parts):
                yield joined
            else:
                partials.append(joined)
                choices.append(self._choices(joined, parts[len(choices)]))

    def _choices(self, partial: Binding, index: PartIndex) -> Iterator[Binding]:
        """The parts that share their values with `partial`; those that met an accepted match are dropped for good."""
        shared, parts = index
        waiting = parts.get(_join_key(partial, shared))
        live: list[Binding] = []
        while waiting and len(live) < COMPLETIONS_TRIED:
            part = waiting.popleft()
            if self._claimed.isdisjoint([part[index] for index in self._operation_indices]):
                live.append(part)
        if waiting is not None:
            waiting.extendleft(reversed(live))
        return iter(live)

    def _join(self, first: Binding, second: Binding) -> Binding | None:
        """Both bindings in one; None where they disagree, or where one node would be two operations."""
        joined = list(first)
        for index, value in enumerate(second):
            if value is _UNBOUND:
                continue
            if joined[index] is _UNBOUND:
                joined[index] = value
            elif not same_value(joined[index], value):
                return None
        self.comparisons += len(joined)
        nodes = [node for index in self._operation_indices if (node := joined[index]) is not _UNBOUND]
        return joined if len(set(nodes)) == len(nodes) else None

    # ---- the whole match ----

    def _is_sound(self, binding: Binding, region: list[Node]) -> bool:
        """Whether each operation (if `narrow`, each input too) has a node of its own, no input is a value that the
        replacement takes away, and no value that it takes away is needed elsewhere.
        """
        inside = set(region)
        if len(inside) != len(region):
            return False
        inputs: set[Node] = set()
        if self.ignore_literals and not self._is_contained(binding, inside):
            return False
        for wildcard in self.pattern.wildcards:
            value = binding[wildcard.index]
            if type(value) is Node:
                if value in inside or value in inputs:
                    return False
                if self.narrow:
                    inputs.add(value)
            elif isinstance(value, list | tuple | dict | slice) and not inside.isdisjoint(nodes_in(value)):
                return False
        return True

    def _is_contained(self, binding: Binding, inside: set[Node]) -> bool:
        """Whether what the pattern does not return is used by the match alone, also where it matches an ignored
        literal and so has more users than in the pattern.
        """
        return all(
            user in inside
            for operation in self.pattern.operations
            if operation.user_count is not None
            for user in binding[operation.index]._users
        )


def _argument_at(argument: Any, position: int, positional: Any, keywords: Any) -> Any:
    if argument.name in keywords:
        return keywords[argument.name]
    if position < len(positional) and not argument.kwarg_only:
        return positional[position]
    return _UNBOUND


def _join_key(binding: Binding, shared: list[int]) -> Any:
    # Literals may be unhashable, and equal without being the same (1 and True); they are compared when the parts are
    # joined.
    return tuple([value if isinstance(value := binding[index], Node) else None for index in shared])


def nodes_in(value: Any) -> list[Node]:
    """Every node in an argument tree, as often as it occurs."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Node)]


def same_spelling(first: Any, second: Any) -> bool:
    """Whether a literal matches another in torch.fx, which asks Python for equality, and truly is the same value.

    >>> nan = float("nan")
    >>> same_spelling(1, 1), same_spelling(1, True), same_spelling(nan, nan), same_spelling([1], (1,))
    (True, False, False, False)
    """
    if not same_value(first, second):
        return False
    try:
        return bool(first == second)
    except (RuntimeError, TypeError, ValueError):  # one and the same tensor
        return True


def same_value(first: Any, second: Any) -> bool:
    """Whether two arguments are the same node, or literals of the same type and value.

    >>> same_value(1, 1), same_value(1, True), same_value([1, 2.0], (1, 2.0)), same_value(0.0, -0.0)
    (True, False, True, False)
    """
    if first is second:
        return True
    kind = type(first)
    if kind is Node or type(second) is Node:
        return False
    if isinstance(first, list | tuple):
        if not isinstance(second, list | tuple) or len(first) != len(second):
            return False
        return all(map(same_value, first, second))
    if kind is not type(second):
        return False
    if kind is float and first and first == second:
        return True
    if kind is float or kind is complex:
        return repr(first) == repr(second)  # tells 0.0 from -0.0, and lets nan be nan
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same_value(item, second[key]) for key, item in first.items())
    if isinstance(first, slice):
        return same_value((first.start, first.stop, first.step), (second.start, second.stop, second.step))
    try:
        return bool(first == second)
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays: equal in some places is not the same
        return False
