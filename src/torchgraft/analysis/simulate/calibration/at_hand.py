"""What a CPU does at best: its name, sizes, arithmetic, memory and caches, asked of the system or measured.
How close kernels of each kind come to that is fitted in `calibrate.py`.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from torchgraft.analysis.simulate.calibration.measuring import least_seconds
from torchgraft.analysis.simulate.kernels import DTYPES
from torchgraft.analysis.simulate.machine import Machine

MAPPED_BYTES = 32 << 20  # the most that glibc keeps in its heap, whatever a program does (DEFAULT_MMAP_THRESHOLD_MAX)
_USUAL_CACHE = 16 << 20
_LARGE = 96 << 20


def cpu_at_hand(name: str | None, threads: int) -> Machine:
    """This CPU with so many threads, still without figures of kernels."""
    cache = cache_bytes()
    with torch.no_grad():
        found = Machine(
            name=name or f"{cpu_name()}, {threads} thread{'s' * (threads > 1)}",
            kind="cpu",
            source="",
            units=threads,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            bandwidth=_stream(_LARGE),
            cache_bytes=cache,
            cache_bandwidth=_stream(min(cache // 8, _LARGE)),
            peak={precision: rate for precision in ("fp32", "fp64", "bf16", "fp16") if (rate := _peak(precision)) > 0},
            kernels={},
            host=_host(),
            fresh_bandwidth=_fresh_bandwidth(),
            mapped_bytes=MAPPED_BYTES,
        )
    return found


def cpu_name() -> str:
    """What the system calls the CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


def cache_bytes() -> int:
    """The size of the largest cache that a core sees."""
    sizes = [_USUAL_CACHE]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes[1:] or sizes)


def _stream(size: int) -> float:
    """Bytes a second, read and written, of a pass through two pieces of memory of together this size."""
    x = torch.ones(size // 8)
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / least_seconds(lambda: torch.clamp_min(x, 0, out=y), 0.15)


def _peak(precision: str) -> float:
    """The most FLOP/s of a large product and a convolution; zero where torch has neither for this type."""
    dtype, best = DTYPES[precision], 0.0
    with contextlib.suppress(RuntimeError, NotImplementedError):
        a = torch.ones(768, 768, dtype=dtype)
        best = 2 * 768**3 / least_seconds(lambda: a @ a, 0.1)
        x, weight = torch.ones(8, 128, 28, 28, dtype=dtype), torch.ones(128, 128, 3, 3, dtype=dtype)
        seconds = least_seconds(lambda: functional.conv2d(x, weight, padding=1), 0.1)
        best = max(best, 2 * 8 * 28 * 28 * 128 * 128 * 9 / seconds)
    return best


def _fresh_bandwidth() -> float:
    """Bytes a second of memory that the system hands out, on top of what filling it takes."""
    count = _LARGE // 4
    kept = torch.empty(count)

    def fill_new() -> None:
        torch.empty(count).fill_(1.0)

    new, old = least_seconds(fill_new, 0.2), least_seconds(lambda: kept.fill_(1.0), 0.1)
    return _LARGE / max(new - old, 1e-6)


def _host() -> dict[str, float]:
    """What Python takes for a call of a module and for a view; what it takes for a kernel is in the kernel's floor, but for
    what an operator takes longer among others than again and again. `call` is how much of a floor is Python's call alone.
    """
    x = torch.ones(8, 8)
    inner = torch.nn.Identity()
    outer = torch.nn.Sequential(inner)
    copies = [x] * 100
    calls: dict[str, Callable[[], Any]] = {
        "module": lambda: outer(x),
        "view": lambda: x.view(64),
        "call": lambda: torch.sigmoid(x),
        "without": lambda: torch._foreach_sigmoid(copies),  # on a CPU, the operator itself for each
    }
    found = {name: least_seconds(call, 0.05) for name, call in calls.items()}
    found["module"] = max(found["module"] / 2, 1e-7)
    found["call"] = max(found["call"] - found.pop("without") / len(copies), 0.0)
    found["operator"] = _among_others()
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def _among_others() -> float:
    """How much longer a small operator takes where others run before it than where it is repeated.

    What a call needs of the caches of a core, code and tables, is there when it is repeated; in a model other calls were between.
    """
    x, image, rows = torch.ones(4, 32), torch.ones(1, 8, 6, 6), torch.zeros(4, dtype=torch.long)
    weight, filters, ones = torch.ones(32, 32), torch.ones(8, 8, 3, 3), torch.ones(8)
    heads = torch.ones(1, 2, 4, 16)
    calls: list[Callable[[], Any]] = [
        lambda: functional.linear(x, weight, weight[0]),
        lambda: torch.relu(x),
        lambda: functional.layer_norm(x, (32,), weight[0], weight[1]),
        lambda: functional.gelu(x),
        lambda: functional.embedding(rows, weight),
        lambda: functional.conv2d(image, filters, ones, padding=1),
        lambda: functional.batch_norm(image, ones, ones, ones, ones),
        lambda: functional.max_pool2d(image, 2),
        lambda: image.mean((2, 3)),
        lambda: x + x,
        lambda: x * 2.0,
        lambda: torch.cat([x, x], 1),
        lambda: functional.softmax(x, -1),
        lambda: heads.transpose(1, 2).contiguous(),
        lambda: torch.sigmoid(x),
        lambda: torch.bmm(heads[0], heads[0].transpose(1, 2)),
        lambda: functional.scaled_dot_product_attention(heads, heads, heads),
    ]
    alone = sum(least_seconds(call, 0.02) for call in calls)
    together = least_seconds(lambda: [call() for call in calls], 0.2)
    return max((together - alone) / len(calls), 0.0)
