"""split_const_subgraphs on programs whose constants are none: written under another name, given to the caller, in a region."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchgraft import symbolic_trace
from torchgraft.fx_passes.const_fold import split_const_subgraphs


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 3))
        self.register_buffer("first", torch.ones(3))
        self.register_buffer("second", self.first)
        self.register_buffer("part", self.first[1:])


class WrittenUnderAnotherName(Base):
    def forward(self, x: torch.Tensor) -> Any:
        self.first.add_(1)
        return x + self.second.neg(), self.part * 2


class Returned(Base):
    def forward(self, x: torch.Tensor) -> Any:
        return self.weight.detach() * 2, (self.weight.detach() * 3).view(3, 1), x + 1


class WrittenLater(Base):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.weight.detach() * 2
        y.view(3).add_(x)
        return y + 1


class InARegion(Base):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.outer(self.weight, self.weight) @ torch.outer(self.weight, self.weight)
        return y, x + 1


class Sound(Base):
    def forward(self, x: torch.Tensor) -> Any:
        return x + self.weight.exp() * self.second.sum()


@pytest.mark.parametrize("kind", [WrittenUnderAnotherName, Returned, WrittenLater, InARegion, Sound])
def test_every_run_computes_what_the_model_does(kind: Any) -> None:
    model, folded, x = kind(), split_const_subgraphs(kind()), torch.arange(3.0)
    for _ in range(3):
        expected, found = (torch.utils._pytree.tree_leaves(module(x)) for module in (model, folded))
        for left, right in zip(expected, found, strict=True):
            assert left.dtype == right.dtype
            torch.testing.assert_close(left, right)
            with torch.no_grad():
                right.add_(100)  # what a caller does with a result is nobody's business


def test_what_is_folded() -> None:
    assert split_const_subgraphs(Sound()).const_subgraph_module is not None
    assert split_const_subgraphs(Returned()).const_subgraph_module is not None  # the detached weight
    assert split_const_subgraphs(WrittenUnderAnotherName()).const_subgraph_module is None


def test_nodes_that_the_caller_calls_impure_stay() -> None:
    folded = split_const_subgraphs(Sound(), is_impure_node=lambda node: node.target == "exp")
    assert [node.target for node in folded.graph.nodes if node.op == "call_method"] == ["exp"]


def test_what_was_noted_about_a_folded_node_is_noted_about_its_value():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * (self.weight + 1) - (self.weight - 1)

    traced = symbolic_trace(Model())
    for node in traced.graph.nodes:
        node.meta["tag"] = node.name
    folded = split_const_subgraphs(traced)
    assert [node.meta.get("tag") for node in folded.graph.nodes if node.op == "call_function"] == [
        "add",
        "sub",
        "mul",
        "sub_1",
    ]
