"""Operators that are several kernels on a GPU and one on a CPU."""

import pytest
import torch
from torch import nn

from torchgraft import simulate
from torchgraft.analysis.simulate.composites import kernels_of

aten = torch.ops.aten


def tensor(*shape):
    return torch.empty(*shape, device="meta")


def backward(wanted, gpu=True):
    args = (tensor(2, 16, 7, 7), tensor(2, 8, 9, 9), tensor(16, 8, 3, 3), [16])
    args = (*args, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted)
    return kernels_of(aten.convolution_backward.default, args, {}, aten.convolution_backward.default(*args), gpu=gpu)


def test_a_bias_of_a_convolution_is_added_by_a_kernel_of_its_own():
    args = (tensor(2, 8, 9, 9), tensor(16, 8, 3, 3), tensor(16), [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    made = aten.convolution.default(*args)
    layer, bias = kernels_of(aten.convolution.default, args, {}, made)
    assert (layer.kind, bias.kind, bias.variant) == ("convolution", "elementwise", "broadcast")
    assert bias.bytes == 2 * 4 * made.numel()
    assert len(kernels_of(aten.convolution.default, args, {}, made, gpu=False)) == 1
    assert len(kernels_of(aten.convolution.default, (*args[:2], None, *args[3:]), {}, made)) == 1


def test_gradients_of_a_convolution():
    both = backward([True, True, False])
    assert [kernel.variant for kernel in both] == ["general-of-input", "general-of-weight"]
    forward = 2 * 2 * 7 * 7 * 16 * 8 * 9
    assert [kernel.flops for kernel in both] == [forward, forward]
    assert [kernel.variant for kernel in backward([False, True, False])] == ["general-of-weight"]
    assert [kernel.kind for kernel in backward([True, True, True])] == ["convolution", "convolution", "reduction"]
    assert len(backward([True, True, True], gpu=False)) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_torchs_fast_path_of_encoder_layers(count):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, device="meta")
    model = nn.TransformerEncoder(layer, count, enable_nested_tensor=False).eval()
    found = simulate(model, tensor(2, 10, 64), mode="graph")
    kinds = [kernel.kind for kernel in found.kernels]
    assert kinds.count("matmul") == 4 * count and kinds.count("attention") == count and kinds.count("norm") == 2 * count
    products = 2 * 20 * (64 * 192 + 64 * 64 + 2 * 64 * 128)
    assert sum(kernel.flops for kernel in found.kernels if kernel.kind == "matmul") == count * products


def test_nothing_to_do_is_no_kernel():
    x = tensor(2, 3)
    assert kernels_of(aten.view.default, (x, [6]), {}, x.view(6)) == []
