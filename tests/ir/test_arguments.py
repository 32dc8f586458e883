"""Argument trees: containers that refuse to change, and the walk that keeps their kinds.
Nodes inside trees are in test_node.py.
"""

import copy
import pickle
from typing import NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from torchgraft.ir.arguments import immutable_dict, immutable_list, map_aggregate, rebuild_tuple


class Pair(NamedTuple):
    first: object
    second: object


LIST_EDITS = {
    "append": lambda value: value.append(1),
    "clear": lambda value: value.clear(),
    "extend": lambda value: value.extend([1]),
    "insert": lambda value: value.insert(0, 1),
    "pop": lambda value: value.pop(),
    "remove": lambda value: value.remove(1),
    "reverse": lambda value: value.reverse(),
    "sort": lambda value: value.sort(),
    "setitem": lambda value: value.__setitem__(0, 1),
    "delitem": lambda value: value.__delitem__(0),
    "iadd": lambda value: value.__iadd__([1]),
    "imul": lambda value: value.__imul__(2),
}
DICT_EDITS = {
    "clear": lambda value: value.clear(),
    "pop": lambda value: value.pop("a"),
    "popitem": lambda value: value.popitem(),
    "setdefault": lambda value: value.setdefault("b", 1),
    "update": lambda value: value.update(b=1),
    "setitem": lambda value: value.__setitem__("a", 1),
    "delitem": lambda value: value.__delitem__("a"),
    "ior": lambda value: value.__ior__({"b": 1}),
}


@pytest.mark.parametrize("edit", LIST_EDITS.values(), ids=LIST_EDITS)
def test_a_list_refuses_every_edit_and_stays_as_it_was(edit) -> None:
    value = immutable_list([1, 2])
    with pytest.raises(TypeError, match="'immutable_list' object does not support mutation.*assign it to node.args"):
        edit(value)
    assert value == [1, 2]


@pytest.mark.parametrize("edit", DICT_EDITS.values(), ids=DICT_EDITS)
def test_a_dict_refuses_every_edit_and_stays_as_it_was(edit) -> None:
    value = immutable_dict({"a": 1})
    with pytest.raises(TypeError, match="'immutable_dict' object does not support mutation.*node.kwargs"):
        edit(value)
    assert value == {"a": 1}


def test_every_method_that_changes_a_list_or_dict_is_refused() -> None:
    """A method that a later Python adds must not slip through unnoticed."""
    reading = {"copy", "count", "index", "fromkeys", "get", "items", "keys", "values"}
    for kind, plain, edits in ((immutable_list, list, LIST_EDITS), (immutable_dict, dict, DICT_EDITS)):
        public = {name for name in vars(plain) if not name.startswith("_")}
        assert public - reading <= set(edits), kind


def test_reading_gives_plain_containers_that_may_change() -> None:
    assert type(immutable_list([1]) * 2) is list
    assert type(immutable_list([1]).copy()) is list
    assert type(immutable_dict(a=1) | {"b": 2}) is dict
    assert type(immutable_dict(a=1).copy()) is dict


@pytest.mark.parametrize("value", [immutable_list([1, (2, 3)]), immutable_dict(a=1, b=(2,))], ids=["list", "dict"])
def test_equal_containers_have_equal_hashes(value) -> None:
    assert hash(value) == hash(type(value)(value))
    assert len({value, type(value)(value)}) == 1


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_stay_immutable(duplicate) -> None:
    value = immutable_list([1, immutable_dict(a=immutable_list([2]))])
    result = duplicate(value)
    assert result == value
    assert type(result) is immutable_list
    assert type(result[1]) is immutable_dict
    assert type(result[1]["a"]) is immutable_list


def test_trees_of_torch_look_inside_and_rebuild() -> None:
    value = immutable_list([1, immutable_dict(a=2)])
    leaves, spec = pytree.tree_flatten(value)
    assert leaves == [1, 2]
    rebuilt = pytree.tree_unflatten(leaves, spec)
    assert type(rebuilt) is immutable_list
    assert type(rebuilt[1]) is immutable_dict


def test_paths_through_containers_are_known_to_torch() -> None:
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(immutable_list([immutable_dict(a=1)]))[0]]
    assert paths == ["[0]['a']"]


class TestRebuildTuple:
    def test_plain(self) -> None:
        assert rebuild_tuple((1, 2), [3, 4]) == (3, 4)

    def test_named(self) -> None:
        assert rebuild_tuple(Pair(1, 2), [3, 4]) == Pair(3, 4)

    def test_size_of_numbers_stays_a_size(self) -> None:
        assert type(rebuild_tuple(torch.Size([1]), [2])) is torch.Size

    def test_size_with_something_else_in_it_becomes_a_tuple(self) -> None:
        assert rebuild_tuple(torch.Size([1]), ["n"]) == ("n",)


class TestMapAggregate:
    def test_every_leaf_is_visited_once_in_order(self) -> None:
        seen = []
        map_aggregate((1, [2, {"a": 3}], slice(4, 5, 6), Pair(7, 8)), seen.append)
        assert seen == [1, 2, 3, 4, 5, 6, 7, 8]

    def test_kinds_of_containers_are_kept_and_made_immutable(self) -> None:
        result = map_aggregate((1, [2, {"a": 3}], slice(4, None), Pair(7, 8)), lambda leaf: leaf and leaf + 1)
        assert result == (2, [3, {"a": 4}], slice(5, None), Pair(8, 9))
        assert type(result[1]) is immutable_list
        assert type(result[1][1]) is immutable_dict
        assert type(result[3]) is Pair

    def test_keys_of_dicts_are_left_alone(self) -> None:
        assert map_aggregate({1: 1}, lambda leaf: leaf * 10) == {1: 10}

    def test_a_leaf_alone(self) -> None:
        assert map_aggregate(3, lambda leaf: leaf + 1) == 4
