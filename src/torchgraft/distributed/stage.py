"""One stage of a pipeline as a module: tensors in, tensors out, whatever passes through it on its way further on among them.
How a program is cut is decided in `pipeline.py`.

Between processes only tensors travel: numbers that a later stage needs as tensors of one element, structures in pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.utils import _pytree

from torchgraft.errors import GraphError

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
# What has no place in a tensor and is the same in every run, or the pipeline is not for it.
_FIXED = (type(None), str, torch.dtype, torch.layout, torch.memory_format)


@dataclass(frozen=True, eq=False)
class Form:
    """How a value travels: its structure, and for each leaf how it does: a tensor as it is, a number as a tensor, a device not at
    all (it is that of the stage that asks), and anything else not at all because it is known."""

    skeleton: Any  # the value with 0 for every leaf
    kinds: tuple[Any, ...]

    @functools.cached_property
    def _structure(self) -> Any:
        return _pytree.tree_flatten(self.skeleton)[1]

    @property
    def width(self) -> int:
        """How many tensors it takes."""
        return sum(kind is torch.Tensor or kind in _NUMBERS for kind in self.kinds)

    def __getstate__(self) -> dict[str, Any]:
        return {"skeleton": self.skeleton, "kinds": self.kinds}  # structures of torch warn where they are unpickled

    def pack(self, value: Any, name: str) -> list[torch.Tensor]:
        """The tensors to send."""
        leaves, structure = _pytree.tree_flatten(value)
        kinds = tuple(_kind_of(leaf, name) for leaf in leaves)
        if structure != self._structure or kinds != self.kinds:
            raise GraphError(
                f"'{name}' is something else than when the pipeline was planned: {kinds}, expected {self.kinds}\n"
                "  plan the pipeline with example inputs like those that it is given"
            )
        packed = []
        for leaf, kind in zip(leaves, kinds, strict=True):
            if kind is torch.Tensor:
                packed.append(leaf)
            elif kind in _NUMBERS:
                packed.append(torch.tensor(leaf, dtype=_NUMBERS[kind]))
        return packed

    def unpack(self, tensors: Sequence[torch.Tensor], device: torch.device) -> Any:
        """The value that was sent, to a stage on this device."""
        given = iter(tensors)
        leaves: list[Any] = []
        for kind in self.kinds:
            if kind is torch.Tensor:
                leaves.append(next(given))
            elif kind in _NUMBERS:
                leaves.append(kind(next(given).item()))
            else:
                leaves.append(device if kind is torch.device else kind)
        return _pytree.tree_unflatten(leaves, self._structure)


def form_of(value: Any, name: str) -> Form:
    """How a value will travel, by an example of it."""
    kinds = tuple(_kind_of(leaf, name) for leaf in _pytree.tree_leaves(value))
    return Form(_pytree.tree_map(lambda leaf: 0, value), kinds)


def _kind_of(leaf: Any, name: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.Tensor
    if type(leaf) in _NUMBERS:
        return type(leaf)
    if isinstance(leaf, torch.device):
        return torch.device
    if isinstance(leaf, _FIXED):
        return leaf
    raise GraphError(
        f"'{name}' cannot go from one process to another: it is a {type(leaf).__name__}\n"
        "  only tensors, numbers and structures of them can\n"
        "  have the model give none (of a cache: use_cache=False), or cut it elsewhere"
    )


def looks(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """A tensor in words."""
    return f"{str(dtype).removeprefix('torch.')} of {tuple(shape)}"


class Stage(torch.nn.Module):
    """A stage of a pipeline: takes the tensors that the stage before gives, and gives those that the stage after takes.

    `part` is the piece of the program that runs here. `takes` and `gives` name the values of the program that come in and go out,
    `own` the attributes of this stage that the part is given besides (weights that several stages use). `constants` has, in the
    first stage, the inputs of the program that are the same for every micro-batch.

    >>> from torchgraft.distributed import pipeline
    >>> layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    >>> first, last = pipeline(layers, torch.randn(2, 8), stages=2).stages
    >>> last(*first(torch.randn(2, 8)))[0].shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        part: torch.nn.Module,
        part_takes: Sequence[str],
        part_gives: Sequence[str],
        takes: dict[str, Form],
        gives: dict[str, Form],
        is_single: bool,
    ) -> None:
        super().__init__()
        self.part = part
        self.part_takes, self.part_gives = tuple(part_takes), tuple(part_gives)
        self.takes, self.gives = takes, gives
        self.own: dict[str, str] = {}
        self._is_single = is_single
        self.constants: dict[str, Any] = {}
        # What another process expects, as tensors without data; None in one process, where views may be handed on.
        self.sends: tuple[torch.Tensor, ...] | None = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the part, and hand on what later stages need."""
        values: dict[str, Any] = dict(self.constants)
        place, device = 0, tensors[0].device if tensors else torch.device("cpu")
        for name, form in self.takes.items():
            values[name] = form.unpack(tensors[place : place + form.width], device)
            place += form.width
        for name, attribute in self.own.items():
            values[name] = attrgetter(attribute)(self)
        result = self.part(*[values[name] for name in self.part_takes])
        made = (result,) if self._is_single else result
        values |= dict(zip(self.part_gives, made, strict=True))
        expected = iter(self.sends or ())
        return tuple(
            [
                self._as_expected(tensor, next(expected, tensor), name)
                for name, form in self.gives.items()
                for tensor in self._sent(values[name], form, name)
            ]
        )

    @staticmethod
    def _as_expected(tensor: torch.Tensor, expected: torch.Tensor, name: str) -> torch.Tensor:
        # Bytes are sent without a word about what they are: other ones would be taken for numbers of the wrong kind.
        if tensor.dtype is expected.dtype and tensor.shape == expected.shape:
            return tensor
        raise GraphError(
            f"'{name}' goes to another stage as {looks(tensor.dtype, tensor.shape)}, and the pipeline was planned for "
            f"{looks(expected.dtype, expected.shape)}\n"
            "  plan it with the dtypes of weights and inputs, the autocast and the micro-batches with which it runs"
        )

    def _sent(self, value: Any, form: Form, name: str) -> list[torch.Tensor]:
        packed = form.pack(value, name)
        if self.sends is not None:
            packed = [tensor.contiguous() for tensor in packed]
        if name in self.takes:  # what only passes through must be another tensor for autograd than what came in
            return [tensor.view_as(tensor) for tensor in packed]
        return packed
