"""Lowered modules on a GPU beside eager and torch.compile: `PYTHONPATH=src python benchmarks/lower_gpu.py`.
It needs torch (2.11 or newer) with CUDA and this project, nothing else; torchvision is not needed.

Each table runs in a process of its own, for a kernel that fails takes its process with it; then its rows run once more, each in
a process of its own, and what the dying one said is in the results. Times are the least of several rounds in turns. After
each table `results.json` and `results.md` are written anew; `--budget` seconds are all that it takes. `--only decoding` is
one table, `--rehearse` tries the program itself on a CPU with small models.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
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


def lowered(model: Any, inputs: tuple[Any, ...], backend: str, **options: Any) -> Callable[[], Any]:
    module = torchgraft.lower(model, inputs, backend=backend, **options)
    print("   ", module.explain().replace("\n", "\n    ")[:600], flush=True)
    return lambda: module(*inputs)


def half_channels_last(x: Tensor) -> Tensor:
    """The input that both are given."""
    return x.half().contiguous(memory_format=torch.channels_last)


def half_compiled(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    import torch.fx.experimental.optimization as optimization

    fused = optimization.fuse(model).half().to(memory_format=torch.channels_last)
    return compiled(fused, half_channels_last(x))


def images(batch: int, backends: list[str]) -> dict[str, Make]:
    """ResNet-50 in TF32 and in 16 bits."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    model = zoo.create("resnet50").eval().to(DEVICE)
    side = 64 if SMALL else 224
    x = torch.randn(batch, 3, side, side, device=DEVICE)
    rows: dict[str, Make] = {
        "eager, TF32": lambda: lambda: model(x),
        "torch.compile reduce-overhead, TF32": lambda: compiled(model, x),
    }
    for name in backends:
        rows[f"lower(backend={name!r}, precision='tf32')"] = lambda name=name: lowered(  # type: ignore[misc]
            model, (x,), name, precision="tf32"
        )
    rows["fused, channels last, reduce-overhead, fp16"] = lambda: half_compiled(model, x)
    for name in backends:
        rows[f"lower(backend={name!r}), fp16"] = lambda name=name: lowered(  # type: ignore[misc]
            copy.deepcopy(model).half(), (half_channels_last(x),), name
        )
    return rows


def painting(batch: int, backends: list[str]) -> dict[str, Make]:
    """The actor of Learning to Paint."""
    model = zoo.create("learning_to_paint").eval().to(DEVICE)
    inputs = tuple(item.to(DEVICE) for item in zoo.example_inputs("learning_to_paint", batch=batch))
    rows: dict[str, Make] = {
        "eager": lambda: lambda: model(*inputs),
        "torch.compile reduce-overhead": lambda: compiled(model, *inputs),
    }
    for name in backends:
        rows[f"lower(backend={name!r})"] = lambda name=name: lowered(  # type: ignore[misc]
            model, inputs, name, precision="tf32"
        )
    return rows


def decoding(_: int, backends: list[str]) -> dict[str, Make]:
    """One token of a language model."""
    model, inputs = llama()

    def with_fixed_caches() -> Callable[[], Any]:
        own = (*inputs[:2], *[[tensor.clone() for tensor in caches] for caches in inputs[2:]])
        for tensor in [*own[2], *own[3]]:
            torch._dynamo.mark_static_address(tensor)
        return compiled(model, *own)

    rows: dict[str, Make] = {
        "eager, bf16": lambda: lambda: model(*inputs),
        "torch.compile reduce-overhead, bf16": with_fixed_caches,
    }
    for name in backends:
        rows[f"lower(backend={name!r}), bf16"] = lambda name=name: lowered(model, inputs, name)  # type: ignore[misc]
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
    """Make the rows of one table (all, or those wanted), time them, and write what was found after each step."""
    _, make_rows, batch = TABLES[name]
    rows = make_rows(min(batch, 2) if SMALL else batch, backends)
    found: dict[str, dict[str, Any]] = {label: {} for label in rows}
    functions: dict[str, Callable[[], Any]] = {}
    for label, make in rows.items():
        if wanted and label not in wanted:
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
    for label, took in measured(functions, 0.1 if SMALL else 1.5).items():
        found[label]["seconds"] = took
    path.write_text(json.dumps(found))


# ---- the whole ----


def child(name: str, wanted: list[str], arguments: Any, seconds: float, extra: dict[str, str]) -> dict[str, Any]:
    """Run a table in a process of its own; what it found, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        command = [sys.executable, __file__, "--table", name, "--rows", json.dumps(wanted), "--found", str(path)]
        command += ["--backends", arguments.backends, *(["--rehearse"] if arguments.rehearse else [])]
        begin, code, text = time.monotonic(), 0, ""
        try:
            done = subprocess.run(
                command, env={**os.environ, **extra}, timeout=seconds, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            code, text = done.returncode, done.stdout.decode(errors="replace")
        except subprocess.TimeoutExpired as error:
            code, text = 124, (error.stdout or b"").decode(errors="replace")
        rows = json.loads(path.read_text()) if path.exists() else {}
    return {"rows": rows, "code": code, "seconds": time.monotonic() - begin, "said": text[-4000:]}


def table(name: str, arguments: Any, end: float) -> dict[str, Any]:
    """One table; where its process dies, its rows one by one, with the first for comparison."""
    left = end - time.monotonic()
    result = child(name, [], arguments, min(left, arguments.limit), {})
    labels = list(result["rows"])
    if result["code"] and labels:
        result["alone"] = {}
        for label in labels[1:]:
            left = end - time.monotonic()
            if left < 20:
                result["rows"][label]["note"] = "left out: the budget was used up"
                continue
            # Launches that wait tell which call it was that failed; only who has failed is asked to.
            again = child(name, [labels[0], label], arguments, min(left, arguments.limit), {})
            for key in (labels[0], label):
                result["rows"][key] |= again["rows"].get(key, {})
            if again["code"] and end - time.monotonic() > 20:
                slow = {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_SHOW_CPP_STACKTRACES": "1"}
                again = child(name, [label], arguments, min(end - time.monotonic(), arguments.limit), slow)
                result["alone"][label] = again["said"]
                result["rows"][label]["note"] = f"its process ended with {again['code']}; see results.json"
    return result


def text_of(name: str, result: dict[str, Any]) -> str:
    """A table in Markdown."""
    rows = result["rows"]
    first = next((row["seconds"] for row in rows.values() if row.get("seconds")), None)
    lines = [f"**{TABLES[name][0]}**", "", "| | a call | times the first | ready in | note |", "|---|---|---|---|---|"]
    for label, row in rows.items():
        took = row.get("seconds")
        cells = [f"{took * 1e3:.3f} ms", f"{first / took:.2f}"] if took and first else ["-", "-"]
        ready = f"{row['ready']:.1f} s" if "ready" in row else "-"
        note = row.get("note", "").partition("\n")[0][:200].replace("|", "/")
        lines.append(f"| {label} | {' | '.join(cells)} | {ready} | {note} |")
    if not rows:
        lines.append(f"| nothing, its process ended with {result['code']} | | | | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    global DEVICE, SMALL
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help=f"tables, with commas, by how they begin: {', '.join(TABLES)}")
    parser.add_argument("--backends", default="cudagraphs,inductor")
    parser.add_argument("--budget", type=float, default=1200.0, help="seconds for all of it")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for one process")
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
    wanted_tables = [item for item in arguments.only.split(",") if item]
    for name in TABLES:
        if (wanted_tables and not any(name.startswith(item) for item in wanted_tables)) or end - time.monotonic() < 20:
            continue
        results["tables"][name] = found = table(name, arguments, end)
        print(text_of(name, found), flush=True)
        (folder / "results.json").write_text(json.dumps(results, indent=1))
        texts = [f"torch {torch.__version__}, {device}\n", *[text_of(*item) for item in results["tables"].items()]]
        (folder / "results.md").write_text("\n".join(texts))
    print(f"all of it in {time.monotonic() - begin:.0f} s; {folder}/results.json and results.md")


if __name__ == "__main__":
    main()
