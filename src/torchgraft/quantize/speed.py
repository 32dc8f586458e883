"""Why a quantized program is not faster: where its time goes, measured node by node, and what stands in the way on this machine.
Errors are in `reporting.py`; what runs faster is made in `native/`.
"""

from __future__ import annotations

import time
import timeit
from dataclasses import dataclass
from typing import Any

import torch

from torchgraft.codegen.calling import example_inputs, placeholder_values
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.interpreter import Interpreter
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.ir.verify import find_attribute
from torchgraft.quantize.config import has_vnni
from torchgraft.quantize.native.cuda import RowLinear
from torchgraft.quantize.native.functions import (
    activate,
    activate_and_quantize,
    dequantize_fast,
    look_up,
    max_pool_bytes,
    quantize_fast,
)
from torchgraft.quantize.native.layers import IntegerLayer
from torchgraft.quantize.native.replaying import Replay
from torchgraft.quantize.native.weight_only import WeightOnlyLayer
from torchgraft.quantize.operators import dequantize_tensor, quantize_tensor, scale_of_values
from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table, seconds_text

_CONVERSIONS = (quantize_fast, dequantize_fast, quantize_tensor, dequantize_tensor, scale_of_values)
_BETWEEN = (activate, activate_and_quantize, look_up, max_pool_bytes)
# Below this many multiplications a call costs more than what it computes.
_SMALL = 1 << 18
# With fewer rows than this, reading the weights takes longer than multiplying them.
_FEW_ROWS = 8


@dataclass(frozen=True)
class TimedNode:
    """A call, its time, and what kind of work it is."""

    node: str
    kind: str
    seconds: float
    note: str
    source: str


@dataclass(frozen=True, repr=False)
class SpeedReport(Tabular):
    """Where the time of a program goes, beside the model's; `notes` say what stands in the way.

    >>> import torch, torchgraft
    >>> model = torchgraft.zoo.create("mlp").eval()
    >>> program = torchgraft.quantize.quantize(model, [torch.randn(4, 16)])
    >>> round(sum(explain_speed(model, program, torch.randn(4, 16)).shares().values()), 3)
    1.0
    """

    model_seconds: float
    program_seconds: float
    nodes: tuple[TimedNode, ...]
    notes: tuple[str, ...]

    @property
    def faster(self) -> float:
        """How many times faster the program is."""
        return self.model_seconds / self.program_seconds

    def shares(self) -> dict[str, float]:
        """The share of each kind of work in the measured time."""
        total = sum(node.seconds for node in self.nodes) or 1.0
        result: dict[str, float] = {}
        for node in self.nodes:
            result[node.kind] = result.get(node.kind, 0.0) + node.seconds / total
        return dict(sorted(result.items(), key=lambda item: -item[1]))

    def headline(self) -> str:
        times = f"{seconds_text(self.model_seconds)} -> {seconds_text(self.program_seconds)}"
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in self.shares().items())
        return f"{self.faster:.2f} times as fast ({times}); {shares}"

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each call."""
        return [vars(node) for node in self.nodes]

    def to_dict(self) -> dict[str, Any]:
        times = {"model_seconds": self.model_seconds, "program_seconds": self.program_seconds}
        return {**times, "shares": self.shares(), "nodes": self.rows(), "notes": list(self.notes)}

    def _table(self) -> Table:
        total = sum(node.seconds for node in self.nodes) or 1.0
        longest = sorted(self.nodes, key=lambda node: -node.seconds)[:20]
        cells = [
            (node.node, node.kind, seconds_text(node.seconds), f"{node.seconds / total:.1%}", node.note, node.source)
            for node in longest
        ]
        columns = ("node", "work", "time", "share", "note", "source")
        return Table(self.headline(), columns, cells, frozenset({"time", "share"}), footer="\n".join(self.notes))


def explain_speed(
    model: Any, program: GraphModule, args: Any = (), kwargs: dict[str, Any] | None = None, *, repeat: int = 5
) -> SpeedReport:
    """Time a model and its quantized program on the same inputs, and say where the program's time goes and why.

    >>> import torchgraft
    >>> model, x = torchgraft.zoo.create("mlp").eval(), torch.randn(4, 16)
    >>> found = explain_speed(model, torchgraft.quantize.quantize(model, [x]), x)
    >>> any("small" in note for note in found.notes)
    True
    """
    values, keywords = example_inputs(args, kwargs)
    with torch.no_grad():
        whole = [_best(lambda item=item: item(*values, **keywords), repeat) for item in (model, program)]
        running = _Timed(program, repeat)
        running.run(initial_env=dict(placeholder_values(program, values, keywords)))
    nodes = tuple(running.found)
    return SpeedReport(whole[0], whole[1], nodes, tuple(_notes(nodes)))


def _best(call: Any, repeat: int) -> float:
    call()
    return min(timeit.repeat(call, number=1, repeat=repeat))


class _Timed(Interpreter):
    def __init__(self, program: GraphModule, repeat: int) -> None:
        super().__init__(program)
        self.repeat = repeat
        self.found: list[TimedNode] = []

    def run_node(self, n: Node) -> Any:
        """Run a call several times; those that write into their input are run once."""
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        layer = find_attribute(self.module, n.target)[0] if n.op == "call_module" else None
        writes = n.target in (activate, activate_and_quantize) or len(n.args) > 1
        if not writes:
            super().run_node(n)
        times = []
        for _ in range(1 if writes else self.repeat):
            started = time.perf_counter()
            result = super().run_node(n)
            times.append(time.perf_counter() - started)
        kind, note = _kind(n, layer, self.env.get(n.args[0]) if n.args and isinstance(n.args[0], Node) else None)
        self.found.append(TimedNode(n.name, kind, min(times), note, str(source_of(n) or "")))
        return result


def _kind(node: Node, layer: Any, value: Any) -> tuple[str, str]:
    if isinstance(layer, (IntegerLayer, WeightOnlyLayer, RowLinear)):
        return "integer layers", _size_note(layer, value)
    if isinstance(layer, Replay):
        return "integer layers", f"{len(list(layer.part.children()))} of them in one call"
    if node.target in _CONVERSIONS:
        return "conversions", "between floats and integers"
    if node.target in _BETWEEN:
        return "between layers", ""
    if isinstance(layer, torch.nn.Module) and any(True for _ in layer.parameters()):
        return "float layers", "not quantized"
    is_guard = getattr(node.target, "__module__", "").startswith("torchgraft.ir")
    return ("guards", "") if is_guard else ("float calls", "")


def _size_note(layer: Any, value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    weight: torch.Tensor = layer.weight
    if weight.dim() == 2:
        rows = value.numel() // max(value.shape[-1], 1)
        if rows * weight.numel() < _SMALL:
            return "a small product: the call costs more than it computes"
        return "bound by reading the weights" if rows < _FEW_ROWS else ""
    return ""


def _notes(nodes: tuple[TimedNode, ...]) -> list[str]:
    total = sum(node.seconds for node in nodes) or 1.0
    notes = []
    if not has_vnni():
        notes.append("this machine does not multiply bytes at once (no VNNI): expect little gain, and use 7 bits")
    for kind, text in (
        ("conversions", "of the time goes into converting between floats and integers around parts that stay floats"),
        ("float calls", "of the time is spent in calls that have no integer kernel"),
        ("float layers", "of the time is spent in layers that were not quantized"),
    ):
        share = sum(node.seconds for node in nodes if node.kind == kind) / total
        if share > 0.05:
            longest = max((node for node in nodes if node.kind == kind), key=lambda node: node.seconds)
            where = f"{longest.node}, {longest.source}" if longest.source else longest.node
            notes.append(f"{share:.0%} {text}; most in {where}")
    for marker, text in (
        ("a small product", "of the time is spent in small products, where calls cost more than what they compute"),
        ("bound by reading", "of the time is spent reading weights: larger batches gain more from integers"),
    ):
        share = sum(node.seconds for node in nodes if node.note.startswith(marker)) / total
        if share > 0.05:
            notes.append(f"{share:.0%} {text}")
    return notes
