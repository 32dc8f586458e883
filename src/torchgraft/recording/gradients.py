"""The gradients that arrive at nodes in one backward, caught by hooks; parameters keep the gradients they have.
What is kept of each is decided by `record.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchgraft.analysis.comparison import tensors_in
from torchgraft.errors import GraftError
from torchgraft.ir.node import Node
from torchgraft.recording.call_watch import brief
from torchgraft.recording.recorded import Entry


class Gradients:
    """Waits for the gradients of the values it is told of, and keeps what its keeper says of them."""

    def __init__(self, entries: dict[str, Entry], keeper: Any) -> None:
        self._entries = entries
        self._keeper = keeper

    def expect(self, node: Node, template: Any, keys: list[str], tensors: list[torch.Tensor]) -> None:
        """Catch the gradient of each tensor of a node's value as it is now: a later write makes another value of it."""
        entry = Entry(template, [None] * len(tensors), keys, [brief(tensor) for tensor in tensors])
        for index, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(self._catcher(node.name, entry, index))

    def _catcher(self, name: str, entry: Entry, index: int) -> Callable[[torch.Tensor], None]:
        def catch(gradient: torch.Tensor) -> None:
            entry.parts[index] = self._keeper.keep_gradient(entry.keys[index], gradient)
            self._entries[name] = entry

        return catch

    def compute(self, result: Any, loss: Callable[[Any], torch.Tensor] | None) -> None:
        """Run the backward of the loss, or of the sum of everything returned."""
        given = [loss(result)] if loss is not None else tensors_in(result)
        outputs = [item for item in given if isinstance(item, torch.Tensor) and item.requires_grad]
        if not outputs:
            raise GraftError(
                "there are no gradients: nothing that the program returns depends on a tensor that requires grad\n"
                "call requires_grad_() on an input or on the parameters, and return what depends on them"
            )
        if loss is not None and outputs[0].numel() != 1:
            raise GraftError(
                f"the loss must be one number, not a tensor of shape {tuple(outputs[0].shape)}\ntake its sum or mean"
            )
        leaves = _leaves(outputs)
        # With the leaves named, nothing is added to their `.grad`.
        torch.autograd.grad(outputs, leaves, [torch.ones_like(item) for item in outputs], allow_unused=True)


def _leaves(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every tensor at the beginning of the autograd graph behind the outputs."""
    found: dict[int, torch.Tensor] = {id(item): item for item in outputs if item.grad_fn is None}
    seen: set[Any] = set()
    pending: list[Any] = [item.grad_fn for item in outputs if item.grad_fn is not None]
    while pending:
        step = pending.pop()
        if step in seen:
            continue
        seen.add(step)
        if hasattr(step, "variable"):
            found[id(step.variable)] = step.variable
        pending += [following for following, _ in step.next_functions if following is not None]
    return list(found.values())


__all__ = ["Gradients"]
