"""Arguments to try a call of torch's with, where shapes are not known: tensors on the meta device, which cost nothing.
Sizes are taken from the module or from constants of the call; what a run with them does is seen in `trials.py`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchgraft.ir.arguments import leaves, map_plain

# Divisible by whatever is asked of a size (groups, heads, factors of upsampling), and larger than any kernel.
_SIZE = 720
_BATCH = 2
_RANKS = (4, 3, 2, 1, 5, 6)
_MOST_TRIALS = 180
_MOST_SIZES = 6

Known = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Slot:
    """The place of a node in the arguments of a call; `known` is the shape and type of its value, where they are known."""

    number: int
    known: Known | None


class Inputs(NamedTuple):
    """The arguments of a call, with slots in the place of nodes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def argument_trials(
    function: Any, inputs: Inputs, module: torch.nn.Module | None = None
) -> Iterator[list[tuple[Any, Any]]]:
    """Arguments to try, the likeliest first; a trial has several variants where a flag is only known when the program runs."""
    sizes, state = ([], None) if module is None else (_module_sizes(module), _module_dtype(module))
    slots = [leaf for leaf in leaves(inputs) if isinstance(leaf, Slot)]
    kinds = _annotated(function, inputs)
    flags = [slot.number for slot in slots if kinds.get(slot.number) is bool]
    numbers: dict[int, Any] = {
        slot.number: 0.5 if kinds[slot.number] is float else 1
        for slot in slots
        if kinds.get(slot.number) in (int, float)
    }
    known = {slot.number: slot.known for slot in slots if slot.known is not None}
    fixed = {*flags, *numbers, *known}
    open_slots = list(dict.fromkeys(slot.number for slot in slots if slot.number not in fixed))
    all_sizes = [*_constant_sizes(inputs), *(size for shape, _ in known.values() for size in shape)]
    shapes = list(dict.fromkeys(_shapes([*sizes, *all_sizes])))
    dtypes = [*([] if state is None else [state]), *[dtype for _, dtype in known.values() if dtype.is_floating_point]]
    dtype = dtypes[0] if dtypes else torch.float32
    for choice in itertools.islice(_choices(len(open_slots), shapes, dtype), _MOST_TRIALS):
        variants = []
        for values in itertools.product((False, True), repeat=len(flags)):
            filled: dict[int, Any] = {**dict(zip(flags, values, strict=True)), **numbers, **known}
            filled |= dict(zip(open_slots, choice, strict=True))
            made: dict[int, Any] = {}
            try:
                variants.append((_filled(inputs.args, filled, made), _filled(inputs.kwargs, filled, made)))
            except RuntimeError:  # a guess so large that not even a tensor without data can have that size
                break
        else:
            yield variants


def _module_sizes(module: torch.nn.Module) -> list[int]:
    """The sizes that the inputs of a module may have in a dimension that its parameters or attributes speak of."""
    sizes: list[int] = []
    for inner in module.modules():
        for name, value in vars(inner).items():
            if type(value) is int and value > 1 and not name.startswith("_"):
                sizes.append(value)
            elif type(value) in (tuple, torch.Size) and value and all(type(item) is int for item in value):
                sizes += [item for item in value if item > 1]
                sizes.append(torch.Size(value).numel())
        for tensor in (*inner._parameters.values(), *inner._buffers.values()):
            sizes += [] if tensor is None else list(tensor.shape)[::-1]
    return sizes


def _module_dtype(module: torch.nn.Module) -> torch.dtype | None:
    tensors = [*module.parameters(), *module.buffers()]
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)


def _annotated(function: Any, inputs: Inputs) -> dict[int, Any]:
    """What the signature says of slots that are arguments themselves."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    bound = {**dict(zip(parameters, inputs.args, strict=False)), **inputs.kwargs}
    kinds = {"bool": bool, "int": int, "float": float}
    result: dict[int, Any] = {}
    for name, value in bound.items():
        if isinstance(value, Slot) and name in parameters:
            annotation = parameters[name].annotation
            result[value.number] = kinds.get(annotation, annotation) if isinstance(annotation, str) else annotation
    return result


def _constant_sizes(inputs: Inputs) -> list[int]:
    """The sizes that constants of a call name."""
    found: list[int] = []
    pending: list[Any] = [*inputs.args, *inputs.kwargs.values()]
    while pending:
        value = pending.pop()
        if isinstance(value, (tuple, list)):
            pending += value
            sizes = [1 if isinstance(item, Slot) else item for item in value]
            if sizes and all(type(size) is int for size in sizes):
                found += [abs(torch.Size(sizes).numel()), sum(sizes)]
        elif type(value) is int and value > 1:
            found.append(value)
    return found


def _shapes(sizes: list[int]) -> Iterator[tuple[int, ...]]:
    """Shapes whose channels, or all of whose dimensions, have one of the sizes."""
    for size in [*dict.fromkeys(sizes)][:_MOST_SIZES]:
        for rank in _RANKS:
            if rank > 1:
                yield (_BATCH, size, *[_SIZE] * (rank - 2))
        for rank in _RANKS:
            yield (*[_BATCH] * (rank - 1), size)
    for rank in _RANKS:
        yield (_SIZE,) * rank
    for size in (_BATCH, 1):
        for rank in _RANKS:
            yield (size,) * rank
    yield ()


def _choices(count: int, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """A value for each of some open slots: all alike first, then numbers for all but the first, then one unlike the others."""
    for shape in shapes:
        yield ((shape, dtype),) * count
    for shape in shapes if count > 1 else ():
        yield ((shape, dtype), *[1] * (count - 1))
    for shape in shapes:
        yield ((shape, torch.int64),) * count
    if count < 2:
        return
    for shape, other in itertools.product([shape for shape in shapes if len(shape) == 2], repeat=2):
        yield ((shape, dtype), *[(other, dtype)] * (count - 1))
    for rank, other_rank in itertools.permutations(_RANKS, 2):  # operands of sums of products have ranks of their own
        yield (((_SIZE,) * rank, dtype), *[((_SIZE,) * other_rank, dtype)] * (count - 1))
    for shape in shapes:
        for kind in ((shape, torch.int64), (shape[:1], torch.int64), (shape[1:2], dtype), (shape[:-1], dtype)):
            yield ((shape, dtype), *[kind] * (count - 1))
            yield (*[(shape, dtype)] * (count - 1), kind)
        yield ((shape, torch.int64), *[(shape, dtype)] * (count - 1))


def _filled(tree: Any, filled: dict[int, Any], made: dict[int, Any]) -> Any:
    def fill(leaf: Any) -> Any:
        value = filled[leaf.number] if isinstance(leaf, Slot) else leaf
        if not isinstance(leaf, Slot) or type(value) is not tuple:
            return value
        if leaf.number not in made:
            shape, dtype = value
            made[leaf.number] = torch.empty(shape, dtype=dtype, device="meta")
            made[leaf.number].torchgraft_place = leaf.number
        return made[leaf.number]

    return map_plain(tree, fill)
