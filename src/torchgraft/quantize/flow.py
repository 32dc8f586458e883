"""`quantize`: from a model and data to an integer program, in one call. The steps are `prepare`, `calibrate` and `convert`, each
in a file of its own; kernels are put in by `native/`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import QuantizeError
from torchgraft.quantize.calibrating import Progress, batches, calibrate, inputs_of, number_of
from torchgraft.quantize.config import as_config, check_machine
from torchgraft.quantize.converting import convert
from torchgraft.quantize.preparing import ConfigLike, Model, prepare


def quantize(
    model: Model,
    data: Iterable[Any] | None = None,
    *,
    config: ConfigLike = None,
    backend: str = "native",
    progress: Progress | None = None,
) -> GraphModule:
    """A program that computes with integers what the model computes with floats. The model stays as it is.

    `data` is an iterable of batches (a tensor, a tuple of inputs or a dict of keyword inputs each): the first is what a model is
    captured with, and all are what scales are chosen by. `backend` says what the program is for: `"native"` and `"cuda"`
    put torch's own integer kernels in, every other leaves the reference form.

    >>> import torch, torchgraft
    >>> model = torchgraft.zoo.create("mlp").eval()
    >>> program = quantize(model, [torch.randn(8, 16)])
    >>> bool((program(torch.ones(2, 16)) - model(torch.ones(2, 16))).abs().max() < 0.1)
    True
    """
    check_machine(as_config(config, backend), backend)  # a mistake is said before anything is run
    given: Iterable[Any] = batches(data)
    args: Any = ()
    kwargs: dict[str, Any] = {}
    if not isinstance(model, GraphModule):
        rest = iter(given)
        first = next(rest, None)
        if first is None:
            raise QuantizeError(
                "there is no calibration data\n"
                "give an iterable of batches such as [x1, x2] or a DataLoader; a model is captured with the first"
            )
        args, kwargs = inputs_of(first)
        given = itertools.chain([first], rest)
    prepared = prepare(model, args, kwargs, config=config, backend=backend)
    total = number_of(data)
    calibrate(prepared, given, None if progress is None else lambda done, _: progress(done, total))
    return finish(prepared, backend)


def finish(prepared: GraphModule, backend: str) -> GraphModule:
    """Convert a calibrated program, and put kernels in where they are wanted."""
    program = convert(prepared)
    if backend in ("native", "cuda"):
        from torchgraft.quantize.native import to_native

        return to_native(program)
    return program
