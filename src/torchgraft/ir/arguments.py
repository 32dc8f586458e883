"""Argument trees: the immutable containers that node arguments are made of, and the walks over them.
What a node is, and which values in a tree are nodes, is said in `node.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils import _pytree as pytree  # the registry has no public door before torch 2.15

T = TypeVar("T")


def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(
        f"'{type(self).__name__}' object does not support mutation, it is immutable: "
        "make a changed copy and assign it to node.args or node.kwargs"
    )


class immutable_list(list):  # noqa: N801 (torch.fx's public name)
    """A list that refuses to change, so that the users of a node cannot get out of step with its arguments.

    >>> immutable_list([1, 2])[0]
    1
    """

    __delitem__ = __iadd__ = __imul__ = __setitem__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))

    def __reduce__(self) -> Any:
        return type(self), (tuple(self),)


class immutable_dict(dict):  # noqa: N801 (torch.fx's public name)
    """A dict that refuses to change, for the same reason as `immutable_list`.

    >>> arguments = immutable_dict(dim=1)
    >>> arguments["dim"], arguments == {"dim": 1}
    (1, True)
    >>> try:
    ...     arguments["dim"] = 2
    ... except TypeError as error:
    ...     print(str(error).partition(":")[0])
    'immutable_dict' object does not support mutation, it is immutable
    """

    __delitem__ = __ior__ = __setitem__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return type(self), (tuple(self.items()),)


EMPTY_DICT = immutable_dict()


def _flatten_list(value: immutable_list) -> tuple[list[Any], None]:
    return list(value), None


def _unflatten_list(values: Iterable[Any], context: Any) -> immutable_list:
    return immutable_list(values)


def _flatten_dict(value: immutable_dict) -> tuple[list[Any], list[Any]]:
    return list(value.values()), list(value)


def _unflatten_dict(values: Iterable[Any], context: Any) -> immutable_dict:
    return immutable_dict(zip(context, values, strict=True))


def _flatten_list_with_keys(value: immutable_list) -> tuple[list[Any], None]:
    return [(pytree.SequenceKey(index), item) for index, item in enumerate(value)], None


def _flatten_dict_with_keys(value: immutable_dict) -> tuple[list[Any], list[Any]]:
    return [(pytree.MappingKey(key), item) for key, item in value.items()], list(value)


pytree.register_pytree_node(
    immutable_list,
    _flatten_list,
    _unflatten_list,
    serialized_type_name="torchgraft.immutable_list",
    flatten_with_keys_fn=_flatten_list_with_keys,
)
pytree.register_pytree_node(
    immutable_dict,
    _flatten_dict,
    _unflatten_dict,
    serialized_type_name="torchgraft.immutable_dict",
    flatten_with_keys_fn=_flatten_dict_with_keys,
)


def rebuild_tuple(original: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """A tuple of the same type as `original` (named tuples and torch.Size included) with other items."""
    cls = type(original)
    if cls is tuple:
        return tuple(items)
    if hasattr(original, "_fields"):
        return cls._make(items)  # type: ignore[attr-defined]  # a constructor may want real tensors
    try:
        return cls(items)
    except TypeError:  # torch.Size takes integers only; a symbolic size makes it a plain tuple
        return tuple(items)


def map_aggregate(a: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply `fn` to every leaf of a tree of tuples, lists, dicts and slices; containers come back immutable.

    >>> map_aggregate((1, [2, {"a": 3}]), lambda leaf: leaf * 10)
    (10, [20, {'a': 30}])
    """
    if isinstance(a, tuple):
        return rebuild_tuple(a, [map_aggregate(item, fn) for item in a])
    if isinstance(a, list):
        return immutable_list([map_aggregate(item, fn) for item in a])
    if isinstance(a, dict):
        return immutable_dict([(key, map_aggregate(item, fn)) for key, item in a.items()])
    if isinstance(a, slice):
        return slice(
            map_aggregate(a.start, fn),
            map_aggregate(a.stop, fn),
            map_aggregate(a.step, fn),
        )
    return fn(a)


def map_plain(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to every leaf as `map_aggregate` does; lists and dicts come back as plain ones, for a call."""
    if isinstance(value, tuple):
        return rebuild_tuple(value, [map_plain(item, function) for item in value])
    if isinstance(value, list):
        return [map_plain(item, function) for item in value]
    if isinstance(value, dict):
        return {key: map_plain(item, function) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*[map_plain(item, function) for item in (value.start, value.stop, value.step)])
    return function(value)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree of values, which may have containers of any kind that torch's pytree knows.

    >>> [tensor.shape for tensor in tensors_of((1, {"a": [torch.ones(2)]}))]
    [torch.Size([2])]
    """
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree of tuples, lists, dicts and slices, in the order in which they are written.

    >>> leaves((1, [2, {"a": slice(3, None)}]))
    [1, 2, 3, None, None]
    """
    found: list[Any] = []
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, (tuple, list)):
            pending += value[::-1]
        elif isinstance(value, dict):
            pending += [*value.values()][::-1]
        elif isinstance(value, slice):
            pending += (value.step, value.stop, value.start)
        else:
            found.append(value)
    return found
