"""Integer and 8-bit float linear layers on a GPU beside bf16: DeepRecommender and an MLP of 4,096, ours and torchao's where it is
installed. One file and no installs: `PYTHONPATH=src python benchmarks/quantize_gpu.py [results.json]`.

Every program is compiled by torch.compile, bf16 as well; times are the smaller half of 30 repetitions on the GPU's own clock.
"""

from __future__ import annotations

import json
import sys
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


def median_ms(call: Callable[[], Any]) -> float:
    for _ in range(5):
        call()
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
                        "ms": median_ms(partial(compiled, example)),
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
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    print(torch.__version__, torch.cuda.get_device_name(), "torchgraft", torchgraft.__version__, flush=True)
    torch.manual_seed(0)
    recommender = torchgraft.zoo.create("deep_recommender").eval().cuda().bfloat16()

    def ratings(batch: int) -> torch.Tensor:
        return torchgraft.zoo.example_inputs("deep_recommender", batch)[0].cuda().bfloat16()

    rows = measure("DeepRecommender", recommender, ratings, [16, 64, 256, 1024])
    wide = mlp().eval().cuda().bfloat16()
    rows += measure(
        "MLP 4096",
        wide,
        lambda batch: torch.randn(batch, 4096, device="cuda", dtype=torch.bfloat16),
        [16, 256, 2048, 8192],
    )
    base = {(row["model"], row["batch"]): row["ms"] for row in rows if row["program"] == "bf16" and "ms" in row}
    for row in rows:
        if "ms" in row:
            faster = base[row["model"], row["batch"]] / row["ms"]
            figures = f"{row['ms']:8.3f} ms  {faster:5.2f}x  {row['sqnr']:6.1f} dB"
            print(f"{row['model']:16} {row['batch']:6} {row['program']:16} {figures}")
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
