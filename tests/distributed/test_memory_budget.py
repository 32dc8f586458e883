"""Layers that keep less for their backward, by a budget or by torch.utils.checkpoint, under DDP and FSDP2 in real processes."""

from __future__ import annotations

import copy
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
from torch.utils.checkpoint import checkpoint

import torchgraft
from tests.distributed.test_lives_on import Llama, loss_of
from tests.schedule.processes import run_processes
from torchgraft.passes import Pipeline

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


class Checkpointed(nn.Module):
    """A layer whose values are all computed again by torch."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.layer, *args, use_reentrant=False)


def example() -> tuple[torch.Tensor, ...]:
    x = torch.randn(2, 6, 32, dtype=torch.float64, requires_grad=True)
    return x, torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)


def kept(layer: nn.Module) -> int:
    return torchgraft.capture_training(copy.deepcopy(layer), example()).saved_bytes


def within(layer: Any, share: int) -> nn.Module:
    """A layer that keeps a share of what it would."""
    return torchgraft.capture_training(layer, example(), memory_budget=kept(layer) // share).module()


def tidied(layer: nn.Module) -> nn.Module:
    program = torchgraft.capture(layer, example(), level="function")
    Pipeline("merge-common, remove-dead-code")(program)
    return program


LAYERS: dict[str, Any] = {
    "eager": lambda layer: layer,
    "captured": lambda layer: torchgraft.capture(layer, example()),
    "checkpointed": lambda layer: Checkpointed(torchgraft.capture(layer, example())),
    "programs": lambda layer: torchgraft.capture_training(layer, example()).module(),
    "half": lambda layer: within(layer, 2),
    "a tenth, of a transformed program": lambda layer: within(tidied(layer), 10),
}


def made(way: str) -> nn.Module:
    torch.manual_seed(0)
    model = Llama(depth=3, tied=False).double()
    model.blocks = nn.ModuleList([LAYERS[way](layer) for layer in model.blocks])
    return model


def batch(rank: int) -> tuple[Any, Any]:
    ids = torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(rank))
    return ids, ids.roll(-1, 1)


def trained(module: nn.Module, ids: Any, target: Any, steps: int = 3) -> list[Any]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(module(ids), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found = [parameter.detach() for parameter in module.parameters()]
    whole = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in found]
    return [*losses, *[tensor.clone() for tensor in whole]]


def _trained(rank: int, count: int) -> Any:
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (count,))
    answers: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {}}
    for way in LAYERS:
        parallel = nn.parallel.DistributedDataParallel(made(way))
        answers["ddp"][way] = trained(parallel, *batch(rank))
        del parallel
        model = made(way)
        for layer in model.blocks:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
        fully_shard(model, mesh=mesh)
        answers["fsdp"][way] = trained(model, *batch(rank))
    distributed.barrier()
    distributed.destroy_process_group()
    return answers


@pytest.mark.parametrize("count", [2, 4])
def test_what_is_kept_changes_nothing(count: int) -> None:
    for answers in run_processes(_trained, count):
        assert not isinstance(answers, str), answers
        for ways in answers.values():
            for way, found in ways.items():
                same_as = "eager" if way in ("eager", "captured", "checkpointed") else "programs"
                assert all(map(torch.equal, found, ways[same_as])), way
                # Gradients in ATen operators may be rounded otherwise than autograd's.
                torch.testing.assert_close(found, ways["eager"], rtol=1e-9, atol=1e-12)


def test_layers_keep_what_they_say() -> None:
    """The bytes that autograd holds, counted by torch's own hooks."""

    def held(way: str) -> int:
        model = made(way)
        there = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
        memory: dict[int, Any] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage()._cdata not in there:
                memory[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        x, cos, sin = example()
        there.update(tensor.untyped_storage()._cdata for tensor in (x, cos, sin))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.blocks[0](x, cos, sin)  # type: ignore[index]
        return sum(storage.nbytes() for storage in memory.values())

    whole = held("eager")
    assert held("half") <= whole / 2
    assert held("a tenth, of a transformed program") <= whole / 10
