"""Sizes that stay free: programs lowered at some sizes are right at others, and what the rules say of sizes is so."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchgraft import GuardError, capture, capture_training
from torchgraft.lowering.layouts import Layout, is_viewable

WEIGHT, TABLE, KERNEL, SQUARE = torch.randn(5, 4), torch.randn(9, 3), torch.randn(6, 4, 3), torch.randn(1, 1, 2, 3)


@torch.jit.script
def scaled(x: torch.Tensor, by: int) -> torch.Tensor:
    """Asks for sizes by operators of torch, as DeBERTa does."""
    return x / torch.sqrt(torch.tensor(x.size(1) * by, dtype=torch.float)) + x.stride(0)


PROGRAMS = {
    "scripted": lambda x: scaled(x, 2),
    "view": lambda x: x.view(x.shape[0], -1),
    "view of several": lambda x: x.view(-1, x.shape[1], 2, 2).transpose(1, 2).reshape(x.shape[0], 2, -1),
    "expand": lambda x: x[:, :1].expand(-1, x.shape[1], -1) + x,
    "broadcast": lambda x: x + x.mean(1, keepdim=True) * torch.ones(4) + x[:, :, :1],
    "permute": lambda x: x.permute(2, 0, 1).flatten(1),
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1).unsqueeze(-1).sum((1, 2)),
    "select": lambda x: x[:, 0] + x.select(1, 0),
    "cat": lambda x: torch.cat([x, x * 2, x[:, :1]], 1).view(x.shape[0], 2 * x.shape[1] + 1, 4),
    "linear": lambda x: F.linear(x, WEIGHT).softmax(-1),
    "matmul": lambda x: (x @ x.transpose(1, 2)) @ x,
    "matmul of many": lambda x: x.view(x.shape[0], x.shape[1], 2, 2).permute(0, 2, 1, 3) @ SQUARE,
    "embedding": lambda x: F.embedding((x > 0).long(), TABLE),
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), KERNEL, padding=1),
    "arange": lambda x: torch.arange(x.shape[1])[None, :, None] * x + torch.full((x.shape[1], 1), 2.0).tril(),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    "masked": lambda x: x.masked_fill(x > x.mean(), 0.0).cumsum(1),
    "reductions": lambda x: (x.sum(), x.amax(1), x.argmin(0), x.var((0, 1)), x.any(), x.logsumexp(1)),
    "indices": lambda x: (x[:, 0, None, 1:-1], x[..., -1], x[None, 1:], x[:, ::2], x[x.shape[0] // 3 :], x[:]),
    "chunks": lambda x: torch.stack(x.chunk(2, 2)).flip(0),
}  # fmt: skip


@pytest.mark.parametrize("level", ["aten", "core_aten"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_other_sizes(name, level):
    run = PROGRAMS[name]
    program = capture(run, (torch.randn(3, 7, 4),), level=level)
    for sizes in ((5, 2, 4), (1, 7, 4), (2, 1, 4)):
        x = torch.randn(sizes)
        torch.testing.assert_close(program(x), run(x))


# What is a view in a run where a size is 1, and a copy in others.
LAID_OUT = {
    "rows": lambda x: x.transpose(0, 1).reshape(-1, 4),
    "flattened": lambda x: (x * 2).transpose(0, 1).flatten(),
    "contiguous": lambda x: [part.transpose(0, 1).contiguous().view(-1) for part in x.chunk(2, -1)],
    "heads": lambda x: x.view(*x.shape[:2], 2, 2).transpose(1, 2).reshape(x.shape[0], 2, -1),
    "expanded": lambda x: torch.ones(1, 4).expand(x.shape[0], 4).reshape(-1) * x.mean(),
    "expanded further": lambda x: torch.cat([torch.ones(1, 1, 4).expand(x.shape[0], -1, -1), x], 1).flatten(1),
    "linear": lambda x: F.linear(x.transpose(0, 1), WEIGHT),
    "matmul": lambda x: torch.matmul(x.transpose(0, 1), WEIGHT.t()),
    "of a slice": lambda x: x[:, :, 1:3].transpose(0, 1).reshape(-1),
    "written": lambda x: (x * 1).transpose(0, 1).reshape(-1, 4).relu_(),
    "channels last": lambda x: x[:, None].contiguous(memory_format=torch.channels_last).flatten(1),
}  # fmt: skip


class _Scaled(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run, self.scale = run, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.run(x * self.scale)


@pytest.mark.parametrize("level", ["core_aten", "joint"])
@pytest.mark.parametrize("name", LAID_OUT)
def test_a_size_of_one_is_no_layout(name, level):
    model = _Scaled(LAID_OUT[name])
    for sizes in ((1, 7, 4), (3, 1, 4), (1, 1, 4)):
        if level == "joint":
            programs = capture_training(model, (torch.randn(sizes),))
            run = lambda x, programs=programs: programs.run(x).results
        else:
            run = capture(model, (torch.randn(sizes),), level=level)
        for other in ((1, 7, 4), (2, 1, 4), (5, 3, 4)):
            x = torch.randn(other)
            try:
                torch.testing.assert_close(run(x), model(x))
            except GuardError:  # the backward asks which sizes were 1 where they are broadcast
                assert level == "joint"


@pytest.mark.parametrize("make", [lambda y: y.t().contiguous(), lambda y: y.t().reshape(-1), lambda y: y.t().flatten()])
@pytest.mark.parametrize("size", [1, 5])
def test_what_is_written_as_a_view_or_as_a_copy_is_checked(make, size):
    def run(x):
        y = x * 1
        z = make(y)
        z.add_(1)
        return y, z

    program = capture(run, (torch.randn(size, 4),), level="core_aten")
    x = torch.randn(size, 4)
    torch.testing.assert_close(program(x), run(x))
    with pytest.raises(GuardError, match=r"\(x\.size\(0\) == 1\)"):
        program(torch.randn(6 - size, 4))


def test_a_copy_that_is_written_alone_is_right_for_all_sizes():
    program = capture(LAID_OUT["written"], (torch.randn(3, 2, 4),), level="core_aten")
    assert not [guard for guard in program.guards if "== 1" in guard.condition]


@pytest.mark.parametrize("level", ["aten", "core_aten"])
def test_a_number_that_python_forces_is_guarded(level):
    program = capture(lambda x: sum([x[:, index] for index in range(x.shape[1])]), (torch.randn(3, 4),), level=level)
    torch.testing.assert_close(program(torch.ones(9, 4)), torch.full((9,), 4.0))
    with pytest.raises(GuardError):
        program(torch.ones(9, 5))


def test_equal_sizes_need_no_guards():
    program = capture(lambda x: (x @ x.transpose(1, 2)) @ x + x, (torch.randn(3, 7, 4),), level="core_aten")
    function = capture(lambda x: (x @ x.transpose(1, 2)) @ x + x, (torch.randn(3, 7, 4),), level="function")
    assert len([guard for guard in program.guards if "size" in guard.condition]) == len(
        [guard for guard in function.guards if "size" in guard.condition]
    )


def test_gradients_have_the_sizes_of_what_they_are_the_gradients_of():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1)
    )
    programs = capture_training(model, (torch.randn(2, 3, 8, 8),), loss=lambda y: y.pow(2).sum())
    # What autograd compares before each step is known: whether sizes are 1, and not which, is all that is asked.
    sizes = [guard.condition for guard in programs.joint.guards if ".size(" in guard.condition]
    assert sizes and [text for text in sizes if not text.endswith(("== 0)", "== 1)", "!= 1)"))] == []
    x = torch.randn(5, 3, 12, 10)
    _, gradients = programs.run(x)
    model(x).pow(2).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4, rtol=1e-4)


def test_views_are_told_from_copies():
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 4), (4, 6), (24,), (2, 12), (3, 8), (1, 24), (2, 1, 12), (2, 2, 6), (6, 4), (-1, 4), (3, -1)]
    for _ in range(300):
        shape = shapes[int(torch.randint(len(shapes) - 2, (), generator=generator))]
        tensor = torch.empty(24).view(shape)
        for _ in range(int(torch.randint(3, (), generator=generator))):
            tensor = (
                tensor.transpose(0, -1)
                if torch.rand((), generator=generator) < 0.5
                else tensor[:, None].expand(-1, 1, *tensor.shape[1:])
            )
        for new in shapes:
            try:
                tensor.view(new)
                is_possible = True
            except RuntimeError:
                is_possible = False
            layout = Layout(list(tensor.shape), list(tensor.stride()))
            assert is_viewable(layout, list(new)) == is_possible, (
                tensor.shape,
                tensor.stride(),
                new,
            )


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
def test_losses_take_a_batch_of_one(loss):
    program = capture(lambda x: loss(x * 2, x), torch.randn(3, 4), level="core_aten")
    x = torch.randn(1, 4)
    torch.testing.assert_close(program(x), loss(x * 2, x))
