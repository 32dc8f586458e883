"""Each stage of a quantization by itself: what it refuses, and that what happens to a model later does not reach its programs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft import GraftError
from torchgraft.errors import QuantizeError
from torchgraft.quantize import Config, calibrate, convert, prepare, prepare_qat, quantize, sqnr, to_native

torch.manual_seed(0)
X = torch.randn(6, 4, 8, 8)


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.GroupNorm(2, 4)).eval()


def _draw_norm(norm: nn.Module) -> None:
    with torch.no_grad():
        norm.running_mean.normal_(), norm.running_var.uniform_(0.2, 3), norm.weight.uniform_(0.2, 3)


@pytest.mark.parametrize("level", ["module", "function"])
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_what_happens_to_the_model_later_does_not_reach_the_program(backend: str, level: str) -> None:
    model = _model()
    program = quantize(torchgraft.capture(model, X, level=level), [X], backend=backend)
    expected = program(X)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    assert torch.equal(program(X), expected)
    changed = model(X)
    program.double()
    assert torch.equal(model(X), changed)


def test_tied_floats_stay_one() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.table(x)) @ self.table.weight[:4] + self.table.weight.sum()

    model, x = Model().eval(), torch.arange(8)
    program = quantize(model, [x], config="dynamic-int8", backend="reference")
    tables = [value for value in program.parameters() if value.shape == (8, 4)]
    assert len(tables) == 1 and tables[0] is not model.table.weight


def test_stages_out_of_order() -> None:
    prepared = prepare(_model(), X)
    with pytest.raises(
        QuantizeError, match=r"Sequential is prepared, and has no integers yet\ncall convert\(\) on it first"
    ):
        to_native(prepared)
    calibrate(prepared, [X])
    reference = convert(prepared)
    assert torch.equal(convert(prepared)(X), reference(X))
    for stage in (convert, lambda program: calibrate(program, [X])):
        for program in (reference, to_native(reference)):
            with pytest.raises(
                QuantizeError, match="Sequential has been converted, and has no observers any more\ngive the"
            ):
                stage(program)


def test_a_lowered_model_is_the_model() -> None:
    model = _model()
    lowered = torchgraft.lower(model, X, backend="native")
    assert sqnr(model, quantize(lowered, [X]), [(X,)]) > 30
    program = torchgraft.capture(lowered, X)
    with torch.no_grad():
        assert torch.equal(program(X), model(X))


@pytest.mark.parametrize("level", ["module", "function", "aten"])
def test_views_of_images_at_every_level(level: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(4, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).relu().view(x.shape[0], -1)

    model = Model().eval()
    program = torchgraft.capture(model, X, level=level)
    assert sqnr(model, quantize(program, [X]), [(X,)]) > 30
    torch.testing.assert_close(torchgraft.lower(program, X, backend="native")(X), model(X))


def test_linear_layers_of_core_operators() -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(6, 8)
    program = quantize(torchgraft.capture(model, x, level="core_aten"), [x])
    assert sqnr(model, program, [(x,)]) > 30
    assert sum(type(module).__name__.startswith("Integer") for module in program.modules()) == 2


def test_convolutions_and_norms_of_core_operators() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, 2, groups=2),
        nn.ConvTranspose2d(4, 4, 2, 2),
    ).eval()
    nn.init.uniform_(model[1].running_var, 0.5, 2.0)
    x = torch.randn(2, 3, 8, 8)
    programs = [quantize(torchgraft.capture(model, x, level=level), [x]) for level in ("function", "core_aten")]
    torch.testing.assert_close(programs[1](x), programs[0](x), rtol=0.0, atol=1e-6)
    assert sqnr(model, programs[1], [(x,)]) > 30


def test_views_of_images_that_are_written() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).relu()
            before = self.second(x)
            x.view(x.shape[0], -1).add_(1)
            return before + self.second(x)

    model = Model().eval()
    assert sqnr(model, quantize(model, [X]), [(X,)]) > 30
    torch.testing.assert_close(torchgraft.lower(model, X, backend="native")(X), model(X))


def test_a_native_program_is_not_run_without_data() -> None:
    with pytest.raises(
        GraftError, match=r"torch cannot say what onednn\.qconv_prepack\.default returns without running it"
    ):
        torchgraft.simulate(quantize(_model(), [X]), X)


def test_a_norm_over_another_dimension_is_not_trained_as_part_of_a_layer() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)), torch.randn(7, 5, 6)
    _draw_norm(model[1])
    with pytest.raises(QuantizeError, match="cannot fold the batch norm after '0' into it: it is given 3 dimensions"):
        prepare_qat(torchgraft.symbolic_trace(model))(x)
    for config in (None, Config(modules={"0": "float"})):
        trained = prepare_qat(model, x, config=config)
        trained(x)
        trained.eval()
        assert sqnr(trained, to_native(convert(trained)), [(x,)]) > 30


def test_a_norm_after_a_transposed_convolution_in_groups_is_trained() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 4, 3, groups=2), nn.BatchNorm2d(4))
    _draw_norm(model[1])
    trained = prepare_qat(model, X, config="static-int8-per-tensor")
    for mode in (False, True):
        assert sqnr(model.train(mode), trained.train(mode), [(X,)]) > 30
