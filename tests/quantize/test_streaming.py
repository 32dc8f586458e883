"""Programs without data, filled from shards: the same as quantizing the model, and never more than one tensor in floats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from torchgraft import QuantizeError
from torchgraft.quantize import Numbers, load_weights, quantize, weights
from torchgraft.quantize import streaming as room
from torchgraft.quantize.weights import quantize_weight

SOURCES = str(Path(room.__file__).parents[2])


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.one, self.two = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 40, bias=False)
        self.register_buffer("shift", torch.ones(width), persistent=False)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(self.norm(x + self.two(torch.relu(self.one(x)))) + self.shift)


def written(model, folder):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    names = list(state)
    for number, part in enumerate((names[:2], names[2:5], names[5:])):
        safetensors.torch.save_file({name: state[name] for name in part}, folder / f"model-{number}.safetensors")


def empty(dtype):
    with torch.device("meta"):
        return Block().eval().to(dtype)


@pytest.mark.parametrize("scheme", ["weight-int8", "weight-int4"])
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_program_filled_from_shards_is_the_quantized_model(tmp_path, scheme, backend, dtype):
    torch.manual_seed(0)
    model = Block().eval().to(dtype)
    written(model, tmp_path)
    ids = torch.randint(0, 40, (2, 5))
    program = quantize(empty(dtype), [ids.to("meta")], config=scheme, backend=backend)
    assert all(value.is_meta for value in [*program.parameters(), *program.buffers()])
    seen = []
    taken = load_weights(program, tmp_path, others={"shift": torch.ones(64, dtype=dtype)}, progress=seen.append)
    assert taken == len(seen) + 1 == 8
    direct = quantize(model, [ids], config=scheme, backend=backend)
    with torch.no_grad():
        assert torch.equal(program(ids), direct(ids))


def test_there_is_never_more_than_one_tensor_in_floats(tmp_path, monkeypatch):
    model = Block().eval().bfloat16()
    written(model, tmp_path)
    ids = torch.zeros(1, 4, dtype=torch.long)
    program = quantize(empty(torch.bfloat16), [ids.to("meta")], config="weight-int8")
    sizes = []

    def watched(weight, *rest):
        floats = [
            value for value in [*program.parameters(), *program.buffers()] if not value.is_meta and value.dim() > 1
        ]
        sizes.append(sum(value.numel() for value in floats if value.is_floating_point()))
        return original(weight, *rest)

    original = room.quantize_weight
    monkeypatch.setattr(room, "quantize_weight", watched)
    load_weights(program, tmp_path, others={"shift": torch.ones(64)})
    assert len(sizes) == 3 and max(sizes) <= model.embedding.weight.numel()


@pytest.mark.parametrize(
    "numbers", [Numbers(8, True, True, "channel"), Numbers(4, per="group", group=32), Numbers(4, True, True, "channel")]
)
def test_large_weights_are_rounded_in_parts(numbers, monkeypatch):
    weight = torch.randn(37, 64, generator=torch.Generator().manual_seed(0))
    whole = quantize_weight(weight, numbers, 0)
    monkeypatch.setattr(weights, "_PART", 640)
    parts = quantize_weight(weight, numbers, 0)
    assert torch.equal(whole.steps, parts.steps) and torch.equal(whole.scale, parts.scale)
    assert torch.equal(whole.values(), parts.values())
    weight[30, 3] = float("nan")
    with pytest.raises(QuantizeError, match="the weights of here hold infinite values"):
        quantize_weight(weight, numbers, 0, "here")


def test_what_is_missing_or_does_not_fit_is_said(tmp_path):
    model = Block().eval()
    written(model, tmp_path)
    ids = torch.zeros(1, 4, dtype=torch.long)
    program = quantize(empty(torch.float32), [ids.to("meta")], config="weight-int8")
    with pytest.raises(
        QuantizeError, match="the checkpoint has no values for shift\ngive tensors that are not in the files"
    ):
        load_weights(program, tmp_path)
    with pytest.raises(QuantizeError, match="there are no safetensors files in"):
        (tmp_path / "other").mkdir()
        load_weights(program, tmp_path / "other")
    safetensors.torch.save_file({"norm.weight": torch.ones(3)}, tmp_path / "wrong.safetensors")
    with pytest.raises(QuantizeError, match=r"'norm.weight' is \(3,\) in the checkpoint and \(64,\) in the program"):
        load_weights(program, [tmp_path / "wrong.safetensors"])


_IN_A_PROCESS = """
import json, sys, threading
from pathlib import Path
import safetensors.torch, torch
from torch import nn
from torchgraft.quantize import load_weights, quantize

def in_use():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

def model():
    return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(24)]).eval()

folder, scheme = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
for number in range(24):
    weight = torch.randn(2048, 2048, dtype=torch.bfloat16) * 0.02
    safetensors.torch.save_file({f"{number}.weight": weight}, folder / f"model-{number:02}.safetensors")
del weight
with torch.device("meta"):
    empty = model().bfloat16()
x = torch.ones(1, 2048, dtype=torch.bfloat16)
quantize(nn.Linear(2048, 2048).eval().bfloat16(), [x], config=scheme)(x)  # what is loaded once is loaded now
program = quantize(empty, [x.to("meta")], config=scheme)
before, most, ends = in_use(), [0], threading.Event()

def look():
    while not ends.wait(0.001):
        most[0] = max(most[0], in_use())

watching = threading.Thread(target=look)
watching.start()
load_weights(program, folder)
ends.set()
watching.join()
held = sum(value.numel() * value.element_size() for value in program.buffers())
assert torch.isfinite(program(x)).all()
print(json.dumps([before, most[0], held]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux how much memory is in use")
@pytest.mark.parametrize("scheme", ["weight-int8", "weight-int4"])
def test_memory_is_that_of_the_program_and_of_one_layer(tmp_path, scheme):
    command = [sys.executable, "-c", _IN_A_PROCESS, str(tmp_path), scheme]
    found = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": SOURCES}
    )
    before, most, held = json.loads(found.stdout)
    layer, model = 2048 * 2048 * 4, 24 * 2048 * 2048 * 2
    # One layer in 32-bit floats with what its rounding takes; far from a second copy of the model, which is 200 MB.
    assert most - before < held + 3 * layer < held + model / 3
