"""Choosing a backend by measuring, keeping the choice, files of lowered modules, and `graft bench` and `graft lower`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft import Backend, BackendError
from torchgraft.backends import auto
from torchgraft.backends.backend import _registered
from torchgraft.backends.bench import bench
from torchgraft.cli.main import main
from torchgraft.codegen.calling import of_batch

MODEL = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def few_backends(monkeypatch):
    """Only the native one and those of a test: others take long, and are not installed everywhere."""
    monkeypatch.setattr(auto, "backend_names", lambda: ["native", *_registered])
    monkeypatch.setattr(auto, "_ROUNDS", 1)
    monkeypatch.setattr(auto, "_MORE_ROUNDS", 0)
    before = dict(_registered)
    _registered.clear()  # the examples of other tests are known in this process, too
    yield
    _registered.clear()
    _registered.update(before)


def _register(cls):
    _registered.clear()
    return torchgraft.register_backend(cls)


def test_the_quickest_is_chosen_and_kept(tmp_path, caplog):
    path = tmp_path / "choice.json"
    seen: list[str] = []
    with torchgraft.follow_progress(lambda progress: seen.append(str(progress))):
        fast = torchgraft.lower(MODEL, X, choice=path)
    assert fast.backend.name == "native" == fast.choice.backend
    assert any("compiling with native (1 of " in text for text in seen)
    assert {row["backend"] for row in fast.choice.rows()} >= {"native", "eager"}
    assert "times eager" in str(fast.choice)
    torch.testing.assert_close(fast(X), MODEL(X))
    written = path.stat().st_mtime_ns
    again = torchgraft.lower(MODEL, X, choice=path)
    assert again.choice.key == fast.choice.key and path.stat().st_mtime_ns == written
    torchgraft.lower(MODEL, X[:1], choice=path)
    assert json.loads(path.read_text())["key"]["inputs"] == "float32[1, 4]"
    path.write_text("{broken")
    torchgraft.lower(MODEL, X, choice=path)
    assert json.loads(path.read_text())["backend"] == "native"


def test_a_choice_is_for_one_model_and_its_file_is_tried_before_the_work(tmp_path):
    path = tmp_path / "choice.json"
    models = [nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)]).eval() for count in (1, 2)]
    first, second = [torchgraft.lower(model, torch.ones(1, 4), choice=path) for model in models]
    assert first.choice.key != second.choice.key  # though both are called Sequential and take the same
    assert torchgraft.lower(models[1], torch.ones(1, 4), choice=path).choice.key == second.choice.key
    path.write_bytes(b"\xff\xfe\x00")  # damaged, so made again
    assert torchgraft.lower(models[1], torch.ones(1, 4), choice=path).choice.key == second.choice.key
    for wrong, text in [(tmp_path, "it is a folder"), (tmp_path / "none" / "x.json", "its folder does not exist")]:
        with pytest.raises(torchgraft.errors.WriteError, match=text):
            torchgraft.lower(models[0], torch.ones(1, 4), choice=wrong)


def test_wrong_numbers_and_crashes_are_not_chosen():
    @_register
    class Fast(Backend):
        name, takes_all, sizes_are_free = "fast-and-wrong", True, True

        def compile(self, part, inputs, options):
            return lambda input: torch.zeros(3, 2)

    fast = torchgraft.lower(MODEL, X)
    assert fast.backend.name == "native"
    row = next(row for row in fast.choice.rows() if row["backend"] == "fast-and-wrong")
    assert row["seconds"] is None and "does not compute what Sequential computes" in row["note"]


def test_a_candidate_that_hangs_is_left_out(monkeypatch):
    import time

    @_register
    class Hanging(Backend):
        name, takes_all = "hanging", True

        def compile(self, part, inputs, options):
            time.sleep(5)

    fast = torchgraft.lower(MODEL, X, time_limit=1.0)
    row = next(row for row in fast.choice.rows() if row["backend"] == "hanging")
    assert "time limit" in row["note"]


def test_where_nothing_can_run_it_the_model_does():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.from_numpy(x.numpy() + 1)

    model = Odd().eval()
    fast = torchgraft.lower(model, X)
    assert torch.equal(fast(X), model(X))
    assert "own Python" in fast.explain()


def test_saved_and_loaded(tmp_path):
    fast = torchgraft.lower(MODEL, X, backend="native", precision="bf16")
    fast.save(tmp_path / "fast.pt")
    loaded = torchgraft.load_lowered(tmp_path / "fast.pt")
    assert loaded.options.precision == "bf16" and torch.equal(loaded(X), fast(X))
    torch.save({"a": 1}, tmp_path / "other.pt")
    with pytest.raises(BackendError, match="is no lowered module"):
        torchgraft.load_lowered(tmp_path / "other.pt")


def test_batches():
    args, kwargs = of_batch((torch.arange(6).reshape(2, 3), "text"), {"mask": torch.ones(2), "other": torch.ones(5)}, 3)
    assert args[0].tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2]] and args[1] == "text"
    assert kwargs["mask"].shape == (3,) and kwargs["other"].shape == (5,)


def test_bench_is_a_table_and_bars():
    result = bench(MODEL, (X,), {}, backends=["native"], batches=(1, 2), threads=(1,), name="<small>")
    assert [(row.batch, row.way) for row in result.results] == [
        (batch, way) for batch in (1, 2) for way in ("eager", "lower, native")
    ]
    assert all(row.seconds and row.times_eager for row in result.results)
    svg = result.svg()
    assert svg.startswith("<svg") and "batch 2, 1 thread" in svg and "&lt;small&gt;" in svg
    assert torch.get_num_threads() >= 1


def test_commands(tmp_path, capsys):
    assert main(["lower", "zoo:mlp", "--backend", "native", "-o", str(tmp_path / "mlp.pt")]) == 0
    assert "on native: " in capsys.readouterr().out
    assert torchgraft.load_lowered(tmp_path / "mlp.pt")(torch.ones(1, 16)).shape == (1, 16)
    assert main(["bench", "zoo:mlp", "--backends", "native", "--batch", "1,2", "-o", str(tmp_path / "bars.svg")]) == 0
    assert "lower, native" in capsys.readouterr().out
    assert (tmp_path / "bars.svg").read_text().startswith("<svg")
    assert main(["lower", "zoo:mlp", "--backend", "natve"]) == 1
    assert "did you mean 'native'?" in capsys.readouterr().err
    assert main(["bench", "zoo:mlp", "--backends", "nothing", "--json"]) == 1
    assert "no backend is called 'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["bench", "zoo:mlp", "-o", "bars.png"], "give an .svg or a .json file"),
        (["bench", "zoo:mlp", "--time-limit", "0"], "give seconds above 0, not '0'"),
        (["lower", "zoo:mlp", "--time-limit", "soon"], "give seconds above 0, not 'soon'"),
        (["bench", "zoo:mlp", "--threads", "1,x"], "give a whole number"),
    ],
)
def test_wrong_usage(command, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2 and text in capsys.readouterr().err


HANGS = """
import sys, time, torch, torchgraft
from torchgraft.cli.main import main

@torchgraft.register_backend
class Slow(torchgraft.Backend):
    name, takes_all = "slow", True

    def compile(self, part, inputs, options):
        while True:
            time.sleep(0.01)
            torch.ones(2).relu_()

sys.argv = ["graft", "lower", "zoo:mlp", "--backend", "slow", "--time-limit", "0.2"]
sys.exit(main())
"""


def test_a_command_ends_although_a_backend_does_not():
    source = os.path.join(os.path.dirname(__file__), "..", "..", "src")
    environment = {**os.environ, "PYTHONPATH": source}
    found = subprocess.run([sys.executable, "-c", HANGS], env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 1
    assert found.stderr.splitlines() == ["graft lower: it took longer than the time limit of 0.2 s"]


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_runtimes(name):
    pytest.importorskip(name)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2)
    ).eval()
    x = torch.randn(2, 3, 8, 8)
    fast = torchgraft.lower(model, x, backend=name)
    assert "calls, in 1 part" in fast.explain() and "stay" not in fast.explain()
    for batch in (2, 5):
        x = torch.randn(batch, 3, 8, 8)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_inductor():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    try:
        fast = torchgraft.lower(model, X, backend="inductor")
    except BackendError as error:
        pytest.skip(str(error))
    torch.testing.assert_close(fast(X), model(X), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs():
    model = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval().cuda()
    )
    x = torch.randn(2, 3, 8, 8, device="cuda")
    fast = torchgraft.lower(model, x, backend="cudagraphs", precision="tf32")
    first = fast(x)
    kept = first.clone()
    other = fast(torch.randn_like(x))
    assert torch.equal(first, kept) and not torch.equal(other, kept)
    torch.testing.assert_close(first, model(x), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(fast(x[:1]), model(x[:1]), rtol=1e-2, atol=1e-2)


def test_converting_for_openvino_reports_to_nobody(monkeypatch):
    pytest.importorskip("openvino")
    sender = pytest.importorskip("openvino_telemetry.utils.sender")
    sent = []
    monkeypatch.setattr(sender.TelemetrySender, "send", lambda *args: sent.append(args))
    torchgraft.lower(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval(), torch.randn(2, 4), backend="openvino"
    )
    assert not sent


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_runtimes_take_what_language_models_do(name):
    """A cache that was never filled, keys for several queries, windows, calls that change nothing, a result given twice."""
    pytest.importorskip(name)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, scale):
            query, key, value = self.query(x), self.key(x), self.value(x)
            query, key, value = [item.view(*x.shape[:2], -1, 4).transpose(1, 2) for item in (query, key, value)]
            key, value = [torch.cat([torch.tensor([]), item], dim=-2) for item in (key, value)]
            y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            windows = query.unflatten(0, (-1, 1))
            y = y + nn.functional.scaled_dot_product_attention(windows, windows, windows).flatten(0, 1)
            y = y.to(x.dtype).contiguous()
            return y * scale, y.float(), y, key, x

    model = Decoder().eval()
    fast = torchgraft.lower(model, (torch.randn(2, 5, 8), 2), backend=name)
    assert "in 1 part" in fast.explain() and "stay" not in fast.explain(), fast.explain()
    for sizes in ((2, 5, 8), (3, 1, 8)):
        x = torch.randn(sizes)
        for found, expected in zip(fast(x, 2), model(x, 2), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


class _Counts(nn.Module):
    """Writes into a buffer and into its input, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x.add_(1)
        return nn.functional.dropout(self.linear(x)) + self.calls


def test_measuring_leaves_the_model_its_inputs_and_random_numbers_as_they_were():
    model, x = _Counts().eval(), torch.zeros(3, 4)
    states = torch.get_rng_state()
    fast = torchgraft.lower(model, x)
    assert model.calls == 0 and not x.any() and torch.equal(torch.get_rng_state(), states)
    expected = model(torch.zeros(3, 4))
    model.calls.zero_()
    torch.set_rng_state(states)
    torch.testing.assert_close(fast(x), expected)
    assert model.calls == 1 and x.eq(1).all()
    bench(model, (x,), {}, backends=["native"])
    assert model.calls == 1 and x.eq(1).all()
