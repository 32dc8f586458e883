"""Probes: small pieces of work, by sizes and options, that are run to learn how fast a machine is at each kind of kernel.
They are drawn at random from the sizes that layers have, and belong to no model; how they are timed is in `measuring.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchgraft.analysis.simulate.kernels import DTYPES

aten = torch.ops.aten
_MOST_FLOPS, _MOST_BYTES = 4e11, 3e9


@dataclass(frozen=True)
class Probe:
    """One piece of work: an entry of `WORK`, the shapes of its tensors and its options. `precision` may be "tf32"."""

    work: str
    shapes: tuple[tuple[int, ...], ...]
    precision: str = "fp32"
    options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, from which `Probe(**values)` makes it again."""
        return asdict(self)

    def tensors(self, device: str) -> list[Tensor]:
        """Tensors to run it on."""
        dtype = DTYPES[self.precision]
        tensors = [torch.randn(shape, dtype=dtype, device=device) for shape in self.shapes]
        return PREPARE[self.work](tensors, self.options) if self.work in PREPARE else tensors

    def run(self, tensors: list[Tensor]) -> Any:
        """The work itself."""
        return WORK[self.work](*tensors, **self.options)

    @property
    def bytes(self) -> int:
        """Of what goes in."""
        return sum(map(prod, self.shapes)) * DTYPES[self.precision].itemsize


def _convolution(x: Tensor, weight: Tensor, channels_last: bool = False, **options: Any) -> Tensor:
    settings = {"stride": 1, "padding": 0, "dilation": 1, "transposed": False, "groups": 1} | options
    sides = x.dim() - 2
    stride, padding, dilation = ([settings[name]] * sides for name in ("stride", "padding", "dilation"))
    return torch.convolution(
        x, weight, None, stride, padding, dilation, settings["transposed"], [0] * sides, settings["groups"]
    )


def _convolution_gradients(gradient: Tensor, x: Tensor, weight: Tensor, **options: Any) -> Any:
    settings = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1} | options
    sides = x.dim() - 2
    stride, padding, dilation = ([settings[name]] * sides for name in ("stride", "padding", "dilation"))
    rest = (stride, padding, dilation, False, [0] * sides, settings["groups"], [True, True, False])
    return aten.convolution_backward(gradient, x, weight, None, *rest)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)


def _recurrent(x: Tensor, state: Tensor, *weights: Tensor, kind: str) -> Any:
    layers = len(weights) // 4
    flags = (True, layers, 0.0, False, False, True)
    if kind == "lstm":
        return torch.lstm(x, (state, state), list(weights), *flags)
    return torch.gru(x, state, list(weights), *flags)


WORK: dict[str, Callable[..., Any]] = {
    "linear": lambda x, weight, bias=None: functional.linear(x, weight, bias),
    "bmm": torch.bmm,
    "bmm_transposed": lambda x, y: torch.bmm(x, y.transpose(1, 2)),
    "convolution": _convolution,
    "convolution_gradients": _convolution_gradients,
    "attention": _attention,
    "recurrent": _recurrent,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "hardswish": functional.hardswish,
    "add": torch.add,
    "mul": torch.mul,
    "add_bias": lambda x, bias: x + bias.view(-1, *[1] * (x.dim() - 2)),
    "relu_": torch.relu_,
    "layer_norm": lambda x, weight, bias: functional.layer_norm(x, weight.shape, weight, bias),
    "batch_norm": lambda x, mean, var, weight, bias: functional.batch_norm(x, mean, var, weight, bias, False),
    "batch_norm_training": lambda x, mean, var, weight, bias: functional.batch_norm(x, mean, var, weight, bias, True),
    "group_norm": lambda x, weight, bias, groups: functional.group_norm(x, groups, weight, bias),
    "softmax": lambda x: functional.softmax(x, -1),
    "log_softmax": lambda x: functional.log_softmax(x, -1),
    "mean_spatial": lambda x: x.mean((2, 3)),
    "sum_last": lambda x: x.sum(-1),
    "sum_first": lambda x: x.sum(0),
    "sum_all": torch.sum,
    "adaptive_pool": lambda x: functional.adaptive_avg_pool2d(x, 1),
    "max_pool": lambda x, kernel, stride: functional.max_pool2d(x, kernel, stride, kernel // 2),
    "avg_pool": lambda x, kernel, stride: functional.avg_pool2d(x, kernel, stride),
    "upsample": lambda x, mode: functional.interpolate(x, scale_factor=2, mode=mode),
    "cat": lambda *tensors: torch.cat(tensors, 1),
    "transpose_copy": lambda x: x.transpose(1, 2).contiguous(),
    "channels_last_copy": lambda x: x.permute(0, 2, 3, 1).contiguous(),
    "copy": torch.clone,
    "to_half": lambda x: x.to(torch.float16),
    "to_float": lambda x: x.to(torch.float32),
    "embedding": lambda table, rows: functional.embedding(rows, table),
    "index_select": lambda x, rows: x.index_select(0, rows),
    "pad": lambda x: functional.pad(x, (1, 1, 1, 1)),
    "roll": lambda x: torch.roll(x, (3, 3), (1, 2)),
    "topk": lambda x: torch.topk(x, 5, -1),
    "cumsum": lambda x: torch.cumsum(x, -1),
    "softmax_gradient": lambda gradient, y: aten._softmax_backward_data(gradient, y, -1, y.dtype),
    "gelu_gradient": lambda gradient, x: aten.gelu_backward(gradient, x),
    "threshold_gradient": lambda gradient, x: aten.threshold_backward(gradient, x, 0),
}


def _rows(tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    table, rows = tensors
    return [table, torch.randint(0, table.shape[0], rows.shape, device=rows.device)]


def _flattened(tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Weights of recurrent layers in one piece of memory, as modules keep them on a GPU: else they are copied in each call."""
    x, state, *weights = tensors
    if x.is_cuda:
        mode = 2 if options["kind"] == "lstm" else 3
        sizes = (state.shape[-1], 0, state.shape[0])
        torch._cudnn_rnn_flatten_weight(weights, 4, x.shape[-1], mode, *sizes, True, False)
    return [x, state, *weights]


def _channels_together(tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """An image in the order of memory in which some models hand it to a convolution, beside weights as they are."""
    x, weight = tensors
    return [x.to(memory_format=torch.channels_last) if options.get("channels_last") else x, weight]


PREPARE: dict[str, Callable[[list[Tensor], dict[str, Any]], list[Tensor]]] = {
    "embedding": _rows,
    "index_select": _rows,
    "recurrent": _flattened,
    "convolution": _channels_together,
}


# ---- drawing them ----

# What is tried with next to nothing to do.
_SMALL = """
    linear bmm convolution attention layer_norm batch_norm softmax mean_spatial adaptive_pool max_pool embedding index_select
    transpose_copy pad relu gelu silu add mul cat copy sum_last relu_ add_bias
"""
# What is much faster in tf32; all else is the same as in fp32.
_PRODUCTS = ("linear", "bmm", "bmm_transposed", "convolution", "convolution_gradients", "recurrent")


class Draw:
    """Draws probes with the sizes of layers; the same for the same seed."""

    def __init__(self, seed: int = 0, batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)) -> None:
        self.random = random.Random(seed)
        self.batches = batches

    def one_of(self, *values: Any) -> Any:
        return self.random.choice(values)

    def batch(self) -> int:
        return self.one_of(*self.batches)

    def channels(self) -> int:
        return self.one_of(
            16, 24, 32, 48, 64, 96, 112, 128, 144, 160, 192, 240, 256, 320, 384, 512, 640, 672, 960, 1024, 2048
        )

    def size(self, low: float, high: float) -> int:
        return int(low * (high / low) ** self.random.random())

    def linear(self) -> Probe:
        rows = self.one_of(self.batch(), self.batch() * self.one_of(49, 64, 128, 196, 197, 256, 512))
        width = (64, 96, 128, 192, 256, 384, 512, 768, 1000, 1024, 1280, 2048, 3072, 4096, 8192)
        columns, depth = self.one_of(*width, 30522), self.one_of(*width, 25088)
        shapes = ((rows, depth), (columns, depth), (columns,))
        return Probe("linear", shapes if self.one_of(True, True, False) else shapes[:2])

    def vector(self) -> Probe:
        """A product with a single row, and with a few."""
        width = (64, 128, 256, 512, 768, 1024, 1280, 2048, 4096, 9216)
        rows, columns, depth = self.one_of(1, 1, 1, 2, 4, 8), self.one_of(*width, 1000, 32000), self.one_of(*width)
        shapes = ((rows, depth), (columns, depth), (columns,))
        return Probe("linear", shapes if self.one_of(True, True, False) else shapes[:2])

    def small(self) -> Probe:
        """Work so little that starting it is what takes the time."""
        name = self.one_of(*_SMALL.split())
        batch, width = self.one_of(1, 2, 4), self.one_of(8, 16, 32)
        rows, image = (batch, width), (batch, 8, 6, 6)
        shapes: dict[str, tuple[tuple[int, ...], ...]] = {
            "linear": (rows, (width, width), (width,)),
            "bmm": ((batch, 4, width), (batch, width, 4)),
            "convolution": (image, (8, 8, 3, 3)),
            "attention": ((batch, 2, 4, width),) * 3,
            "layer_norm": (rows, (width,), (width,)),
            "batch_norm": (image, *[(8,)] * 4),
            "mean_spatial": (image,),
            "adaptive_pool": (image,),
            "max_pool": (image,),
            "embedding": ((100, width), (batch,)),
            "index_select": ((100, width), (batch,)),
            "transpose_copy": ((batch, 4, 2, width),),
            "pad": (image,),
            "add_bias": (image, (8,)),
        }
        two = name in ("add", "mul", "cat")
        options = {"kernel": 2, "stride": 2} if name == "max_pool" else {"padding": 1} if name == "convolution" else {}
        return Probe(name, shapes.get(name, (rows,) * (2 if two else 1)), options=options)

    def bmm(self) -> Probe:
        count, side = self.batch() * self.one_of(1, 3, 8, 12, 16), self.one_of(16, 49, 64, 128, 197, 256, 512)
        width = self.one_of(32, 64, 96, 128)
        if self.one_of(True, False):
            return Probe("bmm_transposed", ((count, side, width), (count, side, width)))
        return Probe("bmm", ((count, side, side), (count, side, width)))

    def convolution(self) -> Probe:
        batch, side = self.batch(), self.one_of(7, 8, 14, 16, 17, 28, 32, 35, 56, 64, 112)
        outer = self.channels()
        kernel = self.one_of(1, 1, 1, 3, 3, 3, 3, 5, 7)
        inner = self.one_of(outer, outer, self.channels(), self.channels(), 3 if kernel in (3, 7) else 64)
        stride = self.one_of(1, 1, 1, 2)
        if inner == 3:
            side, stride = self.one_of(112, 224, 256), self.one_of(1, 2, 2)
        if self.one_of(*[False] * 12, True):  # the patches of a vision transformer
            kernel = stride = self.one_of(4, 14, 16)
            shapes = ((batch, 3, 224, 224), (self.one_of(96, 384, 768, 1024), 3, kernel, kernel))
            return Probe("convolution", shapes, options={"stride": stride})
        padding = kernel // 2 if self.one_of(*[True] * 9, False) else 0
        options = {"stride": stride, "padding": padding}
        return Probe("convolution", ((batch, inner, side, side), (outer, inner, kernel, kernel)), options=options)

    def grouped(self) -> Probe:
        batch, side, kernel = self.batch(), self.one_of(7, 14, 28, 56, 112), self.one_of(3, 3, 3, 5, 5, 7)
        channels = self.channels()
        groups = channels if self.one_of(True, True, False) else self.one_of(2, 4, 8, channels // 8)
        channels -= channels % groups
        options = {"stride": self.one_of(1, 1, 2), "padding": kernel // 2, "groups": groups}
        shapes = ((batch, channels, side, side), (channels, channels // groups, kernel, kernel))
        return Probe("convolution", shapes, options=options)

    def other_convolution(self) -> Probe:
        batch, inner, outer, kernel = self.batch(), self.channels(), self.channels(), self.one_of(1, 3, 3, 5)
        kind = self.one_of("1d", "3d", "transposed", "dilated")
        shapes: tuple[tuple[int, ...], ...]
        if kind == "1d":
            shapes = ((batch, inner, self.one_of(50, 128, 400, 1500, 3000)), (outer, inner, kernel))
            return Probe("convolution", shapes, options={"padding": kernel // 2, "stride": self.one_of(1, 1, 2)})
        if kind == "3d":
            side, inner, outer = self.one_of(7, 14, 28, 56), min(inner, 256), min(outer, 256)
            shapes = ((min(batch, 16), inner, self.one_of(2, 4, 8), side, side), (outer, inner, 3, 3, 3))
            return Probe("convolution", shapes, options={"padding": 1, "stride": self.one_of(1, 1, 2)})
        side = self.one_of(4, 8, 16, 32, 64)
        if kind == "transposed":
            kernel, stride = self.one_of((2, 2), (4, 2), (3, 2))
            shapes = ((batch, inner, side, side), (inner, outer, kernel, kernel))
            return Probe("convolution", shapes, options={"stride": stride, "padding": kernel // 4, "transposed": True})
        dilation = self.one_of(2, 4, 12)
        shapes = ((batch, inner, side, side), (outer, inner, 3, 3))
        return Probe("convolution", shapes, options={"dilation": dilation, "padding": dilation})

    def attention(self) -> Probe:
        examples, heads, width = self.batch(), self.one_of(1, 3, 6, 8, 12, 16, 32), self.one_of(32, 64, 64, 64, 80, 128)
        queries = self.one_of(1, 49, 64, 128, 197, 256, 512, 1024, 2048)
        keys = queries if queries > 1 else self.one_of(128, 512, 2048)
        shapes: tuple[Any, ...] = ((examples, heads, queries, width), *[(examples, heads, keys, width)] * 2)
        kind = self.one_of("full", "full", "causal", "masked")
        if kind == "masked":
            shapes = (*shapes, (examples, 1, queries, keys))
        return Probe("attention", shapes, options={"causal": True} if kind == "causal" and queries > 1 else {})

    def recurrent(self) -> Probe:
        batch, length, inner = self.batch(), self.one_of(16, 35, 64, 128), self.one_of(64, 256, 512)
        width = self.one_of(64, 128, 256, 512, 1024)
        layers, kind = self.one_of(1, 2), self.one_of("lstm", "lstm", "gru")
        rows = width * (4 if kind == "lstm" else 3)
        weights: list[tuple[int, ...]] = []
        for layer in range(layers):
            weights += [(rows, width if layer else inner), (rows, width), (rows,), (rows,)]
        return Probe("recurrent", ((batch, length, inner), (layers, batch, width), *weights), options={"kind": kind})

    def elementwise(self) -> Probe:
        name = self.one_of("relu", "relu", "gelu", "silu", "hardswish", "add", "add", "mul", "relu_", "add_bias")
        if name == "add_bias":
            shape = (self.batch(), self.channels(), *[self.one_of(7, 14, 28, 56, 112)] * 2)
            return Probe(name, (shape, (shape[1],)))
        count = self.size(256, 3e8)
        return Probe(name, ((count,),) * (2 if name in ("add", "mul") else 1))

    def norm(self) -> Probe:
        names = """
            layer_norm layer_norm batch_norm batch_norm batch_norm_training group_norm softmax softmax log_softmax
        """
        name = self.one_of(*names.split())
        channels, side = self.channels(), self.one_of(7, 14, 28, 56, 112)
        if name in ("softmax", "log_softmax"):
            columns = self.one_of(49, 64, 128, 197, 256, 512, 1000, 1024, 30522)
            return Probe(name, ((self.size(8, 2e5), columns),))
        if name == "layer_norm":
            width = self.one_of(96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
            return Probe(name, ((self.size(1, 1e5), width), (width,), (width,)))
        image = (self.batch(), channels, side, side)
        if name == "group_norm":
            return Probe(name, (image, (channels,), (channels,)), options={"groups": self.one_of(1, 8, 16)})
        return Probe(name, (image, *[(channels,)] * 4))

    def memory(self) -> Probe:
        names = """
            mean_spatial sum_last sum_first sum_all adaptive_pool max_pool avg_pool upsample cat transpose_copy channels_last_copy
            copy to_half to_float embedding index_select pad roll topk cumsum
        """
        name = self.one_of(*names.split())
        image = (self.batch(), self.channels(), *[self.one_of(7, 14, 28, 56, 112)] * 2)
        rows = (self.size(4, 1e5), self.one_of(64, 128, 256, 512, 768, 1024, 4096))
        if name in ("mean_spatial", "adaptive_pool", "channels_last_copy", "pad"):
            return Probe(name, (image,))
        if name in ("max_pool", "avg_pool"):
            kernel, stride = self.one_of((2, 2), (3, 2), (3, 1))
            return Probe(name, (image,), options={"kernel": kernel, "stride": stride})
        if name == "upsample":
            return Probe(name, (image,), options={"mode": self.one_of("nearest", "bilinear")})
        if name == "cat":
            return Probe(name, (image,) * self.one_of(2, 2, 3, 4))
        if name == "transpose_copy":
            shape = (self.batch() * 4, self.one_of(12, 16, 64, 197), self.one_of(64, 128, 197, 512), 64)
            return Probe(name, (shape[: self.one_of(3, 4)],))
        if name in ("embedding", "index_select"):
            return Probe(name, ((self.one_of(1000, 30522, 50257), rows[1]), (self.size(8, 3e4),)))
        if name == "roll":
            return Probe(name, ((self.batch(), image[2], image[2], rows[1]),))
        if name in ("topk", "cumsum"):
            return Probe(name, ((self.size(1, 2000), self.one_of(64, 512, 1000, 4096)),))
        return Probe(name, (rows,))

    def gradient(self) -> Probe:
        names = "convolution_gradients convolution_gradients softmax_gradient gelu_gradient threshold_gradient"
        name = self.one_of(*names.split())
        if name == "convolution_gradients":
            forward = self.one_of(self.convolution, self.grouped)()
            made = forward.run([torch.empty(shape, device="meta") for shape in forward.shapes])
            return Probe(name, (tuple(made.shape), *forward.shapes), options=forward.options)
        shape = (self.size(8, 1e5), self.one_of(64, 197, 512, 768))
        return Probe(name, (shape, shape))


def probes(
    counts: dict[str, int],
    precisions: tuple[str, ...],
    seed: int = 0,
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128),
    most_flops: float = _MOST_FLOPS,
    most_bytes: float = _MOST_BYTES,
) -> Iterator[Probe]:
    """So many of each kind, in each precision; kinds that do no products are the same in fp32 and tf32, and left out in one."""
    draw = Draw(seed, batches)
    for kind, count in counts.items():
        made = 0
        while made < count:
            probe = getattr(draw, kind)()
            if not _is_of_use(probe, most_flops, most_bytes):
                continue
            made += 1
            for precision in precisions:
                if precision != "tf32" or probe.work in _PRODUCTS:
                    yield Probe(probe.work, probe.shapes, precision, probe.options)


def _is_of_use(probe: Probe, most_flops: float, most_bytes: float) -> bool:
    """Whether it runs, and neither for too long nor on too much memory."""
    from torch.utils.flop_counter import FlopCounterMode

    tensors = [torch.empty(shape, device="meta") for shape in probe.shapes]
    if probe.bytes > most_bytes:
        return False
    if probe.work == "recurrent":
        examples, steps, _ = probe.shapes[0]
        return 2 * examples * steps * sum(prod(shape) for shape in probe.shapes[2:]) <= most_flops
    if probe.work in ("embedding", "index_select"):
        return True
    try:
        with FlopCounterMode(display=False) as counter:
            result = probe.run(tensors)
    except (RuntimeError, ValueError, TypeError):
        return False
    made = result[0] if isinstance(result, tuple) else result
    return counter.get_total_flops() <= most_flops and 0 < made.numel() * 4 <= most_bytes
