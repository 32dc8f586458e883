"""One stage of a pipeline as a module: tensors in, tensors out, whatever passes through it on its way further on among them.
How a program is cut is decided in `pipeline.py`.

Between processes only tensors travel: numbers that a later stage needs as tensors of one element, structures in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from torchgraft.errors import GraphError

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class Form:
    """How a value travels: its structure, and for each leaf the kind of number it is, or None for a tensor."""

    structure: Any
    kinds: tuple[type | None, ...]

    @property
    def width(self) -> int:
        """How many tensors it takes."""
        return len(self.kinds)

    def pack(self, value: Any, name: str) -> list[torch.Tensor]:
        """The tensors to send."""
        leaves, structure = _pytree.tree_flatten(value)
        kinds = tuple(_kind_of(leaf, name) for leaf in leaves)
        if structure != self.structure or kinds != self.kinds:
            raise GraphError(
                f"'{name}' has another structure than when the pipeline was planned: {structure}, expected {self.structure}\n"
                "  plan the pipeline with example inputs like those that it is given"
            )
        return [
            leaf if kind is None else torch.tensor(leaf, dtype=_NUMBERS[kind])
            for leaf, kind in zip(leaves, kinds, strict=True)
        ]

    def unpack(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value that was sent."""
        leaves = [
            tensor if kind is None else kind(tensor.item()) for tensor, kind in zip(tensors, self.kinds, strict=True)
        ]
        return _pytree.tree_unflatten(leaves, self.structure)


def form_of(value: Any, name: str) -> Form:
    """How a value will travel, by an example of it."""
    leaves, structure = _pytree.tree_flatten(value)
    return Form(structure, tuple(_kind_of(leaf, name) for leaf in leaves))


def _kind_of(leaf: Any, name: str) -> type | None:
    if isinstance(leaf, torch.Tensor):
        return None
    if type(leaf) in _NUMBERS:
        return type(leaf)
    raise GraphError(
        f"'{name}' cannot go from one process to another: it is a {type(leaf).__name__}\n"
        "  only tensors, numbers and structures of them can; cut the program elsewhere"
    )


class Stage(torch.nn.Module):
    """A stage of a pipeline: takes the tensors that the stage before gives, and gives those that the stage after takes.

    `part` is the piece of the program that runs here. `takes` and `gives` name the values of the program that come in and go out,
    `own` the attributes of this stage that the part is given besides (weights that several stages use). `constants` has, in the
    first stage, the inputs of the program that are the same for every micro-batch.
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

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the part, and hand on what later stages need."""
        values: dict[str, Any] = dict(self.constants)
        place = 0
        for name, form in self.takes.items():
            values[name] = form.unpack(tensors[place : place + form.width])
            place += form.width
        for name, attribute in self.own.items():
            values[name] = getattr(self, attribute)
        result = self.part(*[values[name] for name in self.part_takes])
        made = (result,) if self._is_single else result
        values |= dict(zip(self.part_gives, made, strict=True))
        return tuple([tensor for name, form in self.gives.items() for tensor in self._sent(values[name], form, name)])

    def _sent(self, value: Any, form: Form, name: str) -> list[torch.Tensor]:
        packed = form.pack(value, name)
        if name in self.takes:  # what only passes through must be another tensor for autograd than what came in
            return [tensor.view_as(tensor) for tensor in packed]
        return packed
