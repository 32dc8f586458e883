"""`lower` with the native backend and with backends that do everything wrong: crash, hang, lie, or take half."""

from __future__ import annotations

import copy
import pickle
import threading
import time

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft import Backend, BackendError


def _agree(found, expected):
    return torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Net(nn.Module):
    """Convolutions with batch norms, a residual, an activation, and a view at the end."""

    def __init__(self, activation=nn.ReLU) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.act, self.drop = activation(), nn.Dropout(0.5)
        self.head = nn.Linear(8 * 36, 5)
        for norm in (self.norm1, self.norm2):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x):
        x = self.act(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(x))
        y += x
        y = self.act(y)
        return self.head(self.drop(y.view(y.shape[0], -1)))


def _net(**options):
    torch.manual_seed(0)
    return Net(**options).eval()


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
ACTIVATIONS = [
    *(
        nn.ReLU,
        nn.Sigmoid,
        nn.Tanh,
        nn.SiLU,
        nn.Hardswish,
        nn.Hardsigmoid,
        nn.ReLU6,
        nn.GELU,
        nn.LeakyReLU,
        nn.Hardtanh,
    ),
    *(
        nn.ELU,
        nn.Identity,
        lambda: nn.GELU(approximate="tanh"),
        lambda: nn.LeakyReLU(0.3),
        lambda: nn.ReLU(inplace=True),
    ),
]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_native_computes_what_the_model_computes(activation):
    model = _net(activation=activation)
    fast = torchgraft.lower(model, X, backend="native")
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3, 6, 6)
        _agree(fast(x), model(x))
    assert len(fast.variants()) == 1
    assert "1 part" in fast.explain()


def test_native_has_no_norms_dropouts_or_modules_left():
    fast = torchgraft.lower(_net(), X, backend="native")
    code = next(iter(fast._variants[0].compiled.found.values())).module.code
    assert "norm" not in code and "dropout" not in code and "self." not in code
    assert code.count("_convolution_pointwise") + code.count("convolution_and_sum(") >= 2


@pytest.mark.parametrize(
    "model",
    [
        nn.Conv2d(4, 4, 3, groups=4, stride=2),
        nn.Conv2d(4, 6, 3, padding="same", dilation=2),
        nn.Conv2d(4, 6, (1, 3), padding=(0, 1), bias=False, padding_mode="circular"),
        nn.ConvTranspose2d(4, 6, 3, stride=2),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sigmoid(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.Softmax(1)),
    ],
)
def test_native_convolutions(model):
    model = model.eval()
    x = torch.randn(2, 4, 8, 8)
    fast = torchgraft.lower(model, x, backend="native")
    for batch in (1, 3):
        x = torch.randn(batch, 4, 8, 8)
        _agree(fast(x), model(x))
        assert fast(x).stride() == model(x).stride()


def test_a_sum_that_broadcasts_at_other_sizes():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)

        def forward(self, x, y):
            return (self.conv(x) + y).relu()

    model = Sum().eval()
    fast = torchgraft.lower(model, (torch.randn(1, 2, 4, 4), torch.randn(1, 2, 4, 4)), backend="native")
    x, y = torch.randn(3, 2, 4, 4), torch.randn(1, 2, 4, 4)
    _agree(fast(x, y), model(x, y))
    _agree(fast(y, x), model(y, x))


def test_other_ranks_dtypes_and_devices_are_new_variants_or_errors():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    fast = torchgraft.lower(model, torch.randn(2, 4), backend="native")
    _agree(fast(torch.ones(2, 3, 4)), model(torch.ones(2, 3, 4)))
    assert len(fast.variants()) == 2
    with pytest.raises(RuntimeError, match="dtype"):
        fast(torch.ones(2, 4, dtype=torch.float64))
    fast = torchgraft.lower(model, torch.randn(2, 4), backend="native", on_guard="raise")
    with pytest.raises(
        torchgraft.GuardError, match="lowered for 'input' of torch.float32 with 2 dimensions on cpu, and got"
    ):
        fast(torch.ones(2, 3, 4))
    with pytest.raises(torchgraft.GuardError, match="on meta"):
        fast(torch.ones(2, 4, device="meta"))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.init.zeros_(model.conv1.weight),
        lambda model: model.head.weight.mul_(2),
        lambda model: setattr(model.head, "weight", nn.Parameter(torch.zeros(5, 288))),
        lambda model: setattr(model.head.weight, "data", torch.zeros(5, 288)),
        lambda model: model.load_state_dict(_net(activation=nn.Tanh).state_dict()),
        lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True),
        lambda model: model.norm1.running_mean.add_(1),
        lambda model: setattr(model, "head", nn.Linear(288, 5)),
        lambda model: model.double(),
        lambda model: model.norm1.train(),
    ],
)
def test_changed_weights_are_refused_until_refresh(change):
    model = _net()
    fast = torchgraft.lower(model, X, backend="native")
    fast(X)
    with torch.no_grad():
        change(model)
    with pytest.raises(BackendError, match=r"was lowered with other weights: .*\n  call \.refresh\(\)"):
        fast(X)
    fast.refresh()
    x = X.to(model.conv1.weight.dtype)
    copied = copy.deepcopy(model)  # a norm in training mode changes its statistics with each call
    _agree(fast(x), copied(x))


def test_training_mode_autocast_and_gradients():
    model = _net()
    fast = torchgraft.lower(model, X, backend="native")
    with pytest.raises(torchgraft.InputError, match="computes no gradients"):
        fast(X.clone().requires_grad_())
    assert not fast(X).requires_grad and torch.is_grad_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(X).dtype is torch.bfloat16
    fast.train()
    assert fast(X).requires_grad
    with pytest.raises(BackendError, match="training mode"):
        torchgraft.lower(model, X, backend="native")


def test_state_that_a_model_writes_is_written():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return self.layer(x) * self.count

    model = Counting().eval()
    fast = torchgraft.lower(model, torch.ones(2, 3), backend="native")
    count = float(model.count)
    for number in range(1, 4):
        _agree(fast(torch.ones(2, 3)), model.layer(torch.ones(2, 3)) * (count + number))
    assert float(model.count) == count + 3


def test_inputs_that_are_written_are_written():
    def model(x, caches):
        caches[0].index_copy_(0, torch.tensor([1]), x)
        return caches[0].sum(0) + caches[1]

    x, caches = torch.ones(1, 3), [torch.zeros(4, 3), torch.ones(3)]
    fast = torchgraft.lower(model, (x, caches), backend="native")
    caches = [torch.zeros(4, 3), torch.ones(3)]
    assert torch.equal(fast(x, caches), torch.full((3,), 2.0))
    assert torch.equal(caches[0][1], torch.ones(3))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision(precision):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    x = torch.randn(4, 8)
    fast = torchgraft.lower(model, x, backend="native", precision=precision)
    assert fast(x).dtype is torch.float32
    assert 0 < (fast(x) - model(x)).abs().max() < 0.05
    assert model[0].weight.dtype is torch.float32


def test_programs_raise_where_models_are_captured_again():
    program = torchgraft.capture(lambda x: x + 1 if x.sum() > 0 else x - 1, torch.ones(2))
    fast = torchgraft.lower(program, torch.ones(2), backend="native")
    with pytest.raises(torchgraft.GuardError, match="captured for"):
        fast(-torch.ones(2))
    fast = torchgraft.lower(lambda x: x + 1 if x.sum() > 0 else x - 1, torch.ones(2), backend="native")
    assert torch.equal(fast(-torch.ones(2)), -2 * torch.ones(2))
    assert len(fast.variants()) == 2


def _shifted(x):
    return torch.sin(x) if x.shape[0] > 1 else torch.cos(x)


torchgraft.wrap("_shifted")


def test_wrapped_functions_are_looked_into():
    fast = torchgraft.lower(lambda x: _shifted(x) + 1, torch.ones(2), backend=Toy())
    assert "2 of 2 calls" in fast.explain()
    assert "_shifted" in torchgraft.capture(lambda x: _shifted(x) + 1, torch.ones(2)).code


def test_levels_are_still_levels():
    program = torchgraft.capture(nn.Linear(2, 3), torch.ones(4, 2), level="function")
    lowered = torchgraft.lower(program, torch.ones(4, 2), level="aten")
    assert "aten.linear.default" in [str(node.target) for node in lowered.graph.nodes]


def test_copies_and_threads():
    model = _net()
    fast = torchgraft.lower(model, X, backend="native", max_variants=2)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        _agree(other(X), model(X))
    inputs = [torch.randn(batch, 3, 6, 6) for batch in (1, 2, 3)]
    expected, wrong = [model(x).detach() for x in inputs], []

    def work(start: int) -> None:
        for step in range(20):
            number = (start + step) % 3
            if not torch.allclose(fast(inputs[number]), expected[number], atol=1e-4):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precision": "fp8"}, "precision"),
        ({"layout": "nhwc"}, "layout"),
        ({"on_guard": "x"}, "on_guard"),
        ({"time_limit": 0}, "time_limit"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(ValueError, match=text):
        torchgraft.lower(nn.ReLU().eval(), torch.ones(2), backend="native", **options)


# ---- backends that do everything wrong ----


class Toy(Backend):
    """Runs parts as they are, but for what a test puts wrong."""

    name = "toy"

    def compile(self, part, inputs, options):
        return part.forward


def _body(x):
    x = torch.relu(x)
    x = torch.sin(x)
    x = torch.cos(x)
    return torch.tanh(x)


def test_a_part_is_compiled_for_each_size():
    seen = []

    class Sized(Toy):
        def compile(self, part, inputs, options):
            seen.append(inputs[0].shape[0])
            return part.forward

    fast = torchgraft.lower(_body, torch.ones(2), backend=Sized(), max_variants=2)
    for size in (2, 3, 2, 3, 4):
        assert torch.equal(fast(torch.ones(size)), _body(torch.ones(size)))
    assert seen == [2, 3, 4]
    assert len(fast._variants[0].compiled.found) == 2


@pytest.mark.parametrize("kind", ["crash", "wrong", "nan", "crash when run", "hang"])
def test_one_bad_operator_stays_in_python(kind):
    class Bad(Toy):
        def compile(self, part, inputs, options):
            has_sin = any(node.target is torch.sin for node in part.graph.nodes)
            if has_sin and kind == "crash":
                raise RuntimeError("no kernel for sin")
            if has_sin and kind == "hang":
                time.sleep(3)
            if not has_sin or kind == "hang":
                return part.forward
            if kind == "crash when run":
                return lambda *values: 1 / 0
            return lambda *values: part.forward(*values) * (float("nan") if kind == "nan" else 1.01)

    fast = torchgraft.lower(_body, torch.ones(2), backend=Bad(), time_limit=0.5 if kind == "hang" else None)
    assert torch.equal(fast(torch.ones(2)), _body(torch.ones(2)))
    text = fast.explain()
    assert "_body for float32[2] on toy: 3 of 4 calls, in 2 parts\n1 call stays in Python:\n  sin: the backend " in text
    words = {"crash": "no kernel for sin", "wrong": "something else", "nan": "something else", "hang": "time limit"}
    assert words.get(kind, "ZeroDivisionError") in text
    assert "test_lower.py:" in text


def test_a_backend_that_is_wrong_at_other_values_is_refused():
    class Lying(Toy):
        takes_all = True

        def compile(self, part, inputs, options):
            next(node for node in part.graph.nodes if node.target is torch.sin).target = torch.tan
            return part.forward

    with pytest.raises(BackendError) as caught:
        torchgraft.lower(lambda x: torch.sin(x.clamp(min=1)).cos(), torch.zeros(2), backend=Lying())
    text = str(caught.value)
    assert text.startswith(
        "the backend 'toy' does not compute what <lambda> computes\n  on example: output: 2 of 2 values differ"
    )
    assert "first difference: node 'sin'" in text


def test_a_backend_that_takes_all_and_fails():
    class Failing(Toy):
        takes_all = True

        def compile(self, part, inputs, options):
            raise KeyError("nothing")

    with pytest.raises(BackendError, match=r"the backend 'toy' fails on _body: KeyError"):
        torchgraft.lower(_body, torch.ones(2), backend=Failing())


def test_names_of_backends(monkeypatch):
    with pytest.raises(BackendError, match=r"no backend is called 'natve'; did you mean 'native'\?"):
        torchgraft.lower(_body, torch.ones(2), backend="natve")
    with pytest.raises(BackendError, match="give a subclass of Backend"):
        torchgraft.register_backend(int)

    class Native(Toy):
        name = "native"

    with pytest.raises(BackendError, match="already"):
        torchgraft.register_backend(Native)


def test_missing_packages_say_what_to_install(monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openvino" else found(name))
    with pytest.raises(BackendError, match=r"openvino is not installed\n  pip install 'torchgraft\[openvino\]'"):
        torchgraft.lower(_body, torch.ones(2), backend="openvino")


def test_random_numbers_and_kept_python_stay_in_python():
    class Numpy(nn.Module):
        def forward(self, x):
            return torch.from_numpy(x.numpy() * 2)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.numpy, self.layer = Numpy(), nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(self.numpy(torch.relu(x))) + torch.rand(3)

    model = Mixed().eval()
    fast = torchgraft.lower(model, torch.ones(2, 3), backend=Toy())
    torch.manual_seed(0)
    expected = model(torch.ones(2, 3))
    torch.manual_seed(0)
    _agree(fast(torch.ones(2, 3)), expected)
    assert "it is kept whole and runs the model's Python" in fast.explain()
    assert "rand: it draws random numbers" in fast.explain()


def test_native_computes_a_residual_block_in_one_call_for_each_convolution() -> None:
    """`x += y` becomes a sum and a cast, which must not keep the activation from the convolution."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            y = self.second(torch.relu(self.first(x)))
            y += x
            return torch.relu(y)

    model, x = Residual().eval(), torch.randn(2, 4, 8, 8)
    fast = torchgraft.lower(model, x, backend="native")
    module = next(iter(fast._variants[0].compiled.found.values())).module
    calls = [node.name for node in module.graph.nodes if node.op.startswith("call_")]
    assert calls == ["guard_1", "_convolution_pointwise_default", "convolution_and_sum", "contiguous"]
    for batch in (1, 2, 5):
        x = torch.randn(batch, 4, 8, 8)
        torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)


class Functional(Toy):
    """Never writes what it is given, like the backends that convert."""

    def supports(self, node):
        return "no kernel for argsort" if node.target == "argsort" else True

    def compile(self, part, inputs, options):
        return lambda *values: part.forward(*[torch.clone(value) for value in values])


def test_a_write_stays_where_its_memory_was_made():
    def inverse(x):
        places = torch.empty_like(x, dtype=torch.long).fill_(-1) * 1
        order = (x + places).argsort()
        places[order] = torch.arange(len(x))
        return places.relu() + 1

    for size in (4, 7):
        x = torch.randn(size)
        fast = torchgraft.lower(inverse, torch.randn(size), backend=Functional(), verify=False)
        assert torch.equal(fast(x), inverse(x))
        assert "another part has made" in fast.explain()


def test_what_a_backend_fails_on_is_found_once():
    tried = []

    class Bad(Toy):
        def compile(self, part, inputs, options):
            tried.append(len(part.graph.nodes))
            if any(node.target is torch.sin for node in part.graph.nodes):
                raise RuntimeError("no kernel for sin")
            return part.forward

    fast = torchgraft.lower(_body, torch.ones(2), backend=Bad())
    count = len(tried)
    assert torch.equal(fast(torch.ones(3)), _body(torch.ones(3)))
    assert len(tried) - count == 2 and "sin: the backend fails" in fast.explain()
