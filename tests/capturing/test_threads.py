"""Tracing in several threads at once, beside eager models and torch.fx; and that no patch outlives the trace that needed it.
That the model itself is left alone is tested in `test_model_untouched.py`.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.nn import functional

import torchgraft
from torchgraft import zoo
from torchgraft.capturing.patching.active import active


@torchgraft.wrap
def leaf(value, amount):
    return value * amount if value.sum() > 0 else value


def with_leaf(x, y):
    return leaf(x, 2) + leaf(y, amount=3)


def with_math(x):
    scale = math.sqrt(x.shape[0]) + math.floor(math.pi)
    return x * scale


def with_chance(x):
    noise = torch.rand(3) * random.random()
    return functional.dropout(x + noise, 0.5) + torch.zeros(x.shape[0], 3)


def with_regions(x):
    with torch.no_grad():
        y = x * 2
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        z = y @ y.t()
    z[0] = 5
    return z


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True))
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("memory", torch.ones(3))

    def forward(self, x):
        self.memory.mul_(0.5).add_(x.mean(0))
        x = self.layers(x) * self.scale
        return functional.dropout(x, 0.5, self.training) + self.memory.sigmoid()


def subjects() -> list[Any]:
    return [
        with_leaf, with_math, with_chance, with_regions, Mixed(), zoo.create("mlp"), zoo.create("resnet18"),
        zoo.create("transformer"), zoo.create("deep_recommender"), zoo.create("learning_to_paint"),
    ]  # fmt: skip


_CONTEXTS = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode, torch.autocast)


def patch_points() -> dict[str, Any]:
    """Everything that a trace may replace, as it is now."""
    places = {"Module": vars(nn.Module), "Function": vars(torch.autograd.Function), "math": vars(math)}
    places |= {"random": vars(random), "torch": vars(torch), "torch.random": vars(torch.random), "here": globals()}
    places |= {context.__name__: vars(context) for context in _CONTEXTS}
    points = {f"{place}.{name}": value for place, table in places.items() for name, value in table.items()}
    for name in ("__call__", "__getattr__", "__setattr__", "__delattr__"):
        points[f"code of {name}"] = getattr(nn.Module, name).__code__
    return points


def assert_no_patch_left(before: dict[str, Any]) -> None:
    after = patch_points()
    changed = [name for name in {**before, **after} if before.get(name) is not after.get(name)]
    assert not changed, f"still replaced: {changed}"
    assert "training" not in vars(nn.Module)
    assert active.tracer is None
    assert gc.isenabled()
    assert torch._C._len_torch_function_stack() == 0


@pytest.fixture(autouse=True)
def nothing_is_left():
    torchgraft.symbolic_trace(with_math)  # whatever the first trace sets up for good is there now
    before = patch_points()
    yield
    assert_no_patch_left(before)


def text_of(module: torchgraft.GraphModule) -> tuple[str, str, list[str]]:
    lines = [str(node.stack_trace) for node in module.graph.nodes if node.op != "output"]
    return module.code, str(module.graph), lines


def together(jobs: list[Callable[[], Any]], others: list[Callable[[], Any]] = ()) -> list[Any]:
    """Run every job in a thread of its own, all starting at once, and `others` again and again until they are done."""
    start, done = threading.Barrier(len(jobs) + len(others)), threading.Event()

    def run(job: Callable[[], Any]) -> Any:
        start.wait()
        return job()

    def repeat(job: Callable[[], Any]) -> int:
        start.wait()
        count = 0
        while not done.is_set() or count == 0:
            job()
            count += 1
        return count

    with ThreadPoolExecutor(len(jobs) + len(others)) as pool:
        background = [pool.submit(repeat, job) for job in others]
        running = [pool.submit(run, job) for job in jobs]
        try:
            results = [future.result(timeout=300) for future in running]
        finally:
            done.set()
        assert all(future.result(timeout=300) > 0 for future in background)
    return results


def test_eight_threads_trace_while_eager_models_run():
    models = subjects()
    alone = [text_of(torchgraft.symbolic_trace(model)) for model in models]
    others = [eager_model_in_training(), eager_model_in_evaluation(), eager_functions]

    def trace_all(offset: int) -> list[Any]:
        order = [(index + offset) % len(models) for index in range(len(models))]
        return [(index, text_of(torchgraft.symbolic_trace(models[index]))) for _ in range(2) for index in order]

    for results in together([lambda offset=offset: trace_all(offset) for offset in range(8)], others):
        for index, text in results:
            assert text == alone[index], f"subject {index} was traced differently"


def eager_model_in_training() -> Callable[[], None]:
    model = Mixed()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, generator=generator)
    layers = copy.deepcopy(model.layers)
    expected = layers(x).detach()

    def run() -> None:
        again = copy.deepcopy(model)
        assert again.training and again.layers[1].training
        torch.testing.assert_close(again.layers(x).detach(), expected, rtol=0, atol=0)
        again.eval()
        again.counter = again.memory.sum().item()
        del again.counter
        again.train()(x).sum().backward()
        assert all(parameter.grad is not None for parameter in again.parameters())

    return run


def eager_model_in_evaluation() -> Callable[[], None]:
    model = zoo.create("mlp").eval()
    inputs = zoo.example_inputs("mlp")
    expected = model(*inputs).detach()

    def run() -> None:
        with torch.no_grad():
            found = model(*inputs)
        assert not found.requires_grad
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    return run


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def eager_functions() -> None:
    assert math.sqrt(16) == 4.0 and math.floor(2.5) == 2
    assert torch.zeros(2, 2).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert 0 <= random.random() < 1
    assert isinstance(torch.rand(2), torch.Tensor)
    assert leaf(torch.ones(2), 3).tolist() == [3.0, 3.0]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is torch.bfloat16
    assert Twice.apply(torch.ones(1)).item() == 2.0


# ---- a trace that stands still while another thread does something ----


entered, go_on = threading.Event(), threading.Event()


class Waiting(nn.Module):
    """Its forward stops in the middle until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        y = self.first(x) * math.sqrt(x.shape[0])
        entered.set()
        assert go_on.wait(30)
        with torch.no_grad():
            z = torch.rand(3) + random.random()
        return self.second(y) * math.sqrt(y.shape[0]) + z


def during_a_trace(action: Callable[[], Any]) -> tuple[torchgraft.GraphModule, Any]:
    """Run `action` in this thread while another one is in the middle of a trace."""
    entered.clear()
    go_on.clear()
    with ThreadPoolExecutor(1) as pool:
        tracing = pool.submit(torchgraft.symbolic_trace, Waiting())
        try:
            assert entered.wait(30)
            result = action()
        finally:
            go_on.set()
        return tracing.result(30), result


def waiting_alone() -> str:
    go_on.set()
    return torchgraft.symbolic_trace(Waiting()).code


def test_a_trace_within_the_time_of_another():
    module, inner = during_a_trace(lambda: torchgraft.symbolic_trace(Mixed()))
    assert module.code == waiting_alone()
    assert inner.code == torchgraft.symbolic_trace(Mixed()).code


def test_a_failing_trace_within_the_time_of_another():
    def fail() -> None:
        with pytest.raises(torchgraft.TraceError):
            torchgraft.symbolic_trace(lambda x: math.sqrt(3) if x.sum() > 0 else x)

    module, _ = during_a_trace(fail)
    assert module.code == waiting_alone()


def test_torch_fx_within_the_time_of_a_trace():
    expected = torch.fx.symbolic_trace(Mixed()).code
    module, found = during_a_trace(lambda: torch.fx.symbolic_trace(Mixed()).code)
    assert found == expected
    assert module.code == waiting_alone()


def test_a_trace_within_the_time_of_torch_fx():
    """torch.fx patches for the whole process, so only what it does not touch can be asked for: afterwards all is as before."""
    expected = torchgraft.symbolic_trace(with_chance).code
    found = []

    def forward(x):
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(lambda: torchgraft.symbolic_trace(with_chance).code).result(30))
        return torch.relu(x) * math.sqrt(x.shape[0])

    traced = torch.fx.symbolic_trace(forward)
    assert "math_sqrt" in traced.code
    assert found == [expected]


@pytest.mark.parametrize("name", ["call", "training", "eval", "deepcopy", "script"])
def test_script_modules_work_while_another_thread_traces(name):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Dropout()))
    actions = {
        "training": lambda: scripted.training,
        "eval": lambda: scripted.eval().training,
        "deepcopy": lambda: copy.deepcopy(scripted).training,
        "call": lambda: scripted(torch.ones(2, 3)).shape,
        "script": lambda: torch.jit.script(nn.Linear(3, 3)).training,
    }
    _, found = during_a_trace(actions[name])
    assert found == actions[name]()


def test_a_module_that_was_never_initialised_stays_without_attributes():
    class Bare(nn.Module):
        def __init__(self) -> None:
            pass

    bare = Bare()
    _, found = during_a_trace(lambda: getattr(bare, "training", "absent"))
    assert found == getattr(bare, "training", "absent")


def test_eager_code_in_another_thread_sees_plain_values():
    model = Mixed()

    def look() -> tuple[Any, ...]:
        model.note = 3
        model.eval()
        seen = model.training, model.note, type(model.scale), torch.is_grad_enabled(), model.layers[1].training
        model.train()
        return seen

    assert during_a_trace(look)[1] == (False, 3, nn.Parameter, True, False)


# ---- failures ----


class Failing(nn.Module):
    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.error = error

    def forward(self, x):
        x = self.linear(x) * math.sqrt(x.shape[0])
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            if self.error is not None:
                raise self.error
            return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    "error",
    [None, KeyboardInterrupt(), SystemExit(1), ValueError("mine"), GeneratorExit()],
    ids=lambda error: type(error).__name__,
)
def test_a_failing_trace_leaves_no_patch(error):
    model = Failing(error)
    before = patch_points()
    with pytest.raises(torchgraft.TraceError if error is None else type(error)):
        torchgraft.symbolic_trace(model)
    assert_no_patch_left(before)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert "math_sqrt" in torchgraft.symbolic_trace(lambda x: x * math.sqrt(x.shape[0])).code


def test_a_failing_tracer_leaves_no_patch():
    class Refusing(torchgraft.Tracer):
        def call_module(self, m, forward, args, kwargs):
            raise KeyError("no modules today")

    before = patch_points()
    with pytest.raises(KeyError):
        Refusing().trace(Mixed())
    assert_no_patch_left(before)


@pytest.mark.parametrize("subject", [3, torch.relu, "model"], ids=["number", "built in", "text"])
def test_a_trace_that_cannot_begin_leaves_no_patch(subject):
    before = patch_points()
    with pytest.raises(torchgraft.TraceError):
        torchgraft.symbolic_trace(subject)
    assert_no_patch_left(before)


# ---- traces within traces ----


class Outer(nn.Module):
    """Traces something else in the middle of its own forward."""

    def __init__(self, inner: Any, note: Callable[[str], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.inner = [inner]
        self.note = note
        self.register_buffer("memory", torch.ones(3))

    def forward(self, x):
        y = self.linear(x) + self.memory
        self_made = torchgraft.symbolic_trace(self.inner[0])
        assert self_made.graph is not None
        self.note(self_made.code)
        return torch.relu(y) * math.sqrt(y.shape[0])


@pytest.mark.parametrize(
    "inner",
    [
        with_leaf,
        with_math,
        zoo.create("mlp"),
        with_chance,
        with_regions,
        Mixed(),
    ],
    ids=lambda item: getattr(item, "__name__", type(item).__name__),
)
def test_a_trace_within_a_trace(inner):
    alone = torchgraft.symbolic_trace(inner).code
    codes: list[str] = []
    outer = torchgraft.symbolic_trace(Outer(inner, codes.append))
    assert codes == [alone]
    assert [node.name for node in outer.graph.nodes] == [
        "x",
        "linear",
        "memory",
        "add",
        "relu",
        "getattr_1",
        "getitem",
        "sqrt",
        "mul",
        "output",
    ]


def test_a_module_traced_inside_can_be_called_there():
    def outer(x):
        return torchgraft.symbolic_trace(lambda y: y * 2 + 1).forward(torch.relu(x))

    module = torchgraft.symbolic_trace(outer)
    assert [node.name for node in module.graph.nodes] == ["x", "relu", "mul", "add", "output"]


def test_a_trace_in_a_hook():
    module = torchgraft.symbolic_trace(Mixed())
    found = []
    getattr(module.layers, "0").register_forward_hook(
        lambda *details: found.append(torchgraft.symbolic_trace(with_math).code)
    )
    module(torch.ones(2, 3))
    assert found == [torchgraft.symbolic_trace(with_math).code]


def test_torch_fx_within_a_trace():
    inner = nn.Sequential(nn.ReLU(), nn.Linear(3, 3))
    expected = torch.fx.symbolic_trace(inner).code
    found = []

    def outer(x):
        found.append(torch.fx.symbolic_trace(inner).code)
        return torch.relu(x)

    module = torchgraft.symbolic_trace(outer)
    assert found == [expected]
    assert [node.name for node in module.graph.nodes] == ["x", "relu", "output"]


def test_a_model_made_while_tracing_leaves_the_random_state_alone():
    def forward(x):
        return nn.Linear(3, 3).weight.sum() + x

    before = torch.get_rng_state()
    try:
        torchgraft.symbolic_trace(forward)
    except torchgraft.TraceError:
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_one_thread_watches_while_another_traces_symbolically() -> None:
    inside, tracing = threading.Event(), threading.Event()

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("scale", torch.full((2,), 3.0))

        def forward(self, x: Any) -> Any:
            inside.set()
            tracing.wait(10)
            return self.layer(x) * self.scale

    class Traced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            tracing.set()
            watched.result(10)
            return self.layer(x)

    with ThreadPoolExecutor(1) as pool:
        watched = pool.submit(torchgraft.capture, Watched(), torch.randn(1, 2))
        inside.wait(10)
        traced = torchgraft.symbolic_trace(Traced())
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
    targets = [node.target for node in watched.result().graph.nodes]
    assert "layer" in targets and "scale" in targets, watched.result().explain()
