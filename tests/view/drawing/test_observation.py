"""Shapes from one run."""

import pytest
import torch

import torchgraft
from tests.view.drawing.geometry import read
from torchgraft.view.node_facts import observe


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.norm(x))


def test_the_run_leaves_no_trace():
    model = Counting().train()
    inputs = torch.randn(4, 3)
    program = torchgraft.symbolic_trace(model)
    before = {name: buffer.clone() for name, buffer in program.named_buffers()}
    state = torch.random.get_rng_state()
    seen = {node.name: facts for node, facts in observe(program, (inputs,), {}).items()}
    assert seen["norm"].shape == (4, 3)
    assert all(torch.equal(buffer, before[name]) for name, buffer in program.named_buffers())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_inputs_written_in_place_stay_as_they_were():
    program = torchgraft.capture(lambda x: x.add_(1), (torch.zeros(3),))
    given = torch.zeros(3)
    observe(program, (given,), {})
    assert torch.equal(given, torch.zeros(3))


def test_a_run_that_fails_puts_buffers_back():
    class Failing(Counting):
        def forward(self, x):
            return super().forward(x) @ torch.ones(7, 7)

    program = torchgraft.symbolic_trace(Failing().train())
    before = {name: buffer.clone() for name, buffer in program.named_buffers()}
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        torchgraft.draw(program, args=(torch.randn(4, 3),))
    assert all(torch.equal(buffer, before[name]) for name, buffer in program.named_buffers())


def test_keywords_tuples_and_nan():
    def forward(x, *, scale):
        low, high = torch.chunk(x * scale, 2)
        return torch.stack([low, high])

    inputs, keywords = (torch.full((4,), float("nan")),), {"scale": torch.tensor(2.0)}
    picture = read(torchgraft.draw(forward, args=inputs, kwargs=keywords).svg)
    assert {"4", "2, 2", "2×2", "scalar"} <= set(picture.words)


def test_only_our_programs_can_be_run():
    with pytest.raises(
        torchgraft.GraftError, match="cannot run a .* to see its shapes: example inputs need a torchgraft program"
    ):
        torchgraft.draw(torch.fx.symbolic_trace(torch.nn.ReLU()), args=(torch.ones(2),))
