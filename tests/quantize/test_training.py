"""Training with rounding in place: gradients, norms folded while they normalise the batch, modes, freezing, and a real task."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchgraft
from torchgraft import QuantizeError
from torchgraft.quantize import convert, prepare_qat, sqnr
from torchgraft.quantize.native import to_native
from torchgraft.quantize.operators import fake_quantize
from torchgraft.quantize.schemes import Numbers, Scheme
from torchgraft.quantize.training import TrainedLayer
from torchgraft.quantize.weights import quantize_weight, weight_scale


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, 10),
    )  # fmt: skip


def digits(count=8, seed=0):
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("capture", ["model", "symbolic"])
def test_a_program_trains_and_the_model_stays(capture):
    model = convolutional()
    before = copy.deepcopy(model.state_dict())
    program = prepare_qat(model if capture == "model" else torchgraft.symbolic_trace(model), digits())
    assert program.training and sum(p.numel() for p in program.parameters()) == sum(
        p.numel() for p in model.parameters()
    )
    optimizer = torch.optim.SGD(program.parameters(), 0.05)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(program(digits()), torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] * 0.8
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_converted_program_computes_what_evaluation_did():
    program = prepare_qat(convolutional(), digits(), config="static-int8")
    for seed in range(5):
        program(digits(16, seed))
    program.eval()
    integers = convert(program)
    with torch.no_grad():
        expected = program(digits(4, 9))
        assert torch.allclose(integers(digits(4, 9)), expected, atol=2e-2 * float(expected.abs().max()))
        assert torch.allclose(to_native(integers)(digits(4, 9)), integers(digits(4, 9)), atol=5e-2)


def test_a_norm_is_folded_exactly_while_it_normalises_the_batch():
    torch.manual_seed(0)
    layer, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    with torch.no_grad():
        norm.weight.uniform_(-2, 2), norm.bias.uniform_(-1, 1)
    plain = nn.Sequential(copy.deepcopy(layer), copy.deepcopy(norm)).train()
    trained = TrainedLayer(layer, norm, Scheme(), 0, None).train()
    x = torch.randn(6, 3, 7, 7)
    # Without rounding it is the layer and its norm: results, gradients and statistics.
    expected, found = plain(x), trained(x)
    assert torch.allclose(expected, found, atol=1e-5)
    assert torch.allclose(plain[1].running_var, norm.running_var)
    expected.square().sum().backward(), found.square().sum().backward()
    assert torch.allclose(plain[0].weight.grad, layer.weight.grad, rtol=1e-3, atol=1e-3)
    plain.eval(), trained.eval()
    assert torch.allclose(plain(x), trained(x), atol=1e-5)


def test_what_is_rounded_in_training_is_what_will_be_rounded():
    torch.manual_seed(0)
    numbers = Numbers(4, True, True, "channel")
    trained = TrainedLayer(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Scheme(numbers), 0, None).train()
    trained(torch.randn(8, 3, 6, 6))
    weight, _ = trained.folded()
    final = quantize_weight(trained.settled().weight, numbers, 0)
    assert torch.allclose(trained._rounded(weight), final.values(), atol=1e-6)


def test_gradients_of_weights_against_a_written_out_reference():
    torch.manual_seed(0)
    numbers = Numbers(4, True, True, "channel")
    layer = nn.Linear(6, 3)
    trained = TrainedLayer(layer, None, Scheme(numbers), 0, None)
    x = torch.randn(5, 6)
    trained(x).square().sum().backward()
    scale, _ = weight_scale(layer.weight, numbers, 0)
    steps = torch.round(layer.weight / scale[:, None])
    rounded = steps.clamp(-8, 7) * scale[:, None]
    result = x @ rounded.t() + layer.bias
    written_out = (2 * result).t() @ x * ((steps >= -8) & (steps <= 7))
    assert torch.allclose(layer.weight.grad, written_out.detach(), atol=1e-5)
    assert torch.equal(fake_quantize(layer.weight, scale, None, -8, 7, axis=0).detach(), rounded.detach())


def test_statistics_freeze_after_a_step():
    program = prepare_qat(convolutional(), digits(), freeze_after=3)

    def statistics():
        return [value.clone() for name, value in program.named_buffers() if "running" in name or "est" in name]

    for seed in range(3):
        program(digits(8, seed))
    frozen = statistics()
    for seed in range(3, 6):
        program(digits(8, seed) * 5)
    assert all(torch.equal(one, two) for one, two in zip(frozen, statistics(), strict=True))
    # Frozen, training computes what evaluation does, but for the dropout.
    before = next(module for module in program.children() if isinstance(module, TrainedLayer))
    x = digits(2)
    in_training = before.train()(x)
    assert torch.equal(in_training, before.eval()(x))


def test_modes_do_what_they_do():
    program = prepare_qat(convolutional(), digits())
    program(digits())
    program.eval()
    assert torch.equal(program(digits()), program(digits()))
    again = copy.deepcopy(program)
    assert torch.equal(again(digits()), program(digits()))
    other = prepare_qat(convolutional(), digits()).eval()
    other.load_state_dict(program.state_dict())
    assert torch.equal(other(digits()), program(digits()))


def test_what_cannot_be_trained_says_so():
    with pytest.raises(QuantizeError, match="the program is being trained\ncall .eval"):
        convert(prepare_qat(convolutional(), digits()))
    with pytest.raises(
        QuantizeError, match="only layers that are modules are trained|batch norms are folded while training"
    ):
        prepare_qat(torchgraft.capture(convolutional().eval(), digits(), level="function"))
    with pytest.raises(QuantizeError, match="there is no calibration data for"):
        convert(prepare_qat(convolutional(), digits()).eval())


@pytest.mark.slow
def test_four_bits_learn_to_read_digits():
    pytest.importorskip("sklearn")
    from benchmarks.quantizing.digits import results

    found = results(seed=0)
    assert found["fp32"] > 0.97
    assert found["QAT int4"] >= found["fp32"] - 0.005
    assert found["QAT int4"] >= found["post-training int4"]


@pytest.mark.parametrize("scheme", ["dynamic-int8", "dynamic-int8-rows"])
def test_inputs_whose_scales_are_chosen_at_run_time_are_rounded_in_training(scheme):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    program = prepare_qat(model, torch.randn(2, 8), config=scheme)
    x = torch.randn(32, 8, requires_grad=True)
    program(x).sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)
    assert sqnr(program.eval(), convert(program), [x.detach()]) > 100
    assert sqnr(model.eval(), program, [x.detach()]) < 60
