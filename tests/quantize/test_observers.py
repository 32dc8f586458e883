"""Observers: the ranges they choose, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchgraft import QuantizeError
from torchgraft.quantize import Numbers, dequantize_tensor, quantize_tensor
from torchgraft.quantize.observers import OBSERVERS, observer


def noise(watching, values):
    low, high = watching.numbers.range
    scale, zero_point = watching.scale()
    steps = quantize_tensor(values, scale, zero_point, low, high, watching.numbers.dtype)
    return float(((dequantize_tensor(steps, scale, zero_point) - values) ** 2).mean())


@pytest.mark.parametrize("name", OBSERVERS)
def test_an_observer_hands_on_what_it_sees_and_chooses_a_range_that_holds_most(name):
    watching = observer(name, Numbers(8))
    for seed in range(4):
        values = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
        assert watching(values) is values
    lowest, highest = watching.range()
    assert -4.5 < lowest < -1.5 and 1.5 < highest < 4.5
    assert noise(watching, values) < 2e-3


def test_min_max_keeps_the_extremes_and_the_moving_average_forgets_them():
    plain, moving = observer("min-max", Numbers(8)), observer("moving-average", Numbers(8))
    for values in ([-1.0, 1.0], [-9.0, 1.0], [-1.0, 1.0]):
        plain(torch.tensor(values))
        moving(torch.tensor(values))
    assert plain.range()[0] == -9 and moving.range()[0] == pytest.approx(-1.72)


def test_the_histogram_cuts_off_what_costs_more_than_it_is_worth():
    values = torch.cat([torch.randn(20000, generator=torch.Generator().manual_seed(0)), torch.tensor([60.0])])
    plain, best = observer("min-max", Numbers(4)), observer("histogram", Numbers(4))
    plain(values), best(values)
    assert best.range()[1] < 30
    assert noise(best, values) < noise(plain, values) / 2


def test_the_histogram_keeps_a_few_numbers_exact():
    stars = torch.randint(0, 6, (4, 5000), generator=torch.Generator().manual_seed(0)).float()
    best = observer("histogram", Numbers(8))
    best(stars)
    assert noise(best, stars) < 1e-12


def test_a_histogram_that_grows_counts_everything():
    growing, whole = observer("percentile", Numbers(8)), observer("percentile", Numbers(8))
    parts = [torch.randn(3000, generator=torch.Generator().manual_seed(seed)) * 2**seed for seed in range(5)]
    for part in parts:
        growing(part)
    whole(torch.cat(parts))
    assert int(growing.counts.sum()) == int(whole.counts.sum()) == 15000
    assert torch.allclose(growing.range()[1], whole.range()[1], rtol=0.02)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50), st.sampled_from(sorted(OBSERVERS)))
def test_any_finite_values_have_a_scale(values, name):
    watching = observer(name, Numbers(8))
    watching(torch.tensor(values))
    scale, zero_point = watching.scale()
    assert bool(torch.isfinite(scale)) and scale > 0 and 0 <= int(zero_point) <= 255


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused(bad):
    watching = observer("histogram", Numbers(8), "'relu', model.py:3")
    with pytest.raises(QuantizeError) as error:
        watching(torch.tensor([1.0, bad]))
    assert str(error.value).splitlines() == [
        "1 of 2 values are infinite or not numbers, so no range fits them",
        "at 'relu', model.py:3",
        "check the calibration data, or keep this part in floats",
    ]


def test_integers_and_empty_tensors_go_by():
    watching = observer("histogram", Numbers(8))
    watching(torch.arange(3)), watching(torch.zeros(0))
    assert not watching.has_seen


def test_an_unknown_name_says_what_is_meant():
    with pytest.raises(QuantizeError, match="did you mean 'histogram'"):
        observer("histogramm", Numbers(8))


def test_the_sample_of_a_large_tensor_is_of_all_its_places():
    values = torch.zeros(4, 2048, 49)
    values[:, :, 3] = torch.randn(4, 2048, generator=torch.Generator().manual_seed(0)).abs()
    watching = observer("histogram", Numbers(8))
    watching(values)
    share = 1 - float(watching.counts[0] / watching.counts.sum())
    assert 0.015 < share < 0.025  # one place of 49
    assert watching.range()[1] > 0.7 * values.max()


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("name", sorted(OBSERVERS))
def test_the_zeros_of_a_relu_do_not_outweigh_everything_else(name, shift):
    watching = observer(name, Numbers(8))
    values = torch.relu(torch.randn(4096, generator=torch.Generator().manual_seed(0)) - shift)
    watching(values)
    assert float(values.square().mean()) > 300 * noise(watching, values)
