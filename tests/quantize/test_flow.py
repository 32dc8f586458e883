"""From a model to the reference form: at every level, with shared scales, folded norms, and clear words where it cannot be."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchgraft
from torchgraft import QuantizeError
from torchgraft.quantize import Config, calibrate, convert, dequantize_tensor, prepare, quantize, quantize_tensor, sqnr
from torchgraft.quantize.plan import plan_of
from torchgraft.quantize.schemes import NAMED

LEVELS = ["symbolic", "module", "function", "aten"]


class Residual(nn.Module):
    """Norms, a sum with a shortcut, a join, poolings, views and a linear layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.third = nn.Conv2d(16, 8, 1)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 5)
        with torch.no_grad():
            self.norm.running_mean.uniform_(-1, 1)
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        y = F.relu(self.second(x) + x)
        x = self.pool(self.third(torch.cat([x, y], 1)))
        return self.head(x.mean((2, 3)).view(x.size(0), -1))


def images(count=2, seed=0):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def program_at(level, model, x):
    return torchgraft.symbolic_trace(model) if level == "symbolic" else torchgraft.capture(model, x, level=level)


def decibels(expected, found):
    return float(10 * torch.log10((expected**2).sum() / ((expected - found) ** 2).sum()))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Residual().eval()


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_of_any_level_becomes_integers(model, level):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = program_at(level, model, images())
    nodes = len(program.graph.nodes)
    quantized = quantize(program, [images(4, seed) for seed in range(4)], backend="reference")
    x = images(3, 9)
    with torch.no_grad():
        assert decibels(model(x), quantized(x)) > 32
        assert torch.equal(program(x), model(x)) and len(program.graph.nodes) == nodes
    kinds = [tensor.dtype for tensor in quantized.buffers()]
    assert kinds.count(torch.int8) == 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_joined_moved_or_selected_shares_its_scale(model, level):
    plan = plan_of(prepare(program_at(level, model, images())))
    names = list(plan.groups)
    join = next(name for name in names if "cat" in name)
    relus = [name for name in names if "relu" in name]
    assert {plan.groups[name] for name in (join, *relus)} == {plan.groups[join]}
    if level in ("symbolic", "module", "function"):
        view = next(name for name in names if "view" in name)
        mean = next(name for name in names if "mean" in name)
        assert plan.groups[view] == plan.groups[mean] != plan.groups[join]


def test_a_sum_takes_one_side_as_integers_and_the_other_from_the_layer(model):
    plan = plan_of(prepare(torchgraft.symbolic_trace(model)))
    assert "second" not in plan.groups and "relu" in plan.groups
    assert "add" in plan.consumers["relu"]


def test_batch_norms_are_folded(model):
    prepared = prepare(model, images())
    assert not [node for node in prepared.graph.nodes if "norm" in node.name and node.op == "call_function"]
    with torch.no_grad():
        assert torch.allclose(prepared(images()), model(images()), atol=1e-5)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_scheme_runs(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 32)).eval()
    config = Config(name) if name != "weight-int4" else Config(name, modules={"2": "float"})
    data = [torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    if name == "float":
        with pytest.raises(
            QuantizeError, match="nothing in Sequential can be quantized\n'linear' stays: the configuration"
        ):
            quantize(model, data, config=config)
        return
    quantized = quantize(model, data, config=config, backend="reference")
    with torch.no_grad():
        assert decibels(model(data[0]), quantized(data[0])) > {"static-int4": 12, "weight-int4": 12}.get(name, 24)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_convolution(dimensions, transposed):
    torch.manual_seed(0)
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dimensions}d")
    model = nn.Sequential(kind(4, 8, 3, stride=2, padding=1), nn.ReLU(), kind(8, 4, 2)).eval()
    data = [torch.randn(2, 4, *[7] * dimensions)]
    for level in ("module", "function", "aten"):
        quantized = quantize(torchgraft.capture(model, data[0], level=level), data)
        with torch.no_grad():
            assert decibels(model(data[0]), quantized(data[0])) > 28


def test_a_function_can_be_quantized():
    layer = nn.Linear(4, 4).eval()
    quantized = quantize(lambda x: F.relu(layer(x)) * 2, [torch.randn(8, 4)], backend="reference")
    assert any(node.target is quantize_tensor for node in quantized.graph.nodes)


def test_the_reference_form_is_plain(model):
    quantized = quantize(model, [images()], backend="reference")
    calls = [node.target for node in quantized.graph.nodes if node.op == "call_function"]
    assert calls.count(quantize_tensor) == 8 and calls.count(dequantize_tensor) == 12
    assert not any(isinstance(value, nn.Parameter) and value.dim() > 1 for value in quantized.parameters())
    assert all(value.dtype in (torch.int8, torch.int32, torch.float32, torch.int64) for value in quantized.buffers())


def test_copies_pickles_files_and_state_dicts(model, tmp_path):
    quantized = quantize(model, [images()], backend="reference")
    expected = quantized(images(3, 5))
    for again in (copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized))):
        assert torch.equal(again(images(3, 5)), expected)
    file = io.BytesIO()
    torch.save(quantized, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(images(3, 5)), expected)
    other = quantize(model, [images(2, 7) * 3], backend="reference")
    assert not torch.equal(other(images(3, 5)), expected)
    other.load_state_dict(quantized.state_dict())
    assert torch.equal(other(images(3, 5)), expected)


def test_the_reference_form_lives_where_programs_live(model):
    quantized = quantize(model, [images()], backend="reference")
    expected = quantized(images())
    exported = torch.export.export(quantized, (images(),)).module()
    assert torch.allclose(exported(images()), expected, atol=1e-6)
    assert torch.allclose(torch.jit.trace(quantized, images())(images()), expected, atol=1e-6)
    assert torch.equal(torchgraft.to_fx(quantized)(images()), expected)


def test_other_sizes_run(model):
    quantized = quantize(model, [images(2)])
    for count in (1, 3, 7):
        assert quantized(images(count)).shape == (count, 5)


def test_calibrating_more_moves_the_scales(model):
    prepared = prepare(model, images())
    calibrate(prepared, [images(2, 1)])
    first = convert(prepared)
    calibrate(prepared, [images(2, 1) * 10])
    second = convert(prepared)
    assert second.x_scale > first.x_scale * 5
    assert torch.equal(convert(prepared)(images()), second(images()))


def test_progress_is_told(model):
    told = []
    quantize(model, [images(), images()], progress=lambda done, total: told.append((done, total)))
    quantize(model, iter([images(), images()]), progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2), (1, None), (2, None)]


def test_batches_of_keywords_and_tuples():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, a, b=None):
            return self.layer(a if b is None else a + b)

    model, a = Two().eval(), torch.randn(2, 4)
    assert quantize(model, [{"a": a, "b": a}])(a=a, b=a).shape == (2, 4)
    assert quantize(model, [(a, a)])(a, a).shape == (2, 4)


def test_tied_weights_are_rounded_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 4, bias=False)
            self.two = nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(F.relu(self.one(x)))

    quantized = quantize(Tied().eval(), [torch.randn(4, 4)], backend="reference")
    assert [value.dtype for value in quantized.buffers()].count(torch.int8) == 1


def test_a_shared_value_that_floats_use_stays_exact_for_them():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x), x * 3

    quantized = quantize(Both().eval(), [torch.randn(2, 4)])
    x = torch.randn(2, 4)
    assert torch.equal(quantized(x)[1], x * 3)


class StandardizedConv2d(nn.Conv2d):
    def forward(self, x):
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("level", ["function", "aten"])
def test_weights_that_are_computed_of_parameters_alone_are_computed_once(backend, level):
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 4, 3))
    model = nn.Sequential(StandardizedConv2d(3, 6, 3), nn.ReLU(), normed).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(4, 3, 8, 8)
    quantized = quantize(torchgraft.capture(model, x, level=level), [x], backend=backend)
    assert [layer.reason for layer in plan_of(quantized).layers.values()] == [None, None]
    with torch.no_grad():
        assert decibels(model(x), quantized(x)) > 30
        assert torch.equal(pickle.loads(pickle.dumps(quantized))(x), quantized(x))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("level", ["function", "symbolic", "aten"])
def test_products_with_constant_matrices_are_layers(level):
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.bias = (nn.Parameter(torch.randn(shape) / 3) for shape in ((8, 6), (8, 4), (4,)))

        def forward(self, x, other):
            x = torch.relu(x @ self.one.T)
            return torch.addmm(self.bias, x, self.two) @ other

    torch.manual_seed(0)
    model, inputs = Products().eval(), (torch.randn(5, 6), torch.randn(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = (
        torchgraft.symbolic_trace(model) if level == "symbolic" else torchgraft.capture(model, inputs, level=level)
    )
    quantized = quantize(program, [inputs])
    assert [layer.reason for layer in plan_of(quantized).layers.values()] == [None, None]
    with torch.no_grad():
        assert decibels(model(*inputs), quantized(*inputs)) > 30
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---- what cannot be ----


def refused(call):
    with pytest.raises(QuantizeError) as error:
        call()
    return str(error.value)


def test_wrong_input_has_clear_errors(model):
    assert refused(lambda: quantize(model, [])).startswith("there is no calibration data\n")
    assert refused(lambda: quantize(model, None)).startswith("there is no calibration data\n")
    assert refused(lambda: quantize(torchgraft.symbolic_trace(model), [])).startswith("there is no calibration data\n")
    assert refused(lambda: convert(prepare(model, images()))).startswith("there is no calibration data for 'x'\n")
    assert refused(lambda: quantize(model, images())) == (
        "expected an iterable of batches for data, got one tensor\nfor one batch write [batch]"
    )
    assert refused(lambda: quantize(model, [[images(), torch.zeros(2)]])) == (
        "cannot take a batch that is a list\n"
        "for inputs and labels write [(inputs,) for inputs, labels in loader]; for several inputs tuple(batch)"
    )
    assert refused(lambda: quantize(model, [images(), (images(), images())])).startswith(
        "batch 1 of the calibration data does not fit the program: "
    )
    assert refused(lambda: quantize(model, [(images(), images())])).startswith(
        "the first batch does not fit Residual(x): "
    )
    assert refused(lambda: quantize(model, [{"y": images()}])).startswith("the first batch does not fit Residual(x): ")
    assert refused(lambda: quantize(model, [images(), torch.randn(2, 4, 8, 8)])).startswith(
        "batch 1 of the calibration data cannot be run: "
    )
    assert refused(lambda: prepare(prepare(model, images()))).startswith("Residual has been prepared before")
    assert refused(lambda: sqnr(model, model, iter([]))).startswith("there is no data to compare with\n")
    assert refused(lambda: quantize(model, [images() * float("nan")])).startswith(
        "384 of 384 values are infinite or not numbers, so no range fits them\nat 'x'"
    )
    assert refused(lambda: quantize(model, [images() * 0])).startswith(
        "the calibration data has a range of zero: every value of 'x'"
    )
    assert refused(lambda: quantize(model.train(), [images()])).startswith("Residual is in training mode")
    assert refused(lambda: convert(torchgraft.symbolic_trace(model.eval()))).startswith(
        "Residual has not been prepared for quantization\n"
    )
    assert refused(lambda: quantize(nn.ReLU().eval(), [images()])).startswith("nothing in ReLU can be quantized\n")
    assert refused(lambda: quantize(model, [images()], config=Config(modules={"haed": "float"}))).startswith(
        "the configuration names 'haed', and no layer goes by that\nlayers are: "
    )


def test_what_stays_has_a_reason_and_a_line(model):
    plan = plan_of(prepare(model, images(), config=Config(modules={"head": "float"})))
    head = next(layer for layer in plan.layers.values() if layer.path == "head")
    assert head.reason == "the configuration keeps it in floats"
    assert "test_flow.py" in head.source and "self.head" in head.source


def test_weights_that_the_program_writes_stay_floats():
    class Shrinking(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
            return self.other(self.layer(x))

    for program, reason in (
        (torchgraft.symbolic_trace(Shrinking().eval()), "the program writes its weights"),
        (
            torchgraft.capture(Shrinking().eval(), torch.randn(2, 4), level="function"),
            "its weights are computed by the program",
        ),
    ):
        assert [layer.reason for layer in plan_of(prepare(program)).layers.values()] == [reason, None]


@pytest.mark.parametrize("level", LEVELS)
def test_padding_that_is_not_zero_is_never_left_out(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    quantized = quantize(program_at(level, model, images()), [images()])
    with torch.no_grad():
        assert decibels(model(images()), quantized(images())) > 35
    reasons = [layer.reason for layer in plan_of(quantized).layers.values()]
    assert (reasons[0] is None) == (level in ("function", "aten"))


def test_what_is_inside_of_one_call_is_named():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    program = torchgraft.capture(encoder, torch.randn(1, 3, 8), level="module")
    assert "it is one call in this program; capture with level='function'" in refused(lambda: prepare(program))
    assert quantize(encoder, [torch.randn(1, 3, 8)])(torch.randn(1, 3, 8)).shape == (1, 3, 8)


def test_groups_that_do_not_fit_stay_floats():
    model = nn.Sequential(nn.Linear(40, 8), nn.Linear(8, 64)).eval()
    plan = plan_of(
        prepare(torchgraft.symbolic_trace(nn.Sequential(model, nn.Linear(64, 2)).eval()), config="weight-int4")
    )
    reasons = [layer.reason for layer in plan.layers.values()]
    assert reasons == [
        "its 40 inputs are no multiple of the group of 32",
        "its 8 inputs are no multiple of the group of 32",
        None,
    ]
