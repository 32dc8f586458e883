"""Comparing what two runs gave: values of any structure taken apart into leaves, and leaves compared within a tolerance.
Which values are compared, and what a difference means, is decided by who asks: `verify`, `compare`, the check of a pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torchgraft.ir.structures import parts_of

# How far apart results of the same operations in another order may lie, as a part of the largest element.
_RELATIVE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


# Who was run first and second, in the words of a difference.
Sides = tuple[str, str]
MODEL_AND_PROGRAM: Sides = ("model", "program")


class Tolerance(NamedTuple):
    """How far apart numbers may lie; without `rtol` and `atol`, `factor` times a default by the dtype, which is a part of the
    largest element, or of `scale` where that is larger."""

    rtol: float | None = None
    atol: float | None = None
    factor: float = 1.0
    scale: float = 0.0


class FrozenTensor(NamedTuple):
    """A copy of a tensor, and what the copy cannot show."""

    values: torch.Tensor
    requires_grad: bool


class Structure(NamedTuple):
    """The place of a container among the leaves, so that two values with the same leaves in other containers differ."""

    kind: str
    keys: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.kind} of {len(self.keys)}"


class RandomState(NamedTuple):
    """Where a generator of random numbers is."""

    digest: int


class Difference(NamedTuple):
    """One place where two values differ: by `amount`, where both are numbers, and by what `text` says."""

    path: str
    text: str
    amount: float

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How two values compare: the differences beyond the tolerance, and the largest one within it."""

    differences: tuple[Difference, ...] = ()
    largest: float = 0.0
    compared: int = 0

    @property
    def verdict(self) -> str:
        """One word or two for a table."""
        if self.differences:
            return "DIFFERENT"
        if not self.compared:
            return "-"
        return "equal" if self.largest == 0 else f"within {self.largest:.1e}"


# ---- taking values apart ----


def frozen_leaves(value: Any, path: str) -> dict[str, Any]:
    """The leaves of a value by their paths; tensors are copied, so that what happens to them later does not matter.

    >>> list(frozen_leaves({"a": [1, 2.5]}, "output"))
    ['output', "output['a']", "output['a'][0]", "output['a'][1]"]
    """
    return dict(_leaves(value, path, freeze_tensor, ()))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a value, in the order of its leaves."""
    return [leaf for _, leaf in _leaves(value, "", lambda tensor: tensor, ()) if isinstance(leaf, torch.Tensor)]


def named_tensors_in(value: Any, path: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a value with their paths."""
    return [(name, leaf) for name, leaf in _leaves(value, path, lambda x: x, ()) if isinstance(leaf, torch.Tensor)]


def freeze_tensor(tensor: torch.Tensor) -> FrozenTensor:
    """A copy that later writes do not reach."""
    return FrozenTensor(tensor.detach().clone(), tensor.requires_grad)


def _leaves(
    value: Any, path: str, of_tensor: Callable[[torch.Tensor], Any], above: tuple[int, ...]
) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield path, of_tensor(value)
        return
    if id(value) in above:  # what holds itself is compared by the place that it leads back to
        yield path, Structure(f"the container {len(above) - above.index(id(value))} above", ())
        return
    parts = parts_of(value)
    if parts is None:
        yield path, value
        return
    kind = "tuple" if isinstance(value, torch.Size) else type(value).__name__
    yield path, Structure(kind, tuple(parts))
    for step, part in parts.items():
        yield from _leaves(part, path + step, of_tensor, (*above, id(value)))


# ---- comparing ----


def compare(
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    tolerance: Tolerance,
    verb: str = "returns",
    sides: Sides = MODEL_AND_PROGRAM,
) -> Comparison:
    """Compare leaves by their paths; `sides` are who was run first and second, and `verb` what they do with the leaves."""
    differences: list[Difference] = []
    largest = 0.0
    for path in [*expected, *[path for path in found if path not in expected]]:
        if path not in found or path not in expected:
            # Where a container is missing, so is all that it holds.
            if not any(path.startswith((f"{known.path}[", f"{known.path}.")) for known in differences):
                who = f"the {sides[0]} {verb} it, the {sides[1]} does not"
                text = who if path in expected else f"only the {sides[1]} {verb} it"
                differences.append(Difference(path, text, float("inf")))
            continue
        text, amount = _compare_leaves(expected[path], found[path], tolerance, sides)
        if text:
            differences.append(Difference(path, text, amount))
        else:
            largest = max(largest, amount)
    return Comparison(tuple(differences), largest, len(expected))


def _compare_leaves(expected: Any, found: Any, tolerance: Tolerance, sides: Sides) -> tuple[str, float]:
    """What is different beyond the tolerance ("" for nothing), and by how much."""
    if isinstance(expected, FrozenTensor) and isinstance(found, FrozenTensor):
        for name in ("shape", "dtype", "device", "layout"):
            facts = getattr(expected.values, name), getattr(found.values, name)
            if facts[0] != facts[1]:
                facts = (tuple(facts[0]), tuple(facts[1])) if name == "shape" else facts
                return f"{name} is {facts[0]} in the {sides[0]} and {facts[1]} in the {sides[1]}", float("inf")
        grads = expected.requires_grad, found.requires_grad
        if grads[0] != grads[1]:
            return f"requires_grad is {grads[0]} in the {sides[0]} and {grads[1]} in the {sides[1]}", float("inf")
        return compare_tensors(expected.values, found.values, tolerance, sides)
    is_same_kind = type(expected) is type(found)
    if isinstance(expected, RandomState) and is_same_kind:
        return ("", 0.0) if expected == found else (f"other numbers were drawn than in the {sides[0]}", float("inf"))
    if is_same_kind and (expected == found if isinstance(expected, Structure) else plain_equal(expected, found)):
        return "", 0.0
    return f"{_described(expected)} in the {sides[0]}, {_described(found)} in the {sides[1]}", float("inf")


def plain_equal(expected: Any, found: Any) -> bool:
    """Whether two values that are no tensors are the same or equal; not-a-number equals itself."""
    if expected is found:
        return True
    try:
        return bool(expected == found) or bool(expected != expected and found != found)
    except Exception:  # a class of the user's own may refuse to be compared, with any error
        return False


def _described(leaf: Any) -> str:
    if isinstance(leaf, FrozenTensor):
        return f"a tensor of shape {tuple(leaf.values.shape)}"
    if isinstance(leaf, Structure):
        return f"{leaf.kind} with {len(leaf.keys)} entries"
    text = f"{type(leaf).__name__} {leaf!r}"
    return text if len(text) < 80 else text[:77] + "..."


def compare_tensors(
    expected: torch.Tensor, found: torch.Tensor, tolerance: Tolerance, sides: Sides = MODEL_AND_PROGRAM
) -> tuple[str, float]:
    """Values of two tensors with the same shape and dtype; not-a-number equals itself."""
    if not has_values(expected) or not has_values(found) or expected.numel() == 0:
        return "", 0.0
    if _same_bits(expected, found):
        return "", 0.0
    first, second = comparable(expected), comparable(found)
    finite = torch.isfinite(first)
    odd = ~finite & ~((first == second) | (torch.isnan(first) & torch.isnan(second)))
    odd |= finite & ~torch.isfinite(second)
    distance = torch.where(finite & ~odd, (first - second).abs(), 0.0)
    allowed = _allowed(torch.where(finite, first.abs(), 0.0), expected.dtype, tolerance)
    amount = float("inf") if bool(odd.any()) else float(distance.max())
    wrong = odd | (distance > allowed)
    if not bool(wrong.any()) and (expected.is_floating_point() or expected.is_complex()):
        return "", amount
    index = tuple(map(int, torch.unravel_index(wrong.reshape(-1).to(torch.uint8).argmax(), wrong.shape)))
    return (
        f"{max(int(wrong.sum()), 1)} of {wrong.numel()} values differ, by up to {amount:.3g}; first at {list(index)}: "
        f"{first[index].item():.6g} in the {sides[0]}, {second[index].item():.6g} in the {sides[1]}",
        amount,
    )


def _same_bits(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether tensors are equal without going through 64-bit floats, which cannot hold every whole number."""
    try:
        return torch.equal(expected, found)
    except (RuntimeError, NotImplementedError):  # not every layout and dtype can be compared
        return torch.equal(comparable(expected), comparable(found))


def same_tensor(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are alike in shape, dtype, device and every element."""
    if first is second:
        return True
    if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
        return False
    try:
        return first.is_meta or torch.equal(first, second)
    except (RuntimeError, NotImplementedError):  # not every layout and dtype can be compared
        return False


def _allowed(scale: torch.Tensor, dtype: torch.dtype, tolerance: Tolerance) -> Any:
    if tolerance.rtol is None and tolerance.atol is None:
        return tolerance.factor * _RELATIVE.get(dtype, 0.0) * scale.max().clamp(min=tolerance.scale)
    return (tolerance.atol or 0.0) + (tolerance.rtol or 0.0) * scale


def has_values(tensor: torch.Tensor) -> bool:
    """Whether there are numbers behind a tensor; meta and fake tensors only have a shape."""
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The values as plain 64-bit numbers, whatever the layout and dtype."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_quantized:
        plain = plain.dequantize()
    if plain.is_nested:
        plain = torch.cat([part.reshape(-1) for part in plain.unbind()])
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.to(torch.float64)
