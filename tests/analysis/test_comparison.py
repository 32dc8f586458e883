"""Values taken apart into leaves, and leaves compared."""

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch

from tests.names import stable
from torchgraft.analysis.comparison import Tolerance, compare, frozen_leaves, named_tensors_in, tensors_in

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Box:
    inner: object


class Cache:
    def __init__(self, keys):
        self.keys = keys


DEFAULTS = Tolerance()


def differences(expected, found, tolerance=DEFAULTS):
    return [
        str(item) for item in compare(frozen_leaves(expected, "x"), frozen_leaves(found, "x"), tolerance).differences
    ]


def test_paths():
    value = {"a": (torch.ones(1), [2]), "b": Box(Pair(1, torch.ones(2))), "c": Cache([torch.ones(3)])}
    assert [name for name, _ in named_tensors_in(value, "x")] == ["x['a'][0]", "x['b'].inner.b", "x['c'].keys[0]"]
    assert [tuple(tensor.shape) for tensor in tensors_in(value)] == [(1,), (2,), (3,)]


def test_value_that_contains_itself():
    value = [1]
    value.append(value)
    assert "x[1]" in frozen_leaves(value, "x")


def test_frozen_tensors_do_not_change():
    tensor = torch.ones(2)
    leaves = frozen_leaves([tensor], "x")
    tensor.zero_()
    assert torch.all(leaves["x[0]"].values == 1)


@pytest.mark.parametrize(
    "value",
    [
        [1, 2.0, "text", None, float("nan")],
        {"a": torch.ones(2), 1: (torch.tensor(True),)},
        torch.tensor([float("nan"), float("inf")]),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, dtype=torch.complex64),
        torch.tensor(2**53 + 1),
        Box(Cache(Pair(1, torch.ones(2)))),
    ],
    ids=stable,
)
def test_equal(value):
    assert differences(value, value) == []


@pytest.mark.parametrize(
    ("expected", "found", "text"),
    [
        ([1], (1,), "x: list with 1 entries in the model, tuple with 1 entries in the program"),
        (OrderedDict(a=1), {"a": 1}, "x: OrderedDict with 1 entries in the model, dict with 1 entries in the program"),
        (1, 1.0, "x: int 1 in the model, float 1.0 in the program"),
        (torch.ones(2), 1, "x: a tensor of shape (2,) in the model, int 1 in the program"),
        (torch.ones(2), torch.ones(2, 1), "x: shape is (2,) in the model and (2, 1) in the program"),
        (torch.ones(2), torch.ones(2).int(), "x: dtype is torch.float32 in the model and torch.int32 in the program"),
        (torch.tensor(2**53), torch.tensor(2**53 + 1), "x: 1 of 1 values differ"),
        (
            torch.tensor([1, 2]),
            torch.tensor([1, 4]),
            "x: 1 of 2 values differ, by up to 2; first at [1]: 2 in the model, 4",
        ),
        (torch.tensor([float("inf")]), torch.tensor([float("-inf")]), "x: 1 of 1 values differ, by up to inf"),
        (torch.zeros(2, 3), torch.eye(3)[:2] * 2, "x: 2 of 6 values differ, by up to 2; first at [0, 0]"),
    ],
)
def test_different(expected, found, text):
    assert differences(expected, found)[0].startswith(text)


def test_missing_containers_are_named_once():
    found = differences({"a": [1, 2]}, {})
    assert found == [
        "x: dict with 1 entries in the model, dict with 0 entries in the program",
    ]


def test_tolerance_is_a_part_of_the_largest_element():
    expected = torch.tensor([1000.0, 0.0])
    assert differences(expected, expected + torch.tensor([0.0, 0.005])) == []
    assert differences(expected, expected + torch.tensor([0.0, 0.05]))
    assert differences(expected, expected + 0.05, Tolerance(atol=0.1)) == []
    assert differences(expected, expected + 0.05, Tolerance(rtol=0.1))
