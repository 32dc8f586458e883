"""Putting a replacement where a pattern matches: `replace_pattern` and its form with filters, as torch.fx has them.
Finding the matches is `matching.py`, choosing the place `placement.py`, and carrying attributes over `attributes.py`.

Every match is found, every place chosen and everything that can be wrong checked before the first edit, so an error
leaves the program as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraphError
from torchgraft.ir.arguments import leaves
from torchgraft.ir.copying import inherit_origin
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node, map_arg
from torchgraft.rewriting.attributes import Adoption
from torchgraft.rewriting.matching import InternalMatch, SubgraphMatcher, same_value
from torchgraft.rewriting.modules import State
from torchgraft.rewriting.pattern import Pattern, Program, ProgramLike
from torchgraft.rewriting.placement import Placement

MatchFilter = Callable[[InternalMatch, Graph, Graph], bool]
ReplacementCallback = Callable[[InternalMatch, Graph, Graph], ProgramLike]


class Match(NamedTuple):
    """Where a pattern was found. `anchor` is the pattern node from which the match was found; `nodes_map` leads from
    pattern nodes (inputs included) to what they matched.

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: torch.relu(x) + 1)
    >>> [match] = torchgraft.replace_pattern(program, lambda a: torch.relu(a), lambda a: torch.tanh(a))
    >>> match.anchor, list(match.nodes_map.values())
    (relu, [relu, x])
    """

    anchor: Node
    nodes_map: dict[Node, Any]


@dataclass
class ReplacedPatterns:
    """A `Match` together with the nodes that were put in its place.

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: torch.relu(x) + 1)
    >>> pattern, replacement = lambda a: torch.relu(a), lambda a: torch.tanh(a)
    >>> [replaced] = torchgraft.replace_pattern_with_filters(program, pattern, replacement)
    >>> replaced.replacements
    [tanh]
    """

    anchor: Node
    nodes_map: dict[Node, Any]
    replacements: list[Node]


def replace_pattern(gm: GraphModule, pattern: ProgramLike, replacement: ProgramLike) -> list[Match]:
    """Replace every non-overlapping occurrence of `pattern` in `gm` by `replacement`; where two overlap, the first
    counts.

    Both are functions or modules (traced here), GraphModules or Graphs, with as many inputs each. An input of the
    pattern matches any value, the same one wherever it is used; two inputs never match the same node, as in
    torch.fx (they may in `rewrite`). Values that the pattern does not return must not
    be used outside of it. Where the place of a replacement would have to pass an effect (an in-place change, say), it
    is not made.

    >>> import torchgraft
    >>> module = torchgraft.symbolic_trace(lambda x: torch.neg(torch.relu(x)) + 1)
    >>> matches = replace_pattern(module, lambda a: torch.neg(torch.relu(a)), lambda a: torch.sigmoid(a))
    >>> len(matches), [node.name for node in module.graph.nodes]
    (1, ['x', 'sigmoid', 'add', 'output'])
    """
    edits = _rewrite(gm, pattern, replacement)
    return [Match(edit.match.anchors[0], edit.match.nodes_map) for edit in edits]


def replace_pattern_with_filters(
    gm: GraphModule,
    pattern: ProgramLike,
    replacement: ProgramLike | None = None,
    match_filters: Sequence[MatchFilter] | None = None,
    ignore_literals: bool = False,
    replacement_callback: ReplacementCallback | None = None,
    node_name_match: str = "",
) -> list[ReplacedPatterns]:
    """`replace_pattern` with a say in which matches count and what each is replaced by.

    A match counts if every one of `match_filters` answers True to (match, program graph, pattern graph). Filters are
    asked after overlaps are settled, as in torch.fx: a match that does not count still keeps later ones from its nodes
    (with `rewrite` and its `where` it does not). `ignore_literals` lets literals of the pattern stand for any value.
    `replacement_callback`, asked the same, returns the replacement of each match and goes before `replacement`.
    `node_name_match`: a node whose name contains this text may stand for the value the pattern returns, whatever it
    calls.

    >>> import torchgraft
    >>> module = torchgraft.symbolic_trace(lambda x: torch.add(torch.add(x, 1), 2))
    >>> replaced = replace_pattern_with_filters(
    ...     module, lambda a: torch.add(a, 0), lambda a: torch.relu(a), ignore_literals=True)
    >>> [each.replacements for each in replaced]
    [[relu], [relu_1]]
    """
    edits = _rewrite(
        gm, pattern, replacement, match_filters or (), ignore_literals, replacement_callback, node_name_match
    )
    return [ReplacedPatterns(edit.match.anchors[0], edit.match.nodes_map, edit.new_nodes) for edit in edits]


def _rewrite(
    gm: GraphModule,
    pattern: ProgramLike,
    replacement: ProgramLike | None,
    match_filters: Sequence[MatchFilter] = (),
    ignore_literals: bool = False,
    replacement_callback: ReplacementCallback | None = None,
    node_name_match: str = "",
) -> list[Edit]:
    program = Program.to_edit(gm)
    if replacement is None and replacement_callback is None:
        raise GraphError(
            "Must provide either a replacement GraphModule or a replacement callback\n"
            "  to remove a pattern, give a replacement that returns its input"
        )
    compiled = Pattern(Program.of(pattern, "pattern"))
    common = None if replacement is None else Replacement(Program.of(replacement, "replacement"), compiled)
    rewrite = Rewrite(program, SubgraphMatcher(compiled, program, ignore_literals))
    edits = rewrite.find(match_filters, node_name_match, refused_block=True)
    rewrite.choose(edits, common, replacement_callback)
    rewrite.apply(edits)
    if edits and isinstance(replacement, torch.nn.Module):
        gm.delete_all_unused_submodules()
    return edits


class Replacement:
    """A replacement checked against its pattern: what to copy, and which of its values stand for which of the
    pattern's.
    """

    def __init__(self, program: Program, pattern: Pattern) -> None:
        self.program = program
        self.placeholders: list[Node] = []
        self.body: list[Node] = []
        output = None
        for node in program.graph.nodes:
            if node.op == "placeholder":
                self.placeholders.append(node)
            elif node.op == "output":
                output = node
            else:
                self.body.append(node)
        if len(self.placeholders) != len(pattern.placeholders):
            raise GraphError(
                "cannot replace a pattern by something with other inputs: the pattern has "
                f"{_count(pattern.placeholders)}, the replacement {_count(self.placeholders)}; give both the same "
                "parameters, used or not"
            )
        self.inputs = list(zip(self.placeholders, pattern.placeholders, strict=True))
        returned = output.args[0] if output is not None else None
        self.outputs = self._pair_outputs(pattern, returned)
        self.renamed: dict[str, str] = {}

    def _pair_outputs(self, pattern: Pattern, returned: Any) -> list[tuple[Node, Any]]:
        """Pairs of a node that the pattern returns and the value of the replacement that takes its place."""
        expected, found = leaves(pattern.output.args[0]), leaves(returned)
        if len(expected) != len(found):  # torch.fx counts each node that the pattern returns once, and only nodes
            expected = pattern.returned
        if len(expected) != len(found):
            raise GraphError(
                f"cannot replace a pattern by something with other results: the pattern returns {len(expected)} "
                f"values, the replacement {len(found)}; let both return the same number"
            )
        pairs: dict[Node, Any] = {}
        inputs = dict(zip(pattern.placeholders, self.placeholders, strict=True))
        for old, new in zip(expected, found, strict=True):
            if not isinstance(old, Node):
                continue
            if new is None:
                raise GraphError(
                    f"cannot replace '{old.name}' by None: the pattern returns a value there, the replacement returns "
                    "none; let the replacement return a value"
                )
            if old in inputs:
                if inputs[old] is not new:
                    raise GraphError(
                        f"cannot replace the input '{old.target}' that the pattern returns unchanged: the replacement "
                        f"returns {new} in its place; return '{inputs[old].target}' there, or leave it out of both"
                    )
                continue
            if old in pairs and not same_value(pairs[old], new):
                raise GraphError(
                    f"cannot replace one value by two: the pattern returns '{old.name}' twice, the replacement returns "
                    f"{pairs[old]} and {new} for it; return the same value in both places"
                )
            pairs[old] = new
        return list(pairs.items())


@dataclass(slots=True, eq=False)
class Edit:
    """One match on its way to being replaced."""

    match: InternalMatch
    region: list[Node]
    before: Node
    replacement: Replacement = field(init=False)
    new_nodes: list[Node] = field(init=False)


class Rewrite:
    """All matches of one call, found together, then replaced one after the other."""

    def __init__(self, program: Program, matcher: SubgraphMatcher) -> None:
        self._program = program
        self._graph = program.graph
        self._matcher = matcher
        self._pattern = matcher.pattern
        self.adoption = Adoption(program)
        # What returned nodes of replaced regions have become; an input of a later match may be one of them.
        self._became: dict[Node, Any] = {}

    def find(
        self, filters: Sequence[MatchFilter], node_name_match: str = "", refused_block: bool = False
    ) -> list[Edit]:
        """The matches to replace; whether one that a filter refuses still keeps others from overlapping it is
        `refused_block`.
        """
        placement = Placement(self._graph, self._pattern)
        edits: list[Edit] = []

        def accept(match: InternalMatch, region: list[Node]) -> bool:
            before = placement.find(match, region)
            if before is None:
                return False
            for match_filter in filters:
                if not match_filter(match, self._graph, self._pattern.program.graph):
                    return refused_block
            placement.accept(region, before)
            edits.append(Edit(match, region, before))
            return True

        self._matcher.match(accept, node_name_match)
        return edits

    def choose(self, edits: list[Edit], common: Replacement | None, callback: ReplacementCallback | None) -> None:
        """Decide what each match is replaced by, then bring over the attributes that this needs."""
        replacements: dict[int, Replacement] = {}
        for edit in edits:
            if callback is None:
                edit.replacement = common  # type: ignore[assignment]
            else:
                chosen = callback(edit.match, self._graph, self._pattern.program.graph)
                edit.replacement = Replacement(Program.of(chosen, "replacement"), self._pattern)
            replacements[id(edit.replacement)] = edit.replacement
        for replacement in replacements.values():
            self.adoption.check(replacement.program)
        for replacement in replacements.values():
            replacement.renamed = self.adoption.adopt(replacement.program)

    def apply(self, edits: list[Edit]) -> None:
        """Put every replacement in, then lead every user over to them once, then take every region out.

        One after the other for each match would touch a node with many replaced inputs as many times.
        """
        for edit in edits:
            self._insert(edit)
        regions = [node for edit in edits for node in edit.region]
        self._rewire(set(regions))
        for node in sorted(regions, reverse=True):
            self._graph.erase_node(node)
        for edit in edits:
            self._update_inputs(edit.match)

    def _insert(self, edit: Edit) -> None:
        replacement = edit.replacement
        nodes_map = self._update_inputs(edit.match)
        source = nodes_map[self._pattern.anchors[0]]
        edit.new_nodes = []
        with self._graph.inserting_before(edit.before):
            values = {
                new: self._fetched(value, new) if type(value := nodes_map[old]) is State else value
                for new, old in replacement.inputs
            }
            for node in replacement.body:
                new = values[node] = self._graph.node_copy(node, values.__getitem__)
                if replacement.renamed and node.op in ("get_attr", "call_module"):
                    new.target = replacement.renamed.get(node.target, node.target)
                inherit_origin(new, source)
                edit.new_nodes.append(new)
        for pattern_node, result in replacement.outputs:
            self._became[nodes_map[pattern_node]] = values[result] if isinstance(result, Node) else result

    def _fetched(self, value: State, user: Node) -> Any:
        """A weight that a matched module holds, fetched where it is used."""
        return self._graph.create_node("get_attr", value.path) if user._users else None

    def _rewire(self, regions: set[Node]) -> None:
        """Let everything outside the regions use what the returned nodes have become."""
        users = dict.fromkeys(user for old in self._became for user in old._users if user not in regions)
        for user in users:
            for old in user.all_input_nodes:
                if old in self._became:
                    self._graph._notify_replace(old, self._current(old), user)
            user.args = map_arg(user.args, self._current)
            if user.kwargs:
                user.kwargs = map_arg(user.kwargs, self._current)

    def _current(self, value: Any) -> Any:
        """A value of the program as it was, in terms of the program as it is."""
        while isinstance(value, Node):
            if value not in self._became:
                return value
            value = self._became[value]
        if isinstance(value, list | tuple | dict | slice):
            return map_arg(value, self._current)
        return value

    def _update_inputs(self, match: InternalMatch) -> dict[Node, Any]:
        """Let the inputs of a match be nodes of the program as it is."""
        nodes_map = match.nodes_map
        for node in self._pattern.placeholders:
            value = nodes_map[node]
            current = self._current(value)
            if current is not value:
                nodes_map[node] = current
                match.__dict__.pop("placeholder_nodes", None)
        return nodes_map


def _count(placeholders: list[Node]) -> str:
    names = ", ".join(str(node.target) for node in placeholders)
    return f"{len(placeholders)} ({names})"
