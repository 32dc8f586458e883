"""Have the backward of a joint program compute values again instead of keeping them, where memory is short.
Which values those are is chosen in `lowering/recompute.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import PassError
from torchgraft.lowering.kept_calls import run_kept
from torchgraft.lowering.recompute import recompute_within
from torchgraft.passes.definition import Pass


@dataclass(frozen=True)
class Recompute(Pass):
    """Keep at most `memory_budget` bytes for the backward, and compute the rest again where the backward first needs it.

    For programs of forward and backward (`capture` at level "joint"). The least work is computed again:
    arithmetic, and bytes that are moved, on inputs like the example. Results and gradients stay the same bit for bit; random
    draws, effects and what is written are never repeated. A budget that is too small is refused with the least that is possible.

    >>> import torch, torchgraft
    >>> model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.Sigmoid())])
    >>> joint = torchgraft.capture(model, torch.randn(2, 8), level="joint")
    >>> report = Recompute(memory_budget=128)(joint)
    >>> [node.name for node in joint.graph.nodes if node.meta.get("recomputes") == "sigmoid"]
    ['sigmoid_4']
    """

    memory_budget: int | None = None

    def run(self, module: GraphModule) -> int:
        """Edit, and return how many nodes are computed again."""
        if self.memory_budget is None:
            return 0
        if type(self.memory_budget) is not int or self.memory_budget < 0:
            raise PassError(f"memory_budget is a number of bytes, not {self.memory_budget!r}")
        if "entries" not in module.graph.output_node().meta:
            raise PassError(
                f"cannot run recompute on {type(module).__name__}: it is no program of forward and backward; make one with "
                "torchgraft.capture(model, args, level='joint')"
            )
        return recompute_within(module, self.memory_budget)

    def notes(self, module: GraphModule) -> list[str]:
        """What is kept and cannot be counted."""
        return [
            f"'{node.name}' stays one call: what autograd keeps for it is not counted"
            for node in module.graph.find_nodes(op="call_function", target=run_kept)
            if self.memory_budget is not None
        ]
