"""Which sizes of a result are sizes of the arguments, operator by operator, so that equal sizes are one number and need no guard.
What is not said here is a size of its own; nothing is guessed, each rule is part of what the operator means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchgraft.capturing.flowing.sizes import SymbolicNumber, factors, unwrapped, wrapped
from torchgraft.lowering.tensors import TracedTensor

Sizes = list[Any]


def known_sizes(function: Any, args: tuple[Any, ...], result: TracedTensor, number: int = 0) -> Sizes | None:
    """The sizes of a result that are known, None for each that is not; of several results, the one with this number."""
    name = function._schema.name.removeprefix("aten::").rstrip("_")
    rule = _RULES.get(name)
    try:
        if name in _GRADIENTS:
            argument = args[_GRADIENTS[name][number]]
            sizes = list(argument) if isinstance(argument, (tuple, list)) else _of(argument)
        elif rule is not None:
            sizes = rule(result.actual.dim(), *args)
        elif torch.Tag.pointwise in function.tags:
            sizes = _broadcast(result.actual.dim(), [item for item in args if type(item) is TracedTensor])
        else:
            return None
    except (IndexError, TypeError, AttributeError):  # called in a way that the rule does not know
        return None
    values = [_plain(size) for size in sizes]
    is_right = len(sizes) == result.actual.dim() and all(
        value is None or value == size for value, size in zip(values, result.actual.size(), strict=True)
    )
    return sizes if is_right else None


def _plain(size: Any) -> int | None:
    number = unwrapped(size)
    return size if number is None else number.value  # type: ignore[return-value]


def _of(tensor: Any) -> Sizes:
    return list(tensor.symbolic_sizes())


def _broadcast(rank: int, tensors: list[TracedTensor]) -> Sizes:
    """Where all sizes of a dimension are one, or a constant that is not 1, that is the size of the result."""
    return [
        merged([_of(item)[place - rank] for item in tensors if item.actual.dim() >= rank - place])
        for place in range(rank)
    ]


def merged(sizes: Sizes) -> Any:
    """The size that tensors of these sizes are broadcast to, if that is plain to see; else None."""
    constants = [size for size in sizes if unwrapped(size) is None and size != 1]
    if constants:
        return constants[0]
    numbers = [number for size in sizes if (number := unwrapped(size)) is not None]
    if not numbers:
        return 1
    is_one = all(number is numbers[0] for number in numbers)
    return next(size for size in sizes if unwrapped(size) is not None) if is_one else None


def _viewed(rank: int, tensor: Any, sizes: Any, *rest: Any) -> Sizes:
    given = [size for size in sizes if _plain(size) != -1]
    if len(given) == len(sizes):
        return list(sizes)
    return [_quotient(_of(tensor), given) if _plain(size) == -1 else size for size in sizes]


def _quotient(sizes: Sizes, divisors: Sizes) -> Any:
    """The product of some sizes divided by that of others, where that is plain to see."""
    constant, numbers = _factors(sizes)
    by_constant, by_numbers = _factors(divisors)
    for number in by_numbers:
        if not any(number is other for other in numbers):
            return None
        numbers = _without(numbers, number)
    if not by_constant or constant % by_constant:
        return None
    result: Any = constant // by_constant
    for number in numbers:
        result = wrapped(number) * result
    return result


def _factors(sizes: Sizes) -> tuple[int, list[SymbolicNumber]]:
    constant, numbers = 1, []
    for size in sizes:
        number = unwrapped(size)
        for factor in [] if number is None else factors(number):
            if factor.is_constant():
                constant *= int(factor.value)
            else:
                numbers.append(factor)
        constant *= size if number is None else 1
    return constant, numbers


def _without(numbers: list[SymbolicNumber], gone: SymbolicNumber) -> list[SymbolicNumber]:
    place = next(index for index, number in enumerate(numbers) if number is gone)
    return [*numbers[:place], *numbers[place + 1 :]]


def _expanded(rank: int, tensor: Any, sizes: Any, *rest: Any) -> Sizes:
    old = [None] * (rank - tensor.actual.dim()) + _of(tensor)
    return [known if _plain(size) == -1 else size for size, known in zip(sizes, old, strict=True)]


def _swapped(rank: int, tensor: Any, first: int = 0, second: int = 1) -> Sizes:
    sizes = _of(tensor)
    if rank > 1:
        sizes[first], sizes[second] = sizes[second], sizes[first]
    return sizes


def _permuted(rank: int, tensor: Any, order: Any) -> Sizes:
    return [_of(tensor)[place] for place in order]


def _unsqueezed(rank: int, tensor: Any, place: int) -> Sizes:
    sizes = _of(tensor)
    sizes.insert(place % rank, 1)
    return sizes


def _squeezed(rank: int, tensor: Any, places: Any) -> Sizes:
    gone = {place % tensor.actual.dim() for place in ([places] if isinstance(places, int) else places)}
    sizes = [size for place, size in enumerate(_of(tensor)) if place not in gone]
    return sizes if len(sizes) == rank else [None] * rank


def _selected(rank: int, tensor: Any, place: int, *rest: Any) -> Sizes:
    sizes = _of(tensor)
    del sizes[place]
    return sizes


def _changed_at(position: int) -> Callable[..., Sizes]:
    """Operators that change the size of one dimension, which is the argument at this position."""

    def rule(rank: int, tensor: Any, *rest: Any) -> Sizes:
        sizes = _of(tensor)
        sizes[rest[position - 1] if len(rest) >= position else 0] = None
        return sizes

    return rule


def _reduced(rank: int, tensor: Any, places: Any = None, keep: bool = False, *rest: Any) -> Sizes:
    chosen = (
        range(tensor.actual.dim()) if not places and places != 0 else [places] if isinstance(places, int) else places
    )
    gone = {place % tensor.actual.dim() for place in chosen}
    if rank == tensor.actual.dim():
        return [1 if place in gone else size for place, size in enumerate(_of(tensor))]
    return [size for place, size in enumerate(_of(tensor)) if place not in gone]


def _joined(rank: int, tensors: Any, place: int = 0) -> Sizes:
    joined = [
        _of(tensor) for tensor in tensors if tensor.actual.dim() == rank
    ]  # torch passes over empty ones of another rank
    sizes = list(joined[0])
    sizes[place] = sum([item[place] for item in joined[1:]], joined[0][place])
    return sizes


def _convolved(
    rank: int,
    tensor: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    is_transposed: bool,
    *rest: Any,
) -> Sizes:
    batch, _, *sizes = _of(tensor)
    if is_transposed:
        return [batch, *[None] * (rank - 1)]
    steps = zip(
        sizes, _of(weight)[2:], *(_for_each(item, rank - 2) for item in (stride, padding, dilation)), strict=True
    )
    return [batch, _of(weight)[0], *[_window_places(*step) for step in steps]]


def _for_each(given: Any, count: int) -> Any:
    return list(given) * count if len(given) == 1 else given


def _window_places(size: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Any:
    """In how many places a window fits, where that is a constant or the size itself."""
    if all(type(item) is int for item in (size, kernel, stride, padding, dilation)):
        return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    return size if stride == 1 and kernel == 1 and padding == 0 else None


def _same(rank: int, tensor: Any, *rest: Any) -> Sizes:
    return _of(tensor)


_RULES: dict[str, Callable[..., Sizes]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _viewed),
    "expand": _expanded,
    "transpose": _swapped,
    "t": _swapped,
    "permute": _permuted,
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "select": _selected,
    "slice": _changed_at(1),
    "cat": _joined,
    **dict.fromkeys(("sum", "mean", "amax", "amin", "any", "all", "argmax", "argmin", "var", "logsumexp"), _reduced),
    "mm": lambda rank, a, b: [_of(a)[0], _of(b)[1]],
    "bmm": lambda rank, a, b: [_of(a)[0], _of(a)[1], _of(b)[2]],
    "addmm": lambda rank, c, a, b, *rest: [_of(a)[0], _of(b)[1]],
    "linear": lambda rank, a, b, *rest: [*_of(a)[:-1], *_of(b)[:-1]],
    "embedding": lambda rank, a, b, *rest: [*_of(b), *_of(a)[1:]],
    "convolution": _convolved,
    "full": lambda rank, sizes, *rest: list(sizes),
    **dict.fromkeys(("zeros", "ones", "empty", "rand", "randn"), lambda rank, sizes, *rest: list(sizes)),
    "arange": lambda rank, end, *rest: [None] if rest else [end],
    **dict.fromkeys(
        (
            "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "_to_copy", "to", "softmax", "_softmax",
            "log_softmax", "_log_softmax", "dropout", "native_dropout", "layer_norm", "native_layer_norm",
            "batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
            "group_norm", "native_group_norm", "cumsum", "flip", "roll", "masked_fill", "zeros_like", "ones_like",
            "empty_like", "full_like", "rand_like", "randn_like", "new_empty_strided",
            "_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention", "rms_norm", "index_put",
            "scatter", "triu", "tril", "copy",
        ),
        _same,
    ),
}  # fmt: skip

# Operators of the backward: for each result, the argument that it is the gradient of, or that has its sizes.
_GRADIENTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("_adaptive_avg_pool2d_backward", "avg_pool2d_backward", "max_pool2d_with_indices_backward"), (1,)),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), (1,)),
    "convolution_backward": (1, 2, 3),
    "native_batch_norm_backward": (1, 2, 2),
    "native_layer_norm_backward": (1, 5, 6),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 2, 3),
}
