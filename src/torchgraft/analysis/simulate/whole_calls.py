"""Calls that a GPU has kernels of their own for, and that tensors without data take apart: attention and recurrent layers.
While a program runs on fakes they are answered here, forward and backward, and told to whoever listens as one operator each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from torchgraft.analysis.simulate.composites import attention_kernel
from torchgraft.analysis.simulate.kernels import Kernel, type_of

# What a call read, what it made, and its kernels.
Note = Callable[[str, list[Tensor], list[Tensor], list[Kernel]], None]
_RECURRENT = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}


class WholeCalls(TorchFunctionMode):
    """Answers attention and recurrent layers with results that hold no data, and notes each with its kernels."""

    def __init__(self, note: Note, tf32: bool) -> None:
        super().__init__()
        self.note, self.tf32 = note, tf32

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in _RECURRENT and len(args) == 9 and isinstance(args[2], (list, tuple)):
            return self._recurrent(func, *args)
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            # A number that only guards ask for: the run goes on without it, and the host would have waited for it.
            reads = [value for value in args if isinstance(value, Tensor)]
            name = "aten._local_scalar_dense.default"
            self.note(name, reads, [], [Kernel(name, "wait")])
            raise

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **rest: Any,
    ) -> Tensor:
        *outer, queries, width = query.shape
        kernel = attention_kernel(
            query, key.shape[-2], math.prod(outer), width, queries, attn_mask is not None, is_causal
        )
        tensors = [query, key, value, *([attn_mask] if isinstance(attn_mask, Tensor) else [])]

        def made() -> list[Tensor]:
            shape = [*outer[:-1], queries, *outer[-1:], value.shape[-1]]
            # Kernels write the heads of one place side by side.
            result = query.new_empty(shape)
            return [result.transpose(-3, -2) if len(outer) > 1 else result]

        return self._run("aten.scaled_dot_product_attention", tensors, made, [kernel])[0]

    def _recurrent(
        self,
        func: Any,
        x: Tensor,
        state: Any,
        weights: Any,
        has_bias: bool,
        layers: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool,
    ) -> Any:
        states = list(state) if isinstance(state, (list, tuple)) else [state]
        width, directions, gates = states[0].shape[-1], 2 if both else 1, _RECURRENT[func]
        length, batch = (x.shape[0], 1) if x.dim() == 2 else x.shape[:2]
        if batch_first and x.dim() == 3:
            length, batch = batch, length
        # The two directions run side by side.
        kernels = [
            recurrent_kernel(x, batch, length, inner, width, gates, self.tf32, directions)
            for inner in (x.shape[-1], *[width * directions] * (layers - 1))
        ]

        def made() -> list[Tensor]:
            return [x.new_empty(*x.shape[:-1], width * directions), *[torch.empty_like(item) for item in states]]

        return tuple(self._run(f"aten.{func.__name__}", [x, *states, *weights], made, kernels))

    def _run(
        self, name: str, tensors: list[Tensor], made: Callable[[], list[Tensor]], kernels: list[Kernel]
    ) -> list[Tensor]:
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            results = made()
            self.note(name, tensors, results, kernels)
            return results
        return list(_Whole.apply(self, name, made, kernels, *tensors))


class _Whole(torch.autograd.Function):
    """A call with a history: it keeps what it read and made, and its gradient takes two and a half times its work."""

    @staticmethod
    def forward(ctx: Any, mode: WholeCalls, name: str, made: Any, kernels: list[Kernel], *tensors: Tensor) -> Any:
        results = made()
        ctx.mode, ctx.name, ctx.kernels = mode, name, kernels
        ctx.save_for_backward(*tensors, *results)
        ctx.count = len(tensors)
        mode.note(name, list(tensors), results, kernels)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors
        tensors = saved[: ctx.count]
        found = [
            torch.empty_like(tensor) if needed else None
            for tensor, needed in zip(tensors, ctx.needs_input_grad[4:], strict=True)
        ]
        kernels = [backward_kernel(kernel) for kernel in ctx.kernels]
        made = [item for item in found if item is not None]
        ctx.mode.note(f"{ctx.name}_backward", [*saved, *gradients], made, kernels)
        return None, None, None, None, *found


def backward_kernel(kernel: Kernel) -> Kernel:
    """The work of a gradient: scores anew, then two products for each one of before."""
    name, variant = f"{kernel.operator}_backward", f"{kernel.variant}-backward".lstrip("-")
    work = kernel.flops * 5 // 2, kernel.bytes * 2, kernel.read
    return Kernel(name, kernel.kind, kernel.type, *work, kernel.sizes, variant)


def recurrent_kernel(
    x: Tensor, batch: int, length: int, inner: int, width: int, gates: int, tf32: bool, directions: int = 1
) -> Kernel:
    """One layer: a product for all steps at once, then one step after the other; `images` says in how many directions."""
    kind = type_of(x)
    flops = 2 * directions * batch * length * gates * width * (inner + width)
    size = x.itemsize
    weights = directions * gates * width * (inner + width)
    return Kernel(
        *("aten.recurrent", "recurrent", "tf32" if tf32 and kind == "fp32" else kind, flops),
        *((weights + batch * length * inner) * size, batch * length * width * size),
        sizes=(length, batch, gates * width, width),
        window=inner,
        images=directions,
    )
