"""What a compiler makes of the steps of a run: norms folded into the layers before them, chains of element-wise kernels made one.
What a step is and when it runs is in `clocks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchgraft.analysis.simulate.clocks import Step
from torchgraft.analysis.simulate.kernels import Kernel

_LAYERS = ("convolution", "matmul")
_WITH_BIAS = ("addmm", "linear")
_CHAINED = ("elementwise", "copy")


def lowered_steps(steps: Sequence[Step]) -> list[Step]:
    """The steps of the compiled program; those that have become part of others are still there, and have no kernel.

    A norm that takes its statistics as they are is folded into the convolution or product before it, whose bias it becomes;
    where there is none, it is element-wise work like any other. Element-wise kernels one after the other become one: what one of
    them makes and only later ones of the chain read is neither written nor read.
    """
    return _chained(_folded(steps))


def _folded(steps: Sequence[Step]) -> list[Step]:
    readers = _readers(steps)
    found: list[Step] = []
    same: dict[int, int] = {}  # results of norms that are gone are those of the layers before
    layer: Step | None = None  # the last one, as long as nothing but its bias came after it
    has_bias = False
    for step in steps:
        step = replace(
            step, touched=tuple((same.get(memory, memory), size, made) for memory, size, made in step.touched)
        )
        kernel = step.kernel
        if kernel is not None and kernel.kind in _LAYERS:
            layer, has_bias = step, any(name in kernel.operator for name in _WITH_BIAS)
        elif kernel is not None and layer is not None and not step.operator and kernel.operator == "aten.add_":
            has_bias = True  # the second kernel of a convolution
        elif kernel is not None:
            if kernel.kind == "norm" and kernel.variant == "batch-norm":
                result = None if layer is None else _result_of(layer, step, readers)
                if result is not None and has_bias:
                    same.update(dict.fromkeys(_traffic(step)[1], result))
                    step = replace(step, kernel=None, touched=(), gone=True)
                else:
                    step = replace(step, kernel=replace(kernel, kind="elementwise", variant="", rows=0))
            layer = None
        found.append(step)
    return found


def _result_of(layer: Step, norm: Step, readers: dict[int, int]) -> int | None:
    """What a layer makes, where a norm reads it and nothing else does."""
    found = _traffic(layer)[1].keys() & _traffic(norm)[0].keys()
    return next((memory for memory in found if readers[memory] == 1), None)


def _readers(steps: Sequence[Step]) -> dict[int, int]:
    """How many kernels read each piece of memory."""
    found: dict[int, int] = {}
    for step in steps:
        for memory in _traffic(step)[0]:
            found[memory] = found.get(memory, 0) + (step.kernel is not None and bool(step.operator))
    return found


def _traffic(step: Step) -> tuple[dict[int, int], dict[int, int]]:
    """The memory that a kernel reads, and the memory that it writes, with bytes."""
    made = {memory: size for memory, size, is_made in step.touched if is_made}
    read = {memory: size for memory, size, is_made in step.touched if not is_made}
    if not step.operator:  # a further kernel of the same operator goes through its result
        return made, made
    return read, made or dict(list(read.items())[:1])  # without a result of its own it writes into the first


# ---- chains ----


def _chained(steps: Sequence[Step]) -> list[Step]:
    last_use = {memory: place for place, step in enumerate(steps) for memory, _, _ in step.touched}
    found = list(steps)
    chain: list[int] = []
    written: set[int] = set()
    for place, step in enumerate(steps):
        if step.kernel is None:
            continue
        reads, writes = _traffic(step)
        fits = _can_be_chained(step)
        if chain and not (fits and written & reads.keys() and _as_many(steps[chain[-1]], step)):
            _join(found, chain, last_use)
            chain, written = [], set()
        if fits:
            chain.append(place)
            written |= writes.keys()
    _join(found, chain, last_use)
    return found


def _can_be_chained(step: Step) -> bool:
    kernel = step.kernel
    assert kernel is not None
    return kernel.kind in _CHAINED and kernel.variant not in ("strided", "indexed") and step.phase != "optimizer"


def _as_many(one: Step, other: Step) -> bool:
    """Whether two steps work on as many elements."""
    return one.kernel is not None and other.kernel is not None and one.kernel.elements == other.kernel.elements


def _join(steps: list[Step], chain: Sequence[int], last_use: dict[int, int]) -> None:
    """Put one kernel in the place of the last of a chain, and none in that of the others."""
    if len(chain) < 2:
        return
    read: dict[int, int] = {}
    written: dict[int, int] = {}
    for place in chain:
        reads, writes = _traffic(steps[place])
        read |= {memory: size for memory, size in reads.items() if memory not in written and memory not in read}
        written |= writes
    end = chain[-1]
    kept = _traffic(steps[end])[1]
    needed = {memory: size for memory, size in written.items() if memory in kept or last_use[memory] > end}
    kernels = [kernel for kernel in (steps[place].kernel for place in chain) if kernel is not None]
    joined = Kernel(
        *(kernels[-1].operator, "elementwise", kernels[-1].type, sum(kernel.flops for kernel in kernels)),
        # Of a large tensor a kernel may read a part, so its own count is the most.
        min(sum(read.values()), sum(kernel.read for kernel in kernels)),
        min(sum(needed.values()), sum(kernel.written for kernel in kernels)),
        elements=max(kernel.elements for kernel in kernels),
    )
    touched = [(memory, size, False) for memory, size in read.items()]
    touched += [(memory, size, True) for memory, size in needed.items() if memory not in read]
    for place in chain[:-1]:
        steps[place] = replace(steps[place], kernel=None, gone=True)
    operator = steps[end].operator or kernels[-1].operator
    inner = all(steps[place].inner for place in chain)
    steps[end] = replace(steps[end], kernel=joined, touched=tuple(touched), operator=operator, inner=inner)
