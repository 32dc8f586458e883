"""What the schemas of torch's operators say of their parameters, read once for each overload.
What follows from it for a call is said where it is asked: effects in `effects/operators.py`, meanings in `rewriting/meaning.py`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch


class Parameter(NamedTuple):
    """One parameter. `kind` is its `type` without `Optional[...]`, `repeats` how long a list is that one number stands for."""

    name: str
    type: str
    kind: str
    is_optional: bool
    keyword_only: bool
    written: bool
    shared: bool
    has_default: bool
    default: Any
    repeats: int | None


@functools.cache
def schema_parameters(overload: torch._ops.OpOverload) -> tuple[Parameter, ...]:
    """The parameters of one overload.

    >>> [(item.name, item.kind, item.written) for item in schema_parameters(torch.ops.aten.add_.Tensor)]
    [('self', 'Tensor', True), ('other', 'Tensor', False), ('alpha', 'number', False)]
    """
    found = []
    for argument in overload._schema.arguments:
        kind, alias = str(argument.type), argument.alias_info
        is_optional, has_default = kind.startswith("Optional["), argument.has_default_value()
        found.append(
            Parameter(
                *(argument.name, kind, kind[9:-1] if is_optional else kind, is_optional, argument.kwarg_only),
                *(alias is not None and alias.is_write, alias is not None),
                *(has_default, argument.default_value if has_default else None),
                argument.N,  # type: ignore[attr-defined]
            )
        )
    return tuple(found)


def overloads_of(packet: torch._ops.OpOverloadPacket) -> list[torch._ops.OpOverload]:
    """The overloads that tensors can reach: TorchScript has more, of its own types (add of two strings, list.sort)."""
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return [overload for overload in overloads if torch._C._dispatch_has_kernel(overload.name())]
