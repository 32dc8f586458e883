"""Safetensors files written one tensor at a time: any dtype and shape comes back, aligned, and nothing is left on failure."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from torchgraft.errors import GraftError
from torchgraft.recording.tensor_file import _NAMES, read_tensor, storable, tensor_file


def header(path) -> dict:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length])


@st.composite
def tensors(draw) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(sorted(_NAMES, key=str)))
    numbers = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    tensor = numbers.to(torch.float32).to(dtype)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


@given(st.lists(tensors(), max_size=12))
@settings(max_examples=60)
def test_what_is_written_can_be_read(tmp_path_factory, values) -> None:
    path = tmp_path_factory.mktemp("a") / "a.safetensors"
    with tensor_file(path, len(values)) as writer:
        for number, value in enumerate(values):
            writer.write(f"t{number}", value)
        writer.finish({"format": "pt"})
    loaded = load_file(path)
    assert set(loaded) == {f"t{number}" for number in range(len(values))}
    for number, value in enumerate(values):
        found = loaded[f"t{number}"]
        assert found.dtype == value.dtype and found.shape == value.shape
        assert torch.equal(found.to(torch.complex64), value.to(torch.complex64))
        assert torch.equal(read_tensor(path, f"t{number}").to(torch.complex64), value.to(torch.complex64))


@given(st.lists(tensors(), min_size=1, max_size=12))
@settings(max_examples=40)
def test_every_tensor_starts_at_a_multiple_of_its_elements(tmp_path_factory, values) -> None:
    path = tmp_path_factory.mktemp("a") / "a.safetensors"
    with tensor_file(path, 3) as writer:
        for number, value in enumerate(values):
            writer.write(f"t{number}", value)
        writer.finish({})
    start = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    entries = header(path)
    assert start % 8 == 0
    for number, value in enumerate(values):
        assert (start + entries[f"t{number}"]["data_offsets"][0]) % min(value.element_size(), 8) == 0


def test_a_header_longer_than_was_expected(tmp_path) -> None:
    path = tmp_path / "a.safetensors"
    with tensor_file(path, 1) as writer:
        for number in range(400):
            writer.write(f"a tensor with a long name {number}", torch.full((1000,), float(number)))
        writer.finish({"format": "pt", "more": "x" * 100_000})
    loaded = load_file(path)
    assert len(loaded) == 400 and all(
        loaded[f"a tensor with a long name {number}"].eq(number).all() for number in range(400)
    )


def test_an_empty_file_and_empty_tensors(tmp_path) -> None:
    with tensor_file(tmp_path / "a", 0) as writer:
        writer.finish({})
    assert load_file(tmp_path / "a") == {}
    with tensor_file(tmp_path / "b", 1) as writer:
        writer.write("zero", torch.zeros(0, 7))
        writer.finish({"x": "y" * 5000})
    assert load_file(tmp_path / "b")["zero"].shape == (0, 7)


def test_names_that_are_taken(tmp_path) -> None:
    with pytest.raises(GraftError, match="under the name '__metadata__': it is taken"):
        with tensor_file(tmp_path / "a", 1) as writer:
            writer.write("__metadata__", torch.ones(1))
    with pytest.raises(GraftError, match="under the name 'x': it is taken"):
        with tensor_file(tmp_path / "a", 1) as writer:
            writer.write("x", torch.ones(1))
            writer.write("x", torch.ones(1))
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_stored_as_it_is() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert storable(nested)[1] == "nested, stored as one row" and storable(nested)[0].shape == (5,)
    csr = torch.eye(3).to_sparse_csr()
    assert storable(csr)[1] == "sparse_csr, stored dense" and torch.equal(storable(csr)[0], torch.eye(3))
    assert storable(torch.ones(2, device="meta"))[1] == "meta, has no values"
    negative = torch._neg_view(torch.ones(3))
    assert storable(negative)[0].eq(-1).all()


def test_an_interruption_leaves_nothing(tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt):
        with tensor_file(tmp_path / "a", 1) as writer:
            writer.write("x", torch.ones(1))
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
