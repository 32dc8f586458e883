"""Real profiles lined up with simulations, traces of GPUs in torch.profiler's form, and files that are no profiles."""

import gzip
import json
import tempfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from torchgraft import simulate, zoo
from torchgraft.analysis.simulate.profile import aligned_pairs, canonical, events_of
from torchgraft.errors import GraftError

MODEL = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Softmax(-1)).eval()
X = torch.ones(8, 64)


def profiled(model, *args):
    with torch.no_grad():
        model(*args)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            model(*args)
    return found


@pytest.mark.parametrize("name", ["mlp", "resnet50", "transformer"])
def test_every_operator_of_a_run_is_found(name):
    model, x = zoo.create(name).eval(), zoo.example_inputs(name)
    result = simulate(model, x)
    found = result.compare_with_profile(profiled(model, *x))
    assert found.matched == found.simulated_operators and "(not simulated)" not in [node.node for node in found.nodes]
    assert [node.node for node in found.nodes] == list(dict.fromkeys(kernel.node for kernel in result.kernels))
    assert all(node.measured > 0 and node.simulated > 0 for node in found.nodes)
    assert found.simulated == pytest.approx(result.device_seconds) and not found.on_device


def test_files_and_compressed_files(tmp_path):
    real = profiled(MODEL, X)
    real.export_chrome_trace(str(tmp_path / "trace.json"))
    content = (tmp_path / "trace.json").read_bytes()
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(content))
    result = simulate(MODEL, X)
    for trace in (tmp_path / "trace.json", str(tmp_path / "trace.json.gz"), json.loads(content)):
        found = result.compare_with_profile(trace)
        assert found.matched == found.simulated_operators == 4
        assert [node.operators for node in found.nodes] == [
            ("aten::addmm",),
            ("aten::relu",),
            ("aten::addmm",),
            ("aten::_softmax",),
        ]


def test_a_training_step():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with profile(activities=[ProfilerActivity.CPU]) as real:
        y = model(X)
        torch.autograd.backward(y, torch.ones_like(y))
        optimizer.step()
    result = simulate(model, X, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
    found = result.compare_with_profile(real)
    assert found.matched >= found.simulated_operators - 1
    assert "_2 (backward)" in [node.node for node in found.nodes]


def test_the_last_step_counts():
    waits = schedule(wait=1, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=waits) as real, torch.no_grad():
        for _ in range(4):
            MODEL(X)
            real.step()
    found = simulate(MODEL, X).compare_with_profile(real)
    assert found.matched == 4 and "(not simulated)" not in [node.node for node in found.nodes]


def test_where_the_two_part():
    class More(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = MODEL

        def forward(self, x):
            return self.inner(x).cumsum(0).exp()

    result = simulate(MODEL, X)
    found = result.compare_with_profile(profiled(More(), X))
    assert found.matched == 4  # what the simulation does not know is none of its operators
    short = simulate(More(), X).compare_with_profile(profiled(MODEL, X))
    missing = [node for node in short.nodes if node.measured is None]
    assert [node.operators for node in missing] == [("aten::cumsum",), ("aten::exp",)]
    assert "-" in str(short) and short.rows()[-1]["measured"] is None


def test_a_simulation_is_its_own_profile(tmp_path):
    for options in ({}, {"training": True}, {"mode": "graph"}):
        result = simulate(MODEL, X, **options)
        result.to_chrome_trace(tmp_path / "own.json")
        found = result.compare_with_profile(tmp_path / "own.json")
        assert found.matched == found.simulated_operators and found.on_device
        assert found.measured == pytest.approx(found.simulated, rel=1e-3)
        assert all(abs(node.difference) < 1e-9 for node in found.nodes)


def gpu_trace():
    """Two operators as torch.profiler writes them with CUDA: launches on the host, kernels on the device, by correlation."""
    events = []
    for place, (outer, inner, kernels) in enumerate(
        [
            ("aten::linear", "aten::addmm", [3.0, 1.0]),
            ("aten::relu", None, [2.0]),
            ("aten::linear", "aten::addmm", [5.0]),
        ]
    ):
        start = 100.0 * place
        events.append({"ph": "X", "cat": "cpu_op", "name": outer, "pid": 9, "tid": 9, "ts": start, "dur": 50.0})
        if inner:
            events.append({"ph": "X", "cat": "cpu_op", "name": inner, "pid": 9, "tid": 9, "ts": start + 5, "dur": 40.0})
        for number, duration in enumerate(kernels):
            correlation = {"correlation": 10 * place + number}
            launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "dur": 2.0}
            events.append({**launch, "ts": start + 10 + number, "args": correlation})
            kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "dur": duration}
            events.append({**kernel, "ts": 1000.0 + start + 5 * number, "args": correlation})
    return {"traceEvents": events}


def test_kernels_are_found_by_what_launched_them():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    found = simulate(model, X).compare_with_profile(gpu_trace())
    assert found.on_device and found.matched == 3
    assert [node.measured for node in found.nodes] == pytest.approx([4e-6, 2e-6, 5e-6])


def test_names_are_the_same_on_every_device():
    names = ["aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::_native_batch_norm_legit_no_training"]
    assert {canonical(name) for name in names} == {"batch_norm"}
    assert canonical("aten::_scaled_dot_product_flash_attention_for_cpu") == canonical("aten::_flash_attention_forward")
    assert canonical("aten::max_pool2d_with_indices") == canonical("aten::max_pool2d")
    assert canonical("aten::mkldnn_convolution") == "convolution" and canonical("aten::add_") == "add"
    assert canonical("aten::native_layer_norm_backward") != canonical("aten::native_layer_norm")


@given(first=st.text("abc", max_size=30), second=st.text("abc", max_size=30))
def test_pairs_are_in_order_and_complete(first, second):
    pairs = list(aligned_pairs(first, second))
    assert [left for left, _ in pairs if left is not None] == list(range(len(first)))
    assert [right for _, right in pairs if right is not None] == list(range(len(second)))
    assert all(first[left] == second[right] for left, right in pairs if left is not None and right is not None)


def test_equal_lists_are_matched_one_by_one():
    assert all(left == right for left, right in aligned_pairs("abcabc" * 100, "abcabc" * 100))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[1, 2]", "this is no profile: it has no list of events"),
        ('{"events": []}', "this is no profile: it has no list of events"),
        ('{"traceEvents": []}', "the profile has none of the operators that were simulated"),
    ],
)
def test_files_that_are_no_profiles(tmp_path, content, message):
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(GraftError, match=message):
        simulate(MODEL, X).compare_with_profile(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(GraftError, match="cannot read the profile .*: No such file"):
        events_of(tmp_path / "nothing.json")


def test_texts():
    found = simulate(MODEL, X).compare_with_profile(profiled(MODEL, X))
    assert str(found).splitlines()[0] == found.headline() and "4 of 4 operators matched" in repr(found)
    assert json.loads(found.to_json())["matched"] == 4 and "<table" in found._repr_html_()
    assert abs(found.parted[0].difference) == max(abs(node.difference) for node in found.nodes)


def test_a_profile_can_be_compared_with_several_machines():
    model, x = nn.Linear(8, 8), torch.ones(2, 8)
    with torch.profiler.profile() as profile, torch.no_grad():
        model(x)
    first, second = (simulate(model, x, machine=name).compare_with_profile(profile) for name in ("h200", "epyc"))
    assert first.matched == second.matched == 1 and first.measured == second.measured
    with torch.profiler.profile() as written, torch.no_grad():
        model(x)
    with tempfile.TemporaryDirectory() as folder:
        written.export_chrome_trace(f"{folder}/trace.json")
        with pytest.raises(GraftError, match="give the file that it was written to"):
            simulate(model, x).compare_with_profile(written)
        assert simulate(model, x).compare_with_profile(f"{folder}/trace.json").matched == 1


def test_a_part_that_only_one_of_them_has_does_not_shift_what_follows():
    """A mask that a run does not build: single operators that agree by chance on the way do not lead away from the rest."""
    layer = [
        "layer_norm",
        "addmm",
        "attention",
        "addmm",
        "add",
        "layer_norm",
        "addmm",
        "mul",
        "tanh",
        "mul",
        "addmm",
        "add",
    ]
    mask = ["arange", "add", "arange", "le", "index", "eq", "bitwise_and"]
    pairs = list(aligned_pairs(["embedding", "add", *mask, *layer * 3], ["embedding", "add", "eq", *layer * 3]))
    matched = [(left, right) for left, right in pairs if left is not None and right is not None]
    assert matched[-36:] == [(9 + place, 3 + place) for place in range(36)] and len(matched) >= 38
    assert [left for left, _ in pairs if left is not None] == list(range(45))
    assert [right for _, right in pairs if right is not None] == list(range(39))
