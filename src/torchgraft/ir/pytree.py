"""Taking call arguments apart into the leaves a program was captured with; generated code calls this as `fx_pytree`.
Everything else about trees of values is torch's own pytree.
"""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from torchgraft.errors import StructureError


def children_of(spec: Any) -> list[Any]:
    """The child specs of a tree spec; a method in some versions of torch, an attribute in others."""
    return spec.children() if callable(spec.children) else spec.children


def tree_flatten_spec(values: list[Any], spec: Any) -> list[Any]:
    """The leaves of call arguments, which must have the structure the program was captured with."""
    leaves: list[Any] = []
    for position, (value, child) in enumerate(zip(values, children_of(spec), strict=True)):
        try:
            leaves += child.flatten_up_to(value)
        except ValueError as error:
            raise StructureError(
                f"argument {position} does not have the structure the program was captured with: "
                f"expected {child}, found {pytree.tree_structure(value)}; capture again with such an argument"
            ) from error
    return leaves


_LEAF = "*"


def spec_data(spec: Any) -> Any:
    """A tree spec as plain data, for copies and files: making torch's own objects again, as those do, is deprecated for leaves.

    >>> spec_data(pytree.tree_structure([1, {"a": 2}]))
    (<class 'list'>, None, ['*', (<class 'dict'>, ['a'], ['*'])])
    """
    if not isinstance(spec, pytree.TreeSpec):
        return spec
    return _LEAF if spec.type is None else (spec.type, spec.context, [spec_data(child) for child in children_of(spec)])


def spec_from_data(data: Any) -> Any:
    """The tree spec that `spec_data` wrote down."""
    if data == _LEAF:
        return pytree.tree_structure(0)
    if not isinstance(data, tuple):
        return data
    kind, context, children = data
    return pytree.TreeSpec(kind, context, [spec_from_data(child) for child in children])
