"""Traps: Python that asks what a tensor is, beyond its size and dtype: its class, its history, its memory, whether it has an
attribute. Branches on values and sizes are in `branches.py`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from tests.traps.trap import Call, Collection

TRAPS = Collection(sizes=(5, 1))


def _with_scale(n: int = 3) -> torch.Tensor:
    x = torch.randn(n, 4)
    x.scale = 5.0  # type: ignore[attr-defined]
    return x


@TRAPS.function("an attribute asked for by getattr", others={"has it": _with_scale}, skip=frozenset({"double"}))
def attribute_by_getattr(x: torch.Tensor) -> torch.Tensor:
    return x * getattr(x, "scale", 2.0)


@TRAPS.function("an attribute asked for by hasattr", others={"has it": _with_scale}, skip=frozenset({"double"}))
def attribute_by_hasattr(x: torch.Tensor) -> torch.Tensor:
    return x * 3 if hasattr(x, "scale") else x


@TRAPS.function("an attribute of the input used", inputs=_with_scale, skip=frozenset({"double"}))
def attribute_used(x: Any) -> torch.Tensor:
    return x * x.scale


def _marked_mask(n: int = 3) -> Any:
    x = torch.randn(n, 4)
    x.mask = torch.rand(n, 4) > 0.5  # type: ignore[attr-defined]
    return x


@TRAPS.function("a tensor in an attribute of the input", inputs=_marked_mask, skip=frozenset({"double"}))
def tensor_attribute(x: Any) -> torch.Tensor:
    return torch.where(x.mask, x, torch.zeros_like(x))


@TRAPS.function("an attribute set on an intermediate")
def attribute_set(x: torch.Tensor) -> torch.Tensor:
    y: Any = x * 2
    y.factor = 3.0
    return y * y.factor


@TRAPS.function("an attribute set on the input")
def attribute_set_on_input(x: Any) -> torch.Tensor:
    x.seen = getattr(x, "seen", 0) + 1
    return x * x.seen


@TRAPS.model("an attribute of a parameter that counts", skip=frozenset({"deep copy"}))
class AttributeOfParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.randn(4))
        self.weight.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.calls += 1
        return x * self.weight * self.weight.calls


@TRAPS.function("an attribute set on the result")
def attribute_set_on_result(x: torch.Tensor) -> torch.Tensor:
    y: Any = x * 2
    y.note = "word"
    return y


@TRAPS.function(
    "a parameter given", others={"parameter": lambda: nn.Parameter(torch.randn(3, 4))}, skip=frozenset({"double"})
)
def parameter_given(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if isinstance(x, nn.Parameter) else x + 1


@TRAPS.function(
    "the class of a tensor", others={"parameter": lambda: nn.Parameter(torch.randn(3, 4), requires_grad=False)}
)
def class_of_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if type(x) is torch.Tensor else x + 1


class Tagged(torch.Tensor):
    """A subclass that does nothing."""


@TRAPS.function(
    "a subclass asked for", others={"tagged": lambda: torch.randn(3, 4).as_subclass(Tagged)}, skip=frozenset({"double"})
)
def subclass_asked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if isinstance(x, Tagged) else x + 1


@TRAPS.function("a view asked for", others={"view": lambda: torch.randn(4, 4)[:3]})
def view_asked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x._base is None else x + 1


@TRAPS.function("is_view asked", others={"view": lambda: torch.randn(4, 4)[:3]})
def is_view_asked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x._is_view() else x + 1


def _written(n: int = 3) -> torch.Tensor:
    return torch.randn(n, 4).add_(1)


@TRAPS.function("the version asked for", others={"written": _written})
def version_asked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x._version == 0 else x + 1


@TRAPS.function("the offset in memory", others={"offset": lambda: torch.randn(4, 4)[1:]})
def offset_asked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.storage_offset() else x + 1


@TRAPS.function(
    "shared memory asked for",
    inputs=lambda n=3: (torch.randn(n, 4), torch.randn(n, 4)),
    others={"shared": lambda: (lambda x: (x, x[:]))(torch.randn(3, 4))},
)
def shared_asked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.data_ptr() == y.data_ptr() else x + y


@TRAPS.function("is_set_to", inputs=lambda n=3: (torch.randn(n, 4), torch.randn(n, 4)))
def is_set_to(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.is_set_to(y) else x + y


@TRAPS.function("inference tensors asked for", others={"inference": lambda: _inference()})
def inference_asked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.is_inference() else x + 1


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3, 4)


@TRAPS.function("layout asked for", others={"sparse": lambda: torch.eye(3, 4).to_sparse()})
def layout_asked(x: torch.Tensor) -> torch.Tensor:
    if x.layout == torch.sparse_coo or x.is_sparse:
        return x.to_dense() * 2
    return x + 1


@TRAPS.function("the type as a text", others={"integers": lambda: torch.arange(12).view(3, 4)})
def type_as_text(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if "Float" in x.type() else x + 1


@TRAPS.function("the dtype as a key", others={"integers": lambda: torch.arange(12).view(3, 4)})
def dtype_as_key(x: torch.Tensor) -> torch.Tensor:
    return x * {torch.float32: 2, torch.float64: 3, torch.int64: 4}[x.dtype]


@TRAPS.function("the limits of a dtype")
def limits_of_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x > 0, torch.finfo(x.dtype).min) + torch.finfo(x.dtype).eps


@TRAPS.function("the device as a key", devices=True)
def device_as_key(x: torch.Tensor) -> torch.Tensor:
    return x * {"cpu": 2, "meta": 3}.get(str(x.device), 4)


@TRAPS.function("devices compared in a helper", devices=True)
def device_in_helper(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0) if _on_cpu(x.device) else x.sum(1)


def _on_cpu(device: torch.device) -> bool:
    return device == torch.device("cpu")


@TRAPS.function("a device in a tuple compared", devices=True)
def device_in_tuple(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0) if (x.dtype, x.device) == (torch.float32, torch.device("cpu")) else x.sum(1)


@TRAPS.function("a device among others", devices=True)
def device_among_others(x: torch.Tensor) -> torch.Tensor:
    known = {torch.device("cpu")}
    device = x.device
    if device in known:
        return x.sum(0)
    return x.sum(1)


@TRAPS.function("is_cpu and is_meta", devices=True)
def is_cpu(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0) if x.is_cpu and not x.is_meta else x.sum(1)


@TRAPS.function("get_device", devices=True)
def get_device(x: torch.Tensor) -> torch.Tensor:
    return x * (x.get_device() + 2)


@TRAPS.function("shapes compared by function", inputs=lambda n=3: (torch.randn(n, 4), torch.randn(3, 4)))
def same_size(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y if x.is_same_size(y) else x * 2


@TRAPS.function("a channel order asked for", inputs=lambda n=3: torch.randn(2, 3, n, n), sizes=(5, 2))
def channel_order(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.is_contiguous(memory_format=torch.channels_last) else x + 1


@TRAPS.function(
    "allclose decides",
    inputs=lambda n=3: (torch.ones(n, 4), torch.randn(n, 4)),
    others={"close": lambda: (torch.ones(3, 4), torch.ones(3, 4))},
)
def allclose_decides(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x if torch.allclose(x, y) else x - y


@TRAPS.function("the hooks of a tensor", skip=frozenset({"double"}))
def hooks_asked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x._backward_hooks else x + 1


@TRAPS.function("retains_grad asked")
def retains_grad_asked(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.requires_grad:
        y.retain_grad()
    return y * 3 if y.retains_grad else y


def _with_gradient(n: int = 3) -> torch.Tensor:
    x = torch.randn(n, 4, requires_grad=True)
    x.grad = torch.ones(n, 4)
    return x


@TRAPS.function(
    "the gradient of an input asked for",
    others={"has one": _with_gradient},
    skip=frozenset({"gradients", "captured without gradients", "double"}),
)
def gradient_asked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.grad is None else x + x.grad


@TRAPS.function(
    "the name of grad_fn",
    others={
        "sum": lambda: torch.randn(3, 4, requires_grad=True) + 0,
        "product": lambda: torch.randn(3, 4, requires_grad=True) * 1,
    },
)
def name_of_grad_fn(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if "Mul" in type(x.grad_fn).__name__ else x + 1


@TRAPS.function(
    "callables and containers of tensors asked for",
    inputs=lambda n=3: Call((torch.randn(n, 4),), {"y": [torch.randn(n, 4)]}),
)
def kinds_asked(x: torch.Tensor, y: Any = None) -> torch.Tensor:
    if torch.is_tensor(y) or callable(y):
        return x
    return x + y[0] if isinstance(y, (list, tuple)) else x * 2


@TRAPS.function("switches of torch asked for")
def switches_asked(x: torch.Tensor) -> torch.Tensor:
    if torch.jit.is_tracing() or torch.jit.is_scripting() or torch.compiler.is_compiling():
        return x * 100
    return x * 2


@TRAPS.function("an error suppressed", others={"transposed": lambda: torch.randn(4, 3).t()})
def error_suppressed(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(RuntimeError):
        x = x.view(-1) * 2
    return x


@TRAPS.function("an error caught further out", others={"transposed": lambda: torch.randn(4, 3).t()})
def error_caught_outside(x: torch.Tensor) -> torch.Tensor:
    try:
        return _flat(x)
    except RuntimeError:
        return x * 3


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1) * 2


@TRAPS.function("a wrong kind caught", others={"integers": lambda: torch.arange(12).view(3, 4)})
def wrong_kind_caught(x: torch.Tensor) -> torch.Tensor:
    try:
        y = x.softmax(0)
    except (RuntimeError, NotImplementedError):
        y = x * 2
    return y


@TRAPS.model("a layer's error caught", others={"wider": lambda: torch.randn(3, 5)})
class LayerErrorCaught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.linear(x)
        except RuntimeError:
            return x * 2


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).view(-1)


@TRAPS.model("a module's error caught", others={"wider": lambda: torch.randn(3, 5)})
class ModuleErrorCaught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            y = self.inner(x)
        except Exception:
            y = x * 2
        return y + 1


@TRAPS.function("an error caught and raised again", others={"transposed": lambda: torch.randn(4, 3).t()})
def raised_again(x: torch.Tensor) -> torch.Tensor:
    try:
        return _flat(x)
    except RuntimeError as error:
        raise ValueError("must be contiguous") from error


@TRAPS.function("a missing key caught")
def missing_key(x: torch.Tensor) -> torch.Tensor:
    table = {"a": x}
    try:
        y = table["b"]
    except KeyError:
        y = x * 2
    try:
        return y + _flat(x).sum()
    finally:
        table.clear()
