"""How long a kernel runs on a machine, and what sets that time: arithmetic, memory, or the mere start of a kernel.
What a kernel has to do is said in `kernels.py`, the figures are a machine's; when a kernel can start is decided in `clocks.py`.
All but `time_of` and `Timing` is about GPUs; CPUs are in `timing_on_cpu.py`.

Every kernel takes a `floor` and then the longest of what its bytes, elements, rows and products take. The figures of a kind,
each in the table [kernels.KIND] or [kernels.KIND.VARIANT] of a machine:

  floor         seconds of the shortest such kernel, with the gap to the next one
  bandwidth     the share of the machine's memory bandwidth that it reaches
  elements      elements a second that it can work through at best, where indices cost more than bytes
  rows          rows a second that it can start at best (norms, reductions)
  row_elements  elements a second of one row alone, which one unit works through
  rate          the share of the machine's peak that large products reach
  half          the side of a tile of a product that reaches half of that rate
  step          seconds that a tile takes for one step in depth, however small it is
  split         seconds that it takes to sum up a product that was split in depth (nothing: it is never split)
  persistent, each   recurrent layers: bytes of weights up to which one kernel does all steps; what a step takes, in products
  unaligned     the share of that rate that is left where rows do not begin at whole 16 bytes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.machine import TWINS, Machine
from torchgraft.analysis.simulate.timing_on_cpu import seconds_on_cpu


class Timing(NamedTuple):
    """Seconds on the device, and what they are made of; of `compute` and `memory` the larger counts, besides `floor`."""

    seconds: float
    bound: str
    compute: float
    memory: float
    floor: float


def time_of(kernel: Kernel, machine: Machine, cached: float = 0.0, fresh: float = 0.0) -> Timing:
    """The time of a kernel of which `cached` bytes are in the machine's cache, and `fresh` ones new to the program (on a CPU).

    >>> kernel = Kernel("aten.add.Tensor", "elementwise", "fp32", 10**9, 8 * 10**9, 4 * 10**9)
    >>> timing = time_of(kernel, Machine.named("h200"))
    >>> timing.bound, 0.0025 < timing.seconds < 0.0040
    ('memory', True)
    """
    if machine.kind == "cpu":
        floor, compute, memory = seconds_on_cpu(kernel, machine, cached, fresh)
        return Timing(floor + compute + memory, _timing(floor, compute, memory).bound, compute, memory, floor)
    if kernel.kind == "matmul":
        return _matmul_time(kernel, machine, cached)
    if kernel.kind == "convolution":
        return _convolution_time(kernel, machine, cached)
    if kernel.kind == "attention":
        return _attention_time(kernel, machine, cached)
    if kernel.kind == "recurrent" and kernel.sizes:
        return _recurrent_time(kernel, machine, cached)
    kind = "elementwise" if kernel.kind == "recurrent" else kernel.kind  # of a layer whose steps are not known
    return _memory_time(kernel, machine, machine.figures(kind, kernel.variant, kernel.type), cached)


def _timing(floor: float, compute: float, memory: float) -> Timing:
    bound = "compute" if compute > memory else "memory"
    if max(compute, memory) < floor:
        bound = "launch"
    return Timing(floor + max(compute, memory), bound, compute, memory, floor)


def _bytes_time(amount: float, cached: float, machine: Machine, figures: Mapping[str, float]) -> float:
    share = figures.get("bandwidth", 1.0)
    near = min(cached, amount)
    # What is far away takes a while to arrive, however little it is.
    wait = machine.latency * (amount > near)
    return wait + (amount - near) / (machine.bandwidth * share) + near / (machine.cache_bandwidth * share)


# ---- kernels that go through memory ----


def _memory_time(kernel: Kernel, machine: Machine, figures: Mapping[str, float], cached: float) -> Timing:
    memory = _bytes_time(kernel.bytes, cached, machine, figures)
    others = [kernel.flops / figures["flops"]] if "flops" in figures else [0.0]
    if "elements" in figures:
        others.append(kernel.elements / figures["elements"])
    if kernel.rows and "rows" in figures:
        others.append(kernel.rows / figures["rows"])
    if kernel.rows and "row_elements" in figures:
        waves = ceil(kernel.rows / machine.units)
        others.append(waves * kernel.elements / kernel.rows / figures["row_elements"])
    timing = _timing(figures["floor"], max(others), memory)
    return timing if kernel.passes == 1 else Timing(timing.seconds * kernel.passes, *timing[1:])


# ---- products ----

_TILES = tuple((a, b) for a in (32, 64, 128, 256) for b in (32, 64, 128, 256) if a * b <= 128 * 256)
_SPLITS = (1, 2, 4, 8, 16, 32)


def _matmul_time(kernel: Kernel, machine: Machine, cached: float) -> Timing:
    timing = _product_time(kernel.sizes, kernel, machine, machine.figures("matmul", kernel.type), cached)
    count, rows, columns, _ = kernel.sizes
    if count == 1 and min(rows, columns) == 1 and "matmul.vector" in machine.kernels:
        figures = machine.kernels["matmul.vector"]
        vector = _timing(figures["floor"], 0.0, _bytes_time(kernel.bytes, cached, machine, figures))
        return min(timing, vector)
    return timing


def _product_time(
    sizes: tuple[int, ...], kernel: Kernel, machine: Machine, figures: Mapping[str, float], cached: float
) -> Timing:
    peak = machine.peak.get(kernel.type) or machine.peak["fp32"]
    rate = figures["rate"] * (1.0 if is_aligned(kernel) else figures.get("unaligned", 1.0))
    compute = product_seconds(
        *(sizes, peak, machine.units, machine.cache_bandwidth),
        *(rate, figures["half"], figures["step"], figures.get("split", 0.0)),
    )
    return _timing(figures["floor"], compute, _bytes_time(kernel.bytes, cached, machine, figures))


def is_aligned(kernel: Kernel) -> bool:
    """Whether the rows of all three matrices begin at whole 16 bytes, which matrix units want.

    >>> [is_aligned(Kernel("mm", "matmul", "fp16", sizes=sizes)) for sizes in ((1, 7, 64, 64), (1, 64, 30522, 64))]
    [True, False]
    """
    whole = {"fp16": 8, "bf16": 8, "tf32": 4, "int8": 16, "fp8": 16}.get(kernel.type, 1)
    _, rows, columns, depth = kernel.sizes
    if kernel.kind == "convolution":
        inner = [rows // max(kernel.images, 1)] if kernel.variant == "pointwise" else [depth // kernel.window, columns]
    else:
        first, second = kernel.variant[:1] or "n", kernel.variant[1:2] or "t"
        inner = [depth if first == "n" else rows, columns if second == "n" else depth, columns]
    return all(size % whole == 0 for size in inner if size > 1)


@lru_cache(maxsize=20000)
def product_seconds(
    sizes: tuple[int, ...], peak: float, units: int, near: float, rate: float, half: float, step: float, split: float
) -> float:
    """The least seconds over all tiles and splits: units work on whole tiles, in whole waves, each tile step by step in depth.

    >>> big = product_seconds((1, 4096, 4096, 4096), 1e15, 132, 1e13, 0.8, 20.0, 1e-9, 1e-6)
    >>> 1.6e-4 < big < 3e-4
    True
    """
    count, rows, columns, depth = sizes
    best = float("inf")
    for a, b in _TILES:
        tiles = count * ceil(rows / a) * ceil(columns / b)
        side = 2 * a * b / (a + b)
        one = 2 * a * b / (peak / units * rate * side / (side + half))  # a step in depth, where a unit has enough to do
        resident = max(1, min(8, 16384 // (a * b)))
        for parts in _SPLITS if split else (1,):
            if parts > 1 and depth / parts < 64:
                break
            each = ceil(tiles * parts / units)
            seconds = depth / parts * max(each * one, ceil(each / resident) * step)
            if parts > 1:
                seconds += split + 8 * parts * count * rows * columns / near
            best = min(best, seconds)
    return best


# ---- convolutions ----


def _convolution_time(kernel: Kernel, machine: Machine, cached: float) -> Timing:
    """A convolution by the class of algorithm that libraries take for it.

    In types that have matrix units, images go through in another order of memory than they come in: what reorders them is counted
    too, unless plain arithmetic without it is faster. One place of all channels is a product as it stands.
    """
    if kernel.variant.startswith("depthwise") and "convolution.depthwise" in machine.kernels:
        names = [f"convolution.depthwise.{one}" for one in (kernel.type, TWINS.get(kernel.type, ""))]
        tables = [table for table in (machine.kernels["convolution.depthwise"], machine.table(*names)) if table]
        timing = min(_grouped_time(kernel, machine, figures, cached) for figures in tables)
    else:
        timing = _dense_time(kernel, machine, cached)
    return Timing(2 * timing.seconds, *timing[1:]) if "-backward" in kernel.variant else timing


def _grouped_time(kernel: Kernel, machine: Machine, figures: Mapping[str, float], cached: float) -> Timing:
    memory = _bytes_time(kernel.bytes, cached, machine, figures)
    compute = kernel.flops / figures["flops"] + kernel.elements / figures.get("elements", float("inf"))
    return _timing(figures["floor"], compute, memory)


def _dense_time(kernel: Kernel, machine: Machine, cached: float) -> Timing:
    """The faster of plain arithmetic and of matrix units, with what these want done before and after."""
    _count, rows, columns, depth = kernel.sizes
    kind = kernel.variant.partition("-")[0]
    few = depth // kernel.window <= 4 and kind == "general"
    types = (kernel.type, TWINS.get(kernel.type, kernel.type))
    names = [f"convolution.{'few' if few else kind}.{one}" for one in types] + [f"convolution.{one}" for one in types]
    own = machine.table(*names, "convolution.fp32") or machine.figures("matmul", kernel.type)
    timing = _product_time(kernel.sizes, kernel, machine, own, cached)
    reorder = machine.kernels.get("convolution.reorder")
    if kernel.type in ("fp32", "fp64") or few or reorder is None or kernel.variant.endswith("-last"):
        return timing
    extra = _reorder_seconds(kernel, machine, reorder)
    timing = Timing(timing.seconds + extra, timing.bound if extra < timing.seconds else "memory", *timing[2:])
    plain, single = machine.figures("convolution", "fp32"), replace(kernel, type="fp32")
    others = [_product_time(kernel.sizes, single, machine, plain, cached)]
    direct = machine.table(*[f"convolution.pointwise.{one}" for one in types])
    if kind == "pointwise" and direct is not None:
        sizes = kernel.images, columns, rows // max(kernel.images, 1), depth
        others.append(_product_time(sizes, kernel, machine, direct, cached))
    return min(timing, *others)


def _reorder_seconds(kernel: Kernel, machine: Machine, figures: Mapping[str, float]) -> float:
    """Images to the order of memory in which channels lie together, and back; weights of more than one place too."""
    count, _, columns, depth = kernel.sizes
    size = 2 if kernel.type in ("fp16", "bf16") else 4
    weights = count * columns * depth if kernel.window > 1 else 0
    images = 2 * (kernel.bytes - weights * size) / (machine.bandwidth * figures["bandwidth"])
    return 2 * figures["floor"] + images + (figures["floor"] + weights / figures["elements"] if weights else 0.0)


# ---- attention and recurrent layers ----


def _attention_time(kernel: Kernel, machine: Machine, cached: float) -> Timing:
    """Units take tiles of queries and go through the keys tile by tile."""
    figures = machine.figures("attention", kernel.type)
    peak = machine.peak.get(kernel.type) or machine.peak["fp32"]
    heads, queries, keys, width = kernel.sizes
    tile = int(figures.get("tile", 64))
    above, across = ceil(queries / tile), ceil(keys / tile)
    share = (above + 1) / (2 * above) if kernel.variant.startswith("causal") and queries == keys else 1.0
    one = 4 * tile * tile * max(width, 32) / (peak / machine.units * figures["rate"])
    each = ceil(heads * above / machine.units)
    compute = across * share * max(each * one, ceil(each / 2) * figures["step"])
    if kernel.variant.startswith("masked"):
        compute *= figures.get("masked", 1.0)
    if kernel.variant.endswith("backward"):
        compute *= 3.0
    return _timing(figures["floor"], compute, _bytes_time(kernel.bytes, cached, machine, figures))


def is_persistent(kernel: Kernel, machine: Machine) -> bool:
    """Whether one kernel does all steps of a recurrent layer."""
    _, _, gates, width = kernel.sizes
    size = 2 if kernel.type in ("fp16", "bf16") else 4
    return gates * width * size <= machine.figures("recurrent", kernel.type).get("persistent", 0.0)


def _recurrent_time(kernel: Kernel, machine: Machine, cached: float) -> Timing:
    """A product for all steps at once, then the steps one after the other: in one kernel where the weights fit into the units
    (up to `persistent` bytes), else as a product and a kernel over its result for each.
    """
    figures = machine.figures("recurrent", kernel.type)
    length, batch, gates, width = kernel.sizes
    size = 2 if kernel.type in ("fp16", "bf16") else 4
    weights = gates * width * size
    product = replace(kernel, kind="matmul", sizes=(1, length * batch, gates, kernel.window), variant="nt")
    first = _matmul_time(product, machine, cached)
    if is_persistent(kernel, machine):
        step = figures["step"] + weights / (machine.cache_bandwidth * figures["bandwidth"])
    else:
        near = replace(product, sizes=(1, batch, gates, width), read=weights, written=batch * gates * size)
        step = figures["each"] * _matmul_time(near, machine, near.bytes).seconds + figures["step"]
    steps = length * step
    if kernel.variant == "backward":
        steps, first = 2 * steps, Timing(2 * first.seconds, *first[1:])
    return Timing(first.seconds + figures["floor"] + steps, "compute", first.compute + steps, first.memory, first.floor)
