"""A pipeline that loses a process, and one that goes on from a checkpoint with another number of stages."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
import torch.distributed.checkpoint as checkpoint
from torch import nn

from tests.schedule.processes import run_processes
from torchgraft.distributed import pipeline

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


class Block(nn.Module):
    """A layer of a Llama: root-mean-square norms, rotated positions, grouped heads, a gated linear unit."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        batch, length, width = x.shape
        y = self.norm(x)
        q = self.q(y).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(y).view(batch, length, self.heads // 2, self.size).transpose(1, 2)
        v = self.v(y).view(batch, length, self.heads // 2, self.size).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        y = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Llama(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4, words: int = 50, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(depth)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        rates = torch.arange(width // 8) / (width // 8)
        self.register_buffer("rates", 10000.0**-rates, persistent=False)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.rates
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def loss_of(logits: Any, target: Any) -> Any:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 50, (8, 6), generator=generator)
    return ids, ids.roll(-1, 1)


def begin(rank: int, count: int, seconds: int = 120) -> None:
    distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=seconds))


def create(kind: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def made(stages: int, kind: Any = Llama) -> Any:
    return pipeline(create(kind), batch(0)[0][:2], stages=stages)


def _train(rank: int, count: int, stages: int, steps: range, folder: str, resume: bool, kind: Any = Llama) -> Any:
    begin(rank, count)
    plan = made(stages, kind)
    run = plan.schedule("1f1b" if stages == count else "interleaved", microbatches=4, loss=loss_of)
    optimizer = torch.optim.AdamW(run.parameters(), lr=0.01)
    if resume:
        state = run.state_dict(optimizer)
        checkpoint.load(state, checkpoint_id=folder)
        run.load_state_dict(state, optimizer)
    losses = []
    for step in steps:
        ids, target = batch(step)
        optimizer.zero_grad()
        _, found = run.step(ids, target=target)
        optimizer.step()
        losses.append(torch.stack(found).mean().item() if found else None)
    state = run.state_dict(optimizer)
    if not resume:
        checkpoint.save(state, checkpoint_id=folder)
    distributed.barrier()
    distributed.destroy_process_group()
    return losses, state


def one_process(model: nn.Module, steps: int) -> list[float]:
    return stepped(model, steps)[0]


def stepped(model: nn.Module, steps: int) -> tuple[list[float], torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        ids, target = batch(step)
        optimizer.zero_grad()
        parts = [loss_of(model(chunk), wanted) for chunk, wanted in zip(ids.chunk(4), target.chunk(4), strict=True)]
        for part in parts:
            part.backward()
        for parameter in model.parameters():
            parameter.grad /= 4  # type: ignore[operator]
        optimizer.step()
        losses.append(torch.stack(parts).mean().item())
    return losses, optimizer


def test_four_processes_have_the_loss_of_one_and_two_go_on(tmp_path: Path) -> None:
    first = run_processes(_train, 4, 4, range(4), str(tmp_path / "saved"), False)
    assert not any(isinstance(answer, str) for answer in first), first
    expected = one_process(create(Llama), 7)
    torch.testing.assert_close(first[-1][0], expected[:4], rtol=1e-10, atol=1e-12)
    second = run_processes(_train, 2, 2, range(4, 7), str(tmp_path / "saved"), True)
    assert not any(isinstance(answer, str) for answer in second), second
    torch.testing.assert_close(second[-1][0], expected[4:], rtol=1e-10, atol=1e-12)


def _killed(rank: int, count: int) -> Any:
    begin(rank, count, seconds=10)
    run = made(count).schedule("1f1b", microbatches=4, loss=loss_of)
    ids, target = batch(0)
    run.step(ids, target=target)
    if rank == 1:
        os.kill(os.getpid(), 9)
    start = time.perf_counter()
    try:
        for _ in range(3):
            run.step(ids, target=target)
    except Exception as error:
        return time.perf_counter() - start, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return 0.0, ""


def test_the_others_stop_when_a_process_is_killed() -> None:
    answers = run_processes(_killed, 4, without=[1])
    for rank in (0, 2, 3):
        assert not isinstance(answers[rank], str), answers[rank]
        seconds, text = answers[rank]
        assert f"this was a step of stage {rank} of 4" in text
        assert "from a checkpoint" in text
        assert seconds < 60


def _loaded(rank: int, count: int, folder: str) -> Any:
    begin(rank, count)
    with torch.device("meta"):
        model = Llama(tied=False)
    plan = pipeline(model, torch.zeros(2, 6, dtype=torch.int64, device="meta"), stages=count)
    here = plan.of_rank(rank, count)
    read = plan.load_weights(folder, here, others={"rates": Llama().rates})
    elsewhere = [stage for number, stage in enumerate(plan.stages) if number not in here]
    assert all(parameter.is_meta for stage in elsewhere for parameter in stage.parameters())
    run = plan.schedule("1f1b", microbatches=4, loss=loss_of)
    optimizer = torch.optim.AdamW(run.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        ids, target = batch(step)
        optimizer.zero_grad()
        _, found = run.step(ids, target=target)
        optimizer.step()
        losses.append(torch.stack(found).mean().item() if found else None)
    distributed.barrier()
    distributed.destroy_process_group()
    return read, losses


def test_each_process_reads_its_own_weights_and_trains(tmp_path: Path) -> None:
    """As a model that fits into no process would: captured without data, cut, and filled from files shard by shard."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = Llama(tied=False)
    weights = model.state_dict()
    names = sorted(weights)
    save_file({name: weights[name] for name in names[:20]}, tmp_path / "one.safetensors")
    save_file({name: weights[name] for name in names[20:]}, tmp_path / "two.safetensors")
    answers = run_processes(_loaded, 4, str(tmp_path))
    assert not any(isinstance(answer, str) for answer in answers), "\n".join(map(str, answers))
    assert sum(read for read, _ in answers) == len(names)  # each tensor once, by one of them
    assert all(0 < read < len(names) // 2 for read, _ in answers)
    torch.testing.assert_close(answers[-1][1], one_process(model, 3), rtol=1e-5, atol=1e-6)


class Normed(nn.Module):
    """Buffers that training writes, in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)) for _ in range(4)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(8) for _ in range(4)])
        self.head = nn.Linear(8, 50)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(norm(layer(x).transpose(1, 2)).transpose(1, 2))
        return self.head(x)


@pytest.mark.parametrize(("first", "second"), [(2, 4), (4, 2)])
def test_nothing_is_lost_between_numbers_of_stages(first: int, second: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    for count, steps, resume in ((first, range(2), False), (second, range(2, 4), True)):
        answers = run_processes(_train, count, count, steps, folder, resume, Normed)
        assert not any(isinstance(answer, str) for answer in answers), "\n".join(map(str, answers))
    model = create(Normed)
    losses, optimizer = stepped(model, 4)
    torch.testing.assert_close(answers[-1][0], losses[2:], rtol=1e-10, atol=1e-12)
    found: dict[str, Any] = {"model": {}, "optimizer": {}}
    for _, state in answers:
        for kind, values in state.items():
            found[kind].update(values)
    assert set(found["model"]) == set(model.state_dict())
    torch.testing.assert_close(found["model"], dict(model.state_dict()), rtol=1e-10, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found["optimizer"][name], optimizer.state[parameter], rtol=1e-9, atol=1e-12)
