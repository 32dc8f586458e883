"""The reference form: what steps mean, for one scale, for channels and for groups, and the gradients of fake quantization."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchgraft.quantize import dequantize_tensor, fake_quantize, quantize_tensor, scale_of_values
from torchgraft.quantize.operators import scale_of_range

ranges = st.floats(-1e4, 1e4, allow_nan=False, width=32)


@given(
    st.lists(ranges, min_size=1, max_size=40),
    st.booleans(),
    st.sampled_from([(0, 255), (0, 127), (-127, 127), (-8, 7)]),
)
def test_every_value_of_a_range_is_within_half_a_step(values, symmetric, limits):
    x = torch.tensor(values)
    low, high = limits
    scale, zero_point = scale_of_values(x, low, high, symmetric)
    steps = quantize_tensor(x, scale, zero_point, low, high, torch.int32)
    assert int(steps.min()) >= low and int(steps.max()) <= high
    error = (dequantize_tensor(steps, scale, zero_point) - x).abs().max()
    # The zero point is rounded, too, so the ends of the range may be another half step away.
    assert error <= scale * 1.01 + 1e-6 * x.abs().max()


@given(st.lists(ranges, min_size=1, max_size=20))
def test_zero_is_exact(values):
    x = torch.tensor([*values, 0.0])
    scale, zero_point = scale_of_values(x, 0, 255, symmetric=False)
    steps = quantize_tensor(torch.zeros(1), scale, zero_point, 0, 255, torch.uint8)
    assert dequantize_tensor(steps, scale, zero_point).item() == 0.0


@given(st.lists(ranges, min_size=4, max_size=4))
def test_quantizing_again_changes_nothing(values):
    x = torch.tensor(values)
    scale, zero_point = scale_of_values(x, 0, 255, symmetric=False)
    steps = quantize_tensor(x, scale, zero_point, 0, 255, torch.uint8)
    again = quantize_tensor(dequantize_tensor(steps, scale, zero_point), scale, zero_point, 0, 255, torch.uint8)
    assert torch.equal(steps, again)


def test_channels_and_groups_have_scales_of_their_own():
    x = torch.tensor([[1.0, 2.0, 100.0, 200.0], [0.1, 0.2, 0.3, 0.4]])
    scale, zero_point = scale_of_range(-x.amax(1), x.amax(1), -127, 127, symmetric=True)
    steps = quantize_tensor(x, scale, None, -127, 127, torch.int8, axis=0)
    assert steps.tolist() == [[1, 1, 64, 127], [32, 64, 95, 127]]
    parts = x.reshape(2, 2, 2)
    scale, zero_point = scale_of_range(parts.amin(-1), parts.amax(-1), 0, 15, symmetric=False)
    steps = quantize_tensor(x, scale, zero_point, 0, 15, torch.uint8, group=2)
    assert steps.shape == x.shape and steps.tolist()[0] == [7, 15, 8, 15]
    assert torch.allclose(dequantize_tensor(steps, scale, zero_point, group=2), x, rtol=0.08)


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30),
    st.floats(0.05, 2.0),
    st.integers(-3, 3),
)
def test_gradients_pass_inside_the_range_and_are_zero_outside(values, scale, zero_point):
    x = torch.tensor(values, requires_grad=True)
    incoming = torch.arange(1.0, len(values) + 1)
    fake_quantize(x, torch.tensor(scale), torch.tensor(zero_point), -8, 7).backward(incoming)
    steps = torch.round(x.detach() / torch.tensor(scale)) + zero_point
    written_out = incoming * ((steps >= -8) & (steps <= 7))
    assert torch.equal(x.grad, written_out)


def test_fake_quantize_is_quantize_and_dequantize():
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    for options in ({}, {"axis": 0}, {"group": 4}):
        shape = {"axis": (3,), "group": (3, 2)}.get(next(iter(options), ""), ())
        scale = torch.full(shape, 0.1)
        pair = dequantize_tensor(quantize_tensor(x, scale, None, -8, 7, torch.int8, **options), scale, None, **options)
        assert torch.allclose(fake_quantize(x, scale, None, -8, 7, **options), pair, atol=1e-6)


def test_other_types_keep_their_type():
    steps = quantize_tensor(torch.ones(2, dtype=torch.bfloat16), torch.tensor(0.5), None, -8, 7, torch.int8)
    assert dequantize_tensor(steps, torch.tensor(0.5), None, torch.bfloat16).dtype == torch.bfloat16
    assert steps.dtype == torch.int8 and steps.tolist() == [2, 2]


@pytest.mark.parametrize("values", [torch.zeros(3), torch.tensor([5.0, 5.0]), torch.tensor([-3.0])])
def test_constant_values_have_a_scale(values):
    scale, zero_point = scale_of_values(values, 0, 255, symmetric=False)
    steps = quantize_tensor(values, scale, zero_point, 0, 255, torch.uint8)
    assert scale > 0 and torch.allclose(dequantize_tensor(steps, scale, zero_point), values)
