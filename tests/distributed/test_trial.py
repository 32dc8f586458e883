"""Pipelines tried in processes of this machine: what is compared, what is not, and processes that end."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from typing import Any

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft.distributed import pipeline, try_pipeline
from torchgraft.errors import GraphError

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@torchgraft.wrap
def passing(x: Any, how: str) -> Any:
    if multiprocessing.parent_process() is not None:
        if how == "killed":
            os.kill(os.getpid(), 9)
        if how == "sleeping":
            time.sleep(60)
    return x + 0


class Net(nn.Module):
    def __init__(self, how: str = "", sums: bool = False) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)
        self.how, self.sums = how, sums

    def forward(self, x: Any) -> Any:
        y = self.two(passing(self.drop(self.one(x)), self.how))
        return (y, y.sum()) if self.sums else y


def tried(model: nn.Module, **options: Any) -> Any:
    x = torch.randn(2, 4)
    return try_pipeline(pipeline(model, x, stages=2, cost=lambda node: 1.0), x, **options)


def test_results_are_compared_where_they_can_be() -> None:
    trial = tried(Net().eval(), schedule="1f1b")
    assert trial.same is True and "the same as one process computes" in trial.headline()
    assert json.loads(trial.to_json())["same"] is True
    for model, reason in (
        (Net(), "'drop' draws random numbers"),
        (Net(sums=True).eval(), "those of micro-batches cannot be joined to one"),
    ):
        trial = tried(model)
        assert trial.same is None and trial.headline().endswith(f"results were not compared: {reason}")


def test_a_process_that_ends_and_one_that_does_not_answer() -> None:
    with pytest.raises(GraphError, match="exit code -9"):
        tried(Net("killed").eval())
    started = time.monotonic()
    with pytest.raises(GraphError, match="did not answer in 12 seconds|process . of the pipeline failed"):
        tried(Net("sleeping").eval(), time_limit=12.0)
    assert time.monotonic() - started < 40
    assert not multiprocessing.active_children()


def test_too_few_microbatches() -> None:
    with pytest.raises(GraphError, match="1f1b keeps 2 stages busy with at least 2 micro-batches, and there are 1"):
        tried(Net().eval(), schedule="1f1b", microbatches=1)
