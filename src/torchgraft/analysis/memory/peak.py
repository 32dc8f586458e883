"""`memory`: runs a program, or a whole training step, on fake tensors and reports the peak of memory and what is in it.
Lifetimes are those of a real run: the same Python and the same autograd hold and let go of the same tensors.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.analysis.dry_run import DryRun, program_of
from torchgraft.analysis.fake import fakes_in_optimizers, on_device
from torchgraft.analysis.memory.report import Memory, Moment
from torchgraft.analysis.memory.workspaces import HIDES_ROOM, Call, Measure, taken_on_gpu, takes_room
from torchgraft.codegen.calling import example_inputs
from torchgraft.errors import GraftError
from torchgraft.ir.arguments import tensors_of
from torchgraft.ir.node import Node

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def memory(
    program: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool = False,
    optimizer: MakeOptimizer | None = None,
    compute: bool = False,
    device: torch.device | str | None = None,
    measure: Measure | None = None,
) -> Memory:
    """How much memory a run needs, or with `training` a step of forward and backward, without computing or allocating it.

    Counted is what torch allocates for tensors: parameters, inputs, results, what autograd saves, gradients. `optimizer` makes an
    optimizer of the parameters (`torch.optim.Adam`); the step is then one of many, with its state there from the start.
    `compute` runs on copies of the real tensors instead of fakes.

    `device` asks for the memory of that device, with the model and the inputs on it; without it they stay where they are.
    For a program on a GPU the memory of GPUs alone is counted, and the workspaces of convolutions, products and reductions too:
    each distinct call is run there once, on zeros. `measure` is asked instead where it is given, on any device: for the most
    bytes that a `Call` takes, or None.

    >>> result = memory(torch.nn.Linear(1000, 1000, bias=False), torch.empty(10, 1000, device="meta"))
    >>> result.parameters, result.inputs, result.peak - result.resident
    (4000000, 40000, 40000)
    """
    values, keywords = example_inputs(args, kwargs)
    if device is not None:
        program, values, keywords = on_device(program, values, keywords, torch.device(device), compute)
    run = DryRun(program_of(program, values, keywords, compute), values, keywords, compute=compute)
    accounts = Accounts(run, None if device is None else torch.device(device), measure)
    if training or optimizer is not None:
        accounts.train(optimizer)
    else:
        with torch.no_grad():
            accounts.forward()
    return accounts.result()


class Accounts:
    """A dry run whose operators are entered in the books, and what is read from them afterwards."""

    def __init__(
        self, run: DryRun, device: torch.device | None = None, measure: Measure | None = None, grain: int = 1
    ) -> None:
        self.run, self.program = run, run.program
        run.tell(self._operator)
        self.storages = Storages(device or _gpu_of(self.run), grain)
        on_gpu = self.storages.device is not None and self.storages.device.type == "cuda"
        self.measure = measure or (taken_on_gpu if on_gpu else None)
        self.calls: dict[int, Call] = {}
        self.hidden: list[int] = []
        self.state: list[torch.Tensor] = []
        self.saved: dict[str, int] = {}
        self.unmeasured: tuple[tuple[str, str | None], ...] = ()
        self.started = 0
        self._enter_residents()

    def _enter_residents(self) -> None:
        module = self.run.module
        self.parameters = self._sizes(module.parameters())
        self.buffers = self._sizes([*module.buffers(), *pytree.tree_leaves(vars(module))])
        self.inputs = self._sizes(pytree.tree_leaves(self.run.inputs))

    def _sizes(self, tensors: Iterable[Any]) -> int:
        """Enter tensors that are there before the run; the bytes of those that were not entered yet."""
        before = sum(entry.size for entry in self.storages.log)
        self.storages.note(list(tensors))
        return sum(entry.size for entry in self.storages.log) - before

    def _operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.storages.step(result, self.run.place.node)
        if getattr(func, "overloadpacket", None) in HIDES_ROOM and not self.run.computes:
            self.hidden.append(self.storages.time)
        if self.measure is not None and takes_room(func, args):
            self.calls[self.storages.time] = Call.of(func, args, kwargs)

    def forward(self) -> None:
        self.storages.phase = "forward"
        self.run.forward()
        self.run.env.clear()
        self.storages.step((), None)  # what the last node let go is gone only now
        self.after_forward = self.storages.time
        self._note_saved()

    def _note_saved(self) -> None:
        kept = {id(self.storages.entry_of(leaf)) for leaf in tensors_of(self.run.result)}
        saved: dict[str, int] = defaultdict(int)
        for entry in self.storages.alive(self.storages.time):
            if entry.phase == "forward" and entry.born > self.started and id(entry) not in kept:
                saved["(between nodes)" if entry.node is None else entry.node.name] += entry.size
        self.saved = dict(saved)

    def train(self, make_optimizer: MakeOptimizer | None) -> None:
        optimizer = None
        if make_optimizer is not None:
            # A step that comes first makes the state that all others find.
            with self.run.mode, fakes_in_optimizers():
                optimizer = make_optimizer(list(self.run.module.parameters()))
            closure = inspect.signature(optimizer.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                raise GraftError(
                    f"{type(optimizer).__name__} runs the model as often as it likes, by a closure\n"
                    "a step is one run: take another optimizer, or training=True and multiply"
                )
            self._one_step(optimizer)
            with self.run.mode:
                optimizer.zero_grad()
            self.run.result = None
            self.state = [tensor for values in optimizer.state.values() for tensor in tensors_of(values)]
            self.started = self.storages.time
        self._one_step(optimizer)

    def _one_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.forward()
        self.storages.phase = "backward"
        self.run.backward(accumulate=True)
        if optimizer is not None:
            self.storages.phase = "optimizer"
            with self.run.mode, self.run.operators, fakes_in_optimizers():
                optimizer.step()

    def result(self) -> Memory:
        storages, started = self.storages, self.started
        live, workspaces = storages.live_bytes(), self._workspaces()
        full = [size + workspaces.get(time, 0) for time, size in enumerate(live)]
        peak_time = max(range(started, len(full)), key=full.__getitem__)
        return Memory(
            name=type(self.program).__name__,
            device=None if storages.device is None else str(storages.device),
            parameters=self.parameters,
            buffers=self.buffers,
            inputs=self.inputs,
            optimizer_state=_bytes(map(storages.entry_of, self.state)),
            gradients=_bytes(map(storages.entry_of, self._gradients())),
            saved=self.saved,
            forward_peak=max(full[started : self.after_forward + 1]),
            peak=full[peak_time],
            peak_at=self._place(peak_time),
            at_peak=self._at_peak(peak_time, workspaces.get(peak_time, 0)),
            unmeasured=self.unmeasured,
            timeline=tuple(
                Moment(*self._place(time), live[time], workspaces.get(time, 0))
                for time in range(started + 1, len(live))
            ),
        )

    def _place(self, time: int) -> tuple[str, str | None]:
        phase, node = self.storages.places[time - 1] if time else (RESIDENT, None)
        return phase, None if node is None else node.name

    def _workspaces(self) -> dict[int, int]:
        """The bytes that operators took beyond their results, by time; those that could not be measured are kept by name."""
        measure = self.measure or (lambda call: 0)
        taken = {time: measure(call) for time, call in self.calls.items() if time > self.started}
        missing = [
            *[time for time in self.hidden if time > self.started],
            *[time for time in taken if taken[time] is None],
        ]
        self.unmeasured = tuple(dict.fromkeys(map(self._place, sorted(missing))))
        made = self.storages.made_bytes()
        return {time: size - made[time] for time, size in taken.items() if size is not None and size > made[time]}

    def _at_peak(self, time: int, workspace: int) -> dict[str, int]:
        """Bytes by phase and node that made them, the largest first."""
        sizes: dict[str, int] = defaultdict(int)
        for entry in self.storages.alive(time):
            sizes[_owner(entry.phase, None if entry.node is None else entry.node.name)] += entry.size
        if workspace:
            sizes[f"workspace of {_owner(*self._place(time))}"] = workspace
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    def _gradients(self) -> list[torch.Tensor]:
        sources = [*self.run.module.parameters(), *tensors_of(self.run.inputs)]
        return [source.grad for source in sources if source.is_leaf and source.grad is not None]


def _owner(phase: str, node: str | None) -> str:
    return phase if node is None else f"{phase} {node}"


def _bytes(entries: Iterable[Storage | None]) -> int:
    """The bytes of storages, each counted once; None lies on another device."""
    return sum({id(entry): entry.size for entry in entries if entry is not None}.values())


def _gpu_of(run: DryRun) -> torch.device | None:
    """The kind of device whose memory is asked about, where part of the program lies on a GPU."""
    here = [*run.module.parameters(), *run.module.buffers(), *tensors_of(run.inputs)]
    return torch.device("cuda") if any(tensor.device.type == "cuda" for tensor in here) else None


# ---- storages ----


RESIDENT = "resident"
GPU_GRAIN = 512  # torch's allocator hands out the memory of a GPU in pieces of so many bytes


@dataclass
class Storage:
    """One piece of memory. Times count operators; `died` is None while it lives."""

    size: int
    node: Node | None
    phase: str
    born: int
    died: int | None = None

    def lives_at(self, time: int) -> bool:
        return self.born <= time and (self.died is None or self.died > time)


class Storages:
    """All storages seen so far, on one device where one is given.

    A storage is known by a weak reference: torch keeps its Python object as long as the memory is in use, so it dies when the
    last tensor on it does, wherever that was held (a local variable, autograd's graph). Memory is handed out in pieces of `grain`
    bytes; on a GPU of at least `GPU_GRAIN`.
    """

    def __init__(self, device: torch.device | None = None, grain: int = 1) -> None:
        self.device, self.grain = device, grain
        self.time = 0
        self.phase = RESIDENT
        self.log: list[Storage] = []
        self.places: list[tuple[str, Node | None]] = []
        self._known: dict[int, tuple[Any, Storage]] = {}

    def note(self, tree: Any, node: Node | None = None) -> None:
        """Enter the storages of the tensors in a tree that are not known yet."""
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and self._is_here(leaf.device):
                self._enter(leaf, node)

    def _is_here(self, device: torch.device) -> bool:
        mine = self.device
        return mine is None or (device.type == mine.type and mine.index in (None, device.index))

    def step(self, tree: Any, node: Node | None) -> None:
        """An operator ran: time goes on, and what it made is entered."""
        self.time += 1
        self.places.append((self.phase, node))
        self.note(tree, node)

    def _enter(self, tensor: torch.Tensor, node: Node | None) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, self._taken(storage.nbytes(), tensor.device)
        known = self._known.get(key)
        if known is not None and known[0]() is not None:
            known[1].size = max(known[1].size, size)  # a resize in place
            return
        entry = Storage(size, node, self.phase, self.time)
        self.log.append(entry)

        def gone(_: Any) -> None:
            entry.died = self.time + 1
            current = self._known.get(key)
            if current is not None and current[1] is entry:
                del self._known[key]

        self._known[key] = weakref.ref(storage, gone), entry

    def entry_of(self, tensor: torch.Tensor) -> Storage | None:
        """The entry of a tensor's memory."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    # ---- questions ----

    def live_bytes(self) -> list[int]:
        """How many bytes of tensors are alive while each operator runs, by time."""
        changes = [0] * (self.time + 3)
        for entry in self.log:
            changes[entry.born] += entry.size
            if entry.died is not None:
                changes[entry.died] -= entry.size
        return list(itertools.accumulate(changes[: self.time + 1]))

    def made_bytes(self) -> list[int]:
        """How many bytes of new tensors each operator made, by time."""
        made = [0] * (self.time + 1)
        for entry in self.log:
            made[entry.born] += entry.size
        return made

    def alive(self, time: int) -> list[Storage]:
        """Everything that is alive at one time."""
        return [entry for entry in self.log if entry.lives_at(time)]

    def _taken(self, size: int, device: torch.device) -> int:
        grain = max(self.grain, GPU_GRAIN if device.type == "cuda" else 1)
        return -(-size // grain) * grain
