"""What single operators cost, by counting the arithmetic of their definitions, and what counts as none."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchgraft.analysis.cost import cost
from torchgraft.analysis.cost.elementwise import MOVES, work_of
from torchgraft.analysis.cost.formulas import causal_pairs

X = torch.ones(2, 3, 8, 8)


def flops(function: Any, *args: torch.Tensor) -> int:
    result = cost(function, args, backward=False)
    assert result.unknown == {}
    return result.forward.flops


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x: x + x, X.numel()),
        (lambda x: x.relu_(), X.numel()),
        (lambda x: torch.sqrt(x).sum(), 2 * X.numel()),
        (lambda x: F.softmax(x, 1), 5 * X.numel()),
        (lambda x: F.log_softmax(x, 1), 5 * X.numel()),
        (lambda x: F.silu(x), 5 * X.numel()),
        (lambda x: F.layer_norm(x, (8,)), 6 * X.numel()),
        (lambda x: F.layer_norm(x, (8,), torch.ones(8), torch.ones(8)), 8 * X.numel()),
        (lambda x: F.group_norm(x, 3), 6 * X.numel()),
        (lambda x: F.batch_norm(x, torch.ones(3), torch.ones(3)), 2 * X.numel()),
        (lambda x: F.max_pool2d(x, 2), 2 * 3 * 4 * 4 * 4),
        (lambda x: F.avg_pool2d(x, (2, 4)), 2 * 3 * 4 * 2 * 8),
        (lambda x: F.adaptive_avg_pool2d(x, 2), X.numel()),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 7 * 4 * X.numel()),
        (lambda x: x.std(), 4 * X.numel()),
        (lambda x: x.cumsum(1), X.numel()),
        (lambda x: torch.rsub(x, 1), X.numel()),
        (lambda x: torch.polar(x, x), 4 * X.numel()),
    ],
)
def test_arithmetic(function: Any, expected: int) -> None:
    assert flops(function, X.clone()) == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t().contiguous().view(-1).to(torch.float64),
        lambda x: torch.cat([x, x]).flip(0)[:1],
        lambda x: F.pad(x, (1, 1)).new_zeros(3),
        lambda x: x.masked_fill(torch.ones(3, 4, dtype=torch.bool), 1.0),
        lambda x: x.gather(0, torch.zeros(1, 4, dtype=torch.int64)),
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: torch.arange(5),
        lambda x: torch.complex(torch.permute_copy(x, (1, 0)), torch.t_copy(x)),
    ],
)
def test_moving_data_is_no_arithmetic(function: Any) -> None:
    assert flops(function, torch.ones(3, 4)) == 0


def test_operators_of_losses_recurrent_layers_and_transforms_are_known() -> None:
    x, target = torch.ones(4, 5), torch.zeros(4, dtype=torch.int64)
    assert flops(lambda x, y: F.cross_entropy(x, y), x, target) == 5 * 20 + 20
    assert flops(lambda x: F.mse_loss(x, x), x) == 60
    rows = cost(nn.LSTM(3, 4), torch.ones(6, 2, 3))
    assert rows.unknown == {}
    assert rows.forward.macs == 6 * 2 * 4 * 4 * (3 + 4)
    assert rows.backward.macs == 2 * rows.forward.macs
    assert flops(lambda x: torch.fft.fft(x), torch.ones(8, dtype=torch.complex64)) == 5 * 8 * 3
    assert flops(lambda x: x.sort().values, torch.ones(8)) == 24


@pytest.mark.parametrize(
    "model, x",
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Hardswish(), nn.MaxPool2d(2)), X),
        (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout()), X),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.AdaptiveAvgPool2d(2)), X),
        (nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.InstanceNorm2d(3), nn.Softmax(1)), X),
        (nn.TransformerEncoderLayer(8, 2, 16), torch.ones(5, 2, 8)),
        (nn.GRU(3, 4), torch.ones(5, 2, 3)),
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.ELU(), nn.PixelShuffle(2)), X),
    ],
)
def test_no_operator_of_common_models_is_unknown(model: nn.Module, x: torch.Tensor) -> None:
    result = cost(model, x.clone().requires_grad_())
    assert result.unknown == {}
    assert result.backward.flops > result.forward.flops / 4


def test_every_move_is_an_operator_of_torch_and_none_is_claimed_twice() -> None:
    from torchgraft.analysis.cost.formulas import FORMULAS

    missing = [name for name in MOVES if not hasattr(torch.ops.aten, name)]
    assert missing == []
    assert [name for name in MOVES if getattr(torch.ops.aten, name) in FORMULAS] == []


def test_an_operator_that_nothing_is_known_about_has_no_number() -> None:
    assert work_of(torch.ops.aten.linalg_qr.default, (torch.eye(3),), {}, torch.linalg.qr(torch.eye(3))) is None
    result = cost(lambda x: torch.linalg.qr(x).Q, torch.eye(3))
    assert list(result.unknown) == ["aten.linalg_qr"] and result.forward.flops == 0


@pytest.mark.parametrize("queries", range(1, 6))
@pytest.mark.parametrize("keys", range(1, 6))
def test_causal_pairs_are_those_under_the_diagonal(queries: int, keys: int) -> None:
    assert causal_pairs(queries, keys) == int(torch.ones(queries, keys).tril().sum())


def test_a_layer_that_is_one_operator_does_what_its_parts_do() -> None:
    layer = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    x = torch.ones(2, 5, 8)
    fast = cost(layer, x, backward=False)
    slow = cost(layer, x.clone().requires_grad_())
    assert any("encoder_layer" in name for name in fast.operators)
    assert fast.unknown == {} and fast.forward.macs == slow.forward.macs


def test_products_by_group() -> None:
    from torchgraft.analysis.cost.formulas import grouped_product

    rows, weights = torch.ones(10, 4), torch.ones(3, 4, 5)
    assert grouped_product(rows, weights, result=torch.ones(10, 5)) == 2 * 10 * 4 * 5
    assert grouped_product(rows.t(), torch.ones(10, 6), result=torch.ones(3, 4, 6)) == 2 * 4 * 10 * 6


def test_comparisons_in_place_are_pointwise_too() -> None:
    assert flops(lambda x: x.gt_(0).abs_(), torch.ones(3, 4)) == 24
