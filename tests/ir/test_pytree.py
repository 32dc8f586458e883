"""Taking call arguments apart into the leaves that a program was captured with.
Programs with such inputs are in tests/capturing/symbolic/test_inputs.py.
"""

import copy
import pickle
import warnings
from collections import OrderedDict, namedtuple

import pytest
from torch.utils import _pytree as pytree

from torchgraft.ir.pytree import children_of, spec_data, spec_from_data, tree_flatten_spec


def spec_of(*values):
    return pytree.tree_structure(list(values))


def test_children_of_a_spec() -> None:
    children = children_of(spec_of(1, (2, 3)))
    assert [child.num_leaves for child in children] == [1, 2]


def test_leaves_come_in_the_order_of_the_spec() -> None:
    spec = spec_of({"a": 0, "b": 0}, [0, (0,)])
    assert tree_flatten_spec([{"a": 1, "b": 2}, [3, (4,)]], spec) == [1, 2, 3, 4]


def test_what_was_a_leaf_is_handed_on_whole() -> None:
    assert tree_flatten_spec([[1, 2]], spec_of(0)) == [[1, 2]]


@pytest.mark.parametrize(
    "value", [{"a": 1}, {"a": 1, "c": 2}, [1, 2], 3], ids=["missing key", "other key", "other container", "leaf"]
)
def test_another_structure_is_refused_and_both_are_named(value) -> None:
    with pytest.raises(ValueError, match="(?s)argument 1 does not have the structure.*expected.*found.*capture again"):
        tree_flatten_spec([0, value], spec_of(0, {"a": 0, "b": 0}))


def test_too_few_values_are_refused() -> None:
    with pytest.raises(ValueError):
        tree_flatten_spec([1], spec_of(1, 2))


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [0, [], (), {}, None, [1, (2, {"a": 3, "b": [4]})], Point(1, [2]), OrderedDict(b=1, a=2)],
    ids=str,
)
def test_a_spec_as_data_comes_back_the_same(value) -> None:
    spec = pytree.tree_structure(value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data in (copy.deepcopy(spec_data(spec)), pickle.loads(pickle.dumps(spec_data(spec)))):
            again = spec_from_data(data)
            leaves = list(range(spec.num_leaves))
            assert again == spec and pytree.tree_unflatten(leaves, again) == pytree.tree_unflatten(leaves, spec)
    assert spec_from_data(spec_data(None)) is None
