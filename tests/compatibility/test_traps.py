"""What torch.fx gets wrong while tracing, asked of torchgraft alone: contexts, randomness, writes, hooks, threads.

Traps of graphs and modules are in test_traps_of_graphs, programs torch.fx refuses in test_traps_of_programs.
"""

import random
import threading
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn

from .networks import NETWORKS


def assert_same_as_eager(traced: nn.Module, function: Callable, *arguments) -> None:
    torch.manual_seed(7)
    expected = function(*arguments)
    torch.manual_seed(7)
    answer = traced(*arguments)
    assert torch.equal(answer, expected)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(3),
        lambda: torch.randn(3),
        lambda: torch.randint(0, 9, (3,)),
        lambda: torch.randperm(3),
        lambda: torch.bernoulli(torch.full((3,), 0.5)),
        lambda: torch.empty(3).uniform_(),
        lambda: nn.functional.dropout(torch.ones(3), 0.5),
    ],
    ids=["rand", "randn", "randint", "randperm", "bernoulli", "uniform_", "dropout"],
)
def test_random_draw_without_a_traced_input_is_recorded(graft: ModuleType, draw: Callable) -> None:
    def forward(x):
        return x + draw()

    state = torch.get_rng_state()
    traced = graft.symbolic_trace(forward)
    assert torch.equal(torch.get_rng_state(), state), "tracing draws nothing"
    x = torch.zeros(3)
    assert_same_as_eager(traced, forward, x)
    draws = {tuple(traced(x).tolist()) for _ in range(20)}
    assert len(draws) > 1


def seeded(x):
    torch.manual_seed(3)
    return x + torch.rand(3)


def forked(x):
    with torch.random.fork_rng():
        y = torch.rand(3)
    return x + y + torch.rand(3)


def python_random(x):
    return x + random.random()


@pytest.mark.parametrize("function", [seeded, forked, python_random], ids=lambda function: function.__name__)
def test_other_uses_of_random_state_are_recorded_or_refused(graft: ModuleType, function: Callable) -> None:
    try:
        traced = graft.symbolic_trace(function)
    except graft.TraceError:
        return
    x = torch.zeros(3)
    for _ in range(2):
        torch.manual_seed(7), random.seed(7)
        expected = function(x), torch.rand(1)
        torch.manual_seed(7), random.seed(7)
        answer = traced(x), torch.rand(1)
        assert torch.equal(answer[0], expected[0])
        assert torch.equal(answer[1], expected[1]), "the random state afterwards is that of eager"


def test_no_grad_region_is_recorded(graft: ModuleType) -> None:
    def forward(x):
        with torch.no_grad():
            y = x * 2
        return y, x * 3

    frozen, free = graft.symbolic_trace(forward)(torch.ones(1, requires_grad=True))
    assert not frozen.requires_grad
    assert free.requires_grad


def test_no_grad_as_a_decorator_is_recorded(graft: ModuleType) -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        @torch.no_grad()
        def forward(self, x):
            return self.linear(x)

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = Teacher()

        def forward(self, x):
            return self.teacher(x), x * 2

    traced = graft.symbolic_trace(Student())
    frozen, free = traced(torch.ones(1, 2, requires_grad=True))
    assert not frozen.requires_grad
    assert free.requires_grad


def test_enable_grad_region_is_recorded(graft: ModuleType) -> None:
    def forward(x):
        with torch.enable_grad():
            y = x * 2
        return y, x * 3

    traced = graft.symbolic_trace(forward)
    with torch.no_grad():
        free, frozen = traced(torch.ones(1, requires_grad=True))
    assert free.requires_grad
    assert not frozen.requires_grad


def test_inference_mode_region_is_recorded(graft: ModuleType) -> None:
    def forward(x):
        with torch.inference_mode():
            y = x * 2
        return y

    assert graft.symbolic_trace(forward)(torch.ones(1)).is_inference()


def test_autocast_region_is_recorded(graft: ModuleType) -> None:
    def forward(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x
        return y, x @ x

    low, full = graft.symbolic_trace(forward)(torch.eye(2))
    assert low.dtype is torch.bfloat16
    assert full.dtype is torch.float32


def test_grad_mode_is_restored_when_a_region_fails(graft: ModuleType) -> None:
    def forward(x):
        with torch.no_grad():
            return torch.cat([x, x], dim=9)

    traced = graft.symbolic_trace(forward)
    with pytest.raises(IndexError):
        traced(torch.ones(1))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "store",
    [
        lambda y: y.__setitem__(0, 5),
        lambda y: y.__setitem__(slice(1, None), 7),
        lambda y: y.__setitem__(y > 0, 0),
        lambda y: y.__setitem__(..., y * 2),
    ],
    ids=["index", "slice", "mask", "ellipsis"],
)
def test_store_into_a_traced_value_is_recorded(graft: ModuleType, store: Callable) -> None:
    def forward(x):
        y = x.clone()
        store(y)
        return y

    assert_same_as_eager(graft.symbolic_trace(forward), forward, torch.tensor([-1.0, 2.0, 3.0]))


def test_store_to_an_attribute_of_a_traced_value_is_recorded_or_refused(graft: ModuleType) -> None:
    def forward(x):
        y = x * 1
        y.data = torch.zeros(2)
        return y

    try:
        traced = graft.symbolic_trace(forward)
    except graft.TraceError:
        return
    assert_same_as_eager(traced, forward, torch.ones(2))


def test_plain_store_statement_is_recorded(graft: ModuleType) -> None:
    def forward(x):
        y = x * 1
        y[0] = 5
        return y

    traced = graft.symbolic_trace(forward)
    traced.graph.eliminate_dead_code()
    assert_same_as_eager(traced, forward, torch.zeros(2))


def test_augmented_assignment_to_an_input_changes_the_input(graft: ModuleType) -> None:
    def forward(x):
        y = x
        x += 1
        return x + y

    given, expected = torch.zeros(2), torch.zeros(2)
    assert torch.equal(graft.symbolic_trace(forward)(given), forward(expected))
    assert torch.equal(given, expected)


def test_augmented_assignment_to_a_view_changes_its_base(graft: ModuleType) -> None:
    def forward(x):
        base = x * 1
        view = base.view(-1)
        view += 1
        first = base[0]
        first *= 5
        return base

    assert_same_as_eager(graft.symbolic_trace(forward), forward, torch.zeros(2, 2))


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sign(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 10


def test_custom_autograd_function_keeps_its_backward(graft: ModuleType) -> None:
    traced = graft.symbolic_trace(lambda x: Straight.apply(x) * 2)
    x = torch.tensor([-3.0, 3.0], requires_grad=True)
    answer = traced(x)
    assert answer.tolist() == [-2.0, 2.0]
    answer.sum().backward()
    assert x.grad.tolist() == [20.0, 20.0]


class Doubling(nn.Module):
    def forward(self, x):
        return x * 2


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubling()

    def forward(self, x):
        return self.inner(x) + 1


def runs_or_refuses(graft: ModuleType, model: nn.Module) -> None:
    x = torch.ones(2)
    expected = model(x)
    try:
        traced = graft.symbolic_trace(model)
    except Exception as error:
        assert "hook" in str(error).lower()
    else:
        assert torch.equal(traced(x), expected)


@pytest.mark.parametrize("place", ["inner", ""], ids=["submodule", "root"])
def test_forward_hooks_run_or_the_trace_refuses(graft: ModuleType, place: str) -> None:
    model = Holder()
    model.get_submodule(place).register_forward_hook(lambda module, args, output: output * 100)
    runs_or_refuses(graft, model)


@pytest.mark.parametrize("place", ["inner", ""], ids=["submodule", "root"])
def test_forward_pre_hooks_run_or_the_trace_refuses(graft: ModuleType, place: str) -> None:
    model = Holder()
    model.get_submodule(place).register_forward_pre_hook(lambda module, args: (args[0] + 5,))
    runs_or_refuses(graft, model)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_forward_that_writes_a_number_is_refused(graft: ModuleType) -> None:
    model = Counting()
    with pytest.raises(graft.TraceError, match="calls"):
        graft.symbolic_trace(model)
    assert model.calls == 0


def test_forward_that_stores_a_traced_value_is_refused(graft: ModuleType) -> None:
    class Caching(nn.Module):
        def forward(self, x):
            self.cache = x
            return x

    model = Caching()
    with pytest.raises(graft.TraceError, match="cache"):
        graft.symbolic_trace(model)
    assert not hasattr(model, "cache")


def test_write_to_a_buffer_is_recorded_or_refused_and_nothing_is_written_while_tracing(graft: ModuleType) -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(2))

        def forward(self, x):
            self.mean.mul_(0.5).add_(x)
            return x + self.mean

    model, eager = Running(), Running()
    try:
        traced = graft.symbolic_trace(model)
    except graft.TraceError:
        traced = None
    assert torch.equal(model.mean, torch.ones(2))
    if traced is not None:
        x = torch.full((2,), 3.0)
        for _ in range(2):
            assert torch.equal(traced(x), eager(x))
        assert torch.equal(traced.mean, eager.mean)


def test_model_is_left_exactly_as_it_was(graft: ModuleType) -> None:
    constant = torch.ones(2)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.drop = nn.Dropout()
            self.drop.eval()
            self.note = ["kept"]

        def forward(self, x):
            return self.drop(self.linear(x)) + constant + torch.rand(2)

    model = Mixed()
    attributes = dict(vars(model))
    parameters = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    traced = graft.symbolic_trace(model)
    assert vars(model) == attributes
    assert all(torch.equal(value, parameters[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert traced(torch.ones(1, 2)).shape == (1, 2)


def test_model_is_left_as_it_was_when_the_trace_fails(graft: ModuleType) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))
            self.steps = 0

        def forward(self, x):
            x = x + torch.rand(1) + torch.ones(1)
            if x.sum() > 0:
                return x
            return -x

    model = Failing()
    attributes = dict(vars(model))
    random_state = torch.get_rng_state()
    with pytest.raises(graft.TraceError):
        graft.symbolic_trace(model)
    assert vars(model) == attributes
    assert torch.equal(model.seen, torch.zeros(1))
    assert torch.equal(torch.get_rng_state(), random_state)


def test_eight_threads_trace_at_once_while_others_run_eager(graft: ModuleType) -> None:
    expected = {name: graft.symbolic_trace(make()).code for name, (make, _) in NETWORKS.items()}
    failures: list[object] = []
    finished = threading.Event()

    def trace(name: str) -> None:
        try:
            for _ in range(5):
                code = graft.symbolic_trace(NETWORKS[name][0]()).code
                if code != expected[name]:
                    failures.append(code)
        except Exception as error:
            failures.append(error)

    def run_eager() -> None:
        make, inputs = NETWORKS["transformer"]
        model, arguments = make().eval(), inputs()
        answer = model(*arguments)
        try:
            while not finished.is_set():
                again = model(*arguments)
                if type(again) is not torch.Tensor or not torch.equal(again, answer):
                    failures.append(again)
        except Exception as error:
            failures.append(error)

    names = list(NETWORKS)
    tracers = [threading.Thread(target=trace, args=(names[i % len(names)],)) for i in range(8)]
    runner = threading.Thread(target=run_eager)
    runner.start()
    for thread in tracers:
        thread.start()
    for thread in tracers:
        thread.join()
    finished.set()
    runner.join()
    assert failures == []
