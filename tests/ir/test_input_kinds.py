"""Descriptions of inputs: what fits each of them, what does not and in which words, and which values they fix."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torchgraft.ir.input_kinds import class_name, fixed_values, is_instance, misfit, object_kind


@dataclass
class Pair:
    """An object with attributes."""

    first: Any
    second: Any


class OwnTensor(torch.Tensor):
    """A class of tensors of its own."""


X = torch.ones(2)
LABELLED = torch.ones(2)
LABELLED.label = "cat"  # type: ignore[attr-defined]
PAIR = object_kind(Pair, {"first": "tensor", "second": 3})

FITTING = [
    ("tensor", X),
    ("tensor", torch.nn.Parameter(X)),
    ("int", 3),
    ("float", 0.5),
    ("any", Ellipsis),
    (None, None),
    (True, True),
    (torch.float32, torch.float32),
    (("=", "mean"), "mean"),
    (("tuple", "tensor", "int"), (X, 3)),
    (("list", "tensor"), [X]),
    ({"a": "tensor"}, {"a": X}),
    (PAIR, Pair(X, 3)),
    (object_kind(dict, {1: "tensor"}), {1: X}),
    (object_kind(OwnTensor, {}), X.as_subclass(OwnTensor)),
]


@pytest.mark.parametrize(("expected", "value"), FITTING, ids=lambda item: repr(item)[:40])
def test_what_fits(expected: Any, value: Any) -> None:
    assert misfit(expected, value, "x") is None


@pytest.mark.parametrize(
    ("expected", "value", "words"),
    [
        ("tensor", 5, ("x", "a tensor", "5")),
        ("tensor", X.as_subclass(OwnTensor), ("x", "a tensor", "a tensor of the class OwnTensor")),
        ("tensor", LABELLED, ("x", "a tensor without attributes", "one with the attribute 'label'")),
        ("int", 3.0, ("x", "a number of type int", "3.0")),
        ("int", True, ("x", "a number of type int", "True")),
        (None, X, ("x", "None", "a tensor")),
        (1, True, ("x", "1", "True")),
        (("=", "mean"), "sum", ("x", "'mean'", "'sum'")),
        (("tuple", "tensor"), [X], ("x", "a tuple", "a list")),
        (("tuple", "tensor"), (X, X), ("x", "something with 1 parts [0]", "one with 2 [0, 1]")),
        ({"a": "tensor"}, {"b": X}, ("x", "something with 1 parts ['a']", "one with 1 ['b']")),
        ({"a": ("list", "tensor")}, {"a": [None]}, ("x['a'][0]", "a tensor", "None")),
        (PAIR, Pair(X, 4), ("x['second']", "3", "4")),
        (PAIR, (X, 3), ("x", "a Pair", "a tuple")),
    ],
    ids=lambda item: repr(item)[:40],
)
def test_what_does_not_fit(expected: Any, value: Any, words: tuple[str, str, str]) -> None:
    assert misfit(expected, value, "x") == words


@pytest.mark.parametrize("expected", [expected for expected, _ in FITTING], ids=repr)
def test_descriptions_are_plain(expected: Any) -> None:
    assert eval(repr(expected), {"torch": torch}) == expected


def test_fixed_values_are_those_that_are_no_kinds() -> None:
    expected = {"x": "tensor", "n": "int", "mask": None, "items": ("list", "tensor", ("=", "a")), "pair": PAIR}
    assert dict(fixed_values(expected)) == {"mask": None, "items[1]": "a", "pair['second']": 3}


@pytest.mark.parametrize("kind", [int, bool, dict, torch.Tensor, torch.nn.Parameter, Pair])
def test_classes_are_known_by_name(kind: type) -> None:
    values = [3, True, {}, X, torch.nn.Parameter(X), Pair(1, 2)]
    assert [is_instance(value, class_name(kind)) for value in values] == [isinstance(value, kind) for value in values]
