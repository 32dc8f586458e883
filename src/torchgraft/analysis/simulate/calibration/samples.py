"""What a measured probe gives a machine to do: its kernels, taken down from a run on tensors without data, beside its times.
How figures are fitted to samples is in `fitting.py`, how probes are timed in `measuring.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchgraft.analysis.dry_run import WatchedOperators
from torchgraft.analysis.simulate.calibration.probes import Probe
from torchgraft.analysis.simulate.composites import kernels_of
from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.whole_calls import WholeCalls


def kernels_of_probe(probe: Probe, gpu: bool = True) -> tuple[Kernel, ...]:
    """The kernels of a probe, on a GPU or on a CPU, which takes every operator as one.

    >>> [kernel.kind for kernel in kernels_of_probe(Probe("linear", ((8, 16), (32, 16), (32,))))]
    ['matmul']
    """
    found: list[Kernel] = []
    tf32 = probe.precision == "tf32"

    def operator(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        found.extend(kernels_of(func, args, kwargs, result, tf32, gpu))

    def whole_call(name: str, read: list[Tensor], made: list[Tensor], kernels: list[Kernel]) -> None:
        found.extend(kernels)

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        tensors = probe.tensors("cpu")
        if gpu:
            with WholeCalls(whole_call, tf32), WatchedOperators(operator):
                probe.run(tensors)
        else:
            with WatchedOperators(operator):
                probe.run(tensors)
    return tuple(found)
