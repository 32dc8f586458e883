"""What a layer can be computed in: the numbers its weights and inputs become, and the schemes that have names.
Which layer gets which scheme is said by a `Config`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from torchgraft.errors import QuantizeError, suggestion

PER = ("tensor", "channel", "group", "row")
KINDS = ("int", "float8")
CASTS = ("bfloat16", "float16")
_KINDS_OF_VALUES = {bool: "true or false", int: "a whole number"}


@dataclass(frozen=True)
class Numbers:
    """A kind of numbers: how many bits, whether around zero, and for how many values one scale is.

    >>> Numbers(8, per="channel", symmetric=True, signed=True).range
    (-127, 127)
    >>> Numbers(7).range, Numbers(7).dtype
    ((0, 127), torch.uint8)
    """

    bits: int = 8
    symmetric: bool = False
    signed: bool = False
    per: str = "tensor"
    group: int = 0
    kind: str = "int"

    def __post_init__(self) -> None:
        for name in ("bits", "group", "symmetric", "signed"):
            expected = bool if name in ("symmetric", "signed") else int
            if type(getattr(self, name)) is not expected:
                raise QuantizeError(f"expected {_KINDS_OF_VALUES[expected]} for {name}, got {getattr(self, name)!r}")
        if self.kind not in KINDS:
            raise QuantizeError(f"unknown kind of numbers {self.kind!r}\nuse one of: {', '.join(KINDS)}")
        if self.kind == "int" and not 2 <= self.bits <= 8:
            raise QuantizeError(f"cannot use integers of {self.bits} bits\nuse 2 to 8")
        if self.per not in PER:
            raise QuantizeError(f"unknown spread of scales {self.per!r}\nuse one of: {', '.join(PER)}")
        if (self.per == "group") != (self.group > 0):
            raise QuantizeError('groups need a size, and only they have one\nwrite Numbers(per="group", group=128)')

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest step."""
        if self.kind == "float8":
            return -448, 448
        if not self.signed:
            return 0, 2**self.bits - 1
        half = 2 ** (self.bits - 1)
        # Four bits cannot spare one of their sixteen steps.
        return (1 - half if self.symmetric and self.bits > 4 else -half), half - 1

    @property
    def dtype(self) -> torch.dtype:
        """The type of the plain tensor that holds the steps."""
        if self.kind == "float8":
            return torch.float8_e4m3fn
        return torch.int8 if self.signed else torch.uint8


@dataclass(frozen=True)
class Scheme:
    """How a layer is computed: the numbers of its weights and of its inputs, `None` for those that stay floats.

    `dynamic` inputs get their scale when the program runs, others by the `observer` that watched the calibration data; `cast`
    computes the layer in another type of floats instead.

    >>> scheme("weight-int4").weights
    Numbers(bits=4, symmetric=False, signed=False, per='group', group=32, kind='int')
    """

    weights: Numbers | None = None
    inputs: Numbers | None = None
    dynamic: bool = False
    observer: str = "histogram"
    cast: str | None = None

    def __post_init__(self) -> None:
        for name in ("weights", "inputs"):
            if not isinstance(getattr(self, name), Numbers | None):
                raise QuantizeError(f"expected Numbers for {name}, got {getattr(self, name)!r}")
        if self.cast is not None and self.cast not in CASTS:
            raise QuantizeError(f"cannot cast to {self.cast!r}\nuse one of: {', '.join(CASTS)}")

    @property
    def is_static(self) -> bool:
        """Whether it needs calibration data."""
        return self.inputs is not None and not self.dynamic

    @property
    def is_float(self) -> bool:
        """Whether it leaves the layer as it is."""
        return self.weights is None and self.inputs is None and self.cast is None


_WEIGHTS = Numbers(8, symmetric=True, signed=True, per="channel")
_INPUTS = Numbers(8)
_FLOAT8 = Numbers(8, symmetric=True, signed=True, kind="float8")

NAMED: dict[str, Scheme] = {
    "float": Scheme(),
    "static-int8": Scheme(_WEIGHTS, _INPUTS),
    "static-int7": Scheme(_WEIGHTS, Numbers(7)),
    "static-int8-symmetric": Scheme(_WEIGHTS, Numbers(8, symmetric=True, signed=True)),
    "static-int8-per-tensor": Scheme(replace(_WEIGHTS, per="tensor"), _INPUTS),
    "static-int4": Scheme(Numbers(4, symmetric=True, signed=True, per="channel"), _INPUTS),
    "dynamic-int8": Scheme(_WEIGHTS, _INPUTS, dynamic=True),
    "dynamic-int8-rows": Scheme(_WEIGHTS, Numbers(8, symmetric=True, signed=True, per="row"), dynamic=True),
    "weight-int8": Scheme(_WEIGHTS),
    "weight-int4": Scheme(Numbers(4, per="group", group=32)),
    "float8": Scheme(replace(_FLOAT8, per="channel"), replace(_FLOAT8, per="row"), dynamic=True),
    "bf16": Scheme(cast="bfloat16"),
    "fp16": Scheme(cast="float16"),
}


def scheme(name: str | Scheme, own: dict[str, Scheme] | None = None) -> Scheme:
    """The scheme of a name.

    >>> scheme("static-int8").is_static
    True
    """
    known = {**NAMED, **(own or {})}
    if isinstance(name, Scheme):
        return name
    if name in known:
        return known[name]
    raise QuantizeError(f"no scheme is called {name!r}\n{suggestion(name, known)}")
