"""Error measures, against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from torchgraft.recording.program_comparison import error_measures


def test_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(50, generator=generator, dtype=torch.float64)
    b = a + 0.01 * torch.randn(50, generator=generator, dtype=torch.float64)
    found = error_measures(a, b)
    assert found.max_abs == float((a - b).abs().max()) and found.max_rel == float(((a - b).abs() / a.abs()).max())
    assert found.sqnr == pytest.approx(10 * math.log10(float(a.pow(2).sum() / (a - b).pow(2).sum())))
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(a, b, 0)))


def test_the_same_as_torchs_own_sqnr() -> None:
    from torch.ao.ns.fx.utils import compute_sqnr

    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.1, 2.0, 3.0])
    assert error_measures(a, b).sqnr == pytest.approx(float(compute_sqnr(a, b)), rel=1e-5)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(0), torch.zeros(3), torch.tensor([float("nan"), 1.0]), torch.ones(2) > 0]
)
def test_equal_tensors(tensor) -> None:
    assert error_measures(tensor, tensor.clone()) == (0.0, 0.0, math.inf, 1.0, 0)


def test_zeros_against_something() -> None:
    found = error_measures(torch.zeros(2), torch.ones(2))
    assert found == (1.0, math.inf, -math.inf, 0.0, 0)


def test_not_a_number_on_one_side() -> None:
    found = error_measures(torch.tensor([1.0, 2.0, float("inf")]), torch.tensor([float("nan"), 2.5, float("inf")]))
    assert found.unlike == 1 and found.max_abs == 0.5


def test_other_kinds() -> None:
    assert error_measures(torch.ones(2, dtype=torch.bfloat16), torch.ones(2) * 1.5).max_abs == 0.5
    assert error_measures(torch.eye(2).to_sparse(), torch.zeros(2, 2)).max_abs == 1.0
    assert error_measures(torch.tensor([1 + 1j]), torch.tensor([1 - 1j])).max_abs == 2.0
