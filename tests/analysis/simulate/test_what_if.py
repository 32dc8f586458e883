"""A table of cases: what changes and what does not, machines that cannot, prices, mistakes, and the plot."""

import dataclasses
import json
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft import Machine, simulate, what_if, zoo
from torchgraft.errors import GraftError, PassError, QuantizeError


def model(width=1024):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).eval()


def inputs(batch=1, width=1024):
    return torch.empty(batch, width, device="meta")


def without_bf16():
    h200 = Machine.named("h200")
    peak = {name: rate for name, rate in h200.peak.items() if name != "bf16"}
    return dataclasses.replace(h200, name="old", peak=peak)


def test_every_case_is_what_simulate_says():
    found = what_if(model(), inputs(), batch=[1, 64], precision=["fp32", "fp16"], mode=["eager", "graph"])
    assert len(found.results) == 8
    for row in found.results:
        alone = simulate(model(), inputs(row.batch), precision=row.precision, mode=row.mode)
        assert row.seconds == pytest.approx(alone.seconds) and row.peak_bytes == alone.peak_bytes
        assert row.throughput == pytest.approx(row.batch / row.seconds) and row.joules == pytest.approx(alone.joules)


def test_nothing_asked_for_is_one_case():
    found = what_if(model(), inputs(3))
    assert [(row.batch, row.precision, row.change, row.times) for row in found.results] == [
        (3, "fp32", "as it is", 1.0)
    ]
    assert "change" not in str(found) and "note" not in str(found)


def test_each_change_alone_and_all_together():
    found = what_if(model(), inputs(4096), mode="graph", bandwidth=2, compute=3, quantize="static-int8")
    names = [row.change for row in found.results]
    assert names == ["as it is", "bandwidth × 2", "compute × 3", "static-int8", "all of these"]
    rows = dict(zip(names, found.results, strict=True))
    assert all(rows[name].times >= 1 for name in names)
    assert rows["all of these"].times == max(row.times for row in found.results)
    assert rows["static-int8"].peak_bytes == rows["as it is"].peak_bytes - 2 * 1024 * 1024 * 3


def test_a_quick_host_helps_where_the_host_is_waited_for():
    small = zoo.create("mlp").eval()
    rows = what_if(small, zoo.example_inputs("mlp"), host=2, bandwidth=2).results
    assert rows[2].change == "host × 2" and rows[2].times > 1.5
    assert rows[1].change == "bandwidth × 2" and rows[1].times < 1.1


def test_passes_are_run_on_a_copy():
    resnet = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    program = torchgraft.symbolic_trace(resnet)
    before = program.code
    for subject in (resnet, program):
        rows = what_if(subject, torch.randn(2, 3, 32, 32), mode="graph", passes="fuse-conv-norm").results
        assert [row.change for row in rows] == ["as it is", "fuse-conv-norm"] and rows[1].times > 1.1
    assert program.code == before and isinstance(resnet[1], nn.BatchNorm2d)


@pytest.mark.parametrize("scheme", ["static-int8", "dynamic-int8", "weight-int8", "weight-int4", "float8", "fp16"])
def test_schemes(scheme):
    plain, changed = what_if(model(4096), inputs(1, 4096), mode="graph", quantize=scheme).results
    assert changed.change == scheme and changed.times >= 1
    bits = {"weight-int4": 4, "fp16": 32}.get(scheme, 8)  # a cast layer keeps its weights
    assert plain.peak_bytes - changed.peak_bytes == 2 * 4096 * 4096 * (32 - bits) // 8


def test_tied_weights_are_smaller_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1024, 1024, bias=False)

        def forward(self, x):
            return self.layer(self.layer(x))

    plain, changed = what_if(Tied(), inputs(), quantize="weight-int8").results
    assert plain.peak_bytes - changed.peak_bytes == 1024 * 1024 * 3


def test_training_steps():
    rows = what_if(model(), inputs(8), batch=[8, 16], optimizer=torch.optim.Adam).results
    alone = simulate(model(), inputs(16), optimizer=torch.optim.Adam)
    assert rows[1].seconds == pytest.approx(alone.seconds) and rows[1].peak_bytes == alone.peak_bytes
    assert "one training step" in str(what_if(model(), inputs(8), training=True))


def test_a_machine_that_cannot_has_a_note():
    found = what_if(model(), inputs(), machine=["h200", without_bf16()], precision=["fp32", "bf16"])
    notes = {(row.machine, row.precision): row.note for row in found.results}
    assert notes[("old", "bf16")] == "old has no bf16" and notes[("old", "fp32")] == notes[("h200", "bf16")] == ""
    assert [row.seconds is None for row in found.results] == [bool(row.note) for row in found.results]
    assert "old has no bf16" in str(found) and json.loads(found.to_json())["rows"][3]["seconds"] is None
    assert found.best.seconds is not None
    with pytest.raises(GraftError, match="old has no bf16"):
        what_if(model(), inputs(), machine=without_bf16(), precision="bf16")


def test_what_does_not_fit_is_marked():
    small = dataclasses.replace(Machine.named("h200"), name="small", memory_bytes=10_000_000, workspace_bytes=0)
    found = what_if(model(), inputs(), machine=small, batch=[1, 1024])
    assert [row.fits for row in found.results] == [True, False]
    assert found.results[1].note == "does not fit into 10 MB" and found.best.batch == 1


def test_prices():
    both = {"h200": 3.6, "other": 36.0}
    other = dataclasses.replace(Machine.named("h200"), name="other")
    found = what_if(model(), inputs(), machine=["h200", other], batch=4, price_per_hour=both)
    first, second = found.results
    assert first.cost == pytest.approx(3.6 / 3600 * first.seconds / 4 * 1e6) and second.cost == pytest.approx(
        10 * first.cost
    )
    assert found.best.machine == "h200" and "cost of 1 M" in str(found)
    assert what_if(model(), inputs(), price_per_hour=1).results[0].cost > 0


def test_the_same_batch_keeps_the_inputs():
    class Reads(nn.Module):
        def forward(self, x, mask):
            return x * mask if mask.shape[0] == x.shape[0] else x

    x, mask = torch.ones(2, 3), torch.ones(2, 1)
    found = what_if(Reads(), (x,), {"mask": mask}, batch=[2, 6])
    assert [row.peak_bytes > 0 for row in found.results] == [True, True]
    assert x.shape == (2, 3) and torch.equal(x, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"machine": "h999"}, GraftError, "there is no machine named 'h999'"),
        ({"mode": "fast"}, GraftError, "there is no mode 'fast'"),
        ({"precision": "fp17"}, GraftError, "there is no precision 'fp17'"),
        ({"batch": []}, GraftError, "there is nothing to simulate: one of machine, batch, precision and mode is empty"),
        ({"machine": ()}, GraftError, "there is nothing to simulate"),
        ({"batch": 0}, GraftError, "a batch is a whole number, 1 or more, not 0"),
        ({"batch": [1, True]}, GraftError, "a batch is a whole number, 1 or more, not True"),
        ({"bandwidth": -1}, GraftError, "bandwidth is multiplied by a positive number, not by -1"),
        ({"compute": "2"}, GraftError, "compute is multiplied by a positive number, not by '2'"),
        ({"passes": "no-such"}, PassError, "no pass is called 'no-such'"),
        ({"quantize": "int9"}, QuantizeError, "no scheme is called 'int9'"),
        ({"price_per_hour": -3}, GraftError, "the price of h200 is -3"),
        ({"price_per_hour": {"a100": 3}}, GraftError, "there is a price for 'a100', which is not simulated"),
    ],
)
def test_mistakes(options, error, message):
    with pytest.raises(error) as raised:
        what_if(model(8), inputs(1, 8), **options)
    assert str(raised.value).startswith(message)


def test_inputs_without_a_batch():
    class Two(nn.Module):
        def forward(self, number):
            return torch.ones(2) * number

    assert what_if(Two(), (3,)).results[0].batch == 1
    with pytest.raises(GraftError, match="the inputs have no batch to change"):
        what_if(Two(), (3,), batch=[1, 2])


def test_texts_and_plot(tmp_path):
    found = what_if(model(), inputs(), batch=[1, 8, 64], precision=["fp32", "fp16"], price_per_hour=2)
    assert repr(found) == "<WhatIf: Sequential, one run: 6 cases>"
    assert found._repr_html_().count("<tr") == 7 and "<svg" in found._repr_html_()
    text = found.svg(tmp_path / "plot.svg")
    root = ElementTree.fromstring(text)
    circles = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == 4 * 6 and (tmp_path / "plot.svg").read_text() == text
    assert "throughput" in text and "cost of a million examples" in text
    bars = what_if(model(), inputs(), mode=["eager", "graph"]).svg()
    ElementTree.fromstring(bars)
    assert "cost" not in bars and "<circle" not in bars
    assert len(found.rows()) == 6 and found.rows()[0]["machine"] == "h200"
