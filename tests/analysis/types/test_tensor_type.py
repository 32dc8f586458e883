"""TensorType and Dyn beside torch.fx's own."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import tensor_type as theirs

import torchgraft.tensor_type
from torchgraft.analysis.types.tensor_type import Dyn, TensorType, is_consistent, is_more_precise, meet

sizes = st.one_of(st.just("Dyn"), st.integers(1, 3))
shapes = st.one_of(st.just("Dyn"), st.lists(sizes, max_size=3))


def ours(shape: object) -> object:
    return Dyn if shape == "Dyn" else TensorType(tuple(Dyn if size == "Dyn" else size for size in shape))


def their(shape: object) -> object:
    if shape == "Dyn":
        return theirs.Dyn
    return theirs.TensorType(tuple(theirs.Dyn if size == "Dyn" else size for size in shape))


@given(shapes, shapes)
def test_the_relations_are_those_of_torch_fx(first: object, second: object) -> None:
    assert is_consistent(ours(first), ours(second)) == theirs.is_consistent(their(first), their(second))
    assert is_more_precise(ours(first), ours(second)) == theirs.is_more_precise(their(first), their(second))
    assert (ours(first) == ours(second)) == (their(first) == their(second))
    assert repr(ours(first)) == repr(their(first))


@given(shapes, shapes)
def test_what_both_say_is_more_precise_than_either(first: object, second: object) -> None:
    if is_consistent(ours(first), ours(second)):
        both = meet(ours(first), ours(second))
        assert is_more_precise(both, ours(first)) and is_more_precise(both, ours(second))


def test_subscripts_hashes_and_copies() -> None:
    assert TensorType[1, Dyn] == TensorType((1, Dyn)) and TensorType[3] == TensorType((3,))
    assert len({TensorType((1, Dyn)), TensorType([1, Dyn]), Dyn, Dyn}) == 2
    assert copy.deepcopy(Dyn) is Dyn and pickle.loads(pickle.dumps(Dyn)) is Dyn
    assert pickle.loads(pickle.dumps(TensorType((1, Dyn)))) == TensorType((1, Dyn))
    assert TensorType((1,)) != (1,)


@pytest.mark.parametrize("name", ["Dyn", "TensorType", "is_consistent", "is_more_precise"])
def test_the_module_path_of_torch_fx(name: str) -> None:
    assert getattr(torchgraft.tensor_type, name) is globals()[name]
