"""One run of a model or program and everything a user could notice of it: results, gradients, inputs, state, random numbers,
switches, and what shares memory. Which runs are compared, and what a difference means, is decided in `runner.py`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn

from tests.traps.trap import Call

_STANDARD = frozenset(nn.Module().__dict__)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)


@dataclass
class Observation:
    """What a run did. Every value is a copy, under the path it had."""

    error: Exception | None = None
    backward_error: Exception | None = None
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)


def seed(number: int) -> None:
    """Start every source of random numbers anew."""
    torch.default_generator.manual_seed(number)  # torch.manual_seed also asks every device there might be, and is slow
    random.seed(number)
    numpy.random.seed(number)


def observe(
    function: Callable[..., Any], calls: list[Call], model: Any, program: Any = None, is_apart: bool = False
) -> Observation:
    """Call `function` once for each of `calls`, differentiate each result, and note what happened.

    `model` holds the state; `program`, where given, has its own copy of some of it, under the same names. `is_apart` says that
    the program was copied or cast, so that what it does not have itself tells nothing.
    """
    found = Observation()
    outputs = []
    seed(11)
    for call in calls:
        try:
            output = function(*call.args, **call.kwargs)
            outputs.append(output)
        except Exception as error:
            found.error = error
            return found
        try:
            _differentiate(output)
        except Exception as error:
            found.backward_error = error
    inputs = [[call.args, call.kwargs] for call in calls]
    tensors = dict(state_tensors(model, program, is_apart))
    found.parts["outputs"] = frozen("output", outputs)
    found.parts["inputs"] = frozen("input", inputs)
    found.parts["state"] = {f"self.{name}": _freeze(value) for name, value in tensors.items()}
    if not is_apart:
        found.parts["attributes"] = attributes_of(model, program)
    leaves = [*_walk("input", inputs), *[(f"self.{name}", value) for name, value in tensors.items()]]
    found.parts["gradients"] = {path: _freeze(leaf.grad) for path, leaf in leaves if _has_gradient(leaf)}
    found.parts["random numbers"] = random_states()
    found.parts["switches"] = switches()
    found.parts["shared memory"] = _shared([*_walk("output", outputs), *leaves])
    return found


def _differentiate(output: Any) -> None:
    losses = []
    for _, leaf in _walk("", output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.layout is torch.strided:
            real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            # Not a plain sum, whose gradient is zero through a softmax or a normalisation.
            weights = torch.linspace(0.5, 1.5 + len(losses), real.numel(), dtype=torch.float64, device=real.device)
            losses.append((real.double().reshape(-1) * weights).sum())
    if losses:
        with torch.enable_grad():
            sum(losses[1:], losses[0]).backward()  # type: ignore[union-attr]


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.grad is not None


# ---- state ----


def state_tensors(model: Any, program: Any = None, only_own: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers under the model's names; the program's own where it has them."""
    if not isinstance(model, nn.Module):
        return
    for path, module in model.named_modules(remove_duplicate=False):
        other = _counterpart(program, path)
        for table in ("_parameters", "_buffers"):
            own = {} if other is None else dict(getattr(other, table).items())
            for name, value in getattr(module, table).items():
                if only_own and program is not None and name not in own:
                    continue
                value = own.get(name, value)
                if isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value):
                    yield ".".join(filter(None, [path, name])), value


def _counterpart(program: Any, path: str) -> nn.Module | None:
    if program is None:
        return None
    try:
        return program.get_submodule(path)
    except AttributeError:
        return None


def attributes_of(model: Any, program: Any) -> dict[str, Any]:
    """What the modules hold besides parameters and buffers, and in which mode they are."""
    result: dict[str, Any] = {}
    if isinstance(model, nn.Module):
        for path, module in model.named_modules(remove_duplicate=False):
            other = _counterpart(program, path)
            module = other if other is not None and type(other) is type(module) else module
            for name, value in vars(module).items():
                if name not in _STANDARD:
                    result.update(frozen(".".join(filter(None, ["self", path, name])), value))
        for cls in type(model).__mro__:
            if cls.__module__.startswith("tests."):
                result.update(
                    {
                        f"{cls.__name__}.{name}": value
                        for name, value in vars(cls).items()
                        if type(value) in (int, float)
                    }
                )
    watched = getattr(model, "watched", None)  # lists and tensors outside of the model that it writes into
    if watched is not None:
        result.update(frozen("watched", watched))
    return result


def random_states() -> dict[str, Any]:
    """The states of all sources of random numbers."""
    name, keys, *rest = numpy.random.get_state()
    return {"torch": _freeze(torch.get_rng_state()), "random": random.getstate(), "numpy": (keys.tobytes(), *rest)}


def reset_switches() -> None:
    """Undo what a wrong program has left switched, so that it does not disturb the next."""
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    # Compiling for the first time in a process switches this off for good.
    torch.distributions.Distribution.set_default_validate_args(True)


def switches() -> dict[str, Any]:
    """torch's switches, which a program must leave as the model does."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
    }


# ---- values ----


@dataclass(frozen=True)
class FrozenTensor:
    """A copy of a tensor and what the copy cannot show."""

    values: torch.Tensor
    requires_grad: bool
    stride: tuple[int, ...]
    kind: str
    attributes: tuple[Any, ...]


def _freeze(tensor: torch.Tensor) -> FrozenTensor:
    stride = tensor.stride() if tensor.layout is torch.strided and tensor.numel() > 0 else ()
    # A dimension of size one may have any stride.
    stride = tuple([step for step, size in zip(stride, tensor.shape, strict=False) if size > 1])
    kind = "Tensor" if type(tensor) is nn.Parameter else type(tensor).__name__
    attributes = [(name, value) for name, value in vars(tensor).items() if isinstance(value, _PLAIN) and name[0] != "_"]
    return FrozenTensor(tensor.detach().clone(), tensor.requires_grad, stride, kind, tuple(attributes))


def frozen(path: str, value: Any) -> dict[str, Any]:
    """The leaves of a value by their paths, copied."""
    return {name: _freeze(leaf) if isinstance(leaf, torch.Tensor) else leaf for name, leaf in _walk(path, value)}


def _walk(path: str, value: Any, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.Tensor, *_PLAIN)) or id(value) in above:
        yield path, value
        return
    kind = "tuple" if isinstance(value, torch.Size) else type(value).__qualname__
    parts = _parts(value)
    if parts is None:
        yield path, kind
        return
    yield f"{path}: kind", (kind, tuple(parts))
    for step, part in parts.items():
        yield from _walk(path + step, part, (*above, id(value)))


def _parts(value: Any) -> dict[str, Any] | None:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {f".{name}": getattr(value, name) for name in value._fields}
    if isinstance(value, dict):
        return {f"[{key!r}]": item for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return {f"{{{item!r}}}": item for item in sorted(value, key=repr)}
    if isinstance(value, (tuple, list)) or type(value).__name__ == "deque":
        return {f"[{index}]": item for index, item in enumerate(value)}
    if isinstance(value, numpy.ndarray):
        return {f"[{index}]": item for index, item in enumerate(value.ravel().tolist())}
    if isinstance(value, torch.Generator):
        return {".state": value.get_state()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f".{item.name}": getattr(value, item.name) for item in dataclasses.fields(value)}
    if callable(value) or isinstance(value, nn.Module) or not getattr(value, "__dict__", None):
        return {".__repr__": repr(value)} if type(value).__name__ == "count" else None
    return {f".{name}": item for name, item in vars(value).items()}


def _shared(leaves: list[tuple[str, Any]]) -> dict[str, Any]:
    """Which tensors are the same memory."""
    storages: dict[int, list[str]] = {}
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
            storages.setdefault(leaf.untyped_storage()._cdata, []).append(path)
    groups = [group for group in storages.values() if len(group) > 1]
    return {path: tuple(group) for group in groups for path in group if path.startswith("output")}


# ---- comparing ----


def difference(expected: Observation, found: Observation) -> str | None:
    """The first thing in which two runs differ, in words, or None."""
    for part, before in expected.parts.items():
        after = found.parts.get(part)
        if after is None or (part == "gradients" and expected.backward_error is not None):
            continue
        if part in ("state", "gradients"):
            known = found.parts["state"]
            before = {path: value for path, value in before.items() if path in known or not path.startswith("self.")}
        problem = first_difference(before, after)
        if problem is not None:
            return f"{part}: {problem}"
    return None


def first_difference(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The first path at which two sets of leaves differ, in words, or None."""
    for path in [*before, *[path for path in after if path not in before]]:
        if path not in before or path not in after:
            return f"{path} is only in {'eager' if path in before else 'the program'}"
        if not _same(before[path], after[path]):
            return f"{path} should be {_short(before[path])}, is {_short(after[path])}"
    return None


def _same(expected: Any, found: Any) -> bool:
    if isinstance(expected, FrozenTensor):
        return isinstance(found, FrozenTensor) and _same_tensor(expected, found)
    if type(expected) is not type(found):
        return False
    return bool(expected == found) or expected != expected


def _same_tensor(expected: FrozenTensor, found: FrozenTensor) -> bool:
    first, second = expected.values, found.values
    facts = [(item.dtype, item.shape, item.device, item.layout) for item in (first, second)]
    others = [(item.requires_grad, item.stride, item.kind, item.attributes) for item in (expected, found)]
    if facts[0] != facts[1] or others[0] != others[1]:
        return False
    if first.device.type == "meta":
        return True
    if first.layout is not torch.strided:
        first, second = first.to_dense(), second.to_dense()
    if torch.equal(first, second):
        return True
    precise = first.dtype in (torch.float64, torch.complex128)
    return bool(
        torch.allclose(first, second, rtol=1e-9 if precise else 1e-5, atol=1e-12 if precise else 1e-6, equal_nan=True)
    )


def _short(value: Any) -> str:
    if isinstance(value, FrozenTensor):
        tensor = value.values
        numbers = "" if tensor.device.type == "meta" else f" {tensor.flatten()[:4].tolist()}"
        flag = " requires_grad" if value.requires_grad else ""
        flag += f" with {dict(value.attributes)}" if value.attributes else ""
        return f"{value.kind}{list(tensor.shape)} {str(tensor.dtype)[6:]} strides {value.stride}{flag}{numbers}"
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) < 120 else text[:117] + "..."
