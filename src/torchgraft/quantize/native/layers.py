"""Layers that compute with integers by torch's own kernels (oneDNN), each with the activation or sum after it in the same call.
They keep their weights as plain integers and pack them for the kernel when they are first run, so that they can be copied and
saved. Which layers become these is decided in `lowering.py`.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchgraft.errors import QuantizeError
from torchgraft.quantize.native.functions import dequantize_fast, quantize_fast
from torchgraft.quantize.operators import scale_of_values

_onednn: Any = torch.ops.onednn


def outside_of_graphs(call: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """A call that torch.compile runs between its graphs, because it cannot look into packed weights."""
    if torch.compiler.is_exporting():
        raise QuantizeError(
            "a program with packed weights cannot be exported\nexport the reference form, which convert() returns"
        )
    return _run_eagerly(call, *args)


@torch.compiler.disable
def _run_eagerly(call: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    return call(*args)


@dataclass(frozen=True)
class PostOperation:
    """What a kernel does with its results before it writes them."""

    name: str = "none"
    options: tuple[Any, ...] = ()
    algorithm: str = ""


@dataclass(frozen=True)
class Convolution:
    """Where a kernel goes over its input."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What kernels take of it, in their order."""
        return self.stride, self.padding, self.dilation, self.groups


_MOST_SIZES = 8


class _Kept(dict[Any, Any]):
    """What a layer made of its weights when it ran. A class of its own, by which what watches models for changes knows that it
    is none."""

    __slots__ = ()

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made for a key before, or is made now; the oldest goes where there are too many."""
        found = self.get(key)
        if found is None:
            if len(self) >= _MOST_SIZES:
                self.pop(next(iter(self), None), None)
            found = self[key] = make()
        return found


# How often layers have forgotten what they made, so that what others made of that can be known to be old.
_changes = itertools.count()
_last_change = [next(_changes)]


def changes_of_layers() -> int:
    """A number that is another one after weights of any layer were replaced."""
    return _last_change[0]


class Packing(torch.nn.Module):
    """Weights as plain tensors, and what a kernel wants of them, made when it is first needed and never copied or saved."""

    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self._packed, self._calls = _Kept(), _Kept()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": _Kept(), "_calls": _Kept()}

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._forget()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*args, **kwargs)

    def _forget(self) -> None:
        self._packed.clear()
        self._calls.clear()
        _last_change[0] = next(_changes)


class _Call(NamedTuple):
    """How a kernel is called for inputs of one shape: what it takes between the input and the other side of a sum, and after it.

    A convolution that looks at one pixel at a time is a linear layer of pixels, which is faster and need not copy sums: `turned`
    and `back` are the orders of dimensions on the way there and back, and `chosen` are the pixels that a stride leaves."""

    kernel: Any
    weights: tuple[Any, ...]
    rest: tuple[Any, ...]
    turned: tuple[int, ...] | None
    back: tuple[int, ...]
    chosen: tuple[slice, ...] | None
    shape: tuple[int, ...]

    def run(self, steps: torch.Tensor, *other: torch.Tensor) -> torch.Tensor:
        if self.turned is None:
            return self.kernel(steps, *self.weights, *other, *self.rest)
        pixels = steps.permute(self.turned)
        if self.chosen is not None:
            pixels = pixels[self.chosen]
        return self.kernel(pixels, *self.weights, *other, *self.rest).permute(self.back)


# Looked up once, because it is asked in every call.
_is_compiling = torch.compiler.is_compiling


class IntegerLayer(Packing):
    """A linear layer or convolution on bytes. With `output` it returns bytes of that scale and zero point, otherwise floats."""

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        input_scale: tuple[float, int] | None,
        convolution: Convolution | None = None,
        post: PostOperation | None = None,
        output: tuple[float, int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("weight", weight)
        scale = weight_scale.expand(weight.shape[0]) if weight_scale.dim() == 0 else weight_scale
        self.register_buffer("weight_scale", scale.float().contiguous())
        self.register_buffer("weight_zero_point", torch.zeros(weight.shape[0], dtype=torch.int64), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self.weight_scale: torch.Tensor
        self.weight_zero_point: torch.Tensor
        self.bias: torch.Tensor | None
        self.input_scale, self.convolution, self.output = input_scale, convolution, output
        self.post = post or PostOperation()
        # Scales stand in the calls of the program, too: weights of a program with other ones would not fit, and are refused.
        known = [*(input_scale or (0.0, 0)), *(output or (0.0, 0))]
        self.register_buffer("scales", torch.tensor(known, dtype=torch.float64))
        self.scales: torch.Tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}scales")
        if given is not None and not torch.equal(given.cpu().double(), self.scales.cpu().double()):
            errors: list[str] = args[-1]
            errors.append(
                f"'{prefix[:-1]}' was quantized with other scales: load the program itself, or convert it again"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        """The layer on bytes."""
        return outside_of_graphs(self._run, steps) if _is_compiling() else self._run(steps)

    def _run(self, steps: torch.Tensor) -> torch.Tensor:
        call = self._calls.get(steps.shape)
        return self._run_anew(steps, self.input_scale) if call is None else call.run(steps)

    def _run_anew(self, steps: torch.Tensor, scale: tuple[float, int] | None, *, is_kept: bool = True) -> torch.Tensor:
        """Run on inputs of a shape or a scale that were not there before."""
        if self._is_single(steps):
            return self._run_anew(steps.unsqueeze(0), scale, is_kept=is_kept).squeeze(0)
        if not steps.numel():
            return steps.new_empty(self._result_shape(steps), dtype=self.dtype if self.output is None else torch.uint8)
        assert scale is not None
        call = self._call_for(steps, scale, self.output, self.post)
        return (self._calls.once(steps.shape, lambda: call) if is_kept else call).run(steps)

    def _call_for(
        self,
        steps: torch.Tensor,
        scale: tuple[float, int],
        output: tuple[float, int] | None,
        post: PostOperation,
        other: tuple[float, int] | None = None,
    ) -> _Call:
        """The call for inputs, results and the other side of a sum with these scales and zero points."""
        by_pixel = self._is_by_pixel()
        is_linear = self.convolution is None or by_pixel
        # The kernel's own order of weights goes by the size of images: another would be changed back and forth in every call.
        size = () if is_linear else tuple(steps.shape[2:])
        packed = self._packed.once(size, lambda: self._pack(steps, is_linear))
        where = () if self.convolution is None or is_linear else self.convolution.arguments
        result, zero_point = output or (1.0, 0)
        # Kernels have less to do where all scales are in that of the weights, and where a byte that starts at zero is the ReLU.
        unit = result if post.name in ("none", "relu") else 1.0
        if post.name == "relu" and output is not None and zero_point == 0:
            post = PostOperation()
        bias = None if self.bias is None else self.bias / unit
        rest = (bias, *where, result / unit, zero_point, self.dtype if output is None else torch.uint8)
        if other is None:
            kernel = (_onednn.qlinear_pointwise if is_linear else _onednn.qconv_pointwise).default
        else:
            kernel = (_onednn.qlinear_pointwise if is_linear else _onednn.qconv2d_pointwise).binary
            rest = (*rest, other[0] / unit, other[1], "sum", 1.0)
        axes = range(1, steps.dim() - 1)
        stride = self.convolution.stride if self.convolution is not None else ()
        chosen = (
            (slice(None), *(slice(None, None, step) for step in stride)) if by_pixel and set(stride) != {1} else None
        )
        return _Call(
            kernel._op,  # what the overload would call
            (1.0, scale[1], packed, self.weight_scale * (scale[0] / unit), self.weight_zero_point),
            (*rest, post.name, post.options, post.algorithm),
            (0, *(axis + 1 for axis in axes), 1) if by_pixel else None,
            (0, steps.dim() - 1, *axes),
            chosen,
            self._result_shape(steps),
        )

    def _pack(self, steps: torch.Tensor, is_linear: bool) -> Any:
        if is_linear or self.convolution is None:
            return _onednn.qlinear_prepack(self.weight.flatten(1), None)
        scale, zero_point = self.input_scale or (1.0, 0)
        where = self.convolution.arguments
        return _onednn.qconv_prepack(self.weight, self.weight_scale, scale, zero_point, *where, list(steps.shape))

    def _is_by_pixel(self) -> bool:
        where = self.convolution
        if where is None or where.groups != 1 or any(where.padding):
            return False
        return set(self.weight.shape[2:]) == {1}

    def _result_shape(self, steps: torch.Tensor) -> tuple[int, ...]:
        if self.convolution is None:
            return (*steps.shape[:-1], self.weight.shape[0])
        where = self.convolution
        sizes = [
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, padding, dilation, kernel, stride in zip(
                steps.shape[2:], where.padding, where.dilation, self.weight.shape[2:], where.stride, strict=True
            )
        ]
        return (steps.shape[0], self.weight.shape[0], *sizes)

    def _is_single(self, steps: torch.Tensor) -> bool:
        """Whether this is one image without a batch, which torch's convolutions take and these kernels do not."""
        return self.convolution is not None and steps.dim() == self.weight.dim() - 1

    def extra_repr(self) -> str:
        parts = [f"{tuple(self.weight.shape)}", f"input_scale={self.input_scale}"]
        parts += [f"post={self.post.name}"] if self.post.name != "none" else []
        parts += [f"output={self.output}"] if self.output is not None else []
        return ", ".join(parts)


class IntegerLinear(IntegerLayer):
    """A linear layer from floats to floats, by way of bytes of a known scale.

    Few rows are bound by reading the weights, and FBGEMM reads them faster; it rounds the input, too. Many go to oneDNN.
    """

    few_rows = 32

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The layer on floats."""
        return outside_of_graphs(self._call, values) if _is_compiling() else self._call(values)

    def _call(self, values: torch.Tensor) -> torch.Tensor:
        assert self.input_scale is not None
        if self.dtype == torch.float32 and 0 < values.numel() <= self.few_rows * values.shape[-1]:
            # A list, because there may be nothing in it.
            [packed] = self._packed.once("few", lambda: [_pack_for_few(self.weight, self.weight_scale, self.bias)])
            if packed is not None:
                kernel = _few_rows_relu if self.post.name == "relu" else _few_rows
                return kernel(values.float(), *self.input_scale, packed)
        return self._run(quantize_fast(values, *self.input_scale))


_quantized: Any = torch.ops.quantized


def _overload(name: str) -> Any:
    """The one overload of an operator, which need not be chosen in every call; None where this torch has it not."""
    return getattr(getattr(_quantized, name, None), "default", None)


_few_rows = _overload("linear_with_input_q_dq_qweight_dq_output_fp32")
_few_rows_relu = _overload("linear_with_input_q_dq_qweight_dq_relu_output_fp32")


def _pack_for_few(weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """Weights as FBGEMM takes them; None where this torch or this machine has it not."""
    if _few_rows is None or _few_rows_relu is None or torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return None
    zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantized tensors are deprecated, and the only way into this kernel
            quantized = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
            packed = _quantized.linear_prepack(quantized, bias)
            _few_rows(torch.zeros(1, weight.shape[1]), 1.0, 0, packed)
    except (RuntimeError, AttributeError, NotImplementedError):
        return None
    return packed


class IntegerLayerWithSum(IntegerLayer):
    """The same, which adds bytes of another scale to its results, and may write into those bytes."""

    def __init__(self, *args: Any, other_scale: tuple[float, int], may_write: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.other_scale, self.may_write = other_scale, may_write

    def forward(self, steps: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The layer on bytes, plus other bytes, in bytes."""
        if _is_compiling():
            return outside_of_graphs(self._add, steps, other)
        return self._add(steps, other)

    def _add(self, steps: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        call = self._calls.get(steps.shape)
        if call is None:
            if self._is_single(steps):
                return self._add(steps.unsqueeze(0), other.unsqueeze(0)).squeeze(0)
            if not steps.numel():
                return self._spread(steps, other)
            assert self.input_scale is not None
            made = self._call_for(steps, self.input_scale, self.output, self.post, self.other_scale)
            call = self._calls.once(steps.shape, lambda: made)
        if other.shape != call.shape:
            return self._spread(steps, other)
        if call.turned is not None:
            other = other.permute(call.turned)
        order = torch.channels_last if self.convolution is not None and call.turned is None else torch.contiguous_format
        # The kernel writes its results here.
        total = other.contiguous(memory_format=order) if self.may_write else other.clone(memory_format=order)
        return call.run(steps, total)

    def _spread(self, steps: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """A sum with something of another shape, which the kernel does not do."""
        assert self.input_scale is not None and self.output is not None
        if steps.numel():
            total = self._call_for(steps, self.input_scale, None, PostOperation()).run(steps).float()
        else:
            total = steps.new_empty(self._result_shape(steps), dtype=torch.float32)
        total = total + dequantize_fast(other, *self.other_scale)
        return quantize_fast(torch.relu(total) if self.post.name == "relu" else total, *self.output)


class DynamicLayer(IntegerLayer):
    """A layer on floats that chooses the scale of its input anew for each."""

    def __init__(self, *args: Any, limits: tuple[int, int], **options: Any) -> None:
        super().__init__(*args, **options)
        self.limits = limits

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The layer on floats, by way of bytes."""
        return outside_of_graphs(self._call, values) if torch.compiler.is_compiling() else self._call(values)

    def _call(self, values: torch.Tensor) -> torch.Tensor:
        scales = scale_of_values(values, *self.limits, symmetric=False)
        scale, zero_point = scales[0].item(), int(scales[1].item())
        steps = quantize_fast(values, scale, zero_point, *self.limits)
        return self._run_anew(steps, (scale, zero_point), is_kept=False).to(values.dtype)
