"""TensorType and Dyn: the shape of a tensor with sizes that may be left open, under torch.fx's names.
How a program is checked against them is in `checking.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class _DynType:
    """Nothing is known: a size, or a whole type, that agrees with every other.

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(torch.nn.Linear(3, 5))
    >>> torchgraft.check_types(program, {"input": torchgraft.TensorType((torchgraft.Dyn, 3))})["output"]
    TensorType[(Dyn, 5)]
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DynType)

    def __hash__(self) -> int:
        return hash(_DynType)

    def __repr__(self) -> str:
        return "Dyn"

    def __reduce__(self) -> str:
        return "Dyn"


Dyn = _DynType()
"""A size of a `TensorType`, or a whole type, of which nothing is known: it agrees with every other."""


class TensorType:
    """A tensor of this shape; each size is a number or Dyn.

    >>> TensorType((Dyn, 3, 224, 224)).dims, TensorType[2, 3] == TensorType((2, 3))
    ((Dyn, 3, 224, 224), True)
    """

    def __init__(self, dim: Sequence[Any]) -> None:
        self.__origin__ = TensorType
        self.__args__ = dim

    @property
    def dims(self) -> Sequence[Any]:
        """The sizes."""
        return self.__args__

    def __repr__(self) -> str:
        return f"TensorType[{self.dims}]"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorType) and list(self.dims) == list(other.dims)

    def __hash__(self) -> int:
        return hash(tuple(self.dims))

    @staticmethod
    def __class_getitem__(*args: Any) -> TensorType:
        if len(args) == 1 and isinstance(args[0], tuple):
            args = args[0]
        return TensorType(tuple(args))


def is_consistent(t1: object, t2: object) -> bool:
    """Whether two types or sizes can be the same: Dyn can be anything.

    >>> is_consistent(TensorType((1, Dyn)), TensorType((1, 2))), is_consistent(TensorType((1,)), TensorType((2,)))
    (True, False)
    """
    if Dyn in (t1, t2) or t1 == t2:
        return True
    if isinstance(t1, TensorType) and isinstance(t2, TensorType):
        return len(t1.dims) == len(t2.dims) and all(map(is_consistent, t1.dims, t2.dims))
    return False


def is_more_precise(t1: object, t2: object) -> bool:
    """Whether the first says all that the second says.

    >>> is_more_precise(TensorType((1, 2)), TensorType((1, Dyn))), is_more_precise(Dyn, TensorType((1,)))
    (True, False)
    """
    if t1 == t2 or t2 == Dyn:
        return True
    if isinstance(t1, TensorType) and isinstance(t2, TensorType):
        return len(t1.dims) == len(t2.dims) and all(map(is_more_precise, t1.dims, t2.dims))
    return False


def meet(first: Any, second: Any) -> Any:
    """What both types say together; they must be consistent.

    >>> meet(TensorType((Dyn, 3)), TensorType((2, Dyn)))
    TensorType[(2, 3)]
    """
    if isinstance(first, TensorType) and isinstance(second, TensorType):
        return TensorType(tuple(map(meet, first.dims, second.dims)))
    return second if first == Dyn else first
