"""Programs that write into the memory of values: what is quantized is right, and what would not be is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchgraft
from tests.quantize.test_flow import decibels
from torchgraft import QuantizeError
from torchgraft.quantize import quantize, report, sqnr


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("n", torch.zeros(8))


class SetItem(Layers):
    def forward(self, x):
        y = F.relu(self.a(x))
        y[:, 0] = 5.0
        return self.b(y)


class ViewWrite(Layers):
    def forward(self, x):
        y = self.a(x)
        v = y.view(-1)
        v[:3] = 2.0
        return self.b(y)


class InputWrite(Layers):
    def forward(self, x):
        x.mul_(2.0)
        return self.b(F.relu(self.a(x)))


class InputWriteLate(Layers):
    def forward(self, x):
        y = self.a(x)
        x.add_(10.0)
        return self.b(x) + y


class BufferWrite(Layers):
    def forward(self, x):
        self.n.add_(1.0)
        return self.b(self.a(x) + self.n)


class OutArg(Layers):
    def forward(self, x):
        y = self.a(x)
        torch.add(y, 1.0, out=y)
        return self.b(y)


class Masked(Layers):
    def forward(self, x):
        y = self.a(x)
        y.masked_fill_(y < 0, -7.0)
        return self.b(y)


class SumWrite(Layers):
    def forward(self, x):
        y = F.relu(self.a(x))
        z = self.b(y)
        z += y
        y.zero_()
        return self.b(z) + y


class Chain(Layers):
    def forward(self, x):
        y = F.relu(self.a(x))
        z = y[:2]
        z.mul_(3.0)
        return self.b(y)


class Loop(Layers):
    def forward(self, x):
        outs = []
        h = torch.zeros_like(x)
        for _ in range(3):
            h = torch.tanh(self.a(x) + self.b(h))
            outs.append(h)
        return torch.stack(outs).sum(0)


MODELS = [SetItem, ViewWrite, InputWrite, InputWriteLate, BufferWrite, OutArg, Masked, SumWrite, Chain, Loop]


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("level", ["function", "module", "symbolic", "aten"])
@pytest.mark.parametrize("kind", MODELS)
def test_writes_are_never_lost(kind, level, backend):
    torch.manual_seed(0)
    model = kind().eval()
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    with torch.no_grad():
        first = data[0].clone()
        program = (
            torchgraft.symbolic_trace(model) if level == "symbolic" else torchgraft.capture(model, first, level=level)
        )
        try:
            quantized = quantize(program, [x.clone() for x in data], backend=backend)
        except QuantizeError as error:
            assert "is written in place by the program" in str(error)
            return
        model.n.zero_()  # which the program shares, and calibration wrote
        x, y = data[0].clone(), data[0].clone()
        expected = model(x)
        model.n.zero_()
        assert decibels(expected, quantized(y)) > 30
        assert torch.equal(x, y)


class Counter(Layers):
    def forward(self, x):
        self.n.add_(1)
        return self.b(F.relu(self.a(x))) + self.n


@pytest.mark.parametrize("is_program", [False, True])
def test_what_calibrating_and_comparing_change_of_the_model_is_put_back(is_program):
    torch.manual_seed(0)
    model, data = Counter().eval(), [torch.randn(4, 8) for _ in range(3)]
    drawn = torch.get_rng_state()
    given = torchgraft.capture(model, data[0]) if is_program else model
    quantized = quantize(given, data)
    assert sqnr(model, quantized, data) > 30
    assert report(given, data).sqnr > 30
    assert not model.n.any() and torch.equal(torch.get_rng_state(), drawn)
    with torch.no_grad():
        expected = model(data[0])
        model.n.zero_()  # which the program shares
        assert decibels(expected, quantized(data[0])) > 30
