"""Timelines have the structure of torch.profiler's traces, and say what the simulation says."""

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from torchgraft import Machine, simulate, zoo

MODEL = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
X = torch.ones(8, 64)


def events_of(result, **wanted):
    content = json.loads(result.to_chrome_trace())
    return [event for event in content["traceEvents"] if all(event.get(key) == value for key, value in wanted.items())]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_kernels_are_where_the_simulation_has_them(training, mode):
    result = simulate(MODEL, X, training=training, mode=mode)
    kernels = events_of(result, ph="X", cat="kernel")
    assert len(kernels) == len(result.kernels)
    for event, kernel in zip(kernels, result.kernels, strict=True):
        assert event["ts"] == pytest.approx(kernel.start * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx(kernel.seconds * 1e6, abs=1e-3)
        assert event["args"]["node"] == kernel.node and event["args"]["bound by"] == kernel.bound
    assert sum(event["dur"] for event in kernels) == pytest.approx(result.device_seconds * 1e6, rel=1e-3)


def test_kernels_of_a_stream_do_not_overlap_and_come_after_what_issues_them():
    result = simulate(zoo.create("resnet50").eval(), zoo.example_inputs("resnet50"))
    kernels = events_of(result, ph="X", cat="kernel")
    issued = {event["args"]["External id"]: event for event in events_of(result, ph="X", cat="cpu_op")}
    end = 0.0
    for event in kernels:
        assert event["ts"] >= end - 1e-2
        operator = issued[event["args"]["External id"]]
        assert event["ts"] >= operator["ts"] - 1e-2
        end = event["ts"] + event["dur"]


def test_arrows_lead_from_operators_to_kernels():
    result = simulate(MODEL, X)
    starts, ends = events_of(result, ph="s"), events_of(result, ph="f")
    assert [event["id"] for event in starts] == [event["id"] for event in ends] == [1, 2, 3]
    spans = events_of(result, ph="X", cat="cpu_op")
    for arrow in starts:
        assert any(span["ts"] <= arrow["ts"] <= span["ts"] + span["dur"] for span in spans)


def test_nodes_and_memory():
    result = simulate(MODEL, X, training=True)
    names = [event["name"] for event in events_of(result, cat="user_annotation")]
    assert names[:3] == ["_0", "_1", "_2"] and "_2 (backward)" in names
    memory = events_of(result, ph="C")
    assert [event["args"]["bytes in use"] for event in memory] == [kernel.live_bytes for kernel in result.kernels]
    assert {event["args"]["name"] for event in events_of(result, ph="M")} >= {"host", "NVIDIA H200", "stream 7"}


def test_a_cpu_has_one_process():
    cpu = dataclasses.replace(Machine.named("h200"), name="a cpu", kind="cpu")
    result = simulate(MODEL, X, machine=cpu)
    assert {event["pid"] for event in events_of(result)} == {1} and not events_of(result, cat="kernel")
    spans = events_of(result, ph="X", cat="cpu_op")
    assert [span["name"] for span in spans] == ["aten::addmm", "aten::relu", "aten::addmm"]
    ends = [span["ts"] + span["dur"] for span in spans]
    assert ends[-1] == pytest.approx(result.seconds * 1e6, rel=1e-3)


def test_the_form_is_that_of_real_profiles(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as real, torch.no_grad():
        MODEL(X)
    real.export_chrome_trace(str(tmp_path / "real.json"))
    theirs = json.loads((tmp_path / "real.json").read_text())
    simulate(MODEL, X).to_chrome_trace(tmp_path / "ours.json")
    ours = json.loads((tmp_path / "ours.json").read_text())
    assert {"schemaVersion", "traceEvents", "deviceProperties", "displayTimeUnit"} <= set(ours) & {
        *theirs,
        "displayTimeUnit",
    }
    pick = lambda trace: next(
        e for e in trace["traceEvents"] if e.get("cat") == "cpu_op" and e["name"] == "aten::addmm"
    )
    assert set(pick(ours)) <= set(pick(theirs)) and {"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"} <= set(
        pick(ours)
    )
    for event in ours["traceEvents"]:
        assert event["ph"] in "XMCsf" and isinstance(event["pid"], int) and event["ts"] >= 0
