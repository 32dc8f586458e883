"""The measures of `capture`: what it costs in runs of the model itself, and how long torch.export takes for the same models.
The measures of the core, beside torch.fx, are in `core`; models of other libraries are in `benchmarks.coverage`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks.core import always, nodes_of_module
from benchmarks.measure import Arm, Experiment, Figure, Fresh, Row
from benchmarks.models import MixedChain, small_mlp, zoo_model
from torchgraft import zoo

Subject = Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]

# Small pictures and texts: the smaller a kernel, the more of the time is the capture's own.
SUBJECTS: dict[str, Subject] = {
    "MLP of 12 modules": lambda: (small_mlp(), (torch.ones(2, 16),)),
    "200 ops": lambda: (MixedChain(200), (torch.ones(2),)),
    "ResNet-18": lambda: _of_zoo("resnet18", size=64),
    "ResNet-50": lambda: _of_zoo("resnet50", size=64),
    "12-layer Transformer": lambda: _of_zoo("transformer"),
}
RUNS, FUNCTION_RUNS, LEAST, EXPORT = (
    "capture, in runs of the model",
    "capture of functions, in runs",
    "two watched runs alone, in runs",
    "capture beside torch.export",
)
# What is asked of the median of the models; a single one may be all overhead or all arithmetic.
REQUIRED = {RUNS: 3.0, FUNCTION_RUNS: None, LEAST: None, EXPORT: 10.0}


def _of_zoo(name: str, **sizes: Any) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return zoo_model(name).eval(), zoo.example_inputs(name, **sizes)


def experiments(ours: ModuleType) -> Iterator[Experiment]:
    """One experiment a model: a run, a capture at two levels and an export, sampled in turn."""
    for title, subject in SUBJECTS.items():
        arms = (
            Arm("eager", partial(eager, subject)),
            Arm("module", partial(capture, subject, "module", ours), count=nodes_of_module),
            Arm("function", partial(capture, subject, "function", ours)),
            Arm("least", partial(watch_twice, subject)),
            Arm("export", partial(export, subject), long=True),
        )
        rows = (
            Row(f"{RUNS}, {title}", None, "export", "module", theirs_small="eager", ours_small="eager"),
            Row(f"{FUNCTION_RUNS}, {title}", None, "export", "function", theirs_small="eager", ours_small="eager"),
            Row(f"{LEAST}, {title}", None, "export", "least", theirs_small="eager", ours_small="eager"),
            Row(f"{EXPORT}, {title}", None, "export", "module"),
        )
        yield Experiment(f"capture, {title}", arms, rows)


def medians(figures: Sequence[Figure]) -> list[Figure]:
    """The medians of each measure over the models, which is what is asked about."""
    found = []
    for measure, required in REQUIRED.items():
        own = [figure for figure in figures if figure.row.name.startswith(f"{measure}, ")]
        if len(own) > 1:
            row = replace(own[0].row, name=f"{measure}, median of {len(own)}", required=required)
            found.append(Figure(row, own[0].meter, *[_median(own, name) for name in _NUMBERS], ""))
    return found


_NUMBERS = ("theirs", "ours", "ratio", "ratio_of_minima")


def _median(figures: Sequence[Figure], name: str) -> Any:
    return statistics.median(getattr(figure, name) for figure in figures)


def eager(subject: Subject) -> Fresh:
    model, inputs = subject()
    return always(lambda: model(*inputs))


class _Watching(TorchFunctionMode):
    """Sees every call of torch and makes it: what any capture by watching has to do at least."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def watch_twice(subject: Subject) -> Fresh:
    model, inputs = subject()

    def run() -> None:
        for _ in range(2):
            with _Watching():
                model(*inputs)

    return always(run)


def capture(subject: Subject, level: str, library: ModuleType) -> Fresh:
    model, inputs = subject()
    return always(lambda: library.capture(model, inputs, level=level))


def export(subject: Subject) -> Fresh:
    model, inputs = subject()
    # The first export of a process pays for imports.
    torch.export.export(nn.Identity(), (torch.ones(1),))
    return always(lambda: torch.export.export(model, inputs))
