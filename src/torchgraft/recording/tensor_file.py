"""Tensors written to a safetensors file one after the other, each when it is there, and read back one by one.
The format is a header (eight bytes of length, JSON, spaces) and the bytes of the tensors without gaps. What a recording puts into
such a file is decided in `record.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import torch

from torchgraft.analysis.comparison import comparable, has_values
from torchgraft.errors import GraftError
from torchgraft.results.files import named_errors, whole_file

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip

_BYTES_PER_ENTRY = 256
_RESERVED = "__metadata__"


class TensorWriter:
    """Writes tensors into an open file. Nothing of a tensor is kept once it is written."""

    def __init__(self, path: str | PathLike[str], file: BinaryIO, expected: int) -> None:
        self._path = path
        self._file = file
        self._room = 1024 + _BYTES_PER_ENTRY * expected
        self._entries: dict[str, dict[str, Any]] = {}
        self._end = 0
        # A tensor must start at a multiple of its element's size. What would leave the next one badly placed waits here, by
        # the size of its elements, and is put behind the others: the larger elements first.
        self._odd: dict[int, tuple[BinaryIO, list[str]]] = {}
        with named_errors(path):
            file.write(b" " * (8 + self._room))

    def write(self, name: str, tensor: torch.Tensor) -> str:
        """Write one tensor; says what is different about it in the file, if anything is."""
        if name == _RESERVED or name in self._entries:
            raise GraftError(f"cannot write a tensor under the name '{name}': it is taken\nrename the node")
        stored, note = storable(tensor)
        size, length = stored.element_size(), stored.numel() * stored.element_size()
        self._entries[name] = {"dtype": _NAMES[stored.dtype], "shape": list(stored.shape), "data_offsets": [0, length]}
        with named_errors(self._path):
            if length % 8 == 0:
                self._place(name, length)
                _write_bytes(self._file, stored)
                return note
            if size not in self._odd:
                self._odd[size] = tempfile.TemporaryFile(), []  # noqa: SIM115 (see close)
            waiting, names = self._odd[size]
            names.append(name)
            _write_bytes(waiting, stored)
        return note

    def _place(self, name: str, length: int) -> None:
        self._entries[name]["data_offsets"] = [self._end, self._end + length]
        self._end += length

    def finish(self, metadata: dict[str, str]) -> None:
        """Put the header in its place."""
        with named_errors(self._path):
            self._finish(metadata)

    def _finish(self, metadata: dict[str, str]) -> None:
        for size in sorted(self._odd, reverse=True):
            waiting, names = self._odd[size]
            for name in names:
                self._place(name, self._entries[name]["data_offsets"][1])
            waiting.seek(0)
            shutil.copyfileobj(waiting, self._file, 1 << 20)
        text = json.dumps({_RESERVED: metadata, **self._entries}).encode()
        if len(text) > self._room:
            self._make_room(-(-len(text) // 8) * 8)
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + text.ljust(self._room))

    def _make_room(self, length: int) -> None:
        """Move the data so that a longer header fits before it, a block at a time from the end."""
        start, step = 8 + self._room, 1 << 20
        for offset in range((max(self._end, 1) - 1) // step * step, -1, -step):
            self._file.seek(start + offset)
            block = self._file.read(min(step, self._end - offset))
            self._file.seek(8 + length + offset)
            self._file.write(block)
        self._room = length

    def close(self) -> None:
        """Give back what was only needed on the way."""
        for waiting, _ in self._odd.values():
            waiting.close()


@contextlib.contextmanager
def tensor_file(path: str | PathLike[str], expected: int) -> Iterator[TensorWriter]:
    """A writer for a file that is there when the block ends and not at all when it raises; `expected` is about how many."""
    if sys.byteorder != "little":
        raise GraftError("cannot write safetensors on this machine: its numbers start with the high byte")
    with whole_file(path) as file:
        writer = TensorWriter(path, file, expected)
        try:
            yield writer
        finally:
            writer.close()


def storable(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The tensor as the file can hold it, on the CPU and in one piece, and what was changed about it.

    >>> storable(torch.eye(2).to_sparse())[1]
    'sparse_coo, stored dense'
    """
    plain = tensor.detach()
    if not has_values(plain):
        return torch.empty(0, dtype=torch.uint8, device="cpu"), f"{plain.device.type}, has no values"
    note = ""
    if plain.is_nested:
        plain, note = comparable(plain).to(plain.dtype), "nested, stored as one row"
    elif plain.is_quantized:
        plain, note = plain.dequantize(), f"{str(plain.dtype).removeprefix('torch.')}, stored dequantized"
    elif plain.layout is not torch.strided:
        plain, note = plain.to_dense(), f"{str(plain.layout).removeprefix('torch.')}, stored dense"
    if plain.dtype not in _NAMES:
        name = str(plain.dtype).removeprefix("torch.")
        if plain.is_complex():
            plain, note = torch.view_as_real(plain.resolve_conj()), f"{name}, stored as pairs of real numbers"
        else:
            plain, note = plain.to(torch.float32), f"{name}, stored as float32"
    return plain.resolve_conj().resolve_neg().cpu().contiguous(), note


def _write_bytes(file: BinaryIO, tensor: torch.Tensor) -> None:
    length = tensor.numel() * tensor.element_size()
    if length:
        # The memory itself: without numpy, torch offers no other way that makes no copy.
        file.write(memoryview((ctypes.c_char * length).from_address(tensor.data_ptr())))


def read_tensor(path: str | PathLike[str], name: str) -> torch.Tensor:
    """One tensor of a safetensors file."""
    with _opened(path) as file:
        return file.get_tensor(name)


def _opened(path: str | PathLike[str]) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise GraftError(
            f"cannot read '{Path(path)}': the package safetensors is not installed\ninstall it with: pip install safetensors"
        ) from error
    return safe_open(path, framework="pt")
