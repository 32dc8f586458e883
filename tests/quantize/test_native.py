"""Torch's integer kernels: equal to the reference form within one step, fused where they can be, and copied and saved."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import torchgraft
from tests.quantize.test_flow import Residual, decibels, images
from torchgraft.errors import GuardError
from torchgraft.ir.guards import check_value
from torchgraft.quantize import Config, calibrate, convert, prepare, quantize
from torchgraft.quantize.native import to_native
from torchgraft.quantize.native.functions import average_bytes, dequantize_fast, look_up, max_pool_bytes, quantize_fast
from torchgraft.quantize.native.layers import (
    DynamicLayer,
    IntegerLayer,
    IntegerLayerWithSum,
    IntegerLinear,
)
from torchgraft.quantize.native.weight_only import WeightOnlyLayer
from torchgraft.quantize.operators import dequantize_tensor, quantize_tensor

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def both(model, data, config=None):
    prepared = prepare(model, data[0], config=config)
    calibrate(prepared, data)
    reference = convert(prepared)
    return reference, to_native(reference)


def kinds(program):
    return [type(module).__name__ for module in program.children() if type(module) is not nn.Module]


def steps_apart(reference, native, x):
    """How far the results are apart, in steps of the scale that the reference rounds them to in the end."""
    with torch.no_grad():
        expected, found = reference(x), native(x)
    scale = [value for name, value in reference.named_buffers() if name.endswith("_scale") and value.dim() == 0]
    return float((expected - found).abs().max() / max(scale))


ACTIVATIONS = [
    *(
        nn.ReLU,
        nn.ReLU6,
        nn.Hardtanh,
        nn.Hardswish,
        nn.SiLU,
        nn.GELU,
        lambda: nn.GELU("tanh"),
        nn.SELU,
        nn.ELU,
        nn.Sigmoid,
    ),
    *(nn.Tanh, lambda: nn.LeakyReLU(0.1), nn.Mish, nn.Hardsigmoid, nn.Softplus, nn.Identity),
]


@pytest.mark.parametrize("level", ["module", "function", "aten"])
@pytest.mark.parametrize("make", ACTIVATIONS)
@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_layers_with_any_activation_are_within_one_step(make, layer, level):
    torch.manual_seed(0)
    if layer == "linear":
        model = nn.Sequential(nn.Linear(16, 24), make(), nn.Linear(24, 8), make()).eval()
        data = [torch.randn(40, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    else:
        model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), make(), nn.Conv2d(8, 8, 3, padding=1), make()).eval()
        data = [images(4, seed) for seed in range(3)]
    reference, native = both(torchgraft.capture(model, data[0], level=level), data)
    names = {node.target for node in native.graph.nodes}
    assert quantize_tensor not in names and dequantize_tensor not in names
    for rows in (1, 4):
        assert steps_apart(reference, native, data[0][:rows]) <= 1.001


def test_a_residual_network_is_integers_from_end_to_end():
    torch.manual_seed(0)
    model = Residual().eval()
    reference, native = both(model, [images(4, seed) for seed in range(3)])
    assert kinds(native) == ["IntegerLayer", "IntegerLayerWithSum", "IntegerLayer", "IntegerLinear"]
    x = images(3, 9)
    with torch.no_grad():
        assert decibels(reference(x), native(x)) > 38
        assert decibels(model(x), native(x)) > 30
    functions = [node.target for node in native.graph.nodes if node.op == "call_function"]
    # Only the mean is a float in between: bytes are added, and the last layer rounds what comes of it itself.
    assert functions.count(quantize_fast) == 1 and functions.count(dequantize_fast) == 0
    assert functions.count(max_pool_bytes) == 1


class Strided(nn.Module):
    """A block whose other side is a convolution of single pixels with a stride, which adds while it computes."""

    def __init__(self, stride):
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 16, 3, stride, 1), nn.Conv2d(8, 16, 1, stride)
        self.norm, self.last = nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1, 2)
        self.after = nn.BatchNorm2d(8)

    def forward(self, x):
        return self.after(self.last(torch.relu(self.norm(self.one(x)) + self.two(x))))


def pictures(count, size, seed=0):
    return torch.randn(count, 8, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stride", [1, 2, 3, (2, 1), (1, 3)])
def test_convolutions_of_single_pixels_take_strides(stride):
    torch.manual_seed(0)
    model = Strided(stride).eval()
    data = [pictures(4, 13, seed) for seed in range(3)]
    reference, native = both(model, data)
    assert "IntegerLayerWithSum" in kinds(native)
    for x in (data[0], pictures(1, 12, 9), pictures(2, 7, 8).contiguous(memory_format=torch.channels_last)):
        assert steps_apart(reference, native, x) < 1.01


def test_dimensions_are_checked_once():
    model = Strided(2).eval()
    reference, native = both(model, [pictures(4, 13)])
    assert [
        len(program.graph.find_nodes(op="call_function", target=check_value)) for program in (reference, native)
    ] == [2, 1]
    with pytest.raises(GuardError, match="ndim of"):
        native(torch.randn(8, 13, 13))


def test_one_image_without_a_batch():
    torch.manual_seed(0)

    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.one(x)), 2)
            return self.two(F.relu(self.two(x) + x))

    for shape in ((3, 8, 8), (2, 3, 8, 8)):
        data = [torch.randn(shape) for _ in range(3)]
        reference, native = both(Single().eval(), data)
        assert "IntegerLayerWithSum" in kinds(native)
        with torch.no_grad():
            assert native(data[0]).shape == reference(data[0]).shape
            assert decibels(reference(data[0]), native(data[0])) > 35


def test_a_sum_never_destroys_what_is_used_again():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

        def forward(self, x):
            x = F.relu(self.one(x))
            y = F.relu(self.two(x) + x)
            return self.three(F.relu(self.three(y) + x))

    torch.manual_seed(0)
    data = [torch.randn(2, 4, 6, 6) for _ in range(3)]
    reference, native = both(Twice().eval(), data)
    assert kinds(native).count("IntegerLayerWithSum") == 2
    with torch.no_grad():
        first, second = native(data[0]), native(data[0])
        assert torch.equal(first, second) and decibels(reference(data[0]), first) > 38


def test_a_sum_with_something_smaller_is_spread():
    class Spread(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, y):
            return self.two(F.relu(self.two(F.relu(self.one(x))) + F.relu(self.one(y))))

    data = [(torch.randn(5, 4), torch.randn(1, 4)) for _ in range(3)]
    prepared = prepare(Spread().eval(), data[0])
    calibrate(prepared, data)
    reference = convert(prepared)
    native = to_native(reference)
    with torch.no_grad():
        assert decibels(reference(*data[0]), native(*data[0])) > 35


def test_dynamic_layers_choose_their_scale():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    reference, native = both(model, [torch.randn(4, 16)], "dynamic-int8")
    assert kinds(native) == ["DynamicLayer", "DynamicLayer"]
    for factor in (1e-3, 1.0, 1e3):
        x = torch.randn(5, 16) * factor
        with torch.no_grad():
            assert decibels(reference(x), native(x)) > 40 and decibels(model(x), native(x)) > 30


@pytest.mark.parametrize("scheme", ["weight-int8", "weight-int4"])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_alone(scheme, bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=bias), nn.GELU(), nn.Linear(96, 32, bias=bias)).eval().bfloat16()
    data = [torch.randn(4, 64).bfloat16()]
    reference, native = both(model, data, scheme)
    assert kinds(native) == ["WeightOnlyLayer", "WeightOnlyLayer"]
    for rows in (1, 3, 40):
        x = torch.randn(2, rows, 64).bfloat16()
        with torch.no_grad():
            found = native(x)
            assert found.dtype == torch.bfloat16
            assert decibels(reference(x).float(), found.float()) > 35
    size = sum(value.numel() * value.element_size() for value in native.buffers())
    assert size < sum(value.numel() * 2 for value in model.parameters()) * (0.6 if scheme == "weight-int8" else 0.4)


def test_rows_with_scales_of_their_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 56), nn.ReLU(), nn.Linear(56, 24)).eval()
    reference, native = both(model, [torch.randn(5, 40)], "dynamic-int8-rows")
    assert kinds(native) == ["RowLinear", "RowLinear"]
    for rows in (1, 17, 40):
        x = torch.randn(2, rows, 40) * torch.logspace(-2, 2, rows)[:, None]
        with torch.no_grad():
            assert decibels(reference(x), native(x)) > 60 and decibels(model(x), native(x)) > 35


def test_weights_alone_of_32_bit_floats_stay_in_the_reference_form():
    reference, native = both(nn.Sequential(nn.Linear(64, 32)).eval(), [torch.randn(2, 64)], "weight-int8")
    assert kinds(native) == [] and torch.equal(native(torch.ones(1, 64)), reference(torch.ones(1, 64)))


def test_copies_pickles_and_other_images():
    torch.manual_seed(0)
    model = Residual().eval()
    native = quantize(model, [images()])
    expected = native(images(2, 3))
    for again in (copy.deepcopy(native), pickle.loads(pickle.dumps(native))):
        assert torch.equal(again(images(2, 3)), expected)
    other = quantize(model, [images()])
    other.load_state_dict(native.state_dict())
    assert torch.equal(other(images(2, 3)), expected)
    for size in (8, 12, 16, 20, 24, 28, 8):
        assert native(torch.randn(1, 3, size, size)).shape == (1, 5)
    assert torch.equal(native(images(2, 3)), expected)


def test_loading_weights_packs_them_anew():
    torch.manual_seed(0)
    one, two = nn.Linear(8, 8).eval(), nn.Linear(8, 8).eval()
    data = [torch.randn(64, 8)]
    first, second = quantize(nn.Sequential(one).eval(), data), quantize(nn.Sequential(two).eval(), data)
    before, wanted = first(data[0]), second(data[0])
    first.load_state_dict(second.state_dict())
    assert not torch.equal(before, first(data[0])) and torch.allclose(first(data[0]), wanted)
    assert torch.allclose(first(data[0][:3]), wanted[:3], atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_runs_it_and_export_says_what_to_export(backend):
    torch.manual_seed(0)
    native = quantize(Residual().eval(), [images()])
    with torch.no_grad():
        expected = native(images(2, 3))
        torch._dynamo.reset()
        assert torch.allclose(torch.compile(native, backend=backend)(images(2, 3)), expected, atol=1e-2)
        with pytest.raises(Exception, match="a program with packed weights cannot be exported"):
            torch.export.export(native, (images(2, 3),))


def test_threads_may_run_one_program():
    native = quantize(Residual().eval(), [images()])
    inputs = [images(2, seed) for seed in range(8)]
    expected = [native(x) for x in inputs]
    found = [None] * 8

    def run(place):
        for _ in range(5):
            found[place] = native(inputs[place])

    threads = [threading.Thread(target=run, args=(place,)) for place in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


def test_images_laid_out_otherwise_and_views_of_them():
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 2)

        def forward(self, x):
            x = F.relu(self.conv(x))
            return self.head(x.view(x.size(0), -1))

    torch.manual_seed(0)
    model = Viewing().eval()
    native = quantize(model, [images(4)])
    with torch.no_grad():
        plain = native(images(2, 1))
        assert torch.allclose(native(images(2, 1).to(memory_format=torch.channels_last)), plain, atol=1e-6)
        assert decibels(model(images(2, 1)), plain) > 25


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1), st.integers(1, 2), st.integers(7, 12),
)  # fmt: skip
def test_pooling_of_bytes_is_pooling(count, kernel, stride, padding, dilation, size):
    padding = min(padding, kernel // 2)
    pairs = [(item, item) for item in (kernel, stride, padding, dilation)]
    generator = torch.Generator().manual_seed(size)
    for low, dtype in ((0, torch.uint8), (-128, torch.int8)):
        steps = torch.randint(low, low + 256, (count, 3, size, size), dtype=dtype, generator=generator)
        last = steps.contiguous(memory_format=torch.channels_last)
        for laid_out in (
            steps,
            last,
            last[:1],
            last[0].unsqueeze(0),
            last[0],
            steps.transpose(2, 3),
            last[:, 1:],
            last[:0],
        ):
            expected = F.max_pool2d(laid_out.float(), kernel, stride, padding, dilation)
            assert torch.equal(max_pool_bytes(laid_out, *pairs).float(), expected)


@settings(max_examples=40)
@given(
    st.integers(1, 70), st.integers(1, 40), st.integers(1, 40), st.floats(1e-4, 1e4), st.floats(-3, 3),
    st.sampled_from(["static-int8", "static-int7", "static-int8-per-tensor", "dynamic-int8"]),
)  # fmt: skip
def test_any_shape_and_range_of_a_linear_layer(rows, inputs, outputs, size, shift, scheme):
    generator = torch.Generator().manual_seed(rows * inputs)
    model = nn.Sequential(nn.Linear(inputs, outputs)).eval()
    x = (torch.randn(rows, inputs, generator=generator) + shift) * size
    if not bool(x.any()):
        return
    reference, native = both(model, [x], scheme)
    with torch.no_grad():
        expected, found = reference(x), native(x)
    assert torch.allclose(expected, found, rtol=1e-3, atol=1e-3 * float(expected.abs().max()) + 1e-6)


def test_fast_functions_are_the_reference():
    x = torch.randn(7, 5) * 3
    scale, zero = torch.tensor(0.021), torch.tensor(120)
    steps = quantize_tensor(x, scale, zero, 0, 255, torch.uint8)
    assert (quantize_fast(x, 0.021, 120).int() - steps.int()).abs().max() <= 1
    assert torch.allclose(dequantize_fast(steps, 0.021, 120), dequantize_tensor(steps, scale, zero), atol=1e-6)
    assert (quantize_fast(x, 0.05, 60, 0, 127) <= 127).all()
    table = torch.arange(256, dtype=torch.uint8).flip(0)
    assert torch.equal(look_up(steps, table), 255 - steps)


class Averages(nn.Module):
    """Means of bytes that come from a layer, of each image and of all of it, and one that is no mean of whole dimensions."""

    def __init__(self):
        super().__init__()
        self.first, self.pool, self.halves = nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d(2)
        self.second, self.last, self.side = nn.Conv2d(8, 8, 1), nn.Linear(8, 4), nn.Linear(32, 4)

    def forward(self, x):
        y = torch.relu(self.first(x))
        weighted = y * torch.sigmoid(self.pool(y))  # as squeeze-and-excitation does it
        z = self.second(weighted)
        return self.last(self.pool(z).flatten(1)) + self.last(y.mean((2, 3))) + self.side(self.halves(z).flatten(1))


@pytest.mark.parametrize("level", ["module", "function", "aten"])
def test_means_add_bytes(level):
    data = [torch.randn(4, 3, 9, 9) for _ in range(3)]
    reference, native = both(torchgraft.capture(Averages().eval(), data[0], level=level), data)
    assert len(native.graph.find_nodes(op="call_function", target=average_bytes)) == 3
    for x in (data[0], torch.randn(2, 3, 6, 11)):
        assert steps_apart(reference, native, x) <= 1.01
    assert native(torch.randn(0, 3, 9, 9)).shape == (0, 4)


def test_a_mean_of_nothing_is_not_a_number():
    assert average_bytes(torch.zeros(2, 0, dtype=torch.uint8), 0.5, 3, (1,), True).isnan().all()


def test_an_activation_between_integers_is_a_table():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.one(x)), 2)
            return self.two(torch.cat([F.selu(x)], 1)) + self.two(x).sum()

    torch.manual_seed(0)
    reference, native = both(Pooled().eval(), [images(2)])
    assert look_up in {node.target for node in native.graph.nodes}
    with torch.no_grad():
        assert decibels(reference(images(1, 4)), native(images(1, 4))) > 35


def test_all_layers_say_what_they_are():
    layer = IntegerLayer(torch.zeros(2, 3, dtype=torch.int8), torch.ones(2), None, (0.5, 3))
    assert str(layer) == "IntegerLayer((2, 3), input_scale=(0.5, 3))"
    assert issubclass(IntegerLinear, IntegerLayer) and issubclass(DynamicLayer, IntegerLayer)
    assert issubclass(IntegerLayerWithSum, IntegerLayer)
    only = WeightOnlyLayer(torch.zeros(2, 3, dtype=torch.int8), torch.ones(2), None, None, None)
    assert str(only) == "WeightOnlyLayer(outputs=2, int8)"
    assert Config().scheme == "static-int8"
