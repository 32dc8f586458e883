"""What a trap is: a name, a function that builds the model, inputs at any size, and the other inputs it is tried on.
The programs themselves are in the files named after what they trap; how they are judged is in `runner.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Inputs = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(value: Any) -> Call:
        """Inputs are written as a tuple of arguments, one tensor, or a Call where keywords are needed."""
        if isinstance(value, Call):
            return value
        return Call(value) if type(value) is tuple else Call((value,))


def matrix(n: int = 3) -> torch.Tensor:
    """The input of a program that names none: `n` rows of four numbers."""
    return torch.randn(n, 4)


@dataclass(frozen=True)
class Trap:
    """One program and what it is tried on.

    `inputs` is called with the size `example` for the capture and with each of `sizes` afterwards; `others` are inputs of a
    special kind, by name. `mode` is the mode in which the model is captured. `skip` names variations that make no sense.
    """

    name: str
    build: Callable[[], Any]
    inputs: Inputs = matrix
    others: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    example: int = 3
    sizes: tuple[int, ...] = (5, 1, 0)
    mode: str = "train"
    devices: bool = False
    skip: frozenset[str] = frozenset()

    @functools.cached_property
    def is_module(self) -> bool:
        """Whether the program is a module, which has a mode and can be cast."""
        return isinstance(self.build(), nn.Module)


class Collection(list[Trap]):
    """The traps of one file; the decorators put a model or a function into it. `defaults` hold for all of them."""

    def __init__(self, **defaults: Any) -> None:
        super().__init__()
        self._defaults = defaults

    def add(self, name: str, build: Callable[[], Any], **options: Any) -> None:
        """Add the program that `build` makes."""
        self.append(Trap(name, build, **{**self._defaults, **options}))

    def model(self, name: str, **options: Any) -> Callable[[Any], Any]:
        """Add a class of modules, built without arguments."""

        def decorate(cls: Any) -> Any:
            self.add(name, cls, **options)
            return cls

        return decorate

    def function(self, name: str, **options: Any) -> Callable[[Any], Any]:
        """Add a plain function."""

        def decorate(function: Any) -> Any:
            self.add(name, lambda: function, **options)
            return function

        return decorate
