"""Corrections: equalization computes the same, biases bring means back, and learned rounding is better than the nearest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchgraft
from tests.quantize.test_flow import Residual, decibels, images
from torchgraft.quantize import Config, Numbers, Scheme, calibrate, convert, prepare, quantize, sqnr
from torchgraft.quantize.equalizing import EqualizeLayers

LEVELS = ["module", "function", "symbolic"]


def uneven():
    """A network whose channels differ by orders of magnitude, as trained ones with few channels do."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    ).eval()
    with torch.no_grad():
        factor = torch.logspace(-2, 2, 8)
        model[0].weight *= factor.reshape(-1, 1, 1, 1)
        model[0].bias *= factor
        model[2].weight /= factor.reshape(1, -1, 1, 1)
    return model


@pytest.mark.parametrize("level", LEVELS)
def test_equalizing_computes_the_same_and_rounds_better(level):
    model, x = uneven(), images(8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = torchgraft.symbolic_trace(model) if level == "symbolic" else torchgraft.capture(model, x, level=level)
    with torch.no_grad():
        report = EqualizeLayers()(program)
        assert report.changes == 1
        assert torch.allclose(program(x), model(x), atol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    plain = quantize(model, [x], config="static-int8-per-tensor", backend="reference")
    better = quantize(model, [x], config=Config("static-int8-per-tensor", equalize=True), backend="reference")
    with torch.no_grad():
        assert decibels(model(x), better(x)) > decibels(model(x), plain(x)) + 6


@pytest.mark.parametrize("level", LEVELS)
def test_biases_bring_the_mean_back(level):
    torch.manual_seed(0)
    model = Residual().eval()
    data = [images(4, seed) + 0.5 for seed in range(4)]
    program = (
        torchgraft.symbolic_trace(model) if level == "symbolic" else torchgraft.capture(model, data[0], level=level)
    )
    scheme = Scheme(Numbers(4, True, True, "channel"))
    moved = []
    for correct in (False, True):
        config = Config("own", schemes={"own": scheme}, correct_bias=correct)
        quantized = quantize(program, data, config=config, backend="reference")
        with torch.no_grad():
            moved.append(float((torch.stack([quantized(x) - model(x) for x in data]).mean((0, 1))).abs().max()))
    assert moved[1] < moved[0] * 0.5


def test_learned_rounding_is_better_than_the_nearest():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
    mix = torch.randn(6, 32)
    data = [torch.randn(64, 6, generator=torch.Generator().manual_seed(seed)) @ mix for seed in range(4)]
    scheme = Scheme(Numbers(3, True, True, "channel"))
    plain = quantize(model, data, config=Config("own", schemes={"own": scheme}), backend="reference")
    config = Config("own", schemes={"own": scheme}, learn_rounding=True)
    learned = quantize(model, data, config=config, backend="reference")
    x = torch.randn(64, 6) @ mix
    with torch.no_grad():
        assert decibels(model(x), learned(x)) > decibels(model(x), plain(x)) + 3


@pytest.mark.parametrize("level", LEVELS)
def test_all_corrections_together_on_convolutions(level):
    torch.manual_seed(0)
    model = Residual().eval()
    data = [images(4, seed) for seed in range(2)]
    program = (
        torchgraft.symbolic_trace(model) if level == "symbolic" else torchgraft.capture(model, data[0], level=level)
    )
    config = Config("static-int4", equalize=True, correct_bias=True, learn_rounding=True)
    prepared = prepare(program, config=config)
    calibrate(prepared, data)
    corrected = convert(prepared)
    assert not [key for key in corrected.meta if key in ("quantize_inputs", "quantize_rounded")]
    plain = quantize(program, data, config="static-int4", backend="reference")
    with torch.no_grad():
        assert decibels(model(data[0]), corrected(data[0])) > decibels(model(data[0]), plain(data[0])) + 2


def test_weights_that_were_computed_are_equalized():
    torch.manual_seed(0)
    first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(32, 8)
    program = prepare(model, x, config=Config(equalize=True))
    assert torch.allclose(program(x), model(x), atol=1e-5)
    calibrate(program, [x])
    assert sqnr(model, convert(program), [x]) > 30
