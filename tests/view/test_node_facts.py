"""Roles, module paths in all their spellings, and source lines of nodes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchgraft
from tests.view.programs import MLP, Net
from torchgraft.ir.origin import source_of
from torchgraft.view.node_facts import (
    graph_of,
    module_path_of,
    module_stack_of,
    origin_name,
    phases_of,
    role_of,
)

IMAGE = torch.ones(2, 3, 4, 4)


@pytest.mark.parametrize("level", ["function", "aten", "core_aten", "joint"])
def test_paths_are_those_of_named_modules_at_every_level(level: str) -> None:
    model = Net().train(level == "joint")
    graph = torchgraft.capture(model, (IMAGE,), level=level).graph
    paths = {module_path_of(node) for node in graph.nodes}
    assert paths <= set(dict(model.named_modules()))
    assert {"blocks.0.conv", "blocks.1.norm", "head"} <= paths


@pytest.mark.parametrize("level", ["module", "function", "aten", "core_aten", "joint"])
def test_source_lines_are_the_users_at_every_level(level: str) -> None:
    graph = torchgraft.capture(MLP(), (torch.ones(2, 16),), level=level).graph
    lines = {line.text for node in graph.nodes if node.op.startswith("call_") and (line := source_of(node)) is not None}
    assert "x = self.relu(self.fc1(x))" in lines and "x = self.fc2(x)" in lines


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        *(("", ""), ("L['self']", ""), ("layer1.0", "layer1.0"), ("L['self'].layer1[0].conv", "layer1.0.conv")),
        *(("L__self__.layer1", "layer1"), ("L['self']._modules['a']", "_modules.a"), ("fc@1", "fc")),
    ],
)
def test_spellings_of_paths(path: str, expected: str) -> None:
    graph = torchgraft.Graph()
    node = graph.placeholder("x")
    node.meta["nn_module_stack"] = {"k": (path, "torch.nn.modules.linear.Linear"), "l": (path, nn.Linear)}
    assert module_stack_of(node) == [(expected, "Linear")] * 2


def test_roles() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))
            self.register_buffer("b", torch.ones(1))
            self.c = torch.ones(1)  # a program keeps such a tensor as a buffer, so that it moves with it

        def forward(self, x):
            return x + self.w + self.b + self.c + outside

    outside = torch.ones(1)
    graph = torchgraft.symbolic_trace(Model())
    roles = [role_of(node) for node in graph.graph.nodes if node.op in ("get_attr", "placeholder", "output")]
    assert roles == ["input", "parameter", "buffer", "buffer", "constant", "output"]
    assert [origin_name(node) for node in graph.graph.nodes if role_of(node) == "parameter"] == ["w"]
    guarded = torchgraft.capture(lambda x: x + 1 if x.sum() > 0 else x, (torch.ones(1),)).graph
    assert "guard" in [role_of(node) for node in guarded.nodes]
    alone = torchgraft.Graph()
    assert role_of(alone.get_attr("anything")) == "constant"


def test_phases() -> None:
    assert phases_of(torchgraft.symbolic_trace(MLP()).graph) == {}
    graph = torchgraft.capture(MLP(), (torch.ones(2, 16),), level="joint").graph
    assert set(phases_of(graph).values()) == {"forward", "backward"}


def test_what_is_given_stays_what_it_is() -> None:
    program = torchgraft.symbolic_trace(MLP())
    assert graph_of(program) == (program.graph, program)
    assert graph_of(program.graph)[0] is program.graph
