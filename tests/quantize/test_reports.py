"""Reports: what became of each layer, where errors arise, which layers are sensitive, a search, and why it is not faster."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import torchgraft
from tests.quantize.test_flow import Residual, images
from torchgraft import QuantizeError
from torchgraft.quantize import (
    Config,
    calibrate,
    convert,
    explain_speed,
    prepare,
    quantize,
    report,
    search,
    sensitivity,
    sqnr,
    to_native,
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Residual().eval()


DATA = [images(4, seed) for seed in range(3)]


def test_a_report_says_what_became_of_each_layer_and_why(model):
    found = report(model, DATA, config=Config(modules={"head": "float"}))
    assert [(layer.path, layer.reason is None) for layer in found.layers] == [
        ("first", True), ("second", True), ("third", True), ("head", False),
    ]  # fmt: skip
    text = str(found)
    assert text.startswith("Residual: 3 of 4 layers quantized, weights ")
    assert "float: the configuration keeps it in floats" in text and "test_flow.py" in text
    assert json.loads(found.to_json())["layers"][0]["scheme"] == "static-int8"
    assert found.to_html().startswith("<!DOCTYPE html>") and "<table>" in found.to_html()
    assert repr(found).startswith("<QuantizeReport: Residual: 3 of 4")


@pytest.mark.parametrize("level", ["module", "function", "symbolic"])
def test_errors_arise_where_they_arise(model, level):
    """With one layer of four bits, only that layer has a large error of its own; those after it inherit it."""
    program = (
        torchgraft.symbolic_trace(model) if level == "symbolic" else torchgraft.capture(model, DATA[0], level=level)
    )
    found = {
        layer.path: layer for layer in report(program, DATA, config=Config(modules={"first": "static-int4"})).layers
    }
    assert found["first"].own_sqnr < 30 and not found["first"].inherits
    assert found["second"].own_sqnr > 35 and found["second"].sqnr < 30 and found["second"].inherits
    assert found["first"].cosine < found["second"].cosine + 0.1


def test_a_report_of_a_prepared_program(model):
    prepared = prepare(model, DATA[0])
    calibrate(prepared, DATA)
    assert abs(report(prepared, DATA).sqnr - report(model, DATA).sqnr) < 1e-6


def test_products_that_stay_are_listed():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) @ x.t()

    found = report(Product().eval(), [torch.randn(3, 4)])
    assert list(found.others.values()) == ["no integer form of matmul is chosen"]


def test_sensitivity_finds_the_layer_that_suffers(model):
    with torch.no_grad():
        model.second.weight[0] *= 300  # one channel spoils a scale for all, if there is but one
    found = sensitivity(model, DATA, config=Config("static-int8", modules={"second": "static-int4"}))
    assert next(iter(found.values)) == "second" and len(found.values) == 4
    assert "most sensitive: second" in str(found)


def test_search_keeps_in_floats_only_what_must_be(model):
    config = Config("static-int8", modules={"second": "static-int4"})
    easy = search(model, DATA, target=10, config=config)
    assert easy.kept == () and easy.value >= 10
    reached = search(model, DATA, target=40, config=config)
    assert reached.value >= 40 and 0 < len(reached.kept) < 4
    again = quantize(model, DATA, config=reached.config, backend="reference")
    assert sqnr(model, again, DATA) == pytest.approx(reached.value, abs=0.5)
    assert "kept in floats" in str(reached) and "second" in reached.kept


def test_search_takes_any_metric(model):
    calls = []

    def metric(program):
        calls.append(program)
        return -float((program(DATA[0]) - model(DATA[0])).abs().max())

    found = search(model, DATA, target=-0.5, metric=metric)
    assert found.value >= -0.5 and calls
    with pytest.raises(QuantizeError, match="cannot reach 1: with one layer quantized it is"):
        search(model, DATA, target=1.0, metric=metric)


def test_why_it_is_not_faster(model):
    found = explain_speed(model, quantize(model, DATA), DATA[0])
    shares = found.shares()
    assert sum(shares.values()) == pytest.approx(1.0) and shares["integer layers"] > 0
    assert any("small products" in note or "no integer kernel" in note for note in found.notes)
    assert "times as fast" in repr(found) and json.loads(found.to_json())["shares"]


def test_a_drawing_shows_what_computes_with_integers(model):
    native = quantize(model, DATA)
    svg = torchgraft.draw(native).svg
    assert "computed with integers" in svg and "between floats and integers" in svg
    assert "computed with integers" not in torchgraft.draw(torchgraft.symbolic_trace(model)).svg


def test_a_drawing_shows_errors_in_colours(model):
    found = report(model, DATA, config=Config(modules={"second": "static-int4"}))
    prepared = prepare(model, DATA[0], config=Config(modules={"second": "static-int4"}))
    calibrate(prepared, DATA)
    reference = convert(prepared)
    worst = min(found.layers, key=lambda layer: layer.sqnr)
    kind = "error-much" if worst.sqnr < 20 else "error-some" if worst.sqnr < 30 else "error-little"
    for program in (reference, to_native(reference)):
        before = [dict(node.meta) for node in program.graph.nodes]
        drawing = torchgraft.draw(found.marked(program)).svg
        assert f'<g class="b {kind}"' in drawing and "SQNR of" in drawing  # a box, and the legend
        assert f"SQNR {worst.sqnr:.1f} dB, {worst.own_sqnr:.1f} dB of what arises here" in drawing
        assert [dict(node.meta) for node in program.graph.nodes] == before
    assert json.loads(found.to_json())["node_sqnr"][worst.node] == pytest.approx(worst.sqnr)


def test_reports_need_data(model):
    with pytest.raises(QuantizeError, match="there is no data to compare with"):
        report(model, [])


@pytest.mark.parametrize("metric", [lambda program: float("nan"), lambda program: "good", lambda program: None])
def test_a_metric_that_is_no_number_is_refused(model, metric):
    for call in (search, sensitivity):
        options = {"target": 1.0} if call is search else {}
        with pytest.raises(QuantizeError, match="the metric says .*, which is no number"):
            call(model, DATA, metric=metric, **options)
    with pytest.raises(QuantizeError, match="expected a number for target, got 'high'"):
        search(model, DATA, target="high")


class Whole(nn.Module):
    """Layers that torch computes in one call each, and a linear one."""

    def __init__(self):
        super().__init__()
        self.attention, self.memory = nn.MultiheadAttention(8, 2, batch_first=True), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.memory(x)[0])


@pytest.mark.parametrize("level", ["module", "function", "aten"])
def test_layers_of_one_call_are_listed(level):
    x = torch.randn(2, 5, 8)
    found = report(torchgraft.capture(Whole().eval(), x, level=level), [x])
    names = ["MultiheadAttention", "LSTM"] if level == "module" else ["multi_head_attention_forward", "lstm"]
    assert list(found.others.values()) == [f"no integer form of {name} is chosen" for name in names]
    assert all(f"no integer form of {name} is chosen" in str(found) for name in names)
