"""torch.fx's SubgraphMatcher: the occurrences of a pattern graph in another graph, as it is spelled.
The search is in `rewriting/matching.py`, in linear time; replacing what is found is `replace_pattern` and `rewrite`.
"""

from __future__ import annotations

from typing import Any

from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node, map_arg
from torchgraft.rewriting.matching import InternalMatch, same_value
from torchgraft.rewriting.matching import SubgraphMatcher as _Search
from torchgraft.rewriting.pattern import Pattern, Program

__all__ = ["InternalMatch", "SubgraphMatcher"]


class SubgraphMatcher:
    """Finds a pattern, with torch.fx's interface.

    With `match_output`, what the pattern returns must be what the graph returns; with `match_placeholder`, its inputs must be
    inputs of the graph; without `remove_overlapping_matches`, all matches are found, also those that share nodes.

    >>> import torch, torchgraft
    >>> pattern = torchgraft.symbolic_trace(lambda a: torch.neg(torch.relu(a))).graph
    >>> graph = torchgraft.symbolic_trace(lambda x: torch.neg(torch.relu(torch.neg(torch.relu(x))))).graph
    >>> [match.returning_nodes for match in SubgraphMatcher(pattern).match(graph)]
    [[neg], [neg_1]]
    """

    def __init__(
        self,
        pattern: Graph,
        match_output: bool = False,
        match_placeholder: bool = False,
        remove_overlapping_matches: bool = True,
        ignore_literals: bool = False,
    ) -> None:
        self.pattern = pattern
        self.match_output = match_output
        self.match_placeholder = match_placeholder
        self.remove_overlapping_matches = remove_overlapping_matches
        self.ignore_literals = ignore_literals
        self._compiled = Pattern(Program(pattern, pattern.owning_module))
        self.pattern_placeholder_nodes = self._compiled.placeholders
        self.pattern_returning_nodes = self._compiled.returned
        self.pattern_anchors = [self._compiled.output] if match_output else self._compiled.anchors

    def match(self, graph: Graph, node_name_match: str = "") -> list[InternalMatch]:
        """The matches, in the order of the graph."""
        found: list[InternalMatch] = []

        def accept(match: InternalMatch, region: list[Node]) -> bool:
            if self.match_placeholder and not all(_is_input(value) for value in match.placeholder_nodes):
                return False
            if self.match_output and not self._is_returned(match, graph):
                return False
            if self.match_output:
                match.anchors = self.pattern_anchors
                match.nodes_map = {self._compiled.output: graph.output_node(), **match.nodes_map}
            found.append(match)
            return self.remove_overlapping_matches

        _Search(self._compiled, Program(graph, graph.owning_module), self.ignore_literals).match(
            accept, node_name_match
        )
        return found

    def _is_returned(self, match: InternalMatch, graph: Graph) -> bool:
        wanted = map_arg(self._compiled.output.args, match.nodes_map.__getitem__)
        return same_value(wanted, graph.output_node().args)


def _is_input(value: Any) -> bool:
    return not isinstance(value, Node) or value.op == "placeholder"  # torch.fx takes a literal for an input
