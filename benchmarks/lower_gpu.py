"""Lowered modules on a GPU beside eager and torch.compile: `PYTHONPATH=src python benchmarks/lower_gpu.py`.
It needs torch (2.11 or newer) with CUDA and this project, nothing else; torchvision is not needed. A few minutes.

Times are the least of several rounds of calls, interleaved; ratios are to eager in the precision of the table's first row.
"""

from __future__ import annotations

import argparse
import logging
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torchgraft
from torchgraft import zoo

DEVICE = "cuda"


# ---- a language model of one billion parameters that decodes one token, the cache given ----


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, size: int, heads: int, pairs: int, inner: int) -> None:
        super().__init__()
        self.heads, self.pairs, self.width = heads, pairs, size // heads
        self.norm1, self.norm2 = RMSNorm(size), RMSNorm(size)
        self.q = nn.Linear(size, size, bias=False)
        self.k = nn.Linear(size, pairs * self.width, bias=False)
        self.v = nn.Linear(size, pairs * self.width, bias=False)
        self.o = nn.Linear(size, size, bias=False)
        self.gate, self.up = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, position: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        y = self.norm1(x)
        batch = x.shape[0]
        q = self.q(y).view(batch, 1, self.heads, self.width).transpose(1, 2)
        k = self.k(y).view(batch, 1, self.pairs, self.width).transpose(1, 2)
        v = self.v(y).view(batch, 1, self.pairs, self.width).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        attended = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, 1, -1))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The shape of a 1.2-billion-parameter Llama."""

    def __init__(
        self,
        layers: int = 16,
        size: int = 2048,
        heads: int = 32,
        pairs: int = 8,
        inner: int = 8192,
        words: int = 128256,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, size)
        self.blocks = nn.ModuleList([Block(size, heads, pairs, inner) for _ in range(layers)])
        self.norm = RMSNorm(size)
        width = size // heads
        frequencies = 1.0 / 500000.0 ** (torch.arange(0, width, 2).float() / width)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, token: Tensor, position: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        x = self.words(token)
        angles = torch.outer(position.float(), self.frequencies.float())
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = (torch.arange(keys[0].shape[2], device=x.device) <= position)[None, None, None, :]
        for block, k, v in zip(self.blocks, keys, values, strict=True):
            x = block(x, cos, sin, mask, position, k, v)
        return nn.functional.linear(self.norm(x), self.words.weight)


def llama(length: int = 1024) -> tuple[nn.Module, tuple[Any, ...]]:
    with torch.device(DEVICE):
        model = Llama().to(torch.bfloat16).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        shape = (1, 8, length, 64)
        caches = [[torch.randn(shape, dtype=torch.bfloat16) for _ in model.blocks] for _ in range(2)]
        return model, (torch.tensor([[17]]), torch.tensor([length // 2]), *caches)


# ---- measuring ----


def measured(functions: dict[str, Callable[[], Any]], seconds: float = 1.5) -> dict[str, float]:
    """The least time of one call, in seconds, of each function; in turns."""
    best: dict[str, float] = {}
    with torch.no_grad():
        for name, function in functions.items():
            for _ in range(3):
                function()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            function()
            torch.cuda.synchronize()
            best[name] = time.perf_counter() - begin
        calls = {name: max(2, min(200, int(0.05 / took))) for name, took in best.items()}
        end = time.perf_counter() + seconds * len(functions)
        while time.perf_counter() < end:
            for name, function in functions.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(calls[name]):
                    function()
                torch.cuda.synchronize()
                best[name] = min(best[name], (time.perf_counter() - begin) / calls[name])
    return best


def show(title: str, times: dict[str, float], made: dict[str, float]) -> None:
    """One table, with ratios to its first row."""
    first = next(iter(times.values()))
    print(f"\n{title}", flush=True)
    for name, took in times.items():
        seconds = f"   ready in {made[name]:6.1f} s" if name in made else ""
        print(f"  {name:<44} {took * 1e3:9.3f} ms   {first / took:6.2f} x{seconds}", flush=True)


class Rows:
    """The rows of one table; what fails is a line of its own."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[[], Any]] = {}
        self.made: dict[str, float] = {}

    def add(self, name: str, make: Callable[..., Callable[[], Any]], *given: Any, **options: Any) -> None:
        begin = time.perf_counter()
        try:
            with torch.no_grad():
                function = make(*given, **options)
                function()
                torch.cuda.synchronize()
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            traceback.print_exc(limit=-3)
            return
        self.functions[name], self.made[name] = function, time.perf_counter() - begin

    def done(self, title: str) -> None:
        show(title, measured(self.functions), self.made)
        torch._dynamo.reset()


def compiled(model: Any, *inputs: Any) -> Callable[[], Any]:
    """torch.compile's own quickest way for small batches."""
    function = torch.compile(model, mode="reduce-overhead")
    return lambda: function(*inputs)


def lowered(model: Any, inputs: tuple[Any, ...], backend: str, **options: Any) -> Callable[[], Any]:
    module = torchgraft.lower(model, inputs, backend=backend, **options)
    print("   ", module.explain().replace("\n", "\n    ")[:600], flush=True)
    return lambda: module(*inputs)


def eager(model: Any, *inputs: Any) -> Callable[[], Any]:
    return lambda: model(*inputs)


def images(batches: list[int], backends: list[str]) -> None:
    """ResNet-50 in TF32 and in 16 bits."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    model = zoo.create("resnet50").eval().to(DEVICE)
    for batch in batches:
        x = torch.randn(batch, 3, 224, 224, device=DEVICE)
        rows = Rows()
        rows.add("eager, TF32", eager, model, x)
        rows.add("torch.compile reduce-overhead, TF32", compiled, model, x)
        for backend in backends:
            rows.add(f"lower(backend={backend!r}, precision='tf32')", lowered, model, (x,), backend, precision="tf32")
        rows.add("fused, channels last, reduce-overhead, fp16", half_compiled, model, x)
        for backend in backends:
            rows.add(f"lower(backend={backend!r}), fp16", lowered_half, model, half_channels_last(x), backend)
        rows.done(f"ResNet-50, batch {batch}")


def half_compiled(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    import torch.fx.experimental.optimization as optimization

    fused = optimization.fuse(model).half().to(memory_format=torch.channels_last)
    return compiled(fused, half_channels_last(x))


def half_channels_last(x: Tensor) -> Tensor:
    """The input that both are given."""
    return x.half().contiguous(memory_format=torch.channels_last)


def lowered_half(model: nn.Module, x: Tensor, backend: str) -> Callable[[], Any]:
    import copy

    return lowered(copy.deepcopy(model).half(), (x,), backend)


def painting(batches: list[int], backends: list[str]) -> None:
    """The actor of Learning to Paint."""
    model = zoo.create("learning_to_paint").eval().to(DEVICE)
    for batch in batches:
        inputs = tuple(item.to(DEVICE) for item in zoo.example_inputs("learning_to_paint", batch=batch))
        rows = Rows()
        rows.add("eager", eager, model, *inputs)
        rows.add("torch.compile reduce-overhead", compiled, model, *inputs)
        for backend in backends:
            rows.add(f"lower(backend={backend!r})", lowered, model, inputs, backend, precision="tf32")
        rows.done(f"Learning to Paint actor, batch {batch}")


def decoding(backends: list[str]) -> None:
    """One token of a language model."""
    model, inputs = llama()
    rows = Rows()
    rows.add("eager, bf16", eager, model, *inputs)

    def with_fixed_caches() -> Callable[[], Any]:
        own = (*inputs[:2], *[[tensor.clone() for tensor in caches] for caches in inputs[2:]])
        for tensor in [*own[2], *own[3]]:
            torch._dynamo.mark_static_address(tensor)
        return compiled(model, *own)

    rows.add("torch.compile reduce-overhead, bf16", with_fixed_caches)
    for backend in backends:
        rows.add(f"lower(backend={backend!r}), bf16", lowered, model, inputs, backend)
    rows.done("Llama of 1.2 billion parameters, one token, cache of 1024")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="images,painting,decoding")
    parser.add_argument("--backends", default="cudagraphs,inductor")
    parser.add_argument("--log", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.log:
        logging.basicConfig(level=logging.INFO)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    backends = arguments.backends.split(",")
    begin = time.perf_counter()
    if "images" in arguments.only:
        images([1, 128], backends)
    if "painting" in arguments.only:
        painting([1, 96], backends)
    if "decoding" in arguments.only:
        decoding(backends)
    print(f"\nall of it in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
