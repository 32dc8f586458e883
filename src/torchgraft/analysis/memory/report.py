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
    """How many bytes were alive right after one operator, and the node and phase that it ran for; no node: forward is over.
    `workspace` is what the operator took besides while it ran.
    """

    phase: str
    node: str | None
    live: int
    workspace: int = 0


@dataclass(frozen=True, repr=False)
class Memory(Shown):
    """The memory of a run or a training step, in bytes; that of `device` alone where one is named.

    `peak` and `forward_peak` count everything, also what was there before; `saved` is what autograd keeps for backward when
    forward is over, by the node that made it; `unmeasured` names, by phase and node, the workspaces that could not be found
    and are in no sum.

    >>> import torch, torchgraft
    >>> memory = torchgraft.memory(torch.nn.Linear(4, 4), torch.empty(8, 4, device="meta"))
    >>> memory.parameters, memory.inputs, memory.peak
    (80, 128, 336)
    """

    name: str
    device: str | None
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
    unmeasured: tuple[tuple[str, str | None], ...]
    timeline: tuple[Moment, ...] = field(repr=False)

    @property
    def resident(self) -> int:
        """What is there before a step begins: parameters, buffers, inputs, the state of the optimizer."""
        return self.parameters + self.buffers + self.inputs + self.optimizer_state

    @property
    def saved_for_backward(self) -> int:
        """All that autograd keeps."""
        return sum(self.saved.values())

    @property
    def workspaces(self) -> dict[str, int]:
        """What kernels take for themselves while they run, by phase and node, the largest first."""
        sizes: dict[str, int] = {}
        for moment in self.timeline:
            if moment.workspace:
                owner = f"{moment.phase} {moment.node}"
                sizes[owner] = max(sizes.get(owner, 0), moment.workspace)
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    def rows(self) -> list[dict[str, Any]]:
        """The timeline as plain values, one row for each operator."""
        return [asdict(moment) for moment in self.timeline]

    def to_dict(self) -> dict[str, Any]:
        data = {name: value for name, value in vars(self).items() if name != "timeline"}
        return {
            **data,
            "saved_for_backward": self.saved_for_backward,
            "workspaces": self.workspaces,
            "timeline": self.rows(),
        }

    def _table(self) -> Table:
        named = [
            ("parameters", self.parameters),
            ("buffers", self.buffers),
            ("inputs", self.inputs),
            ("optimizer state", self.optimizer_state),
            ("saved for backward", self.saved_for_backward),
            ("gradients", self.gradients),
            ("largest workspace", max(self.workspaces.values(), default=0)),
            ("peak of forward", self.forward_peak),
            ("peak", self.peak),
        ]
        cells = [(name, amount(size, "B")) for name, size in named if size or name == "peak"]
        return Table("", ("part", "bytes"), cells, frozenset(["bytes"]))

    def headline(self) -> str:
        return f"{self.name}, {amount(self.peak, 'B')} at the peak, in the {self._peak_place()}"

    def _peak_place(self) -> str:
        phase, node = self.peak_at
        return phase if node is None else f"{phase} of '{node}'"

    def text(self, color: bool = False) -> str:
        """The parts, and what is alive at the peak."""
        largest = [f"  {amount(size, 'B')}  {owner}" for owner, size in list(self.at_peak.items())[:5]]
        parts = aligned(self._table().cells, [1])
        title = f"{self.name}{'' if self.device is None else f' on {self.device}'}: peak in the {self._peak_place()}"
        missing = []
        if self.unmeasured:
            first = " of ".join(filter(None, self.unmeasured[0]))
            missing = [f"not counted: workspaces that could not be measured, {len(self.unmeasured)} (first: {first})"]
        return "\n".join([title, *parts, *missing, "largest at the peak:", *largest])

    def _repr_html_(self) -> str:
        return self._table().html()
