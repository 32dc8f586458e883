"""torch.fx's const_fold: what depends on parameters and constants alone is put aside and computed once, before the first run.
Folding for good, in place, is `torchgraft.passes.FoldConstants`.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.capturing.symbolic.tracer import symbolic_trace
from torchgraft.codegen.attributes import Adoption
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraphError
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute


class FoldedGraphModule(GraphModule):
    """A program whose constant part, `const_subgraph_module`, runs once before the first call."""

    def __init__(
        self,
        root: torch.nn.Module,
        graph: Graph,
        const_subgraph: Graph | None = None,
        fx_const_folded_attrs_name: str | None = None,
        device_for_folded_attrs: str = "cuda",
    ) -> None:
        super().__init__(root, graph)
        self.const_subgraph_module = None if const_subgraph is None else GraphModule(root, const_subgraph)
        self.has_folding_been_run = False
        self.fx_const_folded_attrs_name = fx_const_folded_attrs_name
        self.device_for_folded_attrs = device_for_folded_attrs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.has_folding_been_run:
            self.run_folding()
        return super().__call__(*args, **kwargs)

    def run_folding(self) -> None:
        """Compute the constant part and keep its results as parameters."""
        if self.const_subgraph_module is None or self.fx_const_folded_attrs_name is None:
            return
        if self.has_folding_been_run:
            raise GraphError("cannot fold twice: Folding has already been run; its results are in the program")
        self.has_folding_been_run = True
        found = self.const_subgraph_module()
        folded: Any
        if isinstance(found, tuple):
            folded = torch.nn.ParameterList([self._parameter(value) for value in found])
        else:
            folded = self._parameter(found)
        setattr(self, self.fx_const_folded_attrs_name, folded)

    def _parameter(self, value: Any) -> torch.nn.Parameter:
        if isinstance(value, torch.Tensor):
            return torch.nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
        made = torch.tensor([float(value)], device=self.device_for_folded_attrs)
        return torch.nn.Parameter(made, requires_grad=False)


def get_unique_attr_name_in_module(mod_traced: torch.nn.Module, name: str) -> str:
    """A name like this one that the module does not have."""
    name = re.sub("[^0-9a-zA-Z_]+", "_", name)
    name = f"_{name}" if name[0].isdigit() else name
    wish, number = re.sub(r"_\d+$", "", name), 0
    while hasattr(mod_traced, name):
        number += 1
        name = f"{wish}_{number}"
    return name


def split_const_subgraphs(
    module: torch.nn.Module,
    skip_folding_node_fn: Callable[[Node], bool] | None = None,
    device_for_folded_attrs: str = "cpu",
    is_impure_node: Callable[[Node], bool] | None = None,
) -> FoldedGraphModule:
    """A module that computes its constant part once. What draws, writes, reads written state or is returned is no constant.

    Neither is what `skip_folding_node_fn` or `is_impure_node` says.

    >>> import torchgraft
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = torch.nn.Parameter(torch.ones(2, 3))
    ...     def forward(self, x):
    ...         return x @ self.weight.t()
    >>> print(split_const_subgraphs(Model()).code.strip())
    def forward(self, x):
        _fx_const_folded_attrs = self._FX_CONST_FOLDED_ATTRS
        matmul = x @ _fx_const_folded_attrs;  x = _fx_const_folded_attrs = None
        return matmul
    """
    traced = module if isinstance(module, GraphModule) else symbolic_trace(module)
    graph = copy.deepcopy(traced.graph)
    main = GraphModule(traced, graph)
    constant = _constant_nodes(graph, skip_folding_node_fn, is_impure_node)
    results = [node for node in constant if node.op != "get_attr" and any(user not in constant for user in node._users)]
    if not results:
        return FoldedGraphModule(traced, traced.graph)
    name = get_unique_attr_name_in_module(traced, "_FX_CONST_FOLDED_ATTRS")
    aside = Graph()
    copies: dict[Node, Node] = {}
    for node in constant:
        copies[node] = aside.node_copy(node, copies.__getitem__)
    aside.output(copies[results[0]] if len(results) == 1 else tuple([copies[node] for node in results]))
    aside.eliminate_dead_code()
    setattr(main, name, torch.nn.Parameter() if len(results) == 1 else torch.nn.ParameterList())
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        fetched = graph.create_node("get_attr", name)
        values = (
            [fetched]
            if len(results) == 1
            else [graph.call_function(operator.getitem, (fetched, i)) for i in range(len(results))]
        )
    for node, value in zip(results, values, strict=True):
        value.meta.update(node.meta)
        node.replace_all_uses_with(value)
    for node in reversed(constant):
        if not node._users:
            graph.erase_node(node)
    for path in {node.target for node in aside.nodes if node.op in ("get_attr", "call_module")}:
        Adoption(traced, main).adopt(path)
    return FoldedGraphModule(main, graph, aside, name, device_for_folded_attrs)


def _constant_nodes(
    graph: Graph, skip: Callable[[Node], bool] | None, is_impure_node: Callable[[Node], bool] | None
) -> list[Node]:
    memory = Aliases(graph)
    end = len(graph.nodes)
    found: dict[Node, None] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or (skip is not None and skip(node)):
            continue
        if is_impure_node is not None and is_impure_node(node):
            continue
        if node.op == "get_attr":
            is_constant = isinstance(find_attribute(graph.owning_module, node.target)[0], torch.Tensor)
        else:
            # In a region it would be computed otherwise; a caller who writes into a result must not change the next run.
            is_constant = (
                all(source in found for source in node.all_input_nodes)
                and memory.is_pure(node)
                and memory.region[node] is None
                and not memory.outlives(node)
            )
        if is_constant and not memory.is_touched_between(node, -1, end):
            found[node] = None
    return list(found)
