"""Integer and 8-bit float linear layers on a GPU beside bf16: DeepRecommender and an MLP of 4,096, ours and torchao's where it is
to be had. One file and no installs: `PYTHONPATH=src python benchmarks/quantize_gpu.py [results.json] --torchao FOLDER`.

torchao has no build step of its own and its wheel (3 MB, 21 MB unpacked) needs nothing but torch, so that a folder of it will do;
0.18 takes torch 2.11 and newer. `make bench-quantize` has it in `.venv-quantize`; where there is a network, from the root:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 torchao==0.18.0 -d build
    python -m zipfile -e build/torchao-0.18.0-*.whl build/torchao

and then, with `build/torchao` brought along, on the machine with the GPU, where nothing is installed but torch:

    PYTHONPATH=src python benchmarks/quantize_gpu.py results.json --torchao build/torchao

The first line of the output says which torchao was found. Whatever fails is a row that says how, and no arm takes longer than two
minutes; after `--seconds` (270) no further sizes are begun, and what was measured is in the file after every row. `--sizes small`
is a trial of a minute, also on a machine without a GPU, where only integers run and times mean nothing.

Every program is compiled by torch.compile, bf16 as well, all with the settings of it that torchao recommends (`--mode
reduce-overhead` adds CUDA graphs); times are the smaller quarter of 30 repetitions on the GPU's own clock.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._inductor.config
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
    if torchao_version() is None:
        return None
    import copy

    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int8DynamicActivationInt8WeightConfig,
        PerRow,
        quantize_,
    )

    copied = copy.deepcopy(model)
    config = (
        Int8DynamicActivationInt8WeightConfig()
        if kind == "int8"
        else Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    )
    quantize_(copied, config)
    return copied


# What torchao sets for all of torch.compile when it quantizes: set for every program here, and put back after each.
SETTINGS = {"coordinate_descent_tuning": True, "coordinate_descent_check_all_directions": True}
_SECONDS = 120


def programs(model: nn.Module, example: torch.Tensor) -> dict[str, Callable[[], nn.Module | None]]:
    """The programs to measure; each beside the one that it is compared with, in case there is no time for all."""
    on_gpu = example.is_cuda

    def ours(scheme: str) -> nn.Module:
        return quantize(model, [example], config=scheme, backend="cuda" if on_gpu else "native")

    return {
        "bf16": lambda: model,
        "ours int8": lambda: ours("dynamic-int8-rows"),
        "torchao int8": lambda: of_torchao(model, "int8"),
        **({"ours float8": lambda: ours("float8")} if on_gpu else {}),
        **({"torchao float8": lambda: of_torchao(model, "float8")} if on_gpu else {}),
    }


def measured(make: Callable[[], nn.Module | None], example: torch.Tensor, exact: torch.Tensor, mode: str | None) -> Any:
    """The time and SQNR of one program; None where it is not to be had."""
    before = torch._inductor.config.save_config()
    try:
        program = make()
        if program is None:
            return None
        torch._dynamo.reset()
        with torch._inductor.config.patch(SETTINGS):
            compiled = torch.compile(program, mode=mode)
            quality = sqnr(exact, compiled(example))
        return {"ms": quarter_ms(partial(compiled, example)), "sqnr": quality}
    finally:
        torch._inductor.config.load_config(before)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"takes longer than {_SECONDS} s")


def measure(
    name: str,
    model: nn.Module,
    inputs: Callable[[int], torch.Tensor],
    batch: int,
    mode: str | None,
    note: Callable[[dict[str, Any]], None],
) -> None:
    """Measure every program of a model at one size; one that fails shall not hide the others."""
    example = inputs(batch)
    with torch.no_grad():
        exact = model.float()(example.float())
        model.bfloat16()
        for kind, make in programs(model, example).items():
            row: dict[str, Any] = {"model": name, "batch": batch, "program": kind}
            signal.alarm(_SECONDS)
            try:
                found = measured(make, example, exact, mode)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
            finally:
                signal.alarm(0)
            if found is not None:
                note(row | found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="?", help="where the figures are written, too")
    parser.add_argument("--torchao", metavar="FOLDER", help="a folder that holds the package torchao")
    parser.add_argument("--sizes", choices=("all", "small"), default="all")
    parser.add_argument("--seconds", type=float, default=270, help="after this no further size is begun (default 270)")
    parser.add_argument("--mode", help="a mode of torch.compile, such as reduce-overhead")
    options = parser.parse_args()
    started = time.monotonic()
    if options.torchao is not None:
        sys.path.insert(0, options.torchao)
    is_small = options.sizes == "small"
    if not torch.cuda.is_available() and not is_small:
        raise SystemExit("no CUDA device")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    ao = torchao_version() or f"is not there ({_missing()})"
    print(torch.__version__, name, "torchgraft", torchgraft.__version__, "torchao", ao, flush=True)
    torch.manual_seed(0)
    signal.signal(signal.SIGALRM, _too_long)
    width = 256 if is_small else 4096
    wide = mlp(width).eval().to(device).bfloat16()
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.json is not None:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(rows, file, indent=1)

    def values(batch: int) -> torch.Tensor:
        return torch.randn(batch, width, device=device, dtype=torch.bfloat16)

    mlp_at = partial(measure, f"MLP {width}", wide, values, mode=options.mode, note=note)
    if is_small:
        mlp_at(32)
    else:
        recommender = torchgraft.zoo.create("deep_recommender").eval().to(device).bfloat16()

        def ratings(batch: int) -> torch.Tensor:
            return torchgraft.zoo.example_inputs("deep_recommender", batch)[0].to(device).bfloat16()

        ratings_at = partial(measure, "DeepRecommender", recommender, ratings, mode=options.mode, note=note)
        # The sizes that say most come first.
        for run, batch in (
            *((mlp_at, 2048), (ratings_at, 256), (mlp_at, 8192), (ratings_at, 1024)),
            *((mlp_at, 256), (ratings_at, 64), (mlp_at, 16), (ratings_at, 16)),
        ):
            if time.monotonic() - started > options.seconds:
                print(f"no time for {run.args[0]} at {batch}", flush=True)
                continue
            run(batch)
    print_table(rows)


def torchao_version() -> str | None:
    """The version of torchao on the path; None where it cannot be imported."""
    return None if _missing() else str(sys.modules["torchao"].__version__)


@functools.cache
def _missing() -> str:
    """Why torchao cannot be imported; empty where it can."""
    try:
        importlib.import_module("torchao.quantization")
    except Exception as error:  # it may be there and not fit this torch
        return f"{type(error).__name__}: {error}"[:200]
    return ""


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
