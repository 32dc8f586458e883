"""torch.fx's `split_module` and `split_by_tags`: the caller says for every node in which part it goes.
Choosing the parts is `split.py`; putting them together is `assembly.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraphError
from torchgraft.ir.node import Node
from torchgraft.splitting.assembly import Piece, Style, assemble, bind, call_order, cut
from torchgraft.splitting.order import Order


def split_module(
    m: GraphModule,
    root_m: Any,
    split_callback: Callable[[Node], Hashable],
    qualname_map: dict[str, str] | None = None,
    keep_original_order: bool | None = False,
    keep_original_node_name: bool | None = False,
    keep_original_input_name: bool = True,
    *,
    partition_affix: str | None = None,
    tuple_return: bool = False,
) -> GraphModule:
    """Split a program into the parts that `split_callback` puts each call in; the parts are called `submod_0` and so on.

    The interface and the names are torch.fx's (`root_m` is not used there either). Beyond torch.fx: a write and what reads the
    memory stay in their order; regions (`with torch.no_grad():`) are opened again in every part that has a piece of one; with
    `keep_original_order`, parts run in the order of the program as far as they can; parts that wait for each other raise an error
    that says which nodes bind them.

    >>> import torch, torchgraft
    >>> module = torchgraft.symbolic_trace(lambda x: torch.relu(torch.sin(x)) + 1)
    >>> split = split_module(module, None, lambda node: 0 if node.name == "sin" else 1)
    >>> print(split.code.strip())
    def forward(self, x):
        submod_0 = self.submod_0(x);  x = None
        submod_1 = self.submod_1(submod_0);  submod_0 = None
        return submod_1
    """
    order = Order(m.graph)
    affix = "" if partition_affix is None else f"{partition_affix}_"
    label_of: dict[Node, Hashable] = {node: f"{affix}{split_callback(node)}" for node in order.calls}
    pieces = cut(order, label_of, {label: f"submod_{label}" for label in label_of.values()})
    parts = call_order(pieces, label_of, order, bool(keep_original_order))
    style = Style(
        bool(keep_original_node_name), keep_original_input_name, tuple_return, fetch_late=bool(keep_original_order)
    )
    joined = assemble(m, order, parts, style)
    if qualname_map is not None:
        qualname_map.update(new_names(parts))
    return joined


def split_module_simple(
    m: GraphModule, node_to_partition: dict[Node, int], *, partition_affix: str | None = None
) -> GraphModule:
    """`split_module` with a table in the place of a function; torch.fx has it as a faster way for simple programs.

    >>> import torch, torchgraft
    >>> module = torchgraft.symbolic_trace(lambda x: torch.relu(torch.sin(x)))
    >>> x, sin, relu, _ = module.graph.nodes
    >>> [name for name, _ in split_module_simple(module, {sin: 0, relu: 1}).named_children()]
    ['submod_0', 'submod_1']
    """
    missing = [node.name for node in Order(m.graph).calls if node not in node_to_partition]
    if missing:
        raise GraphError(f"cannot split: no part is given for {', '.join(missing)}; give one for every call")
    return split_module(m, m, node_to_partition.__getitem__, partition_affix=partition_affix)


def split_by_tags(
    gm: GraphModule,
    tags: list[str],
    return_fqn_mapping: bool = False,
    return_tuple: bool = False,
    GraphModuleCls: type[GraphModule] = GraphModule,
) -> Any:
    """Split a program into the parts that the nodes name in their attribute `tag`, called in the order of `tags`.

    Every call has one of the tags. With `return_fqn_mapping`, also return where each module and tensor of the program is now.

    >>> import torch, torchgraft
    >>> module = torchgraft.symbolic_trace(lambda x: torch.relu(torch.sin(x)))
    >>> for node in module.graph.nodes:
    ...     node.tag = "left" if node.name == "sin" else "right"
    >>> print(split_by_tags(module, ["left", "right"]).code.strip())
    def forward(self, x):
        left = self.left(x);  x = None
        right = self.right(left);  left = None
        return right
    """
    order = Order(gm.graph)
    label_of: dict[Node, Hashable] = {}
    for node in order.calls:
        tag = getattr(node, "tag", None)
        if tag not in tags:
            raise GraphError(
                f"cannot split by tags: node '{node.name}' has the tag {tag!r}, which is none of {', '.join(tags)}; "
                "set node.tag of every call"
            )
        label_of[node] = tag
    pieces = cut(order, label_of, {tag: tag for tag in tags})
    parts = [pieces.get(tag) or Piece(tag, tag) for tag in tags]
    bind(parts, label_of, order.before)
    _check_tag_order(parts, order)
    style = Style(True, True, return_tuple, inner_tensors=True, graph_module_class=GraphModuleCls, keep_paths=True)
    joined = assemble(gm, order, parts, style)
    for part in parts:
        for node, copied in zip(part.nodes, _calls(part.module, order), strict=True):
            copied.tag = node.tag  # type: ignore[attr-defined]
    if not return_fqn_mapping:
        return joined
    return joined, {old: new for new, old in new_names(parts).items()}


def _calls(module: GraphModule, order: Order) -> list[Node]:
    marks = {mark.target for pair in order.exits.items() for mark in pair}
    return [
        node
        for node in module.graph.nodes
        if node.op in ("call_module", "call_method") or (node.op == "call_function" and node.target not in marks)
    ]


def _check_tag_order(parts: list[Piece], order: Order) -> None:
    rank = {part.label: number for number, part in enumerate(parts)}
    for part in parts:
        for other, (node, earlier) in part.waits_for.items():
            if rank[other] > rank[part.label]:
                raise GraphError(
                    f"cannot split by tags: part '{part.name}' stands before part '{other}' in the list of tags, but its node "
                    f"'{node.name}' {order.why(earlier, node)}; change the tags or their order"
                )


def new_names(parts: list[Piece]) -> dict[str, str]:
    """The name in the program of every module and tensor that lives in a part, by its name there."""
    return {f"{part.name}.{name}": path for part in parts for path, name in part.attributes.items()}
