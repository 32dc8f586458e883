"""Plain data: what is encoded decodes to the same, is JSON, and what cannot be decoded says so."""

from __future__ import annotations

import enum
import json
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgraft.view.plain import decode, encode, readable, uses_in


class Point(NamedTuple):
    x: int
    y: int


class Colour(enum.Enum):
    RED = 1


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.sampled_from(
        [torch.float16, torch.strided, torch.channels_last, torch.device("cpu"), ..., range(1, 9, 2), torch.relu, int]
    ),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers()),
    st.lists(st.integers(0, 5)).map(torch.Size),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=40)
@given(trees)
def test_round_trip(value) -> None:
    encoded = encode(value, lambda node: None)
    text = json.dumps(encoded, allow_nan=False)
    again = decode(json.loads(text), lambda key: None)
    assert repr(again) == repr(value) and type(again) is type(value)
    json.dumps(readable(value), allow_nan=False)


def test_names_of_importable_things() -> None:
    assert encode(Point(1, 2), lambda node: None) == {"namedtuple": [f"{Point.__module__}.Point", 1, 2]}
    assert decode({"namedtuple": ["torch.Size", [1, 2]]}, lambda key: None) == torch.Size([1, 2])
    assert decode({"enum": ["enum.FlagBoundary", "KEEP"]}, lambda key: None) is enum.FlagBoundary.KEEP
    assert encode(Colour.RED, lambda node: None) == {"enum": [f"{Colour.__module__}.Colour", "RED"]}


def test_uses() -> None:
    tree = [
        {"input": 0},
        {"tuple": [{"input": 1}, {"dict": [["a", {"input": 2}]]}]},
        {"slice": [None, {"input": 3}, None]},
    ]
    assert uses_in(tree) == [0, 1, 2, 3]
    assert decode(tree, lambda key: f"node{key}") == ["node0", ("node1", {"a": "node2"}), slice(None, "node3", None)]


@pytest.mark.parametrize(
    "value",
    [
        *({"dtype": "float7"}, {"dtype": 3}, {"function": "torch.nothing"}, {"nothing": 1}, {}, {"a": 1, "b": 2}),
        *(
            {"slice": 3},
            {"object": "<thing>"},
            {"enum": ["enum.FlagBoundary", "NO"]},
            {"dict": [1]},
            {"device": "moon"},
        ),
        {"float": "x"},
    ],
)
def test_what_cannot_be_decoded(value) -> None:
    with pytest.raises(ValueError):
        decode([value], lambda key: None)


def test_a_value_that_cannot_be_shown() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert encode(Broken(), lambda node: None) == {"object": "<Broken>"} and readable([Broken()]) == ["<Broken>"]


def test_objects_are_shown_on_one_short_line() -> None:
    class Long:
        def __repr__(self) -> str:
            return "long\n" * 100

    (text,) = encode(Long(), lambda node: None).values()
    assert len(text) == 120 and "\n" not in text
    assert readable(math.nan) == "nan" and readable({1: (Long(),)})["1"][0].endswith("...")
