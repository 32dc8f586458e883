"""Statistics of tensors of every kind, against torch's and numpy's own."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchgraft.recording.statistics import MEASURES, reducer, statistics_of


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50))
def test_against_numpy(numbers) -> None:
    tensor, array = torch.tensor(numbers, dtype=torch.float64), numpy.array(numbers)
    found = statistics_of(tensor, MEASURES)
    assert found["min"] == array.min() and found["max"] == array.max()
    assert found["mean"] == pytest.approx(array.mean(), abs=1e-6) and found["std"] == pytest.approx(
        array.std(), abs=1e-6
    )
    assert found["norm"] == pytest.approx(numpy.linalg.norm(array)) and found["zeros"] == int((array == 0).sum())
    counts, low, high = found["histogram"]
    assert sum(counts) == len(numbers) and len(counts) == 32 and (low, high) == (array.min(), array.max())


def test_histogram_is_numpys() -> None:
    tensor = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert statistics_of(tensor, ["histogram"])["histogram"][0] == numpy.histogram(tensor.numpy(), 32)[0].tolist()


def test_not_a_number_is_counted_and_left_out() -> None:
    found = statistics_of(torch.tensor([float("nan"), float("inf"), -float("inf"), 2.0, 0.0]), MEASURES)
    assert (found["nan"], found["inf"], found["zeros"]) == (1, 2, 1)
    assert (found["min"], found["max"], found["mean"]) == (0.0, 2.0, 1.0)


def test_nothing_finite() -> None:
    found = statistics_of(torch.tensor([float("nan")]), MEASURES)
    assert found["nan"] == 1 and found["max"] is None and found["histogram"] is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 3),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
        torch.ones(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.ones(3, requires_grad=True),
        torch.tensor([1e308, -1e308], dtype=torch.float64),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tensor.layout} {tensor.device}",
)
def test_every_kind_of_tensor(tensor) -> None:
    found = statistics_of(tensor, MEASURES)
    assert found["dtype"] == str(tensor.dtype).removeprefix("torch.") and str(found)


def test_choosing() -> None:
    assert reducer(None) is None and reducer(False) is None
    assert set(reducer("max")(torch.ones(2))) == {"shape", "dtype", "max"}
    assert "histogram" not in reducer(True)(torch.ones(2))
    with pytest.raises(ValueError, match="there is no statistic 'average'; there are min, max, mean"):
        reducer(["average"])
