"""Integer and 8-bit float linear layers on a GPU beside bf16: DeepRecommender and an MLP of 4,096, ours and torchao's where it is
to be had. One file and no installs: `PYTHONPATH=src python benchmarks/quantize_gpu.py [results.json]`.

torchao has no build step of its own and its wheel (3 MB, 21 MB unpacked) needs nothing but torch, so that a folder of it on the
path will do; 0.18 takes torch 2.11 and newer. Where there is a network, from the repository's root:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 torchao==0.18.0 -d build
    python -m zipfile -e build/torchao-0.18.0-*.whl build/torchao

and then, with `build/torchao` brought along, on the machine with the GPU, where nothing is installed but torch:

    PYTHONPATH=src:build/torchao python benchmarks/quantize_gpu.py results.json

The first line of the output says which torchao was found. `--sizes small` is a trial of a minute, also of the folder on a
machine without a GPU, where only bf16 and torchao's integers run and times mean nothing.

Every program is compiled by torch.compile, bf16 as well; times are the smaller quarter of 30 repetitions on the
GPU's own clock.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import torchgraft
from torchgraft.quantize import quantize


def mlp(width: int = 4096, layers: int = 4) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def quarter_ms(call: Callable[[], Any]) -> float:
    for _ in range(5):
        call()
    if not torch.cuda.is_available():
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3
    torch.cuda.synchronize()
    times = []
    for _ in range(30):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return sorted(times)[7]


def sqnr(expected: torch.Tensor, found: torch.Tensor) -> float:
    expected, found = expected.double(), found.double()
    return float(10 * torch.log10((expected**2).sum() / ((expected - found) ** 2).sum()))


def of_torchao(model: nn.Module, kind: str) -> nn.Module | None:
    try:
        import copy

        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            Int8DynamicActivationInt8WeightConfig,
            PerRow,
            quantize_,
        )
    except ImportError:
        return None
    copied = copy.deepcopy(model)
    config = (
        Int8DynamicActivationInt8WeightConfig()
        if kind == "int8"
        else Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    )
    quantize_(copied, config)
    return copied


def programs(model: nn.Module, example: torch.Tensor) -> dict[str, Callable[[], nn.Module | None]]:
    def ours(scheme: str) -> nn.Module:
        return quantize(model, [example], config=scheme, backend="cuda")

    return {
        "bf16": lambda: model,
        "ours int8": lambda: ours("dynamic-int8-rows"),
        "ours float8": lambda: ours("float8"),
        "torchao int8": lambda: of_torchao(model, "int8"),
        "torchao float8": lambda: of_torchao(model, "float8"),
    }


def measure(
    name: str, model: nn.Module, inputs: Callable[[int], torch.Tensor], batches: list[int]
) -> list[dict[str, Any]]:
    rows = []
    for batch in batches:
        example = inputs(batch)
        with torch.no_grad():
            exact = model.float()(example.float())
            model.bfloat16()
            for kind, make in programs(model, example).items():
                try:
                    program = make()
                    if program is None:
                        continue
                    torch._dynamo.reset()
                    compiled = torch.compile(program)
                    found = compiled(example)
                    row = {
                        "model": name,
                        "batch": batch,
                        "program": kind,
                        "ms": quarter_ms(partial(compiled, example)),
                    }
                    row["sqnr"] = sqnr(exact, found)
                except Exception as error:  # one that fails shall not hide the others
                    row = {
                        "model": name,
                        "batch": batch,
                        "program": kind,
                        "error": f"{type(error).__name__}: {error}"[:300],
                    }
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="?", help="where the figures are written, too")
    parser.add_argument("--sizes", choices=("all", "small"), default="all")
    options = parser.parse_args()
    is_small = options.sizes == "small"
    if not torch.cuda.is_available() and not is_small:
        raise SystemExit("no CUDA device")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    print(torch.__version__, name, "torchgraft", torchgraft.__version__, "torchao", torchao_version(), flush=True)
    torch.manual_seed(0)
    width, batches = (256, [32]) if is_small else (4096, [16, 256, 2048, 8192])
    wide = mlp(width).eval().to(device).bfloat16()
    rows: list[dict[str, Any]] = []
    if not is_small:
        recommender = torchgraft.zoo.create("deep_recommender").eval().to(device).bfloat16()

        def ratings(batch: int) -> torch.Tensor:
            return torchgraft.zoo.example_inputs("deep_recommender", batch)[0].to(device).bfloat16()

        rows += measure("DeepRecommender", recommender, ratings, [16, 64, 256, 1024])

    def values(batch: int) -> torch.Tensor:
        return torch.randn(batch, width, device=device, dtype=torch.bfloat16)

    rows += measure(f"MLP {width}", wide, values, batches)
    print_table(rows)
    if options.json is not None:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


def torchao_version() -> str:
    """The version of torchao on the path."""
    try:
        import torchao
    except ImportError as error:
        return f"is not there ({error})"
    return str(torchao.__version__)


def print_table(rows: list[dict[str, Any]]) -> None:
    base = {(row["model"], row["batch"]): row["ms"] for row in rows if row["program"] == "bf16" and "ms" in row}
    for row in rows:
        head = f"{row['model']:16} {row['batch']:6} {row['program']:16}"
        if "ms" not in row:
            print(f"{head} fails: {row['error']}")
            continue
        faster = base.get((row["model"], row["batch"]), float("nan")) / row["ms"]
        print(f"{head} {row['ms']:8.3f} ms  {faster:5.2f}x  {row['sqnr']:6.1f} dB")


if __name__ == "__main__":
    main()
