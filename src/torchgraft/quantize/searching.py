"""Which layers cost most: `sensitivity` quantizes one at a time, `search` keeps in floats only what must be to reach a target.
Both measure whole programs; errors of single layers are in `reporting.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import QuantizeError
from torchgraft.quantize.calibrating import Progress
from torchgraft.quantize.config import Config
from torchgraft.quantize.converting import convert
from torchgraft.quantize.flow import finish
from torchgraft.quantize.measuring import float_of, sqnr
from torchgraft.quantize.plan import KEY, make_plan, plan_of
from torchgraft.quantize.preparing import ConfigLike, Model, insert_observers
from torchgraft.quantize.reporting import prepared_with
from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table

Metric = Callable[[GraphModule], float]


@dataclass(frozen=True, repr=False)
class Sensitivity(Tabular):
    """The metric with each layer alone quantized, the most sensitive first.

    >>> import torch, torchgraft
    >>> model = torchgraft.zoo.create("mlp").eval()
    >>> [value > 20 for value in sensitivity(model, [torch.randn(8, 16)]).values.values()]
    [True, True]
    """

    values: dict[str, float]
    unit: str

    def headline(self) -> str:
        first = next(iter(self.values), None)
        return f"{len(self.values)} layers, one at a time" + (f"; most sensitive: {first}" if first else "")

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each layer."""
        return [{"layer": name, "value": value} for name, value in self.values.items()]

    def _table(self) -> Table:
        cells = [(name, f"{value:.2f} {self.unit}".rstrip()) for name, value in self.values.items()]
        return Table(self.headline(), ("layer", "alone quantized"), cells, frozenset({"alone quantized"}))


@dataclass(frozen=True, repr=False)
class SearchResult(Tabular):
    """A program that reaches the target, its configuration, and the layers that had to stay floats.

    >>> import torch, torchgraft
    >>> model = torchgraft.zoo.create("mlp").eval()
    >>> found = search(model, [torch.randn(8, 16)], target=20)
    >>> found.value > 20, found.layers
    (True, 2)
    """

    program: GraphModule
    config: Config
    kept: tuple[str, ...]
    value: float
    target: float
    layers: int

    def headline(self) -> str:
        return (
            f"{self.value:.2f} reached (target {self.target:g}) with {len(self.kept)} of {self.layers} layers in floats"
        )

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each layer that stays."""
        return [{"layer": name} for name in self.kept]

    def _table(self) -> Table:
        return Table(self.headline(), ("kept in floats",), [(name,) for name in self.kept])


def sensitivity(
    model: Model,
    data: Iterable[Any],
    *,
    config: ConfigLike = None,
    metric: Metric | None = None,
    backend: str = "native",
    progress: Progress | None = None,
) -> Sensitivity:
    """Quantize one layer at a time, and measure: by SQNR of the results, or by any `metric(program)` that is higher when better.

    >>> import torch, torchgraft
    >>> found = sensitivity(torchgraft.zoo.create("mlp").eval(), [torch.randn(8, 16)])
    >>> sorted(found.values)
    ['fc1', 'fc2']
    """
    prepared, kept = prepared_with(model, data, config, backend)
    measure, unit = _measure(prepared, kept, metric)
    values = {}
    paths = _paths(prepared)
    for done, path in enumerate(paths):
        values[path] = measure(convert(with_layers(prepared, [path])))
        if progress is not None:
            progress(done + 1, len(paths))
    return Sensitivity(dict(sorted(values.items(), key=lambda item: item[1])), unit)


def search(
    model: Model,
    data: Iterable[Any],
    *,
    target: float,
    metric: Metric | None = None,
    config: ConfigLike = None,
    backend: str = "native",
    progress: Progress | None = None,
) -> SearchResult:
    """A program that reaches `target` with as few layers in floats as a greedy search finds.

    `target` is an SQNR in decibels, or a value of `metric(program)`, any callable that is higher when better, such as accuracy.

    >>> import torch, torchgraft
    >>> found = search(torchgraft.zoo.create("mlp").eval(), [torch.randn(8, 16)], target=20)
    >>> found.kept
    ()
    """
    if not isinstance(target, (int, float)) or math.isnan(target):
        raise QuantizeError(
            f"expected a number for target, got {target!r}\ngive an SQNR in decibels, or a value of the metric"
        )
    prepared, kept = prepared_with(model, data, config, backend)
    measure, _ = _measure(prepared, kept, metric)
    paths = _paths(prepared)
    order = paths
    value = measure(convert(prepared))
    count = 0
    if value < target:
        order = list(sensitivity(prepared, kept, metric=metric, progress=progress).values)
        count, value = _fewest(prepared, order, measure, target)
    chosen = [path for path in paths if path not in order[:count]]
    reached = with_layers(prepared, chosen)
    config_of = plan_of(prepared).config
    return SearchResult(
        finish(reached, backend),
        config_of.with_float(order[:count]),
        tuple(order[:count]),
        value,
        target,
        len(paths),
    )


def _fewest(prepared: GraphModule, order: list[str], measure: Metric, target: float) -> tuple[int, float]:
    """How many of the most sensitive layers have to stay floats, by halving."""
    low, high = 0, len(order) - 1  # with `low` the target is missed
    value = measure(convert(with_layers(prepared, order[high:])))
    if value < target:
        raise QuantizeError(
            f"cannot reach {target:g}: with one layer quantized it is {value:.2f}\n"
            "give a lower target, or another scheme for the layers"
        )
    while high - low > 1:
        middle = (low + high) // 2
        found = measure(convert(with_layers(prepared, order[middle:])))
        if found >= target:
            high, value = middle, found
        else:
            low = middle
    return high, value


def _measure(prepared: GraphModule, data: list[Any], metric: Metric | None) -> tuple[Metric, str]:
    if metric is not None:
        return (lambda program: _number(metric(program))), ""
    floats = float_of(prepared)
    return (lambda program: sqnr(floats, program, data)), "dB"


def _number(value: Any) -> float:
    """What a metric says, which has to be a number that others can be more or less than."""
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if math.isnan(found):
        raise QuantizeError(
            f"the metric says {str(value)[:60]!r}, which is no number\n"
            "give metric=f where f(program) is a number, higher when better"
        )
    return found


def _paths(prepared: GraphModule) -> list[str]:
    layers = plan_of(prepared).layers.values()
    return list(dict.fromkeys(layer.path for layer in layers if layer.reason is None))


def with_layers(prepared: GraphModule, paths: list[str]) -> GraphModule:
    """A calibrated program in which only the layers at these paths will be quantized."""
    plan = plan_of(prepared)
    others = [path for path in _paths(prepared) if path not in paths]
    # A path may lie in another one, so that each is named, the ones to quantize as well.
    named = {layer.path: layer.scheme_name for layer in plan.layers.values() if layer.path in paths}
    config = dataclasses.replace(plan.config, modules={**dict.fromkeys(others, "float"), **named})
    result = float_of(prepared)
    fresh = make_plan(result, config, plan.backend)
    insert_observers(result, fresh)
    for name, group in fresh.groups.items():
        known = plan.groups.get(name)
        if known is not None:
            result.add_module(group, getattr(prepared, known))
    fresh.inputs = plan.inputs
    result.meta[KEY] = fresh
    return result
