"""Programs that ask for infinities and NaN where there are no values, as models in 16 bits do, are told that there are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchgraft import cost, simulate
from torchgraft.errors import GraftError


class Clamped(nn.Module):
    """What BART, Whisper and others do in 16 bits."""

    def __init__(self, asked: Any) -> None:
        super().__init__()
        self.layer, self.asked = nn.Linear(4, 4), asked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if x.dtype == torch.float16 and self.asked(x):
            x = torch.clamp(x, -1000, 1000)
        return x


QUESTIONS = [
    lambda x: not torch.isfinite(x).all(),
    lambda x: torch.isinf(x).any() or torch.isnan(x).any(),
    lambda x: (torch.isnan(x) | torch.isinf(x)).any().item(),
    lambda x: (~(torch.isfinite(x) & (x == x))).any(),
    lambda x: bool((x != x).any(dim=-1).any()),
]


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("asked", QUESTIONS)
def test_numbers_are_finite(asked: Any, device: str) -> None:
    with torch.device(device):
        model, x = Clamped(asked), torch.zeros(2, 4)
    for training in (False, True):
        found = simulate(model, x, precision="fp16", training=training)
        assert "clamp" not in {node.name for node in found.nodes} and found.precision == "fp16"
    assert not any("clamp" in str(row) for row in cost(model.half(), x.half()).rows())


def test_asking_on_the_host_takes_time_on_a_gpu() -> None:
    with torch.device("meta"):
        model, x = Clamped(QUESTIONS[0]), torch.zeros(2, 4)
    asking, plain = (simulate(model, x, precision=precision).seconds for precision in ("fp16", "bf16"))
    assert asking > plain


def test_other_values_are_not_known() -> None:
    with torch.device("meta"):
        model, x = Clamped(lambda x: x.max() > 100), torch.zeros(2, 4)
    with pytest.raises(GraftError, match="the model reads values of a tensor, and its inputs hold none"):
        simulate(model, x, precision="fp16")


def test_where_only_a_run_tells_it_is_made_in_the_precision_that_is_asked_for() -> None:
    model, x = Clamped(lambda x: x.max() > 100), torch.zeros(2, 4)
    found = simulate(model, x, precision="fp16")
    assert {"layer", "max_1"} <= {node.name for node in found.nodes}
    assert model.layer.weight.dtype == x.dtype == torch.float32
