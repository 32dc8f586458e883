"""What must run for a node: its inputs, and earlier writes, draws, checks and regions that it would notice."""

from __future__ import annotations

import torch

from torchgraft import capture, symbolic_trace
from torchgraft.recording.selection import required_nodes


def required(function, *names: str, program=None) -> list[str]:
    nodes = list((program or symbolic_trace(function)).graph.nodes)
    return [node.name for node in required_nodes(nodes, [node for node in nodes if node.name in names])]


def test_inputs_only() -> None:
    def f(x, y):
        a, b = torch.exp(x), torch.tanh(y)
        return torch.relu(a), b

    assert required(f, "relu") == ["x", "exp", "relu"]
    assert required(f, "tanh") == ["y", "tanh"]
    assert required(f) == []


def test_everything_for_the_result() -> None:
    def f(x):
        y = torch.exp(x)
        x.add_(1)
        return y

    assert required(f, "output") == ["x", "exp", "add_", "output"]


def test_writes_through_views() -> None:
    def f(x):
        y = torch.exp(x)
        view = y.view(-1)
        view.mul_(2)
        other = torch.tanh(x)
        other.neg_()
        return torch.relu(y), other

    assert required(f, "relu") == ["x", "exp", "view", "mul_", "relu"]
    assert required(f, "exp") == ["x", "exp"]


def test_writes_of_module_state() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)
            self.other = torch.nn.BatchNorm1d(3)

        def forward(self, x):
            y = self.norm(x)
            self.other(x)
            return torch.neg(self.norm.running_mean), y

    program = symbolic_trace(Model().train())
    names = required(None, "neg", program=program)
    assert "norm" in names and "other" not in names


def test_draws() -> None:
    def f(x):
        a = torch.rand(2)
        b = torch.exp(x)
        c = torch.rand(2)
        return a, b, c

    assert required(f, "rand_1") == ["rand", "rand_1"]
    assert required(f, "exp") == ["x", "exp"]


def test_regions_and_guards_stay() -> None:
    def f(x):
        with torch.no_grad():
            y = torch.exp(x)
        return torch.tanh(y), torch.relu(x)

    assert "exit_context" in required(f, "tanh")
    program = capture(lambda x: torch.exp(x) if x.sum() > 0 else x, (torch.ones(2),))
    guards = [guard.node.name for guard in program.guards]
    assert guards and set(guards) <= set(required(None, "exp", program=program))
