"""torch.fx's CSEPass: equal calls become one. The work is `torchgraft.passes.MergeCommon`."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.fx_passes.pass_manager import PassBase, PassResult
from torchgraft.passes.merge_common import MergeCommon


def get_CSE_banned_ops() -> set[Any]:
    """Operators that torch.fx must be told to leave alone; here writes and random draws are known from their schemas."""
    names = "dropout native_dropout bernoulli multinomial normal poisson binomial rrelu rand_like rand randint randn randperm"
    written = "add_ sub_ mul_ div_ pow_ lerp_ relu_ sigmoid_ tanh_"
    return {getattr(torch.ops.aten, name) for name in f"{names} {written}".split()}


class CSEPass(PassBase):
    """Merges equal calls into a new module; calls of `banned_ops` stay, and so does what writes or draws.

    >>> import torchgraft
    >>> module = torchgraft.symbolic_trace(lambda a: torch.mul(a, a) + torch.mul(a, a))
    >>> result = CSEPass()(module)
    >>> result.modified, len(result.graph_module.graph.nodes)
    (True, 4)
    """

    def __init__(self, banned_ops: set[Any] | None = None) -> None:
        self.banned_ops = banned_ops or set()

    def call(self, graph_module: GraphModule) -> PassResult:
        result = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
        banned = {node: node.target for node in result.graph.nodes if _packet(node.target) in self.banned_ops}
        for node, target in banned.items():
            node.target = functools.partial(target)  # like no other, and nothing is known about it
        merged = MergeCommon().run(result)
        for node, target in banned.items():
            node.target = target
        return PassResult(result, True) if merged else PassResult(graph_module, False)


def _packet(target: Any) -> Any:
    return target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
