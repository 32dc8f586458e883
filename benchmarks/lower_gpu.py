"""Lowered modules on a GPU beside eager and torch.compile: `PYTHONPATH=src python benchmarks/lower_gpu.py`.
It needs torch (2.11 or newer) with CUDA and this project, nothing else; torchvision is not needed.

Each row runs in a process of its own, beside the first row of its table and in turns with it, for a kernel that fails takes its
process with it; what a dying one said is in the results, and at the end it runs once more with launches that wait. Times are
the least of several rounds. After each row `results.json` and `results.md` are written anew; `--limit` seconds are all that a
row takes, `--budget` all that everything does. The most telling rows come first; `--only decoding` is one table, `--rehearse`
tries the program itself on a CPU with small models.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchgraft
from torchgraft import zoo

# Set by `--rehearse`: the CPU and small models, to try this program itself.
DEVICE, SMALL = "cuda", False
# Seconds below which no row is begun.
LEAST = 20.0


# ---- a language model of one billion parameters that decodes one token, the cache given ----


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, size: int, heads: int, pairs: int, inner: int) -> None:
        super().__init__()
        self.heads, self.pairs, self.width = heads, pairs, size // heads
        self.norm1, self.norm2 = RMSNorm(size), RMSNorm(size)
        self.q = nn.Linear(size, size, bias=False)
        self.k = nn.Linear(size, pairs * self.width, bias=False)
        self.v = nn.Linear(size, pairs * self.width, bias=False)
        self.o = nn.Linear(size, size, bias=False)
        self.gate, self.up = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, position: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        y = self.norm1(x)
        batch = x.shape[0]
        q = self.q(y).view(batch, 1, self.heads, self.width).transpose(1, 2)
        k = self.k(y).view(batch, 1, self.pairs, self.width).transpose(1, 2)
        v = self.v(y).view(batch, 1, self.pairs, self.width).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        attended = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, 1, -1))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The shape of a 1.2-billion-parameter Llama."""

    def __init__(
        self,
        layers: int = 16,
        size: int = 2048,
        heads: int = 32,
        pairs: int = 8,
        inner: int = 8192,
        words: int = 128256,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, size)
        self.blocks = nn.ModuleList([Block(size, heads, pairs, inner) for _ in range(layers)])
        self.norm = RMSNorm(size)
        width = size // heads
        frequencies = 1.0 / 500000.0 ** (torch.arange(0, width, 2).float() / width)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, token: Tensor, position: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        x = self.words(token)
        angles = torch.outer(position.float(), self.frequencies.float())
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = (torch.arange(keys[0].shape[2], device=x.device) <= position)[None, None, None, :]
        for block, k, v in zip(self.blocks, keys, values, strict=True):
            x = block(x, cos, sin, mask, position, k, v)
        return nn.functional.linear(self.norm(x), self.words.weight)


def llama(length: int = 1024) -> tuple[nn.Module, tuple[Any, ...]]:
    sizes = {"layers": 2, "size": 128, "heads": 4, "pairs": 2, "inner": 256, "words": 100} if SMALL else {}
    with torch.device(DEVICE):
        model = Llama(**sizes).to(torch.bfloat16).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        block: Any = model.blocks[0]
        shape = (1, block.pairs, length, block.width)
        caches = [[torch.randn(shape, dtype=torch.bfloat16) for _ in model.blocks] for _ in range(2)]
        return model, (torch.tensor([[17]]), torch.tensor([length // 2]), *caches)


# ---- what is measured: rows of tables; the first one is what the others are times of ----

Make = Callable[[], Callable[[], Any]]


def compiled(model: Any, *inputs: Any) -> Callable[[], Any]:
    """torch.compile's own quickest way for small batches."""
    function = torch.compile(model, mode="reduce-overhead")
    return lambda: function(*inputs)


Given = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


def eager(given: Given) -> Make:
    def make() -> Callable[[], Any]:
        model, inputs = given()
        return lambda: model(*inputs)

    return make


def lowered(given: Given, backend: str, **options: Any) -> Make:
    def make() -> Callable[[], Any]:
        model, inputs = given()
        module = torchgraft.lower(model, inputs, backend=backend, **options)
        print("   ", module.explain().replace("\n", "\n    ")[:600], flush=True)
        return lambda: module(*inputs)

    return make


def images(batch: int, backends: list[str]) -> dict[str, Make]:
    """ResNet-50 in TF32 and in 16 bits."""

    @functools.cache
    def given() -> tuple[nn.Module, tuple[Any, ...]]:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        side = 64 if SMALL else 224
        return zoo.create("resnet50").eval().to(DEVICE), (torch.randn(batch, 3, side, side, device=DEVICE),)

    def half() -> tuple[nn.Module, tuple[Any, ...]]:
        model, (x,) = given()
        return copy.deepcopy(model).half(), (x.half().contiguous(memory_format=torch.channels_last),)

    def half_compiled() -> Callable[[], Any]:
        import torch.fx.experimental.optimization as optimization

        model, inputs = half()
        return compiled(optimization.fuse(model).to(memory_format=torch.channels_last), *inputs)

    rows = {"eager, TF32": eager(given)}
    rows |= {f"lower(backend={name!r}, precision='tf32')": lowered(given, name, precision="tf32") for name in backends}
    rows |= {f"lower(backend={name!r}), fp16": lowered(half, name) for name in backends}
    rows["torch.compile reduce-overhead, TF32"] = lambda: compiled(given()[0], *given()[1])
    rows["fused, channels last, reduce-overhead, fp16"] = half_compiled
    return rows


def painting(batch: int, backends: list[str]) -> dict[str, Make]:
    """The actor of Learning to Paint."""

    @functools.cache
    def given() -> tuple[nn.Module, tuple[Any, ...]]:
        inputs = zoo.example_inputs("learning_to_paint", batch=batch)
        return zoo.create("learning_to_paint").eval().to(DEVICE), tuple(item.to(DEVICE) for item in inputs)

    rows = {"eager": eager(given)}
    rows |= {f"lower(backend={name!r})": lowered(given, name, precision="tf32") for name in backends}
    rows["torch.compile reduce-overhead"] = lambda: compiled(given()[0], *given()[1])
    return rows


def decoding(_: int, backends: list[str]) -> dict[str, Make]:
    """One token of a language model."""
    given = functools.cache(llama)

    def with_fixed_caches() -> Callable[[], Any]:
        model, inputs = given()
        own = (*inputs[:2], *[[tensor.clone() for tensor in caches] for caches in inputs[2:]])
        for tensor in [*own[2], *own[3]]:
            torch._dynamo.mark_static_address(tensor)
        return compiled(model, *own)

    rows = {"eager, bf16": eager(given)}
    rows |= {f"lower(backend={name!r}), bf16": lowered(given, name) for name in backends}
    rows["torch.compile reduce-overhead, bf16"] = with_fixed_caches
    return rows


# The most telling first, for a budget that ends early.
TABLES: dict[str, tuple[str, Callable[[int, list[str]], dict[str, Make]], int]] = {
    "decoding": ("Llama of 1.2 billion parameters, one token, cache of 1024", decoding, 1),
    "images-1": ("ResNet-50, batch 1", images, 1),
    "images-128": ("ResNet-50, batch 128", images, 128),
    "painting-1": ("Learning to Paint actor, batch 1", painting, 1),
    "painting-96": ("Learning to Paint actor, batch 96", painting, 96),
}


# ---- measuring, in a process of its own ----


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured(functions: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The least time of one call, in seconds, of each function; in turns."""
    best: dict[str, float] = {}
    with torch.no_grad():
        for name, function in functions.items():
            for _ in range(3):
                function()
            wait()
            begin = time.perf_counter()
            function()
            wait()
            best[name] = time.perf_counter() - begin
        calls = {name: max(2, min(200, int(0.05 / took))) for name, took in best.items()}
        end = time.perf_counter() + seconds * len(functions)
        while time.perf_counter() < end:
            for name, function in functions.items():
                wait()
                begin = time.perf_counter()
                for _ in range(calls[name]):
                    function()
                wait()
                best[name] = min(best[name], (time.perf_counter() - begin) / calls[name])
    return best


def run_table(name: str, wanted: list[str], backends: list[str], path: Path) -> None:
    """Make those rows of one table that are wanted, time them, and write what was found after each step."""
    _, make_rows, batch = TABLES[name]
    rows = make_rows(min(batch, 2) if SMALL else batch, backends)
    found: dict[str, dict[str, Any]] = {label: {} for label in rows}
    functions: dict[str, Callable[[], Any]] = {}
    for label, make in rows.items():
        if label not in wanted:
            continue
        found[label]["began"] = True
        path.write_text(json.dumps(found))
        print(f"  {label}", flush=True)
        begin = time.perf_counter()
        try:
            with torch.no_grad():
                function = make()
                function()
                wait()
        except torch.AcceleratorError:  # the process has no GPU any more
            raise
        except Exception as error:
            found[label]["note"] = f"{type(error).__name__}: {str(error)[:1500]}"
            continue
        functions[label], found[label]["ready"] = function, time.perf_counter() - begin
        path.write_text(json.dumps(found))
    for label, took in measured(functions, 0.1 if SMALL else 1.5).items():
        found[label]["seconds"] = took
    path.write_text(json.dumps(found))


# ---- the whole ----


def run_alone(command: list[str], seconds: float, extra: dict[str, str]) -> tuple[int, str]:
    """Run a process, and end it with all that it has started after so many seconds (124); how it ended and what it said."""
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            command, env={**os.environ, **extra}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = 124
            os.killpg(process.pid, signal.SIGKILL)  # it may have started compilers
            process.wait()
        out.seek(0)
        return code, out.read().decode(errors="replace")


def child(name: str, wanted: list[str], arguments: Any, seconds: float, extra: dict[str, str]) -> dict[str, Any]:
    """Measure some rows of a table in a process of its own; what it found, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        command = [sys.executable, __file__, "--table", name, "--rows", json.dumps(wanted), "--found", str(path)]
        command += ["--backends", arguments.backends, *(["--rehearse"] if arguments.rehearse else [])]
        code, said = run_alone(command, seconds, extra)
        rows = json.loads(path.read_text()) if path.exists() else {}
        return {"rows": rows, "code": code, "said": said[-4000:]}


def measure_row(results: dict[str, Any], name: str, first: str, label: str, arguments: Any, end: float) -> None:
    """One row beside the first one of its table, in a process of its own: one that dies or hangs takes no other row with it."""
    table = results["tables"].setdefault(name, {"rows": {}, "alone": {}})
    left = min(end - time.monotonic(), arguments.limit)
    if left <= LEAST:
        table["rows"][label] = {"note": "left out: the budget was used up"}
        return
    found = child(name, [first, label], arguments, left, {})
    row, base = found["rows"].get(label, {}), found["rows"].get(first, {})
    if base.get("seconds"):
        row["first"] = base["seconds"]
        known = table["rows"].setdefault(first, base)
        known["seconds"] = min(base["seconds"], known.get("seconds", base["seconds"]))
    if found["code"]:
        how = f"took longer than {left:.0f} s" if found["code"] == 124 else f"ended with {found['code']}"
        row["note"] = f"its process {how}; see results.json"
        table["alone"][label] = found["said"]
    table["rows"][label] = row


def explain_deaths(results: dict[str, Any], arguments: Any, end: float) -> None:
    """Rows whose process died once more, with launches that wait and so tell which call it was."""
    slow = {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_SHOW_CPP_STACKTRACES": "1"}
    for name, table in results["tables"].items():
        for label in list(table["alone"]):
            left = min(end - time.monotonic(), arguments.limit)
            if left > LEAST:
                table["alone"][f"{label}, with launches that wait"] = child(name, [label], arguments, left, slow)[
                    "said"
                ]


def text_of(name: str, result: dict[str, Any]) -> str:
    """A table in Markdown; what is times the first row was measured in turns with it."""
    rows = result["rows"]
    lines = [f"**{TABLES[name][0]}**", "", "| | a call | times the first | ready in | note |", "|---|---|---|---|---|"]
    for label, row in rows.items():
        took = row.get("seconds")
        first = row.get("first", took)
        cells = [f"{took * 1e3:.3f} ms", f"{first / took:.2f}"] if took and first else ["-", "-"]
        ready = f"{row['ready']:.1f} s" if "ready" in row else "-"
        note = row.get("note", "").partition("\n")[0][:200].replace("|", "/")
        lines.append(f"| {label} | {' | '.join(cells)} | {ready} | {note} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    global DEVICE, SMALL
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help=f"tables, with commas, by how they begin: {', '.join(TABLES)}")
    parser.add_argument("--backends", default="cudagraphs,inductor")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all of it (540)")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for one row (150)")
    parser.add_argument("--output", default="build/lower_gpu")
    parser.add_argument("--rehearse", action="store_true")
    for name in ("--table", "--rows", "--found"):  # what a process of one table is told
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.rehearse:
        DEVICE, SMALL = "cpu", True
    elif not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; --rehearse tries this program on a CPU")
    if arguments.table:
        wanted = json.loads(arguments.rows)
        run_table(arguments.table, wanted, arguments.backends.split(","), Path(arguments.found))
        return
    begin = time.monotonic()
    end = begin + arguments.budget
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    device = "a CPU" if arguments.rehearse else torch.cuda.get_device_name()
    results: dict[str, Any] = {"torch": str(torch.__version__), "device": device, "tables": {}}
    beginnings = [item for item in arguments.only.split(",") if item]
    names = [name for name in TABLES if not beginnings or any(name.startswith(item) for item in beginnings)]

    def write() -> None:
        (folder / "results.json").write_text(json.dumps(results, indent=1))
        texts = [f"torch {torch.__version__}, {device}\n", *[text_of(*item) for item in results["tables"].items()]]
        (folder / "results.md").write_text("\n".join(texts))

    for name in names:
        first, *labels = TABLES[name][1](1, arguments.backends.split(","))
        for label in labels:
            measure_row(results, name, first, label, arguments, end)
            write()
        print(text_of(name, results["tables"][name]), flush=True)
    explain_deaths(results, arguments, end)
    write()
    print(f"all of it in {time.monotonic() - begin:.0f} s; {folder}/results.json and results.md")


if __name__ == "__main__":
    main()
