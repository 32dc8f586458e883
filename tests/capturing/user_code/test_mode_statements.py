"""Statements that choose by the mode, those of torch.nn's norms among them: both modes are right, in whichever the model was
captured."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchgraft
from torchgraft import GraphModule, GuardError, capture
from torchgraft.ir.choices import add_if

LEVELS = ["module", "function"]


class Around(nn.Module):
    """A module inside another: what is asked of it is not asked of the model itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def step(model: nn.Module, x: torch.Tensor, training: bool, seed: int) -> tuple[list[Any], dict[str, Any]]:
    """The results and gradients of a step in a mode, and the state after it."""
    model.train(training).zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    results = model(x)
    results = [item for item in (results if isinstance(results, tuple) else (results,)) if item is not None]
    sum([(item * torch.arange(1.0, item.numel() + 1).view_as(item)).sum() for item in results]).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*results, x.grad, *gradients], {name: value.clone() for name, value in model.state_dict().items()}


def right_in_both_modes(build: Callable[[], nn.Module], x: torch.Tensor, level: str = "function") -> GraphModule:
    """Capture in each mode, then switch there and back: results, gradients and buffers are the model's."""
    for captured_in in (False, True):
        torch.manual_seed(0)
        model = build().train(captured_in)
        theirs = copy.deepcopy(model)
        program = capture(model, (x,), level=level)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        ours = pickle.loads(pickle.dumps(copy.deepcopy(program)))
        for seed, mode in enumerate((captured_in, not captured_in, captured_in, not captured_in, not captured_in)):
            found, buffers = step(ours, x, mode, seed)
            expected, wanted = step(theirs, x, mode, seed)
            torch.testing.assert_close(found, expected, msg=f"captured with training={captured_in}, run with {mode}")
            read = {name: value for name, value in wanted.items() if name in buffers}
            torch.testing.assert_close({name: buffers[name] for name in read}, read)
            unread = {name: value for name, value in wanted.items() if name not in buffers}
            assert all(torch.equal(value, state[name]) for name, value in unread.items()), list(unread)
        torch.testing.assert_close(model.state_dict(), state)
    return program


def mode_guards(program: GraphModule) -> list[str]:
    return [str(guard) for guard in program.guards if "training" in str(guard.condition)]


IMAGES, ROWS, SEQUENCES = torch.randn(4, 6, 5, 5), torch.randn(4, 6), torch.randn(3, 5, 8)
LAYERS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), ROWS),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6), IMAGES),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(6), torch.randn(2, 6, 3, 3, 3)),
    "without weights": (lambda: nn.BatchNorm2d(6, affine=False), IMAGES),
    "without statistics": (lambda: nn.BatchNorm2d(6, track_running_stats=False), IMAGES),
    "a momentum of zero": (lambda: nn.BatchNorm2d(6, momentum=0.0), IMAGES),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(6), IMAGES),
    "InstanceNorm2d with statistics": (lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True), IMAGES),
    "Dropout": (lambda: nn.Dropout(0.3), IMAGES),
    "Dropout2d": (lambda: nn.Dropout2d(0.3), IMAGES),
    "AlphaDropout": (lambda: nn.AlphaDropout(0.3), IMAGES),
    "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(0.3), IMAGES),
    "RReLU": (lambda: nn.RReLU(), IMAGES),
    "LSTM": (lambda: First(nn.LSTM(8, 4, 2, dropout=0.4, bidirectional=True)), SEQUENCES),
    "GRU": (lambda: First(nn.GRU(8, 4, 2, dropout=0.4)), SEQUENCES),
}


class First(Around):
    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)[0]


@pytest.mark.parametrize("name", list(LAYERS))
def test_layers_of_torch_broken_open(name: str) -> None:
    build, x = LAYERS[name]
    program = right_in_both_modes(lambda: Around(build()), x)
    assert mode_guards(program) == [] and program.meta["kept_whole"] == {}
    assert not program.graph.find_nodes(op="call_module")


@pytest.mark.parametrize("build", [lambda: nn.BatchNorm2d(6, momentum=None), lambda: nn.SyncBatchNorm(6)])
def test_layers_of_torch_that_cannot_be_broken_open_are_called(build: Callable[[], nn.Module]) -> None:
    program = right_in_both_modes(lambda: Around(build()), IMAGES)
    assert "something else in the other mode" in program.meta["kept_whole"]["inner"]


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1),
    ],
)
def test_attention_of_torch_asks_for_its_mode_to_choose_a_kernel(build: Callable[[], nn.Module]) -> None:
    for training in (False, True):
        model = Around(build()).train(training)
        program = capture(model, (SEQUENCES,), level="function")
        torch.manual_seed(0)
        found = program(SEQUENCES)
        torch.manual_seed(0)
        torch.testing.assert_close(found, model(SEQUENCES))
        with pytest.raises(GuardError, match=r"self\.training"):
            program.train(not training)(SEQUENCES)


def test_the_code_of_a_norm_can_be_read() -> None:
    model = nn.Sequential(nn.BatchNorm2d(6)).eval()
    program = capture(model, (IMAGES,), level="function")
    assert "add_if(_0_training, _0_num_batches_tracked, 1)" in program.code
    assert "training = _0_training, momentum = 0.1" in program.code


def test_counting_is_never_dead() -> None:
    program = capture(nn.Sequential(nn.BatchNorm2d(6)).eval(), (IMAGES,), level="function")
    program.graph.eliminate_dead_code()
    assert len(program.graph.find_nodes(op="call_function", target=add_if)) == 1
    program.train()(IMAGES)
    assert program.state_dict()["0.num_batches_tracked"] == 1


@pytest.mark.zoo
def test_resnet50_is_trained_and_evaluated_by_one_program() -> None:
    x = torch.randn(2, 3, 64, 64)
    program = right_in_both_modes(lambda: torchgraft.zoo.create("resnet50"), x)
    assert mode_guards(program) == []


class OwnNorm(nn.BatchNorm2d):
    """A norm with a forward of its own, as libraries have them, that spells out what torch's does."""

    def __init__(self, features: int, **options: Any) -> None:
        super().__init__(features, **options)
        self.activation = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(x)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if self.momentum is None:
                    factor = 1.0 / float(self.num_batches_tracked)
                else:
                    factor = self.momentum
        if self.training:
            by_batch = True
        else:
            by_batch = self.running_mean is None and self.running_var is None
        mean = self.running_mean if not self.training or self.track_running_stats else None
        variance = self.running_var if not self.training or self.track_running_stats else None
        return self.activation(F.batch_norm(x, mean, variance, self.weight, self.bias, by_batch, factor, self.eps))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}, {"affine": False}])
def test_a_norm_with_a_forward_of_its_own(options: dict[str, Any], level: str) -> None:
    program = right_in_both_modes(lambda: Around(OwnNorm(6, **options)), IMAGES, level)
    assert mode_guards(program) == [] and program.meta["kept_whole"] == {}


def test_what_cannot_be_done_on_both_sides_is_a_guard() -> None:
    for training in (False, True):
        model = Around(OwnNorm(6, momentum=None)).train(training)
        theirs, program = copy.deepcopy(model), capture(model, (IMAGES,))
        torch.testing.assert_close(program(IMAGES), theirs(IMAGES))
        with pytest.raises(GuardError):
            program.train(not training)(IMAGES)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.rate, self.is_noted = 0.3, True
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("evaluated", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, count = 1.0, 0
        if self.training:
            """Noted."""
            rate = self.rate
            if self.is_noted:
                self.seen += 1
                scale = 2.0
        elif self.is_noted is False:
            rate = 0.7
        else:
            rate = 0.0
            self.evaluated.add_(0.5)
        if not self.training:
            count = 3
        return F.dropout(self.linear(x), rate, not not self.training) * scale + count + self.seen


class InOrder(nn.Module):
    """Both names are read in the branch that gives them values, and values are exchanged."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = 2.0, 3.0, 5.0
        if self.training:
            c = a
            a = b
            b = c
        return x * a + b - c


class Questions(nn.Module):
    def __init__(self, track: Any = True, rate: float = 0.5) -> None:
        super().__init__()
        self.track, self.rate = track, rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        live = self.training and self.rate > 0
        other = self.training or not self.track
        neither = not (self.training or self.track is None)
        y = F.dropout(x, 0.5, live) + F.dropout(x, 0.25, training=other)
        y = y * (2.0 if self.training and self.rate else 3.0) + (1 if neither else 7)
        return F.dropout(y, 0.1, self.training and live)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "build",
    [
        Counting,
        InOrder,
        Questions,
        lambda: Questions(False),
        lambda: Questions(None),
        lambda: Questions(rate=0.0),
        lambda: Around(Counting()),
    ],
)
def test_values_and_counters(build: Callable[[], nn.Module], level: str) -> None:
    program = right_in_both_modes(build, ROWS, level)
    assert mode_guards(program) == [] and program.meta["kept_whole"] == {}


class Computed(nn.Module):
    """`total` is computed, so adding to it is no addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("halved", torch.ones(6))

    @property
    def total(self) -> torch.Tensor:
        return self.halved * 2

    @total.setter
    def total(self, value: torch.Tensor) -> None:
        self.halved.copy_(value / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.total += 2
        return x + self.halved


class Unbound(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            noise = 0.5
        return x * noise if self.training else x


class Everything(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            scale = 2
        else:
            scale = 3
        return x * scale * len(locals())


class Caught(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            if self.training:
                scale = 2.0
            else:
                scale = 3.0 if self.missing else 4.0  # type: ignore[truthy-function]
        except AttributeError:
            scale = 5.0
        return x * scale


class Returning(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return x * 2


class OfTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_on", torch.tensor(True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0
        if self.training:
            if self.is_on:
                scale = 2.0
        return x * scale


@pytest.mark.parametrize("build", [Computed, Unbound, Everything, Caught, Returning, OfTensor])
def test_other_statements_are_guards(build: Callable[[], nn.Module]) -> None:
    for training in (False, True):
        model = build().train(training)
        theirs, program = copy.deepcopy(model), capture(model, (ROWS,))
        assert torch.equal(program(ROWS), theirs(ROWS))
        assert program.meta["kept_whole"] == {}
        with pytest.raises(GuardError, match=r"self\.training"):
            program.train(not training)(ROWS)


class DropPath(nn.Module):
    """Drops whole rows, as stochastic depth does: it has nothing but a branch on the mode."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        return x * x.new_empty((x.shape[0], 1)).bernoulli_(1 - self.rate) / (1 - self.rate)


@pytest.mark.parametrize("level", LEVELS)
def test_a_module_that_is_little_more_than_its_branch_is_called(level: str) -> None:
    program = right_in_both_modes(lambda: nn.Sequential(nn.Linear(6, 6), DropPath(0.4)), ROWS, level)
    assert [node.target for node in program.graph.find_nodes(op="call_module")][-1] == "1"
    assert program.meta["kept_whole"]["1"].startswith("it does something else in the other mode")
    unneeded = capture(nn.Sequential(nn.Linear(6, 6), DropPath(0.0)).eval(), (ROWS,))
    assert unneeded.meta["kept_whole"] == {}


def test_methods_are_left_as_they_were() -> None:
    before = nn.modules.batchnorm._BatchNorm.forward.__code__, OwnNorm.forward.__code__
    capture(Around(OwnNorm(6)), (IMAGES,), level="function")
    capture(nn.Sequential(nn.BatchNorm2d(6)), (IMAGES,), level="function")
    assert before == (nn.modules.batchnorm._BatchNorm.forward.__code__, OwnNorm.forward.__code__)
