"""A program as a chain of units that can be cut into stages: time, memory and weights of each, and what crosses a cut.
One run without data tells all of it; where to cut is decided in `cuts.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.analysis.cost.count import distinct_bytes, module_paths
from torchgraft.analysis.fake import fakes_in_optimizers
from torchgraft.analysis.memory.peak import RESIDENT, MakeOptimizer
from torchgraft.analysis.simulate.clocks import run_clocks
from torchgraft.analysis.simulate.machine import Machine
from torchgraft.analysis.simulate.simulate import Recorder, recorded
from torchgraft.errors import GraftError
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer that a unit uses; `trained` where it has a gradient. The same one may be used by several units."""

    identity: int
    size: int
    trained: bool


@dataclass
class Unit:
    """One call of the program. `saved` is what backward needs of it, `working` the most bytes that come and go while it runs.

    `sent` and `returned` are the bytes that pass from all before it to it and what follows, and those of their gradients.
    """

    name: str
    module: str = ""
    saved: int = 0
    working: int = 0
    sent: int = 0
    returned: int = 0
    weights: list[Weight] = field(default_factory=list)


@dataclass(frozen=True)
class Times:
    """Seconds of units on one machine, summed from the first on: `forward[j] - forward[i]` is the time of units i to j."""

    forward: Sequence[float]
    backward: Sequence[float]
    optimizer: float


class Chain:
    """The units of a program, from one run of it on one micro-batch."""

    def __init__(
        self,
        program: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        machine: Machine,
        precision: str | None,
        training: bool,
        optimizer: MakeOptimizer | None,
    ) -> None:
        self._values: dict[Node, list[tuple[int, int, bool]]] = {}
        self.run = recorded(program, args, kwargs, machine, precision, training, node_done=self._node_done)
        self.state_bytes = 0 if optimizer is None else _state_after_update(self.run, optimizer)
        self.training = training
        calls = [
            node for node in self.run.program.graph.nodes if node._op.startswith("call") and not is_guard(node._target)
        ]
        if not calls:
            raise GraftError("the program computes nothing\ngive one that has at least one call")
        self.calls = calls
        self.units = [Unit(node.name, next(reversed(module_paths(node)), "")) for node in calls]
        self._place = {node.name: place for place, node in enumerate(calls)}
        self._add_weights(calls)
        self._add_crossing(calls)
        self._add_memory()
        self.flops = sum(step.kernel.flops for step in self.run.last_steps() if step.kernel is not None)
        self.precision = precision or self.run._precision()

    def times(self, machine: Machine, mode: str) -> Times:
        """How long each unit takes on a machine."""
        forward, backward, optimizer = [0.0] * len(self.units), [0.0] * len(self.units), 0.0
        now = 0.0
        for entry in run_clocks(self.run.steps_of(mode), machine, mode):
            end = max(entry.end, entry.issued)
            share, now = max(end - now, 0.0), max(now, end)
            if entry.step.phase == "optimizer":
                optimizer += share
            elif entry.step.phase == "forward":
                forward[self._place.get(entry.step.node or "", 0)] += share
            else:  # the first gradients belong to no node: they are made where the program ends
                backward[self._place.get(entry.step.node or "", len(self.units) - 1)] += share
        return Times(_sums(forward), _sums(backward), optimizer)

    # ---- what is known after the run ----

    def _node_done(self, node: Node, value: Any) -> None:
        found = []
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                found.append((leaf.untyped_storage()._cdata, distinct_bytes(leaf), leaf.requires_grad))
        self._values[node] = found

    def _add_weights(self, calls: Sequence[Node]) -> None:
        module = self.run.run.module
        for node, unit in zip(calls, self.units, strict=True):
            tensors: list[Any] = []
            if node._op == "call_module":
                inner = module.get_submodule(str(node._target))
                tensors += [*inner.parameters(), *inner.buffers()]
            for source in node._inputs:
                if source._op == "get_attr":
                    tensors += pytree.tree_leaves(find_attribute(module, str(source._target))[0])
            unit.weights = [_weight(tensor) for tensor in _distinct(tensors)]

    def _add_crossing(self, calls: Sequence[Node]) -> None:
        """What is made before a cut and used after it; views of one another cross once."""
        spans: list[_Span] = []
        current: dict[int, _Span] = {}
        for place, node in enumerate(calls):
            last = max((self._place.get(user.name, -1) for user in node._users), default=-1)
            for storage, size, differentiable in self._values.get(node, ()):
                span = current.get(storage)
                # Memory that is free again may be handed out anew, and then is another value.
                if span is None or span.last < place:
                    span = current[storage] = _Span(place, last)
                    spans.append(span)
                span.last, span.size = max(span.last, last), max(span.size, size)
                span.differentiable |= differentiable
        sent, returned = [0] * (len(calls) + 1), [0] * (len(calls) + 1)
        for span in spans:
            for sums, size in ((sent, span.size), (returned, span.size if span.differentiable else 0)):
                if span.last > span.first:
                    sums[span.first + 1] += size
                    sums[span.last + 1] -= size
        sums_sent, sums_returned = itertools.accumulate(sent), itertools.accumulate(returned)
        for unit, one, other in zip(self.units, sums_sent, sums_returned, strict=False):
            unit.sent, unit.returned = one, other

    def _add_memory(self) -> None:
        storages, started, after = self.run.storages, self.run.started, self.run.after_forward
        lasting = {id(storages.entry_of(tensor)) for tensor in self.run._gradients()}
        changes = [0] * (storages.time + 3)
        for entry in storages.log:
            if entry.phase == RESIDENT or entry.born <= started or id(entry) in lasting:
                continue
            if self.training and entry.phase == "forward" and entry.lives_at(after):
                place = self._place.get(entry.node.name if entry.node is not None else "", 0)
                self.units[place].saved += entry.size
                continue
            changes[entry.born] += entry.size
            if entry.died is not None:
                changes[entry.died] -= entry.size
        for time, working in enumerate(itertools.accumulate(changes[: storages.time + 1])):
            phase, node = storages.places[time - 1] if time else (RESIDENT, None)
            if node is not None and phase != "optimizer" and node.name in self._place:
                unit = self.units[self._place[node.name]]
                unit.working = max(unit.working, working)


@dataclass
class _Span:
    """A value from where it is made to where it is used last."""

    first: int
    last: int
    size: int = 0
    differentiable: bool = False


def _state_after_update(run: Recorder, make_optimizer: MakeOptimizer) -> int:
    """Let an optimizer update the weights, once to make its state and once as every later step; the bytes of its state."""
    optimizer = run.made_optimizer(make_optimizer)(list(run.run.module.parameters()))
    run.storages.phase = "optimizer"
    with run.run.mode, fakes_in_optimizers():
        optimizer.step()
        with run.run.operators:
            optimizer.step()
    state = [tensor for values in optimizer.state.values() for tensor in _distinct(values.values())]
    return sum(tensor.numel() * tensor.element_size() for tensor in state)


def _sums(values: Iterable[float]) -> list[float]:
    return [0.0, *itertools.accumulate(values)]


def _distinct(tensors: Iterable[Any]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors if isinstance(tensor, torch.Tensor)}.values())


def _weight(tensor: torch.Tensor) -> Weight:
    size = tensor.numel() * tensor.element_size()
    return Weight(id(tensor), size, tensor.is_leaf and tensor.requires_grad)


# ---- stages ----


@dataclass(frozen=True)
class Stage:
    """Units that are on one device together: seconds of one micro-batch, bytes that it holds, and what comes over to it."""

    first: str
    module: str
    forward: float
    backward: float
    optimizer: float
    weight_bytes: int
    gradient_bytes: int
    saved: int
    working: int
    sent: int
    returned: int
    gradients: tuple[tuple[float, int], ...] = ()


def stage_of(chain: Chain, times: Times, start: int, end: int) -> Stage:
    """The stage of the units from `start` to `end`; its gradients are ready at seconds after its backward began."""
    units = chain.units[start:end]
    weights = {weight.identity: weight for unit in units for weight in unit.weights}.values()
    gradients: dict[int, tuple[float, int]] = {}
    # Backward comes to the first use of a weight last, and only then is its gradient complete.
    for place in range(end - 1, start - 1, -1):
        ready = times.backward[end] - times.backward[place]
        for weight in chain.units[place].weights:
            if weight.trained and chain.training:
                gradients[weight.identity] = ready, weight.size
    trained = sum(weight.size for weight in weights if weight.trained)
    whole = sum({w.identity: w.size for unit in chain.units for w in unit.weights if w.trained}.values()) or 1
    return Stage(
        first=units[0].name,
        module=next((unit.module for unit in units if unit.module), ""),
        forward=times.forward[end] - times.forward[start],
        backward=times.backward[end] - times.backward[start],
        optimizer=times.optimizer * trained / whole,
        weight_bytes=sum(weight.size for weight in weights),
        gradient_bytes=trained if chain.training else 0,
        saved=sum(unit.saved for unit in units),
        working=max(unit.working for unit in units),
        sent=units[0].sent,
        returned=units[0].returned,
        gradients=tuple(sorted(gradients.values())),
    )
