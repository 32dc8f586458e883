"""A step on several devices: stages that add up to the program, memory, copies, mistakes, and models larger than this machine."""

import dataclasses
import json
import time

import pytest
import torch
from torch import nn

import torchgraft
from benchmarks.simulating.llama import SIZES, Llama
from torchgraft import Stages, simulate, split, split_module
from torchgraft.errors import GraftError


def layers(count=8, width=512, device="meta"):
    return nn.Sequential(*[nn.Linear(width, width, device=device) for _ in range(count)])


def inputs(batch=64, width=512):
    return torch.empty(batch, width, device="meta")


OPTIONS = {"mode": "graph", "precision": "bf16"}


def test_equal_stages_have_the_bubble_of_the_formula():
    one = torchgraft.Link("at once", 1e30, 0.0)
    found = simulate(layers(), inputs(), machines=["h200"] * 4, microbatches=8, links=one, training=True, **OPTIONS)
    assert found.bubble == pytest.approx(3 / (8 + 3), abs=0.04)  # the first stage needs no gradient of its input
    assert found.cuts == ("_2", "_4", "_6")
    assert [device.in_flight for device in found.devices] == [4, 3, 2, 1]
    assert found.fits and found.seconds >= found.pipeline_seconds > 0


def test_stages_add_up_to_the_program():
    whole = simulate(layers(), inputs(8), training=True, **OPTIONS)
    found = simulate(layers(), inputs(8), machines=["h200"] * 4, training=True, **OPTIONS)
    assert sum(device.busy_seconds for device in found.devices) == pytest.approx(whole.seconds, rel=0.02)
    assert sum(device.weight_bytes for device in found.devices) == 8 * (512 * 512 + 512) * 2


def test_one_device_is_the_whole_program():
    model, x = layers(4), inputs(8)
    found = simulate(model, x, machines=["h200"], training=True, **OPTIONS)
    whole = simulate(model, x, training=True, **OPTIONS)
    assert found.bubble == pytest.approx(0.0) and found.cuts == () and found.links == ()
    assert found.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert found.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.1)


def test_a_split_keeps_its_parts():
    program = torchgraft.symbolic_trace(layers(8, device="cpu"))
    parts = split(program, by=Stages(2))
    found = simulate(parts, inputs(), machines=["h200"] * 2, microbatches=4, training=True)
    assert [device.stages for device in found.devices] == [("submod_0",), ("submod_1",)]
    halves = [sum(p.numel() * 4 for p in part.module.parameters()) for part in parts.parts]
    assert [device.weight_bytes for device in found.devices] == halves
    with pytest.raises(GraftError, match="the split has 2 parts, and there are 3 stages\ngive a machine for each part"):
        simulate(parts, inputs(), machines=["h200"] * 3)


def test_the_cut_that_was_found_makes_parts():
    program = torchgraft.symbolic_trace(layers(8, device="cpu"))
    found = simulate(program, inputs(), machines=["h200"] * 4, microbatches=4, training=True)
    parts = split_module(program, None, found.stage_of)
    assert len(list(parts.children())) == 4
    x = torch.randn(2, 512)
    assert torch.equal(parts(x), program(x))


def test_cuts_by_name():
    program = torchgraft.symbolic_trace(layers(4, device="cpu"))
    found = simulate(program, inputs(), machines=["h200"] * 2, cuts=["_1"], training=True)
    assert found.cuts == ("_1",) and found.devices[0].weight_bytes * 3 == found.devices[1].weight_bytes
    searched = simulate(program, inputs(), machines=["h200"] * 2, training=True)
    assert searched.pipeline_seconds <= found.pipeline_seconds * 1.001
    with pytest.raises(GraftError, match="there is no call named 'nothing' to cut before"):
        simulate(program, inputs(), machines=["h200"] * 2, cuts=["nothing"])
    with pytest.raises(GraftError, match="2 cuts do not make 2 stages"):
        simulate(program, inputs(), machines=["h200"] * 2, cuts=["_1", "_2"])


def test_interleaving_has_a_smaller_bubble():
    plain = simulate(layers(16), inputs(), machines=["h200"] * 4, microbatches=8, training=True, **OPTIONS)
    options = {"schedule": "interleaved", "chunks": 2, **OPTIONS}
    found = simulate(layers(16), inputs(), machines=["h200"] * 4, microbatches=8, training=True, **options)
    assert found.bubble < plain.bubble and found.seconds < plain.seconds
    assert all(len(device.stages) == 2 for device in found.devices) and len(found.cuts) == 7


def test_gpipe_holds_more():
    sizes = {}
    for schedule in ("gpipe", "1f1b"):
        found = simulate(
            layers(), inputs(1024), machines=["h200"] * 4, microbatches=16, schedule=schedule, training=True
        )
        sizes[schedule] = [device.peak_bytes for device in found.devices]
    assert all(one > other for one, other in zip(sizes["gpipe"], sizes["1f1b"], strict=True))
    saved = 1024 // 16 * 512 * 4 * 2  # two layers' inputs of a micro-batch, of which 16 and 4 are under way
    assert sizes["gpipe"][0] - sizes["1f1b"][0] == pytest.approx(12 * saved, rel=0.1)


def test_recomputing_takes_time_and_saves_memory():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 256)) for _ in range(8)])
    x = torch.empty(4096, 256, device="meta")
    plain = simulate(model, x, machines=["h200"] * 4, microbatches=8, training=True, **OPTIONS)
    again = simulate(model, x, machines=["h200"] * 4, microbatches=8, training=True, recompute=True, **OPTIONS)
    assert again.devices[0].peak_bytes < plain.devices[0].peak_bytes
    assert again.pipeline_seconds > 1.1 * plain.pipeline_seconds


def test_copies_share_gradients_while_backward_runs():
    x = inputs(1024)
    alone = simulate(layers(), x, machines=["h200"], training=True, **OPTIONS)
    found = simulate(layers(), x, machines=["h200"], replicas=8, training=True, bucket_bytes=2**20, **OPTIONS)
    device = found.devices[0]
    assert found.batch == 8 * 1024 and found.replica_link == "nvlink"
    assert 0 < device.exposed_seconds < device.reduce_seconds  # some of it was hidden
    assert sum(bucket.size for bucket in found.buckets[0]) == 8 * (512 * 512 + 512) * 2
    assert found.seconds == pytest.approx(alone.seconds + device.exposed_seconds)
    slow = simulate(layers(), x, machines=["h200"], replicas=8, replica_link="ethernet-100", training=True, **OPTIONS)
    assert slow.devices[0].exposed_seconds > device.exposed_seconds
    assert simulate(layers(), x, machines=["h200"], replicas=64, training=True).replica_link == "network"


def test_an_optimizer_has_state_and_takes_time():
    x = inputs()
    plain = simulate(layers(), x, machines=["h200"] * 2, training=True)
    adam = simulate(layers(), x, machines=["h200"] * 2, optimizer=torch.optim.Adam)
    weights = plain.devices[0].weight_bytes
    assert adam.devices[0].peak_bytes - plain.devices[0].peak_bytes == pytest.approx(2 * weights, rel=0.05)
    assert all(device.optimizer_seconds > 0 for device in adam.devices) and adam.seconds > plain.seconds
    shared = simulate(layers(), x, machines=["h200"] * 2, optimizer=torch.optim.Adam, replicas=4, shard_optimizer=True)
    assert shared.devices[0].peak_bytes - plain.devices[0].peak_bytes == pytest.approx(weights / 2, rel=0.1)


def test_an_update_takes_what_it_takes_on_one_device():
    model, x = layers(4), inputs(8)
    whole = simulate(model, x, optimizer=torch.optim.AdamW, **OPTIONS)
    found = simulate(model, x, machines=["h200"], optimizer=torch.optim.AdamW, **OPTIONS)
    assert found.seconds == pytest.approx(whole.seconds, rel=0.03)


def test_memory_decides_where_to_cut():
    small = dataclasses.replace(
        torchgraft.Machine.named("h200"), name="small", memory_bytes=5_000_000, workspace_bytes=0
    )
    model = nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512), *[nn.Linear(512, 512) for _ in range(4)])
    found = simulate(model, inputs(8), machines=[small, "h200"], training=False)
    assert found.fits and found.devices[0].peak_bytes <= 5_000_000
    tiny = dataclasses.replace(small, memory_bytes=1000)
    over = simulate(model, inputs(8), machines=[tiny, "h200"])
    assert not over.fits and "does not fit" in str(over)


def test_weights_that_two_stages_use_are_on_both():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(512, 512)
            self.middle = nn.Linear(512, 512)

        def forward(self, x):
            return self.first(self.middle(self.first(x)))

    found = simulate(Tied(), inputs(8), machines=["h200"] * 3, training=True)
    assert len({device.weight_bytes for device in found.devices}) == 1


def test_what_crosses_a_cut_counts_once():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(512, 512), nn.Linear(512, 512)

        def forward(self, x):
            y = self.a(x)
            return self.b(y.view(-1, 512)) + y

    slow = torchgraft.Link("slow", 1e6, 0.0)
    x = inputs(8)
    found = simulate(Residual(), x, machines=["h200"] * 2, cuts=["b"], links=slow)
    sent = 8 * 512 * 4 / 1e6  # y and its view are one piece of memory
    assert found.seconds == pytest.approx(sent, rel=0.05)


def test_texts_and_files(tmp_path):
    found = simulate(layers(), inputs(), machines=["h200"] * 2, microbatches=4, replicas=2, training=True, **OPTIONS)
    assert "4 devices (2 copies on 2 each)" in found.headline() and "bubble" in str(found)
    assert found.headline() in repr(found)
    content = json.loads(found.to_json())
    assert len(content["devices"]) == 2 and len(content["tasks"]) == 16 and content["fits"] is True
    assert "<table" in found._repr_html_() and found.svg(tmp_path / "a.svg").count("<rect") > 16
    trace = json.loads(found.to_chrome_trace(tmp_path / "trace.json"))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1} and {event["cat"] for event in spans} >= {"forward", "backward"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    assert (tmp_path / "a.svg").read_text().startswith("<svg") and json.loads((tmp_path / "trace.json").read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machines": "h200"}, "machines is a list with one machine for each device, not 'h200'"),
        ({"machines": []}, "machines is a list with one machine for each device"),
        ({"machines": ["h200"] * 2, "microbatches": 0}, "microbatches is 0\ngive a whole number, 1 or more"),
        ({"machines": ["h200"] * 2, "microbatches": 3}, "a batch of 64 cannot be divided into 3 micro-batches"),
        (
            {"machines": ["h200"] * 2, "links": ["nvlink"] * 3},
            "3 links cannot join 2 machines in a row\ngive one, or 1",
        ),
        ({"machines": ["h200"] * 2, "links": "string"}, "there is no link 'string'"),
        ({"machines": ["h200"] * 2, "schedule": "x"}, "there is no schedule 'x'"),
        ({"machines": ["h200"] * 2, "mode": "quick"}, "there is no mode 'quick'\nchoose one of eager, graph, lowered"),
        ({"machines": ["h200"] * 2, "machine": "h100"}, "there is a machine=, 'h100', and machines="),
        ({"machines": ["h200"] * 9}, "cannot cut 8 calls into 9 stages"),
        ({"machines": ["h999"]}, "there is no machine named 'h999'"),
        ({"microbatches": 4}, "microbatches= is about several devices\ngive machines="),
        ({"machine": ["h200", "h200"]}, "machine= is one machine, not several"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(GraftError) as raised:
        simulate(layers(), inputs(), **options)
    assert str(raised.value).startswith(message)


def llama_step(size, devices, replicas):
    with torch.device("meta"):
        model = Llama(**SIZES[size])
    ids = torch.empty(16, 512, dtype=torch.long, device="meta")
    options = {"microbatches": 16, "precision": "bf16", "mode": "graph", "optimizer": torch.optim.AdamW}
    return model, simulate(model, ids, machines=["h200"] * devices, replicas=replicas, recompute=True, **options)


def test_a_small_llama_on_64_devices():
    model, found = llama_step("tiny", 8, 8)
    assert len(found.devices) * found.replicas == 64
    assert sum(device.weight_bytes for device in found.devices) >= 2 * sum(p.numel() for p in model.parameters())
    assert [device.in_flight for device in found.devices] == [8, 7, 6, 5, 4, 3, 2, 1]


@pytest.mark.slow
def test_a_llama_of_70_billion_parameters_on_64_devices_in_a_minute():
    started = time.process_time()
    model, found = llama_step("70b", 8, 8)
    assert time.process_time() - started < 60
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(70.6e9, rel=0.01)
    assert found.seconds > 0 and 0 < found.bubble < 0.5
