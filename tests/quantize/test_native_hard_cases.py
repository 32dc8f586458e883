"""Native programs where kernels are touchy: no rows, no batch, negative bytes, other layouts, threads, and files."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchgraft
from torchgraft.quantize import Config, Numbers, Scheme, calibrate, convert, prepare, prepare_qat, quantize, sqnr


class Calls(nn.Module):
    """A model made of a function and the layers that it calls."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def _both(model: nn.Module, *inputs: torch.Tensor, config: str = "static-int8") -> tuple[Any, Any]:
    return tuple(
        quantize(model.eval(), [inputs], config=config, backend=backend) for backend in ("reference", "native")
    )  # type: ignore[return-value]


@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.2), nn.GELU(), nn.Sigmoid(), nn.Mish(), nn.SELU(), nn.Tanh()])
def test_programs_with_activations_are_copied_and_saved(activation: nn.Module) -> None:
    x = torch.randn(2, 4, 8, 8)
    _, native = _both(nn.Sequential(nn.Conv2d(4, 8, 3), activation, nn.Conv2d(8, 4, 1)), x)
    file = io.BytesIO()
    torch.save(native, file)
    file.seek(0)
    for again in (
        copy.deepcopy(native),
        pickle.loads(pickle.dumps(native)),
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(again(x), native(x))


@pytest.mark.parametrize("config", ["static-int8", "static-int8-symmetric", "static-int7"])
def test_padding_never_wins_a_maximum(config: str) -> None:
    model = Calls(lambda self, x: self.conv(functional.max_pool2d(x, 3, 2, 1)), conv=nn.Conv2d(4, 4, 1))
    x = -torch.rand(2, 4, 8, 8) - 3
    reference, native = _both(model, x, config=config)
    assert sqnr(reference, native, [(x,)]) > 35


@pytest.mark.parametrize(
    ("model", "shape", "empty"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), (64, 8), (2, 0, 8)),
        (nn.Sequential(nn.Conv1d(4, 6, 3), nn.ReLU(), nn.Conv1d(6, 3, 3)), (4, 4, 12), (0, 4, 12)),
        (nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 3, 3)), (4, 4, 9, 9), (0, 4, 9, 9)),
    ],
)
@pytest.mark.parametrize("config", ["static-int8", "dynamic-int8"])
def test_no_rows_at_all(model: nn.Module, shape: Any, empty: Any, config: str) -> None:
    for program in _both(model, torch.randn(shape), config=config):
        assert program(torch.empty(empty)).shape == model(torch.empty(empty)).shape


def test_an_image_without_a_batch() -> None:
    model = Calls(
        lambda self, x: self.last(functional.max_pool2d(torch.relu(self.second(x) + self.first(x)), 3, 2, 1)),
        first=nn.Conv2d(4, 4, 3, padding=1), second=nn.Conv2d(4, 4, 1), last=nn.Conv2d(4, 4, 1),
    )  # fmt: skip
    x = torch.randn(2, 4, 8, 8)
    reference, native = _both(model, x)
    assert native(x[0]).shape == model(x[0]).shape
    assert sqnr(reference, native, [(x[0],)]) > 35


def test_a_view_of_what_a_convolution_returns() -> None:
    x = torch.randn(2, 4, 8, 8)
    model = Calls(lambda self, x: torch.tanh(self.conv(x).view(x.shape[0], -1)), conv=nn.Conv2d(4, 4, 3))
    reference, native = _both(model, x)
    assert sqnr(reference, native, [(x,)]) > 35


def test_threads_that_add_tensors_of_different_shapes() -> None:
    model = Calls(
        lambda self, x, y: self.last(torch.relu(self.conv(x) + y)), conv=nn.Conv2d(4, 4, 1), last=nn.Conv2d(4, 4, 1)
    )
    x, y = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)
    _, native = _both(model, x, y)
    inputs = [(x, y), (x, y[:1, :, :1, :1])]
    expected = [native(*given) for given in inputs]
    wrong: list[int] = []

    def work(which: int) -> None:
        for _ in range(200):
            try:
                if not torch.equal(native(*inputs[which]), expected[which]):
                    wrong.append(which)
            except Exception:
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_weights_of_a_program_with_other_scales_are_refused() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(64, 8)
    (_, one), (_, other) = _both(model, x), _both(model, x * 3)
    other(x)
    with pytest.raises(RuntimeError, match="quantized with other scales"):
        other.load_state_dict(one.state_dict())
    same = quantize(model, [(x,)])
    same.load_state_dict(one.state_dict())
    assert torch.equal(same(x), one(x))


@pytest.mark.parametrize("observer", ["min-max", "moving-average", "percentile", "histogram", "entropy"])
def test_what_observers_have_seen_is_in_the_state_dict(observer: str) -> None:
    model, data = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), [torch.randn(32, 8)] * 2
    scheme = Scheme(Numbers(8, symmetric=True, signed=True, per="channel"), Numbers(8), observer=observer)
    config = Config("mine", schemes={"mine": scheme})
    calibrated = prepare(model, data[0], config=config)
    calibrate(calibrated, data)
    loaded = prepare(model, data[0], config=config)
    loaded.load_state_dict(calibrated.state_dict())
    assert torch.equal(convert(loaded)(data[0]), convert(calibrated)(data[0]))


def test_what_was_trained_is_in_the_state_dict() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(32, 8)
    trained, loaded = prepare_qat(model, x), prepare_qat(model, x)
    trained.train()(x)
    loaded.load_state_dict(trained.state_dict())
    assert torch.equal(convert(loaded.eval())(x), convert(trained.eval())(x))


@pytest.mark.parametrize("level", ["module", "function", "aten"])
def test_activations_in_place_are_applied_once(level: str) -> None:
    torch.manual_seed(0)  # elsewhere a value may lie between two steps, which the two then round apart
    x = torch.randn(4, 4, 8, 8)
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.Hardswish(True), nn.Conv2d(4, 4, 3), nn.ELU(1.0, True), nn.Conv2d(4, 2, 1)
    )
    program = torchgraft.capture(model.eval(), x, level=level)
    reference, native = (quantize(program, [x], backend=backend) for backend in ("reference", "native"))
    assert sqnr(reference, native, [x]) > 60 and sqnr(model, native, [x]) > 25


@pytest.mark.parametrize("level", ["function", "aten"])
def test_sums_in_place_are_fused(level: str) -> None:
    def function(self: Any, x: torch.Tensor) -> Any:
        y = torch.relu(self.one(x))
        z = self.two(y)
        z += y
        return self.three(z.relu_())

    torch.manual_seed(0)
    model = Calls(function, one=nn.Conv2d(4, 4, 3, padding=1), two=nn.Conv2d(4, 4, 1), three=nn.Conv2d(4, 4, 1)).eval()
    x = torch.randn(4, 4, 8, 8)
    program = torchgraft.capture(model, x, level=level)
    reference, native = (quantize(program, [x], backend=backend) for backend in ("reference", "native"))
    assert "IntegerLayerWithSum" in [type(module).__name__ for module in native.modules()]
    assert sqnr(reference, native, [x]) > 35


def test_layers_that_are_kept_whole_may_be_called_by_keywords() -> None:
    model = Calls(lambda self, x: self.last(self.drop(input=x)), drop=nn.Softmax(1), last=nn.Linear(4, 4)).eval()
    x = torch.randn(4, 4)
    native = quantize(torchgraft.capture(model, x, level="module"), [x])
    assert sqnr(model, native, [x]) > 25
