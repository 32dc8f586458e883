"""`memory`: runs a program, or a whole training step, on fake tensors and reports when memory is fullest and what is in it.
Lifetimes are those of a real run: the same Python and the same autograd hold and let go of the same tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.analysis.dry_run import DryRun, program_of
from torchgraft.analysis.memory.report import Memory, Moment
from torchgraft.analysis.memory.storages import RESIDENT, Storage, Storages
from torchgraft.codegen.graph_module import GraphModule

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def memory(
    program: Any,
    *args: Any,
    kwargs: dict[str, Any] | None = None,
    training: bool = False,
    optimizer: MakeOptimizer | None = None,
    compute: bool = False,
) -> Memory:
    """How much memory a run needs, or with `training` a step of forward and backward, without computing or allocating it.

    Counted is what torch allocates for tensors: parameters, inputs, results, what autograd saves, gradients. What a kernel
    takes for itself while it runs is not. `optimizer` makes an optimizer of the parameters (`torch.optim.Adam`); the step is then
    one of many, with its state there from the start. `compute` runs on copies of the real tensors instead of fakes.

    >>> result = memory(torch.nn.Linear(1000, 1000, bias=False), torch.empty(10, 1000, device="meta"))
    >>> result.parameters, result.inputs, result.peak - result.resident
    (4000000, 40000, 40000)
    """
    accounts = _Accounts(program_of(program, args, kwargs, compute), args, kwargs, compute)
    if training or optimizer is not None:
        accounts.train(optimizer)
    else:
        with torch.no_grad():
            accounts.forward()
    return accounts.result()


class _Accounts:
    """A dry run whose operators are entered in the books, and what is read from them afterwards."""

    def __init__(
        self, program: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any] | None, compute: bool
    ) -> None:
        self.program = program
        self.storages = Storages()
        self.run = DryRun(program, args, kwargs, watch=self._operator, compute=compute)
        self.state: list[torch.Tensor] = []
        self.saved: dict[str, int] = {}
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

    def forward(self) -> None:
        self.storages.phase = "forward"
        self.run.forward()
        self.run.env.clear()
        self.storages.step((), None)  # what the last node let go is gone only now
        self.after_forward = self.storages.time
        self._note_saved()

    def _note_saved(self) -> None:
        kept = {id(self.storages.entry_of(leaf)) for leaf in _tensors(self.run.result)}
        saved: dict[str, int] = defaultdict(int)
        for entry in self.storages.alive(self.storages.time):
            if entry.phase == "forward" and entry.born > self.started and id(entry) not in kept:
                saved["(between nodes)" if entry.node is None else entry.node.name] += entry.size
        self.saved = dict(saved)

    def train(self, make_optimizer: MakeOptimizer | None) -> None:
        optimizer = None
        if make_optimizer is not None:
            # A step that comes first makes the state that all others find.
            optimizer = make_optimizer(list(self.run.module.parameters()))
            self._one_step(optimizer)
            with self.run.mode:
                optimizer.zero_grad()
            self.run.result = None
            self.state = [tensor for values in optimizer.state.values() for tensor in _tensors(values)]
            self.started = self.storages.time
        self._one_step(optimizer)

    def _one_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.forward()
        self.storages.phase = "backward"
        self.run.backward(accumulate=True)
        if optimizer is not None:
            self.storages.phase = "optimizer"
            with self.run.mode, self.run.operators:
                optimizer.step()

    def result(self) -> Memory:
        storages, started = self.storages, self.started
        live = storages.live_bytes()
        moments = [
            Moment(phase, None if node is None else node.name, size)
            for (phase, node), size in zip(storages.places[started:], live[started + 1 :], strict=True)
        ]
        peak_time = max(range(started, len(live)), key=live.__getitem__)
        phase, node = storages.places[peak_time - 1] if peak_time else (RESIDENT, None)
        gradients = {id(entry): entry.size for entry in map(storages.entry_of, self._gradients()) if entry is not None}
        forward_end = self.after_forward + 1
        return Memory(
            name=type(self.program).__name__,
            parameters=self.parameters,
            buffers=self.buffers,
            inputs=self.inputs,
            optimizer_state=sum(tensor.untyped_storage().nbytes() for tensor in self.state),
            gradients=sum(gradients.values()),
            saved=self.saved,
            forward_peak=max(live[started:forward_end]),
            peak=live[peak_time],
            peak_at=(phase, None if node is None else node.name),
            at_peak=_by_node(storages.alive(peak_time)),
            timeline=tuple(moments),
        )

    def _gradients(self) -> list[torch.Tensor]:
        sources = [*self.run.module.parameters(), *_tensors(self.run.inputs)]
        return [source.grad for source in sources if source.is_leaf and source.grad is not None]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _by_node(entries: list[Storage]) -> dict[str, int]:
    """Bytes by phase and node that made them, the largest first."""
    sizes: dict[str, int] = defaultdict(int)
    for entry in entries:
        owner = entry.phase if entry.node is None else f"{entry.phase} {entry.node.name}"
        sizes[owner] += entry.size
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
