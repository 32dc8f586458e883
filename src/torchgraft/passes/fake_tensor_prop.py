"""FakeTensorProp: note a fake tensor for every value in `node.meta["val"]`, under torch.fx's name and interface.
Fake tensors are made in `analysis/fake.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.analysis.dry_run import contents_of
from torchgraft.analysis.fake import fake_mode_of, fake_module, fake_tensor, fake_tree
from torchgraft.analysis.fake_calls import FakeCalls, FakeInterpreter
from torchgraft.ir.arguments import map_aggregate
from torchgraft.ir.node import Node

_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


class FakeTensorProp(FakeInterpreter):
    """Runs a program on fake copies of its tensors and notes `meta["val"]` of every value.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x.sum(0))
    >>> FakeTensorProp(program).propagate(torch.ones(2, 3)).shape
    torch.Size([3])
    >>> [tuple(node.meta["val"].shape) for node in program.graph.nodes]
    [(2, 3), (3,), (3,)]
    """

    def __init__(self, module: Any, mode: Any = None) -> None:
        self._mode = mode if mode is not None else fake_mode_of(module)
        self.calls: FakeCalls = FakeCalls(self._mode)
        super().__init__(fake_module(contents_of(module), self._mode), graph=module.graph)

    def run_node(self, n: Node) -> Any:
        """Work out one value and note a fake of it."""
        result = super().run_node(n)
        value = self._snapshot(result) if isinstance(result, torch.Tensor) else map_aggregate(result, self._snapshot)
        if value is not None:
            n.meta["val"] = value
        return result

    def _snapshot(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            # A later write in place may change the shape of the value itself.
            return self.calls.snapshot(fake_tensor(leaf, self._mode))
        return leaf if isinstance(leaf, _NUMBERS) else None

    def propagate(self, *args: Any) -> Any:
        """Run the program on fakes of `args`."""
        return self.propagate_dont_convert_inputs(*fake_tree(args, self._mode))

    def propagate_dont_convert_inputs(self, *args: Any) -> Any:
        """Run the program on `args`, which are fakes already."""
        with self._mode:
            return self.run(*args)
