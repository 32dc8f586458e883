"""torch.fx's graph_gradual_typechecker: types with open sizes, worked out for every node and written into `node.type`.
The work is done by `torchgraft.check_types`, which knows every operator and not a list of them.
"""

from __future__ import annotations

from typing import Any

from torchgraft.analysis.types.checking import check_types
from torchgraft.analysis.types.tensor_type import Dyn, TensorType
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import ShapeError
from torchgraft.ir.node import Node

__all__ = ["GraphTypeChecker", "broadcast_types", "expand_to_tensor_dim"]


class GraphTypeChecker:
    """Checks a program whose inputs are annotated with TensorType; a node that cannot be right raises a TypeError.

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: torch.transpose(x, 0, 1))
    >>> x, transpose, output = program.graph.nodes
    >>> x.type = TensorType((1, 2, 3, Dyn))
    >>> GraphTypeChecker({}, program).type_check()
    True
    >>> transpose.type
    TensorType[(2, 1, 3, Dyn)]
    """

    def __init__(self, env: dict[str, Any], traced: GraphModule) -> None:
        self.env = env
        self.traced = traced

    def type_check(self) -> bool:
        """Give every node its type; annotations that nodes have are checked, and stay where they say more."""
        for node, found in self._types().items():
            node.type = found
        return True

    def type_check_node(self, n: Node) -> Any:
        """The type of one node, written into it."""
        n.type = self._types()[n]
        return n.type

    def _types(self) -> dict[Node, Any]:
        types = check_types(self.traced)
        return {node: types[node.name] for node in self.traced.graph.nodes}


def broadcast_types(t1: Any, t2: Any) -> tuple[Any, Any]:
    """Two types as they are when one is broadcast to the other: of one rank, and with no 1 where the other has more.

    >>> broadcast_types(TensorType((1, 2, 3)), TensorType((2, 1)))
    (TensorType[(1, 2, 3)], TensorType[(1, 2, 3)])
    """
    if t1 == Dyn or t2 == Dyn:
        return t1, t2
    if not (isinstance(t1, TensorType) and isinstance(t2, TensorType)):
        raise ShapeError(f"Cannot broadcast types {t1} and {t2}\n  both must be types of tensors, or Dyn")
    rank = max(len(t1.dims), len(t2.dims))
    first, second = [(*[1] * (rank - len(kind.dims)), *kind.dims) for kind in (t1, t2)]
    pairs = list(zip(first, second, strict=True))
    return (
        TensorType(tuple([two if one == 1 else one for one, two in pairs])),
        TensorType(tuple([one if two == 1 else two for one, two in pairs])),
    )


def expand_to_tensor_dim(t: Any, n: int) -> TensorType:
    """A type of rank `n`: with all sizes open for Dyn, the type itself where it has that rank."""
    if t == Dyn:
        return TensorType((Dyn,) * n)
    if not isinstance(t, TensorType):
        raise ShapeError(f"Cannot match the type {t}\n  give a TensorType or Dyn")
    if len(t.dims) != n:
        raise ShapeError(f"Cannot extend tensor. Tensor {t} has rank {len(t.dims)}. It should have rank {n}")
    return t
