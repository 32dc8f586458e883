"""Captured and transformed programs under DDP, FSDP2 and tensor parallelism in two real processes: what the model does there."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchgraft
from tests.schedule.processes import run_processes
from torchgraft.passes import Pipeline

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.head = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y = self.down(torch.relu(self.up(x)))
        return self.head(self.norm(x + y))


def made() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)).double()


def full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(module: nn.Module, x: Any, steps: int = 3) -> list[Any]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    named = {name.removeprefix("module."): full(parameter.detach()) for name, parameter in module.named_parameters()}
    return [named[name].clone() for name in sorted(named)]


def subjects(x: Any) -> dict[str, nn.Module]:
    """The model itself, what was captured of it, and that after passes."""
    tidy = torchgraft.capture(made(), x)
    Pipeline("remove-dead-code, merge-common, remove-no-ops")(tidy)
    return {
        "model": made(),
        "captured": torchgraft.capture(made(), x),
        "transformed": tidy,
        "symbolic": torchgraft.symbolic_trace(made()),
    }


def _sharded(rank: int, count: int) -> Any:
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (count,))
    answers: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {}, "tensor": {}}
    for name, module in subjects(batch(0)).items():
        parallel = nn.parallel.DistributedDataParallel(module)
        answers["ddp"][name] = trained(parallel, batch(rank))
        del parallel
    for name, module in subjects(batch(0)).items():
        fully_shard(module.up, mesh=mesh)  # type: ignore[arg-type]
        fully_shard(module, mesh=mesh)
        answers["fsdp"][name] = trained(module, batch(rank))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for name, module in subjects(batch(0)).items():
        answers["tensor"][name] = trained(parallelize_module(module, mesh, plan), batch(0))
    distributed.barrier()
    distributed.destroy_process_group()
    return answers


@pytest.mark.parametrize("count", [2, 4])
def test_programs_are_sharded_as_their_models(count: int) -> None:
    for answers in run_processes(_sharded, count):
        assert not isinstance(answers, str), answers
        for found in answers.values():
            for name, parameters in found.items():
                assert name == "model" or all(map(torch.equal, parameters, found["model"]))
        for way, alone in (("ddp", count), ("fsdp", count), ("tensor", 1)):
            model = made()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                (sum(model(batch(rank)).square().mean() for rank in range(alone)) / alone).backward()  # type: ignore[union-attr]
                optimizer.step()
            named = dict(model.named_parameters())
            for parameter, name in zip(answers[way]["captured"], sorted(named), strict=True):
                torch.testing.assert_close(parameter, named[name].detach(), rtol=1e-12, atol=1e-14)
