"""Tensors without data: fake copies of inputs and modules, on which torch works out shapes, dtypes and strides only.
This is the one place outside `bridge/` that knows torch's FakeTensorMode, which is private; running on fakes is in `dry_run.py`.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import importlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._guards import detect_fake_mode  # private as well
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import (  # private: `tests/analysis/test_fake.py` holds what we rely on
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from torchgraft.analysis.finite_numbers import ASKING, note, noted, truth_of
from torchgraft.errors import GraftError

_fast_detach: Any = getattr(fake_impls, "fast_detach", None)  # nothing but speed depends on it

_in_optimizers: contextvars.ContextVar[bool] = contextvars.ContextVar("_in_optimizers", default=False)
_WITHOUT_TENSORS = frozenset({int, float, bool, str, type(None)})
_TABLES = frozenset({dict, OrderedDict, set})

# What torch raises when a result depends on values that a fake tensor has not.
NeedsValues = (DataDependentOutputException, DynamicOutputShapeException)


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Have torch log nothing where an operator refuses fake tensors: it raises too, and that is enough."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta")

    log = logging.getLogger(FakeTensorMode.__module__)
    log.addFilter(is_wanted)
    try:
        yield
    finally:
        log.removeFilter(is_wanted)


def active_fake_mode() -> FakeTensorMode | None:
    """The mode that fake tensors are being made under right now."""
    return detect_fake_mode()


def fake_mode_of(*trees: Any) -> FakeTensorMode:
    """The mode of the fake tensors in the trees or modules, or a new one where there are none."""
    for tensor in _tensors(trees):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    # Constants in functions and closures are met on the way; they are read as fakes too.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # On the instance, because torch tells its modes by their very class.
    mode.dispatch = functools.partial(_dispatch, mode, mode.dispatch)  # type: ignore[method-assign]
    return mode


def _dispatch(mode: FakeTensorMode, dispatch: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """The result of an operator: torch's, but for products of groups (mixtures of experts), whose fakes refuse all types but
    bfloat16, which the kernels do not, and for what is asked of numbers that are finite."""
    if func is _GROUPED_PRODUCT:
        with mode:
            return _grouped_product(*args, **(kwargs or {}))
    try:
        result = dispatch(func, types, args, kwargs)
        if func in ASKING and (truth := truth_of(func, args)) is not None and isinstance(result, FakeTensor):
            note(result, truth)
        return result
    except DataDependentOutputException:
        if func is not torch.ops.aten._local_scalar_dense.default:
            raise
        if (truth := noted(args[0])) is not None:
            return truth
        if not _in_optimizers.get():
            raise
        # An optimizer multiplies by the number that it reads, such as a norm: what it does next is the same for any.
        return 1.0 if args[0].is_floating_point() else 1


_GROUPED_PRODUCT = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)


def _grouped_product(
    first: torch.Tensor, second: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Groups lie in rows of the first, in columns of the second, along what is summed over, or in a dimension of their own."""
    rows, columns = first.shape[-2], second.shape[-1]
    grouped = first.dim() == second.dim()
    groups = () if not grouped else (offs.numel(),) if first.dim() == 2 else (first.shape[0],)
    return first.new_empty((*groups, rows, columns), dtype=out_dtype)


def is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor."""
    return isinstance(value, FakeTensor)


def fake_tree(tree: Any, mode: FakeTensorMode) -> Any:
    """A tree of values with a fake in the place of every tensor; `requires_grad` is kept, history is not.

    >>> x = torch.ones(2, 3)
    >>> fake = fake_tree((x, 1), fake_mode_of(x))
    >>> type(fake[0]).__name__, fake[0].shape, fake[1]
    ('FakeTensor', torch.Size([2, 3]), 1)
    """
    return pytree.tree_map_only(torch.Tensor, lambda tensor: fake_tensor(tensor, mode), tree)


def fake_tensor(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake of one tensor; the same one for the same tensor, and sharing memory where the originals do."""
    if isinstance(tensor, FakeTensor):
        return tensor if tensor.fake_mode is mode else _fake_like(tensor, mode)
    if tensor.grad_fn is not None:
        # A fake with a history would carry gradients out of the program that is looked at.
        return mode.from_tensor(tensor.detach(), static_shapes=True).requires_grad_(tensor.requires_grad)
    return mode.from_tensor(tensor, static_shapes=True)


def _fake_like(
    tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A new fake that looks the same, but for the device or dtype."""
    device, dtype = device or tensor.device, dtype or tensor.dtype
    with mode:
        return _of_kind(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device))


def _of_kind(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Another tensor as a parameter where the first is one, and with gradients where that has some."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return (
        torch.nn.Parameter(other, tensor.requires_grad) if is_parameter else other.requires_grad_(tensor.requires_grad)
    )


def detached(fake: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake of the same memory without a history; not by `detach()`, which is a call that torch works out at length."""
    return fake.detach() if _fast_detach is None else _fast_detach(mode, fake)


def fake_inputs(
    tree: Any,
    model: Any,
    mode: FakeTensorMode,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Any:
    """Inputs as fakes; those on the meta device stand for inputs on the device that the model is on, or on `device`.

    With `dtype` those of floating point become of that type.
    """
    first = next(_tensors((model,)), None) if isinstance(model, torch.nn.Module) else None
    there = device or (None if first is None or first.device.type == "meta" else first.device)

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if (there is None or tensor.device.type != "meta") and not _is_converted(tensor, dtype):
            return fake_tensor(tensor, mode)
        return _fake_as(tensor, mode, dtype, there)

    return pytree.tree_map_only(torch.Tensor, convert, tree)


def _is_converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether a tensor is to become of another type: as `module.to(dtype)` has it, where it is of floating point."""
    return dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype


def _fake_as(
    tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype | None, device: torch.device | None
) -> torch.Tensor:
    """A new fake of another type, where it is of floating point, and on a device, where it is on the meta device."""
    there = device if tensor.device.type == "meta" else None
    return _fake_like(tensor, mode, there, dtype if tensor.is_floating_point() else None)


def fake_module(
    module: torch.nn.Module,
    mode: FakeTensorMode,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> torch.nn.Module:
    """A copy of a module whose tensors are fakes; the original is not touched by anything that the copy does.

    With `dtype` those of floating point become of that type, as `module.to(dtype)` has it; with `device` those on the meta
    device are taken to be there.
    """
    tensors = {id(tensor): tensor for tensor in _tensors((module,))}
    holders = Counter(tensor.untyped_storage()._cdata for tensor in tensors.values() if tensor.layout is torch.strided)

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        if _is_converted(tensor, dtype) or (device is not None and tensor.device.type == "meta"):
            return _fake_as(tensor, mode, dtype, device)
        return _bare_fake(tensor, mode) if _is_ordinary(tensor, mode, holders) else fake_tensor(tensor, mode)

    return _copy_with(module, {key: faked(tensor) for key, tensor in tensors.items()})


def _is_ordinary(tensor: torch.Tensor, mode: FakeTensorMode, holders: Counter[int]) -> bool:
    """Whether shape, strides, type and device are all that there is to say about a tensor, as they are for most weights."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and tensor.is_leaf
        and tensor.grad is None
        and not tensor.__dict__
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        and mode.shape_env is None
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        and holders[tensor.untyped_storage()._cdata] == 1
    )


def _bare_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """What `from_tensor` makes of an ordinary tensor, which describes each at length first: a fake in memory of its own."""
    with torch._C._DisableTorchDispatch():
        bare = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
        )
    fake = FakeTensor(mode, bare, tensor.device)
    if isinstance(tensor, torch.nn.Parameter):
        fake._is_param = True
    return fake


def on_device(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, compute: bool
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A model and its inputs as they would be on another device: fakes, or with `compute` real copies.

    >>> model, args, _ = on_device(torch.nn.Linear(2, 3), (torch.ones(1, 2),), {}, torch.device("cpu"), False)
    >>> is_fake(model.weight), is_fake(args[0]), args[0].device.type
    (True, True, 'cpu')
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise GraftError(
            f"cannot ask about {device}: torch sees no GPU on this machine; leave `device` out, or run this where there is one"
        )
    mode = fake_mode_of(args, kwargs, *([model] if isinstance(model, torch.nn.Module) else []))

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if compute:
            return _of_kind(tensor, tensor.detach().to(device, copy=True))
        return _fake_like(tensor, mode, device)

    if isinstance(model, torch.nn.Module):
        model = _copy_with(model, {id(tensor): moved(tensor) for tensor in _tensors((model,))})
    return model, *pytree.tree_map_only(torch.Tensor, moved, (args, kwargs))


@contextlib.contextmanager
def fakes_in_optimizers() -> Iterator[None]:
    """Let optimizers treat fakes as what they stand for: on a GPU they work on all parameters at once, by the type of tensors;
    and let them read numbers, which are one."""
    # Private; torch.optim hides the module of that name behind its class.
    types: list[type] = getattr(importlib.import_module("torch.optim.optimizer"), "_foreach_supported_types", [])
    types.append(FakeTensor)
    token = _in_optimizers.set(True)
    try:
        yield
    finally:
        _in_optimizers.reset(token)
        types.remove(FakeTensor)


def meta_module(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module whose tensors are on the meta device: no data either, and torch is quiet when something does not fit."""
    memo: dict[int, Any] = {}
    for tensor in _tensors((module,)):
        if id(tensor) not in memo:
            bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            memo[id(tensor)] = _of_kind(tensor, bare)
    return _copy_with(module, memo)


def copied_module(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module on real tensors, for what can only be found by computing."""
    memo = {}
    for tensor in _tensors((module,)):
        if tensor.grad_fn is not None:  # deepcopy takes leaves only
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return _copy_with(module, memo)


def _copy_with(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise GraftError(
            f"cannot look at {type(module).__name__} without touching it: a copy of it could not be "
            f"made ({type(error).__name__}: {error}); make it copyable with copy.deepcopy"
        ) from error


def _tensors(trees: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Every tensor in trees of values and in the attributes of modules."""
    for leaf in pytree.tree_leaves(tuple(trees)):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, torch.nn.Module):
            for module in leaf.modules():
                attributes = [
                    value for name, value in module.__dict__.items() if _may_hold(value) and name != "_modules"
                ]
                yield from (value for value in pytree.tree_leaves(attributes) if isinstance(value, torch.Tensor))


def _may_hold(value: Any) -> bool:
    """Not so are numbers and empty tables, of which a module has some twenty."""
    cls = type(value)
    return cls not in _WITHOUT_TENSORS and (cls not in _TABLES or len(value) > 0)
