"""What became of a model: each layer with its scheme or the reason why it stays, its error, and the source line.
The figures are measured in `measuring.py`; which layers are worth keeping in floats is found in `searching.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchgraft.codegen.graph_module import GraphModule, with_own_graph
from torchgraft.errors import QuantizeError
from torchgraft.quantize.calibrating import batches, calibrate, inputs_of
from torchgraft.quantize.converting import convert
from torchgraft.quantize.measuring import error_of, float_of, node_errors
from torchgraft.quantize.plan import KEY, Plan, plan_of
from torchgraft.quantize.preparing import ConfigLike, Model, prepare
from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table, amount

# The least SQNR of each colour in a drawing.
_COLOURS = ((40, "error-none"), (30, "error-little"), (20, "error-some"), (-math.inf, "error-much"))


@dataclass(frozen=True)
class LayerReport:
    """One layer: what it is, what it became, and its error."""

    node: str
    path: str
    kind: str
    scheme: str
    reason: str | None
    source: str
    bytes_before: int
    bytes_after: int
    sqnr: float | None
    own_sqnr: float | None
    cosine: float | None

    @property
    def inherits(self) -> bool:
        """Whether most of its error came in with its inputs."""
        if self.sqnr is None or self.own_sqnr is None or math.isinf(self.sqnr):
            return False
        return self.own_sqnr > self.sqnr + 3


@dataclass(frozen=True, repr=False)
class QuantizeReport(Tabular):
    """What was quantized and what was not, and why; SQNR of each layer, of what arises in it, and of the results.

    >>> import torch, torchgraft
    >>> model = torchgraft.zoo.create("mlp").eval()
    >>> report(model, [torch.randn(8, 16)]).headline().partition(", SQNR")[0]
    'MLP: 2 of 2 layers quantized, weights 4.1 kB -> 1.02 kB'
    """

    name: str
    layers: tuple[LayerReport, ...]
    others: dict[str, str]
    notes: tuple[str, ...]
    sqnr: float
    cosine: float
    node_sqnr: dict[str, float]

    def headline(self) -> str:
        done = [layer for layer in self.layers if layer.reason is None]
        before, after = (
            sum(layer.bytes_before for layer in self.layers),
            sum(layer.bytes_after for layer in self.layers),
        )
        sizes = f"weights {amount(before, 'B')} -> {amount(after, 'B')}"
        return f"{self.name}: {len(done)} of {len(self.layers)} layers quantized, {sizes}, SQNR {_decibels(self.sqnr)}"

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each layer."""
        return [{**vars(layer), "inherits": layer.inherits} for layer in self.layers]

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "sqnr": self.sqnr,
            "cosine": self.cosine,
            "layers": self.rows(),
            "others": self.others,
            "notes": list(self.notes),
            "node_sqnr": self.node_sqnr,
        }

    def marked(self, program: GraphModule) -> GraphModule:
        """A copy of the quantized program, in its reference form or native, that is drawn in the colours of its errors.

        >>> import torch, torchgraft
        >>> model, data = torchgraft.zoo.create("mlp").eval(), [torch.randn(8, 16)]
        >>> program = torchgraft.quantize.quantize(model, data)
        >>> "SQNR" in torchgraft.draw(report(model, data).marked(program)).svg
        True
        """
        result = with_own_graph(program)
        own = {layer.node: layer.own_sqnr for layer in self.layers}
        for node in result.graph.nodes:
            # A native layer is called by the name of the call that it stands for.
            name = node.name if node.name in self.node_sqnr else str(node.target) if node.op == "call_module" else ""
            found = self.node_sqnr.get(name)
            if found is not None:
                node.meta["drawn_as"] = next(kind for least, kind in _COLOURS if found >= least)
                arising = own.get(name)
                node.meta["drawn_note"] = f"SQNR {_decibels(found)}" + (
                    f", {_decibels(arising)} of what arises here" if arising is not None else ""
                )
        return result

    def _table(self) -> Table:
        cells = []
        for layer in self.layers:
            what = layer.scheme if layer.reason is None else f"float: {layer.reason}"
            inherited = "inherited" if layer.inherits else ""
            figures = (
                _decibels(layer.sqnr),
                _decibels(layer.own_sqnr),
                "" if layer.cosine is None else f"{layer.cosine:.5f}",
            )
            cells.append((layer.path or layer.node, layer.kind, what, *figures, inherited, layer.source))
        worst = sorted(
            (index for index, layer in enumerate(self.layers) if layer.own_sqnr is not None),
            key=lambda index: self.layers[index].own_sqnr or 0.0,
        )
        columns = ("layer", "kind", "scheme", "SQNR", "own SQNR", "cosine", "", "source")
        footer = [f"{name} stays in floats: {reason}" for name, reason in self.others.items()]
        marked = frozenset(worst[: max(1, len(worst) // 10)])
        numbers = frozenset({"SQNR", "own SQNR", "cosine"})
        return Table(self.headline(), columns, cells, numbers, marked, "\n".join([*footer, *self.notes]))


def report(
    model: Model, data: Iterable[Any], *, config: ConfigLike = None, backend: str = "native", compare: int = 2
) -> QuantizeReport:
    """Quantize a model, or take a program that was prepared and calibrated, and say what becomes of each layer.

    The first `compare` batches are run through both programs, layer by layer. "own SQNR" is what a layer does to exact inputs;
    where it is much higher than "SQNR", the error was inherited.

    >>> import torch, torchgraft
    >>> found = report(torchgraft.zoo.create("mlp").eval(), [torch.randn(8, 16)])
    >>> [layer.path for layer in found.layers], found.sqnr > 30
    (['fc1', 'fc2'], True)
    """
    prepared, kept = prepared_with(model, data, config, backend)
    quantized = convert(prepared)
    floats = float_of(prepared)
    plan = plan_of(prepared)
    chosen = [name for name, layer in plan.layers.items() if layer.reason is None]
    errors = node_errors(floats, quantized, kept[:compare], chosen)
    total = error_of(floats, quantized, kept[:compare])
    layers = tuple([_layer_report(plan, name, errors) for name in plan.layers])
    name = type(prepared).__name__
    found = {node: error.sqnr for node, error in errors.total.items()}
    return QuantizeReport(name, layers, dict(plan.others), tuple(plan.notes), total.sqnr, total.cosine, found)


def prepared_with(model: Any, data: Iterable[Any], config: ConfigLike, backend: str) -> tuple[GraphModule, list[Any]]:
    """A calibrated program, made where it is not given, and the batches of data."""
    kept = list(batches(data))
    if not kept:
        raise QuantizeError("there is no data to compare with\ngive an iterable of batches such as [x1, x2]")
    if isinstance(model, GraphModule) and isinstance(model.meta.get(KEY), Plan):
        return model, kept
    args, kwargs = ((), {}) if isinstance(model, GraphModule) else inputs_of(kept[0])
    prepared = prepare(model, args, kwargs, config=config, backend=backend)
    calibrate(prepared, kept)
    return prepared, kept


def _layer_report(plan: Plan, name: str, errors: Any) -> LayerReport:
    planned = plan.layers[name]
    count = math.prod(planned.shape) if planned.shape else 0
    width = 8 if "64" in planned.dtype else 2 if "16" in planned.dtype else 4
    bits = planned.scheme.weights.bits if planned.scheme.weights is not None else 8 * width
    bits = 16 if planned.scheme.cast is not None else bits
    total, own = errors.total.get(name), errors.own.get(name)
    return LayerReport(
        name, planned.path, planned.kind, planned.scheme_name, planned.reason, planned.source,
        count * width, count * bits // 8,
        None if total is None else total.sqnr, None if own is None else own.sqnr, None if total is None else total.cosine,
    )  # fmt: skip


def _decibels(value: float | None) -> str:
    return "" if value is None else "exact" if math.isinf(value) and value > 0 else f"{value:.1f} dB"
