"""The measures of rewriting and splitting: patterns by meaning, by torch.fx's side where it has a counterpart, and growth.
How they are taken is in `measure`.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from benchmarks.measure import Arm, Experiment, Fresh, Row, Run
from benchmarks.models import MixedChain, PairChain, pair_pattern, traced_chain, traced_zoo_model

# torch.fx is slow beyond this size (its partitioner looks at every node that follows, for every node).
PARTITIONED = 2_000


class SpelledChain(nn.Module):
    """`length` operations in a row, relu and plus one in turn, each in another spelling: one match of meaning per pair."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length // 8):
            x = torch.relu(x) + 1
            x = 1 + x.relu()
            x = torch.add(nn.functional.relu(x), 1)
            x = nn.functional.relu(x).add(other=1)
        return x


def spelled_pattern(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) + 1


def spelled_replacement(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x)


def experiments(theirs: ModuleType, ours: ModuleType) -> list[Experiment]:
    """Every experiment, in the order of the table."""
    return [
        meaning(theirs, ours),
        *matchers(theirs, ours),
        split_modules(theirs, ours),
        partitions(theirs, ours),
        split_growth(ours),
    ]


def meaning(theirs: ModuleType, ours: ModuleType) -> Experiment:
    """By meaning beside torch.fx's search by spelling, which finds a quarter of it and is sampled only in a full run."""
    arms, rows = [], []
    for length in (2_000, 20_000):
        large = length == 20_000
        their_label, our_label = f"torch.fx {length}", f"ours {length}"
        arms.append(Arm(their_label, partial(rewritten, length, theirs, False), count=int, slow=large))
        arms.append(Arm(our_label, partial(rewritten, length, ours, True), count=int, long=large))
        rows.append(Row(f"rewrite by meaning, {length:,} nodes, {length // 2:,} matches", None, their_label, our_label))
    growth = "rewrite by meaning, per node, 20,000 over 2,000"
    rows.append(Row(growth, 1.3, "torch.fx 20000", "ours 20000", "torch.fx 2000", "ours 2000", times_larger=10))
    return Experiment("rewrite by meaning", tuple(arms), tuple(rows))


def rewritten(length: int, library: ModuleType, by_meaning: bool) -> Fresh:
    original = traced_chain(SpelledChain, length, library)

    def fresh() -> Run:
        module = library.GraphModule(original, copy.deepcopy(original.graph))
        replace = library.rewrite if by_meaning else library.replace_pattern
        return lambda: len(replace(module, spelled_pattern, spelled_replacement))

    return fresh


def matchers(theirs: ModuleType, ours: ModuleType) -> Iterator[Experiment]:
    """torch.fx's SubgraphMatcher and ours behind the same interface; nothing is replaced."""
    for length in (2_000, 20_000):
        name = f"SubgraphMatcher, {length:,} nodes, {length // 2:,} matches"
        large = length == 20_000
        arms = [
            Arm(label, partial(matched, length, library), count=len, slow=large and label == "torch.fx")
            for label, library in (("torch.fx", theirs), ("ours", ours))
        ]
        yield Experiment(name, tuple(arms), (Row(name, 3.0),))


def matched(length: int, library: ModuleType) -> Fresh:
    module = traced_chain(PairChain, length, library)
    pattern = library.symbolic_trace(pair_pattern).graph
    kind = importlib.import_module(f"{library.__name__}.passes.utils.matcher_utils").SubgraphMatcher
    return lambda: lambda: kind(pattern).match(module.graph)


def split_modules(theirs: ModuleType, ours: ModuleType) -> Experiment:
    arms, rows = [], []
    for name in ("ResNet-152", "20,000 nodes"):
        for label, library in (("torch.fx", theirs), ("ours", ours)):
            arms.append(Arm(f"{label} {name}", partial(split_in_four, name, library), long=name != "ResNet-152"))
        rows.append(Row(f"split_module in 4 parts, {name}", 3.0, f"torch.fx {name}", f"ours {name}"))
    return Experiment("split_module", tuple(arms), tuple(rows))


def split_in_four(name: str, library: ModuleType) -> Fresh:
    module = (
        traced_zoo_model("resnet152", library) if name == "ResNet-152" else traced_chain(MixedChain, 20_000, library)
    )
    split = importlib.import_module(f"{library.__name__}.passes.split_module").split_module
    part = {node.name: number * 4 // len(module.graph.nodes) for number, node in enumerate(module.graph.nodes)}
    return lambda: lambda: split(module, module, lambda node: part[node.name])


def partitions(theirs: ModuleType, ours: ModuleType) -> Experiment:
    arms = [
        Arm(label, partial(propose, library), count=len) for label, library in (("torch.fx", theirs), ("ours", ours))
    ]
    name = f"CapabilityBasedPartitioner, {PARTITIONED:,} nodes"
    return Experiment(name, tuple(arms), (Row(name, 3.0),))


def propose(library: ModuleType) -> Fresh:
    module = traced_chain(PairChain, PARTITIONED, library)
    support = importlib.import_module(f"{library.__name__}.passes.operator_support").create_op_support(
        lambda modules, node: node.op == "call_function" and not node.name.endswith("9")
    )
    partitioner = importlib.import_module(f"{library.__name__}.passes.infra.partitioner").CapabilityBasedPartitioner
    return lambda: lambda: partitioner(module, support).propose_partitions()


def split_growth(ours: ModuleType) -> Experiment:
    """torch.fx has no counterpart, so ours stands on both sides and only the growth is of interest."""
    arms = [
        Arm(f"ours {length}", partial(split_supported, length, ours), long=length > 2_000) for length in (2_000, 20_000)
    ]
    growth = "split by predicate, per node, 20,000 over 2,000"
    row = Row(growth, 1.3, "ours 20000", "ours 20000", "ours 2000", "ours 2000", times_larger=10)
    return Experiment("split by predicate", tuple(arms), (row,))


def split_supported(length: int, library: Any) -> Fresh:
    module = traced_chain(MixedChain, length, library)
    step = length // 10
    position = {node.name: number for number, node in enumerate(module.graph.nodes)}
    return lambda: lambda: library.split(module, by=lambda node: position[node.name] // step % 2 == 0)
