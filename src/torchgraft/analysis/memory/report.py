"""The answer to how much memory a program needs, as data and as text.
How it is found is in `peak.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchgraft.results.shown import Shown
from torchgraft.results.tables import Table, aligned, amount


@dataclass(frozen=True)
class Moment:
    """How many bytes were alive right after one operator, and the node and phase that it ran for; no node: forward is over."""

    phase: str
    node: str | None
    live: int


@dataclass(frozen=True)
class Memory(Shown):
    """The memory of a run or a training step, in bytes. `peak` and `forward_peak` count everything, also what was there before;
    `saved` is what autograd keeps for backward when forward is over, by the node that made it.
    """

    name: str
    parameters: int
    buffers: int
    inputs: int
    optimizer_state: int
    gradients: int
    saved: Mapping[str, int]
    forward_peak: int
    peak: int
    peak_at: tuple[str, str | None]
    at_peak: Mapping[str, int]
    timeline: tuple[Moment, ...] = field(repr=False)

    @property
    def resident(self) -> int:
        """What is there before a step begins: parameters, buffers, inputs, the state of the optimizer."""
        return self.parameters + self.buffers + self.inputs + self.optimizer_state

    @property
    def saved_for_backward(self) -> int:
        """All that autograd keeps."""
        return sum(self.saved.values())

    def rows(self) -> list[dict[str, Any]]:
        """The timeline as plain values, one row for each operator."""
        return [asdict(moment) for moment in self.timeline]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        data = {name: value for name, value in vars(self).items() if name != "timeline"}
        return {**data, "saved_for_backward": self.saved_for_backward, "timeline": self.rows()}

    def _table(self) -> Table:
        named = [
            ("parameters", self.parameters),
            ("buffers", self.buffers),
            ("inputs", self.inputs),
            ("optimizer state", self.optimizer_state),
            ("saved for backward", self.saved_for_backward),
            ("gradients", self.gradients),
            ("peak of forward", self.forward_peak),
            ("peak", self.peak),
        ]
        cells = [(name, amount(size, "B")) for name, size in named if size or name == "peak"]
        return Table("", ("part", "bytes"), cells, frozenset(["bytes"]))

    def text(self, color: bool = False) -> str:
        """The parts, and what is alive where memory is fullest."""
        phase, node = self.peak_at
        where = phase if node is None else f"{phase} of '{node}'"
        largest = [f"  {amount(size, 'B')}  {owner}" for owner, size in list(self.at_peak.items())[:5]]
        parts = aligned(self._table().cells, [1])
        return "\n".join([f"{self.name}: fullest in the {where}", *parts, "largest then:", *largest])

    def _repr_html_(self) -> str:
        return self._table().html()
