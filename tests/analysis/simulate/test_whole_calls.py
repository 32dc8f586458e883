"""Attention and recurrent layers, which a GPU runs as kernels of their own, forward and backward."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchgraft import Machine, simulate
from torchgraft.analysis.simulate.kernels import attention_flops

CPU = dataclasses.replace(Machine.named("h200"), kind="cpu")


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value, mask=None):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **self.options)


def heads(queries=16, keys=16, examples=2, count=4, width=32):
    shapes = (queries, keys, keys)
    return tuple(torch.empty(examples, count, length, width, device="meta", requires_grad=True) for length in shapes)


def kernels(model, args, **options):
    return [kernel for kernel in simulate(model, args, mode="graph", **options).kernels if kernel.kind in _KINDS]


_KINDS = ("attention", "recurrent")


def test_attention_is_one_kernel():
    (found,) = kernels(Attention(), heads(16, 48))
    assert (found.kind, found.variant) == ("attention", "full") and found.flops == attention_flops(
        (8, 16, 48, 32), False
    )
    assert kernels(Attention(is_causal=True), heads())[0].variant == "causal"
    mask = torch.empty(2, 1, 16, 16, dtype=torch.bool, device="meta")
    assert kernels(Attention(), (*heads(), mask))[0].variant == "masked"
    assert kernels(Attention(is_causal=True), heads())[0].flops < kernels(Attention(), heads())[0].flops


def test_the_gradient_of_attention_takes_two_and_a_half_times_its_work():
    forward, backward = kernels(Attention(), heads(), training=True)
    assert (forward.phase, backward.phase, backward.variant) == ("forward", "backward", "full-backward")
    assert backward.flops == forward.flops * 5 // 2 and backward.seconds > forward.seconds


def test_results_have_the_shape_and_dtype_that_torch_gives():
    class Checks(nn.Module):
        def forward(self, query, key, value):
            y = F.scaled_dot_product_attention(query, key, value)
            assert y.shape == (*query.shape[:-1], value.shape[-1]) and y.dtype == query.dtype
            return y.transpose(1, 2).reshape(2, 16, -1)  # of heads side by side this is a view

    found = simulate(Checks(), tuple(t.detach().half() for t in heads()), mode="graph")
    assert [kernel.kind for kernel in found.kernels] == ["attention"]


@pytest.mark.parametrize(("module", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("both", [False, True])
def test_recurrent_layers(module, gates, both):
    model = module(8, 16, num_layers=2, batch_first=True, bidirectional=both)
    found = kernels(model, torch.empty(3, 5, 8, device="meta"))
    directions = 2 if both else 1
    assert len(found) == 2
    assert found[0].flops == 2 * directions * 3 * 5 * gates * 16 * (8 + 16)
    assert found[1].flops == 2 * directions * 3 * 5 * gates * 16 * (16 * directions + 16)


@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU])
def test_recurrent_layers_train(module):
    found = kernels(module(8, 16, batch_first=True), torch.empty(3, 5, 8, device="meta"), training=True)
    assert [(kernel.phase, kernel.variant) for kernel in found] == [("forward", ""), ("backward", "backward")]


def test_longer_sequences_take_longer():
    times = [kernels(nn.LSTM(64, 512), torch.empty(length, 4, 64, device="meta"))[0].seconds for length in (1, 10, 100)]
    assert times == sorted(times) and times[2] > 5 * times[1]


def test_on_a_cpu_torch_answers_these_calls_itself():
    model = nn.LSTM(8, 16, batch_first=True).eval()
    found = simulate(model, torch.zeros(3, 5, 8), machine=CPU)
    assert found.seconds > 0 and not any(kernel.operator == "aten.lstm" for kernel in found.kernels)
