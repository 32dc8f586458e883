"""Autocast around programs whose operators have its casts among them."""

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft import capture, capture_training
from torchgraft.errors import GuardError
from torchgraft.lowering.autocast import active_casts, is_autocast, regions_without

X = torch.randn(16, 8)


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.linear, self.run = nn.Linear(8, 8), forward

    def forward(self, x):
        return self.run(self, self.linear(x))


class Product(torch.autograd.Function):
    """A call that stays one call."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return (gradient.to(weight.dtype) @ weight.t()).to(x.dtype), (x.t().float() @ gradient.float()).to(weight.dtype)


def in_float(self, y):
    with torch.autocast("cpu", enabled=False):
        scores = y.float() @ y.float().t()
    return scores + 1


def distances(self, y):
    return torch.cdist(y, y + 1)


def distances_inside(self, y):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.cdist(y, y + 1)


def attention(self, y):
    return nn.functional.scaled_dot_product_attention(y[None], y[None], y[None])


def kept(self, y):
    return Product.apply(y.float(), self.linear.weight)


def asked(self, y):
    with torch.no_grad():
        scores = y.float() @ y.float().t()
    return y * scores.sum() if torch.is_autocast_enabled("cpu") else y + 1


MODELS = [in_float, distances, distances_inside, attention, kept, asked]


@pytest.mark.parametrize("forward", MODELS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("is_on", [True, False])
def test_nothing_is_cast_twice(forward, is_on):
    model = Model(forward)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
        expected = model(X)
        program = capture(model, (X,), level="core_aten")
        step = capture_training(model, (X,))
        # Attention is rounded to 16 bits at other places when it is taken apart.
        near = {"rtol": 1.6e-2, "atol": 2e-3} if is_on and forward is attention else {}
        for found in (program(X), torchgraft.Interpreter(program).run(X), torchgraft.to_fx(program)(X)):
            assert found.dtype is expected.dtype
            torch.testing.assert_close(found, expected, **near)
        value, gradients = step.run(X)
        learned = step.module()(X)
    for found in (value, learned):
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected, **near)
    expected.sum().backward()
    for name, parameter in model.named_parameters():
        close = {"rtol": 0.1, "atol": 0.05} if is_on and forward is attention else {}
        torch.testing.assert_close(gradients[name], parameter.grad, **close)


def test_the_region_is_seen_in_the_code():
    with torch.autocast("cpu", torch.bfloat16):
        program = capture(Model(kept), (X,), level="core_aten")
    assert "with torch.autocast('cpu', enabled = False):" in program.code
    assert "with torch.autocast('cpu', dtype = torch.bfloat16):" in program.code  # around the call that is kept
    inside = capture(Model(distances_inside), (X,), level="core_aten").code
    assert "cdist" in inside.split("with torch.autocast('cpu', dtype = torch.bfloat16):")[1]  # it stays torch's call
    assert "autocast" not in capture(Model(distances), (X,), level="core_aten").code


def test_backward_runs_without_it_too():
    with torch.autocast("cpu", torch.bfloat16):
        programs = capture_training(Model(in_float), (X,))
    for program in (programs.joint, programs.forward, programs.backward):
        assert len(regions_without(program.graph)) == 2
        assert all(map(is_autocast, regions_without(program.graph)))
        program.graph.lint()


@pytest.mark.parametrize("forward", MODELS, ids=lambda function: function.__name__)
def test_another_dtype_is_refused(forward):
    with torch.autocast("cpu", torch.bfloat16):
        program = capture(Model(forward), (X,), level="core_aten")
    with (
        pytest.raises(GuardError, match="lowered with autocast to torch.bfloat16 on cpu"),
        torch.autocast("cpu", torch.float16),
    ):
        program(X)
    with pytest.raises(GuardError, match="lowered with autocast to torch.bfloat16 on cpu"):
        program(X)
    conditions = {(guard.condition, guard.expected) for guard in program.guards}
    assert ("torch.get_autocast_dtype('cpu')", torch.bfloat16) in conditions


def test_torch_compile_and_export_take_them():
    model = Model(in_float)
    with torch.autocast("cpu", torch.bfloat16):
        program, expected = capture(model, (X,), level="core_aten"), model(X)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(program, backend="eager", fullgraph=True)(X), expected)
        torch.testing.assert_close(torch.export.export(program, (X,)).module()(X), expected)
    assert active_casts() == ()
