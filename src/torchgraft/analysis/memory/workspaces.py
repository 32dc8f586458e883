"""Workspaces: the memory that kernels take for themselves while they run, found by running each distinct call once on a GPU.
What a call is measured for and where the bytes go in the books is decided in `peak.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from torchgraft.analysis.fake import active_fake_mode
from torchgraft.capturing.patching.active import paused_collection

aten = torch.ops.aten

# Operators whose kernels take memory besides their results, as seen on GPUs: libraries that choose among algorithms, reductions
# that meet in a buffer, gradients written in steps. Each is safe to run on zeros: none asserts anything or draws numbers.
TAKES_ROOM = frozenset(
    [
        *(aten.convolution, aten.convolution_backward, aten._cudnn_rnn),
        *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm),
        *(aten.sum, aten.mean, aten._softmax_backward_data, aten._log_softmax_backward_data),
        *(aten._scaled_dot_product_flash_attention_backward, aten._scaled_dot_product_efficient_attention_backward),
        *(aten.native_layer_norm, aten.native_layer_norm_backward),
        *(aten.native_group_norm, aten.native_group_norm_backward),
        *(aten.native_batch_norm, aten.native_batch_norm_backward),
        *(aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward),
    ]
)

# Operators that hand a workspace to their gradient as one of their results: on tensors without data it is empty, and how large
# it really is only oneDNN knows.
HIDES_ROOM = frozenset([aten.mkldnn_rnn_layer, aten.mkldnn_rnn_layer_backward])


def takes_room(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call is worth measuring: its kernel may take memory of its own, and all its tensors have strides.

    >>> takes_room(aten.mm.default, (torch.ones(2, 3), torch.ones(3, 4))), takes_room(aten.exp.default, (torch.ones(2),))
    (True, False)
    """
    if getattr(operator, "overloadpacket", None) not in TAKES_ROOM:
        return False
    return all(leaf.layout is torch.strided for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor))


@dataclass(frozen=True)
class TensorLike:
    """All that a kernel's choice of algorithm can depend on in a tensor, and none of its values.
    `storage` is the place of its memory among those of the call.
    """

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """One call of an operator without the values of its tensors: calls that are equal take the same memory.

    >>> x, weight = torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)
    >>> arguments = (weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    >>> first, second = (Call.of(aten.convolution.default, (image, *arguments), {}) for image in (x, x + 1))
    >>> first == second, first.operands()[0].shape, first.storages
    (True, torch.Size([1, 3, 8, 8]), ((768, device(type='cpu')), (432, device(type='cpu'))))
    """

    operator: Any
    arguments: tuple[Any, ...]
    names: tuple[str, ...]
    storages: tuple[tuple[int, torch.device], ...]

    @staticmethod
    def of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with its tensors described; those that share memory say so."""
        storages: dict[int, tuple[int, torch.device]] = {}
        arguments = _described((*args, *kwargs.values()), storages)
        return Call(operator, arguments, tuple(kwargs), tuple(storages.values()))

    def operands(self) -> list[Any]:
        """Arguments to run it with, on zeros: they are valid to every kernel, whatever was in that memory before."""
        rooms = [torch.zeros(size, dtype=torch.uint8, device=device) for size, device in self.storages]
        return [_made(value, rooms) for value in self.arguments]

    def run(self, operands: list[Any]) -> Any:
        """Run it for real."""
        count = len(operands) - len(self.names)
        return self.operator(*operands[:count], **dict(zip(self.names, operands[count:], strict=True)))


# These two are no closures: one that calls itself would keep the memory of a call until garbage is collected.


def _described(value: Any, storages: dict[int, tuple[int, torch.device]]) -> Any:
    if not isinstance(value, torch.Tensor):
        return tuple(_described(item, storages) for item in value) if isinstance(value, (list, tuple)) else value
    memory = value.untyped_storage()
    storages.setdefault(memory._cdata, (memory.nbytes(), value.device))
    number, offset = list(storages).index(memory._cdata), cast(int, value.storage_offset())
    return TensorLike(number, offset, tuple(value.shape), value.stride(), value.dtype)


def _made(value: Any, rooms: list[torch.Tensor]) -> Any:
    if not isinstance(value, TensorLike):
        return tuple(_made(item, rooms) for item in value) if isinstance(value, tuple) else value
    room = rooms[value.storage]
    bare = torch.empty(0, dtype=value.dtype, device=room.device)
    return bare.set_(room.untyped_storage(), value.offset, value.shape, value.stride)


Measure = Callable[[Call], int | None]


# ---- measured on a GPU ----

# By call and by the settings that cuDNN chooses by. A GPU is not changed while a process runs, so neither are these.
_measured: dict[Any, int | None] = {}


def taken_on_gpu(call: Call) -> int | None:
    """The most bytes that a call takes, its results included, from the allocator of its GPU; measured once in a process.

    None where it cannot be measured: no tensor of the call is on a GPU, or it does not fit into its memory. The allocator's
    record of its peak starts anew.

    >>> taken_on_gpu(Call.of(aten.mm.default, (torch.ones(2, 3), torch.ones(3, 4)), {})) is None
    True
    """
    device = next((device for _, device in call.storages if device.type == "cuda"), None)
    if device is None or not torch.cuda.is_available() or active_fake_mode() is not None:
        return None
    key = call, _settings()
    try:
        known = key in _measured
    except TypeError:  # sizes are symbolic: such a call cannot be run
        return None
    if not known:
        _measured[key] = _measure(call, device)
    return _measured[key]


def _settings() -> tuple[Any, ...]:
    chosen: Any = torch.backends.cudnn
    own = (chosen.enabled, chosen.benchmark, chosen.benchmark_limit, chosen.deterministic)
    precisions = (chosen.conv.fp32_precision, chosen.rnn.fp32_precision, torch.backends.cuda.matmul.fp32_precision)
    return *own, *precisions, torch.are_deterministic_algorithms_enabled()


def _measure(call: Call, device: torch.device) -> int | None:
    try:
        with torch.no_grad(), torch.cuda.device(device):
            operands = call.operands()
            call.run(operands)  # the first time a library makes itself at home, and may try its algorithms
            with paused_collection:  # tensors that Python frees meanwhile would be taken for the call's
                torch.cuda.reset_peak_memory_stats()
                before = _asked_for("current")
                call.run(operands)
                return _asked_for("peak") - before
    except RuntimeError:  # out of memory, or no kernel for it: the run itself would say so
        return None


def _asked_for(when: str) -> int:
    """Not what was handed out: how much larger a piece the allocator gives depends on what it has at hand."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])
