"""What a model computes on the way, without a program to say so: every torch call and module call of an eager run, in order.
A value is kept as a fingerprint, so that looking for one costs no memory; who looks is `first_difference.py`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchgraft.analysis.comparison import comparable, has_values, tensors_in
from torchgraft.ir.origin import current_source_line


class Fingerprint(NamedTuple):
    """What is remembered of a tensor: enough to know it again. None is what cannot be seen: `requires_grad` below autograd,
    `sums` where there are no values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool | None
    sums: tuple[float, ...] | None

    def difference(self, other: Fingerprint, exactly: bool) -> str | None:
        """What is different about another tensor, or None."""
        if self.shape != other.shape:
            return f"shape {self.shape} in the model and {other.shape} in the program"
        if self.dtype != other.dtype:
            return f"dtype {self.dtype} in the model and {other.dtype} in the program"
        if not self.same_values(other, exactly):
            return "other values in the program than in the model"
        if self.requires_grad not in (other.requires_grad, None):
            return f"requires_grad {self.requires_grad} in the model and {other.requires_grad} in the program"
        return None

    def same_values(self, other: Fingerprint, exactly: bool) -> bool:
        """Whether the values are the same, up to what another order of additions can change."""
        if self.sums is None or other.sums is None or exactly:
            return self.sums == other.sums or self.sums is None or other.sums is None
        unit = torch.finfo(self.dtype).eps if self.dtype.is_floating_point or self.dtype.is_complex else 0.0
        allowed = 32 * unit * self.sums[0]
        return all(abs(mine - theirs) <= allowed for mine, theirs in zip(self.sums, other.sums, strict=True))


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """The fingerprint of a tensor as it is now."""
    sums: tuple[float, ...] | None = None
    # A tensor inside vmap and the like has no values that Python may see.
    if has_values(tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        with torch.no_grad():
            values = comparable(tensor).reshape(-1)
            odd = float((~torch.isfinite(values)).sum())
            values = torch.nan_to_num(values, nan=0.5, posinf=2.0, neginf=-2.0)
            sums = (float(values.abs().sum()), float(values.sum()), float(values @ _weights(values)), odd)
    return Fingerprint(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, sums)


_longest_weights: dict[torch.device, torch.Tensor] = {}


def _weights(values: torch.Tensor) -> torch.Tensor:
    """Numbers that make a sum depend on the order; the longest ones made are kept, because they take long to compute."""
    known = _longest_weights.get(values.device)
    if known is None or known.numel() < values.numel():
        known = torch.arange(values.numel(), dtype=torch.float64, device=values.device).mul_(0.7).cos_()
        _longest_weights[values.device] = known
    return known[: values.numel()]


class Call(NamedTuple):
    """One call: what it gave, and the gradients that came back to that (filled in when there is a backward)."""

    key: str
    name: str
    prints: tuple[Fingerprint, ...]
    line: str
    effect: str
    gradients: dict[int, Fingerprint]


def recorded_call(
    key: str, result: Any, args: tuple[Any, ...], name: str = "", effect: str = "", is_above_autograd: bool = True
) -> Call | None:
    """A call with the tensors it gave, or None where it gave none; one that returns nothing has written its first argument."""
    tensors = tensors_in(args[0] if result is None and args and isinstance(args[0], torch.Tensor) else result)
    if not tensors:
        return None
    prints = [fingerprint(item) for item in tensors]
    if not is_above_autograd:
        prints = [item._replace(requires_grad=None) for item in prints]
    call = Call(key, name or key, tuple(prints), str(current_source_line() or ""), effect, {})
    for index, tensor in enumerate(tensors):
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(_keeper(call.gradients, index))
    return call


def _keeper(gradients: dict[int, Fingerprint], index: int) -> Callable[[torch.Tensor], None]:
    def keep(gradient: torch.Tensor) -> None:
        gradients[index] = fingerprint(gradient)

    return keep


# ---- names of calls ----

_ALIASES = {"truediv": "div", "true_divide": "div", "multiply": "mul", "subtract": "sub", "invert": "bitwise_not"}


def call_key(name: str) -> str:
    """One name for the operator, the method, the in-place form and the ATen overload of an operation.

    >>> [call_key(name) for name in ("__iadd__", "add_", "add.Tensor", "__radd__", "relu")]
    ['add', 'add', 'add', 'add', 'relu']
    """
    plain = name.split(".")[0].strip("_")
    if name.startswith("__") or plain in _IN_PLACE_OPERATORS:
        if plain[:1] in ("i", "r") and plain[1:] in _OPERATORS:
            plain = plain[1:]
    return _ALIASES.get(plain, plain)


_OPERATORS = frozenset({"add", "sub", "mul", "truediv", "div", "matmul", "pow", "and", "or", "xor", "floordiv", "mod"})
_IN_PLACE_OPERATORS = frozenset({f"i{name}" for name in _OPERATORS})


# ---- the eager run ----


class Timeline:
    """The calls of one run: by key in order, those inside modules that the program calls whole left out; and every value."""

    def __init__(self, whole: set[int]) -> None:
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.order: list[Call] = []
        self._whole = whole
        self._depth = 0
        self._busy = False
        # Of each level the state at its last call, because a call of one level consists of calls of the next.
        self._random_states: dict[str, torch.Tensor] = {}
        self._values: dict[tuple[Any, ...], list[Fingerprint]] = defaultdict(list)

    def add(self, key: str, result: Any, args: tuple[Any, ...] = (), name: str = "", writes: bool = False) -> None:
        """Note a call that has just been made."""
        if self._busy:
            return
        self._busy = True
        try:
            inside = _is_inside_autograd_function()
            level = "operator" if key.startswith("operator ") else "inside" if self._depth else "outside"
            effect = "writes" if writes else "draws" if self._has_drawn(level) else ""
            call = recorded_call(key, result, args, name, effect, not inside and level != "operator")
        finally:
            self._busy = False
        if call is None:
            return
        self.add_values(call.prints)
        if not self._depth and not inside:
            self.calls[key].append(call)
            self.order.append(call)

    def _has_drawn(self, level: str) -> bool:
        previous, now = self._random_states.get(level), torch.get_rng_state()
        self._random_states[level] = now
        return previous is not None and not torch.equal(previous, now)

    def add_values(self, prints: tuple[Fingerprint, ...]) -> None:
        """Note values that the model has."""
        for item in prints:
            self._values[item.shape, item.dtype].append(item)

    def has_value(self, wanted: Fingerprint, exactly: bool) -> bool:
        """Whether the model computed such a value anywhere."""
        same = [item for item in self._values[wanted.shape, wanted.dtype] if item.same_values(wanted, exactly)]
        seen = {item.requires_grad for item in same}
        return wanted.requires_grad in seen or seen == {None}

    @contextlib.contextmanager
    def watching(self, root: torch.nn.Module | None, operators: bool) -> Iterator[None]:
        """Note everything that this thread does; with `operators` also what happens below autograd."""
        handles = [] if root is None else [handle for item in root.named_modules() for handle in self._hooks(*item)]
        try:
            self._random_states = dict.fromkeys(("operator", "inside", "outside"), torch.get_rng_state())
            with _Functions(self), _Operators(self) if operators else contextlib.nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, path: str, module: torch.nn.Module) -> list[Any]:
        if isinstance(module, torch.jit.ScriptModule):
            return []
        is_whole = id(module) in self._whole

        def enter(*arguments: Any) -> None:
            self._depth += is_whole

        def leave(called: Any, args: Any, result: Any) -> None:
            self._depth -= is_whole
            self.add(f"module {path}", result)

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def _is_inside_autograd_function() -> bool:
    """Whether a custom autograd.Function is running: a program calls it as a whole."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "apply" and code.co_filename == torch.autograd.function.__file__:
            return True
        if code.co_name == "forward" and _is_forward_of_function(code):  # from torch 2.15 on `apply` has no frame
            return True
        frame = frame.f_back
    return False


@functools.cache
def _is_forward_of_function(code: CodeType) -> bool:
    pending: list[type] = [torch.autograd.Function]
    while pending:
        cls = pending.pop()
        pending += type(cls).__subclasses__(cls)
        forward = inspect.unwrap(getattr(cls.__dict__.get("forward"), "__func__", None))  # type: ignore[arg-type]
        if getattr(forward, "__code__", None) is code:
            return True
    return False


def _writes(name: str) -> bool:
    is_operator = name.startswith("__i") and name.strip("_")[1:] in _OPERATORS
    return is_operator or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


class _Functions(TorchFunctionMode):
    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name == "__get__":
            name = getattr(function.__self__, "__name__", "")
        if name != "__set__":
            self._timeline.add(call_key(name), result, args, name, _writes(name))
        return result


class _Operators(TorchDispatchMode):
    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self._timeline._busy:
            self._timeline.add(f"operator {function}", result, args)
        return result


__all__ = ["Call", "Fingerprint", "Timeline", "call_key", "fingerprint", "recorded_call"]
