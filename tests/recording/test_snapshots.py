"""Memory for copies: pieces do not overlap, live as long as they are referred to, and are used again afterwards."""

from __future__ import annotations

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgraft.recording import snapshots
from torchgraft.recording.snapshots import Room


def taken(space: Room, length: int) -> torch.Tensor:
    storage, start = space.place(length)
    return torch.empty(0, dtype=torch.uint8).set_(storage)[start : start + length]


@given(st.lists(st.integers(0, 3_000_000), max_size=20))
@settings(max_examples=20)
def test_pieces_do_not_overlap(lengths) -> None:
    space = Room()
    pieces = [taken(space, length) for length in lengths]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert [len(piece) for piece in pieces] == lengths
    assert all(bool(piece.eq(number).all()) for number, piece in enumerate(pieces))
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)


def test_large_tensors_have_a_piece_of_their_own() -> None:
    piece = taken(Room(), 70 << 20)
    piece[-1] = 7
    assert len(piece) == 70 << 20 and int(piece[-1]) == 7


def test_memory_is_used_again_only_when_nobody_refers_to_it() -> None:
    first = taken(Room(), 1000).fill_(5)
    view = first[10:20].view(torch.int16)
    address = first.data_ptr()
    del first
    gc.collect()
    other = taken(Room(), 1000).fill_(9)
    assert other.data_ptr() != address and view.eq(0x0505).all()
    del view, other
    gc.collect()
    idle = sum(size * len(pieces) for size, pieces in snapshots._idle.items())
    assert idle <= snapshots._MOST_IDLE
