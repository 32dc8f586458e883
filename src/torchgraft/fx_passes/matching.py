"""torch.fx's SubgraphMatcher: the occurrences of a pattern graph in another graph, as it is spelled; and `passes.utils`, which
compares graphs with it. The search is in `rewriting/matching.py`, in linear time; replacing what is found is `replace_pattern`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.codegen.source import PyTreeCodeGen
from torchgraft.errors import GraphError
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node, map_arg
from torchgraft.rewriting.matching import InternalMatch, same_value
from torchgraft.rewriting.matching import SubgraphMatcher as _Search
from torchgraft.rewriting.pattern import Pattern, Program

__all__ = [
    *("InternalMatch", "SubgraphMatcher", "SubgraphMatcherWithNameNodeMap"),
    *("HolderModule", "compare_graphs", "lift_subgraph_as_module"),
]


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


class SubgraphMatcherWithNameNodeMap(SubgraphMatcher):
    """A matcher whose pattern returns, last of all, a dict that names some of its values; matches have them by name.

    The dict is taken out of the pattern module that is given.

    >>> import torch, torchgraft
    >>> def pattern(x):
    ...     relu = torch.relu(x)
    ...     return torch.neg(relu), {"inner": relu}
    >>> matcher = SubgraphMatcherWithNameNodeMap(torchgraft.symbolic_trace(pattern))
    >>> program = torchgraft.symbolic_trace(lambda x: torch.neg(torch.relu(x)) + 1)
    >>> [match.name_node_map for match in matcher.match(program.graph)]
    [{'inner': relu}]
    """

    def __init__(
        self,
        pattern_gm: GraphModule,
        match_output: bool = False,
        match_placeholder: bool = False,
        remove_overlapping_matches: bool = True,
        ignore_literals: bool = False,
    ) -> None:
        self.name_node_map: dict[str, Node] = _take_out_names(pattern_gm.graph)
        super().__init__(pattern_gm.graph, match_output, match_placeholder, remove_overlapping_matches, ignore_literals)

    def match(self, graph: Graph, node_name_match: str = "") -> list[InternalMatch]:
        """The matches, in the order of the graph."""
        found = super().match(graph, node_name_match)
        for match in found:
            match.name_node_map.update({name: match.nodes_map[node] for name, node in self.name_node_map.items()})
        return found


def _take_out_names(graph: Graph) -> dict[str, Node]:
    codegen, output = graph._codegen, graph.output_node()
    is_tree = isinstance(codegen, PyTreeCodeGen) and codegen.out_spec is not None
    returned = codegen.process_outputs(output.args[0]) if is_tree else output.args[0]
    if not isinstance(returned, (tuple, list)) or len(returned) < 2 or not isinstance(returned[-1], dict):
        raise GraphError(
            f"cannot match by names: the pattern returns {returned}, Expecting the pattern graph to return a tuple with a dict "
            "of its values by name as the last element; return (result, {'name': value})"
        )
    leaves, spec = pytree.tree_flatten(list(returned[:-1]))
    output.args = (leaves,)
    if isinstance(codegen, PyTreeCodeGen):
        codegen.out_spec = spec
    return dict(returned[-1])


# ---- torch.fx.passes.utils.common ----


class HolderModule(torch.nn.Module):
    """A module of the modules in a dict, and nothing else."""

    def __init__(self, d: dict[str, torch.nn.Module | None]) -> None:
        super().__init__()
        for name, module in d.items():
            self.add_module(name, module)


def lift_subgraph_as_module(
    gm: GraphModule, subgraph: Graph, comp_name: str = "", class_name: str = "GraphModule"
) -> tuple[GraphModule, dict[str, str]]:
    """A module that runs a graph made of copies of nodes of `gm`, with what these refer to; and where each of that is in `gm`
    once the module is called `comp_name` there.
    """
    targets = [node.target for node in subgraph.nodes if node.op in ("call_module", "get_attr")]
    return GraphModule(gm, subgraph, class_name), {target: f"{comp_name}.{target}" for target in targets}


def compare_graphs(left: Graph, right: Graph) -> bool:
    """Whether two graphs take as many inputs, make the same calls of them and return the same.

    >>> import torchgraft
    >>> first, second = [torchgraft.symbolic_trace(lambda x: x + 1).graph for _ in range(2)]
    >>> compare_graphs(first, second)
    True
    """
    return bool(SubgraphMatcher(left, match_output=True, match_placeholder=True).match(right))
