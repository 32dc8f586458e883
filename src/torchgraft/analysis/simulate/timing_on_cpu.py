"""How long a kernel runs on a CPU: the sum of a few terms, each an amount of work over a figure of the machine for that kind.
What kernels have to do is said in `kernels.py`; kernels on GPUs are in `timing.py`.

Cores do one thing after the other, and libraries lay data out anew before they compute, so that terms add up; that also makes
them easy to fit (`calibration/fitting.py`). A term without a figure costs nothing. The figures of a kind, each in
[kernels.KIND] or [kernels.KIND.VARIANT] of a machine:

  floor     seconds of the shortest such kernel, Python's call of it included
  rate      the share of the machine's peak at which `flops` are done; channels of convolutions count in whole vectors
  near      the share of the cache's bandwidth for bytes that are in the cache
  far       the share of the memory's bandwidth for all others
  packed    elements a second and thread of matrices and weights that are put in the order in which they are used
  elements  elements a second and thread, where arithmetic that is not counted in FLOPs takes the time
  rows      rows a second and thread that are started (norms, reductions, queries of attention, steps of recurrence)

A product with a vector goes through its matrix as it lies and once; it has a table of its own, [kernels.matmul.vector]. What
torch itself runs on threads it cuts into pieces of `GRAIN` elements: a smaller kernel has one thread, however many there are.
What calling an operator takes besides, between others and from Python, is in `clocks.py`.

Memory that is new to the program comes from the system page by page (`fresh_bandwidth` of [memory]): pieces of `mapped_bytes`
and more always, since they are given back at once; which others, is worked out in `pages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.machine import Machine

LANES = 16  # channels of a convolution are worked on in blocks of so many
FEW = 4  # so many channels of an image are taken as they come
GRAIN = 32768  # elements below which torch gives no thread a piece of its own
_OF_TORCH = (
    "elementwise",
    "copy",
    "gather",
    "reduction",
    "norm",
    "pooling",
)  # kinds that torch cuts into pieces itself
_IMAGES_TOGETHER = 16  # from so many images on, or on several threads, torch hands products over places to oneDNN
# Functions that cost much more than an addition.
_COSTLY = """
    gelu silu sigmoid tanh exp expm1 exp2 log log2 log10 log1p erf erfc erfinv sin cos tan asin acos atan atan2 sinh cosh
    softplus mish elu selu celu log_sigmoid pow logit logaddexp gelu_backward silu_backward mish_backward
"""
_TRANSCENDENTAL = frozenset(_COSTLY.split())


def seconds_on_cpu(kernel: Kernel, machine: Machine, cached: float, fresh: float = 0.0) -> tuple[float, float, float]:
    """What the floor, arithmetic and memory of a kernel take, of which `cached` bytes are in the cache and `fresh` ones new.

    >>> kernel = Kernel("aten.add.Tensor", "elementwise", "fp32", 10**8, 8 * 10**8, 4 * 10**8, elements=10**8)
    >>> floor, compute, memory = seconds_on_cpu(kernel, Machine.named("epyc"), 0.0)
    >>> floor < compute < memory < 0.1
    True
    """
    figures = figures_on_cpu(kernel, machine)
    amounts = amounts_on_cpu(kernel, machine, cached)
    units = units_of(kernel, machine)
    times = {name: amount / (figures[name] * units[name]) for name, amount in amounts.items() if name in figures}
    memory = times.pop("near", 0.0) + times.pop("far", 0.0)
    if machine.fresh_bandwidth:
        memory += (fresh + scratch_bytes(kernel, machine)) / machine.fresh_bandwidth
    return figures["floor"] * kernel.passes, sum(times.values()), memory


def figures_on_cpu(kernel: Kernel, machine: Machine) -> Mapping[str, float]:
    """The figures of a kernel's class on a CPU."""
    return machine.figures(kernel.kind, class_on_cpu(kernel, machine), kernel.type)


def units_of(kernel: Kernel, machine: Machine) -> dict[str, float]:
    """What a figure is a share of; others are so many a second and thread."""
    peak = machine.peak.get(kernel.type) or machine.peak["fp32"]
    threads = float(machine.units)
    if kernel.kind in _OF_TORCH:
        threads = max(min(threads, kernel.elements // GRAIN), 1.0)
    share = threads / machine.units
    units = dict.fromkeys(("packed", "elements", "rows"), threads)
    return units | {"rate": peak * share, "near": machine.cache_bandwidth * share, "far": machine.bandwidth}


@lru_cache(maxsize=4096)
def _name_of(operator: str) -> str:
    return operator.removeprefix("aten.").partition(".")[0].rstrip("_")


def class_on_cpu(kernel: Kernel, machine: Machine) -> str:
    """The variant of a kernel: what libraries for CPUs do in different ways."""
    kind, variant, name = kernel.kind, kernel.variant, _name_of(kernel.operator)
    if kind == "matmul":
        return "vector" if min(kernel.sizes[1:3]) == 1 else kernel.type
    if kind == "convolution":
        base = variant.partition("-")[0]
        if base == "pointwise" and machine.units == 1 and kernel.images < _IMAGES_TOGETHER and "-" not in variant:
            return "direct"
        if base == "general" and kernel.sizes[3] // kernel.window <= FEW:
            return "few"
        return base
    if kind == "elementwise" and name in _TRANSCENDENTAL:
        return "transcendental"
    if kind == "pooling":
        return "resampling" if variant.startswith("resampling") else "average" if "avg" in name else "max"
    return variant


def amounts_on_cpu(kernel: Kernel, machine: Machine, cached: float) -> dict[str, float]:
    """How much work of each sort a kernel is."""
    cached = min(cached, kernel.bytes)
    amounts = {"near": cached, "far": kernel.bytes - cached, "rate": float(kernel.flops)}
    if kernel.kind == "matmul":
        count, rows, columns, depth = kernel.sizes
        amounts["packed"] = 0.0 if min(rows, columns) == 1 else float(count * (rows + columns) * depth)
    elif kernel.kind == "convolution":
        amounts |= _of_convolution(kernel, machine)
    elif kernel.kind == "attention":
        amounts |= _of_attention(kernel)
    elif kernel.kind == "recurrent" and kernel.sizes:
        length, _, gates, width = kernel.sizes
        amounts |= {
            "rows": float(length),
            "packed": float(gates * (width + kernel.window)),
            "elements": float(length * gates * width),
        }
    else:
        amounts |= {"elements": float(kernel.elements), "rows": float(kernel.rows)}
    for name in ("near", "far", "elements"):
        amounts[name] = amounts.get(name, 0.0) * kernel.passes
    return amounts


def _of_convolution(kernel: Kernel, machine: Machine) -> dict[str, float]:
    count, rows, columns, depth = kernel.sizes
    kind, inner = class_on_cpu(kernel, machine), depth // kernel.window
    packed = float(count * columns * depth)
    if kind == "transposed":
        inner, columns = depth, columns // kernel.window
    if kind == "direct":
        return {"packed": packed * kernel.images + rows * depth, "rows": float(kernel.images)}
    flops = float(kernel.flops)
    if kind == "depthwise":
        flops *= _whole(count) / count
    else:
        flops *= _whole(columns) / columns * (1.0 if kind == "few" else _whole(inner) / inner)
    return {"rate": flops, "packed": packed, "elements": float(kernel.elements)}


def _whole(channels: int) -> int:
    return -(-channels // LANES) * LANES


def _of_attention(kernel: Kernel) -> dict[str, float]:
    """Queries are taken in blocks; one that is partly masked is computed whole."""
    heads, queries, keys, width = kernel.sizes
    block = 256 if queries >= 768 else 64 if queries >= 192 else 32
    pairs = queries * keys
    if kernel.variant.startswith("causal") and queries == keys:
        pairs = sum(min(block, queries - at) * min(at + block, keys) for at in range(0, queries, block))
    passes = 3.5 if kernel.variant.endswith("backward") else 1.0
    return {
        "rate": 4.0 * heads * width * pairs * passes,
        "elements": float(heads * pairs) * passes,
        "rows": float(heads * -(-queries // block)),
    }


def scratch_pieces(kernel: Kernel, machine: Machine) -> tuple[int, ...]:
    """The memory that a convolution takes for as long as it runs: what goes in and comes out, in another order."""
    if kernel.kind != "convolution" or kernel.variant.endswith("-last"):
        return ()
    kind = class_on_cpu(kernel, machine)
    if kind == "direct":
        return ()
    count, _, columns, depth = kernel.sizes
    size = 8 if kernel.type == "fp64" else 2 if kernel.type in ("fp16", "bf16") else 4
    weights = count * columns * depth * size
    return (0 if kind == "few" else max(kernel.read - weights, 0), kernel.written, weights)


def scratch_bytes(kernel: Kernel, machine: Machine) -> float:
    """Those of these pieces that are new memory each time, because they are large."""
    return float(sum(size for size in scratch_pieces(kernel, machine) if size >= machine.mapped_bytes))
