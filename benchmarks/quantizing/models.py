"""The command `python -m benchmarks.quantizing.models`: models of the zoo, timm, torchvision and transformers quantized without a
line of configuration, with their SQNR in a table. It runs in the environment of `make coverage`.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.coverage.cases import Case
from torchgraft import zoo
from torchgraft.errors import one_line
from torchgraft.quantize import calibrate, convert, prepare, sqnr
from torchgraft.quantize.native import to_native
from torchgraft.quantize.plan import plan_of

TIMM = ("resnet", "mobilenetv3", "efficientnet", "convnext", "vision_transformer", "swin_transformer", "regnet", "densenet",
        "mlp_mixer", "levit", "vgg", "ghostnet")  # fmt: skip
TORCHVISION = ("resnet18", "mobilenet_v2", "shufflenet_v2_x0_5", "googlenet", "squeezenet1_1", "mnasnet0_5")
LANGUAGE = (
    "llama",
    "gpt2",
    "qwen2",
    "mistral",
    "gemma",
    "phi",
    "opt",
    "bloom",
    "gpt_neox",
    "falcon",
    "olmo",
    "stablelm",
)
IMAGES = 64


class Row(NamedTuple):
    """A model, and how its quantization went."""

    library: str
    name: str
    layers: str
    sqnr: str
    native: str
    seconds: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantizing.models", description=__doc__)
    parser.add_argument("--markdown", type=Path, help="write the table as a page")
    parser.add_argument("--only", nargs="*", choices=("zoo", "timm", "torchvision", "language"), default=None)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for library, name, model, batches in found(options.only):
        row = measure(library, name, model, batches)
        rows.append(row)
        print("  ".join(row), flush=True)
    if options.markdown is not None:
        options.markdown.write_text(page(rows), encoding="utf-8")
    return 0


def found(only: list[str] | None) -> Iterator[tuple[str, str, Any, list[Any]]]:
    """The models, each with five batches: four to calibrate with and one to measure on."""
    if only is None or "zoo" in only:
        for name in zoo.names():
            torch.manual_seed(0)
            sizes = {"items": 17768} if name == "deep_recommender" else {"size": 128} if "resnet" in name else {}
            model = zoo.create(name).eval()
            inputs = zoo._entry(name).inputs
            yield "zoo", name, model, [inputs(torch.Generator().manual_seed(seed), 4, **sizes) for seed in range(5)]
    from benchmarks.coverage import language_models, timm_models, torchvision_models

    for library, module, names in (
        ("torchvision", torchvision_models, TORCHVISION),
        ("timm", timm_models, TIMM),
        ("language", language_models, LANGUAGE),
    ):
        if only is not None and library not in only:
            continue
        for case in module.cases():
            if _is_wanted(case, names, library):
                torch.manual_seed(0)
                try:
                    model = case.build().eval()
                except Exception as error:  # what a library cannot build is its own affair
                    print(f"{library} {case.name}: {one_line(error)}", file=sys.stderr)
                    continue
                yield library, case.name, model, _batches(case)


def _is_wanted(case: Case, names: tuple[str, ...], library: str) -> bool:
    if library == "timm":
        return case.name.partition(":")[0] in names
    return any(case.name == name or case.name.endswith(f": {name}") or case.name.endswith(f".{name}") for name in names)


def _batches(case: Case) -> list[Any]:
    batches = []
    for seed in range(5):
        torch.manual_seed(seed)
        found = case.example()
        batches.append(dict(found.kwargs) if found.kwargs else tuple(found.args))
    return batches


def measure(library: str, name: str, model: Any, batches: list[Any]) -> Row:
    """Quantize a model with the defaults, and compare."""
    started = time.perf_counter()
    try:
        with torch.no_grad():
            args, kwargs = ((), batches[0]) if isinstance(batches[0], dict) else (batches[0], {})
            prepared = prepare(model, args, kwargs)
            calibrate(prepared, batches[:4])
            reference = convert(prepared)
            native = to_native(reference)
            seconds = time.perf_counter() - started
            layers = plan_of(prepared).layers.values()
            done = sum(layer.reason is None for layer in layers)
            quality = [sqnr(model, program, batches[4:]) for program in (reference, native)]
    except Exception as error:  # the table says which model fails and how
        return Row(library, name, "", one_line(error)[:120], "", "")
    return Row(library, name, f"{done} of {len(layers)}", f"{quality[0]:.1f}", f"{quality[1]:.1f}", f"{seconds:.1f}")


def page(rows: list[Row]) -> str:
    """The table as Markdown."""
    good = [row for row in rows if row.layers]
    lines = [
        "# Models quantized without configuration",
        "",
        f"`python -m benchmarks.quantizing.models` quantizes {len(rows)} models with random weights, static 8-bit integers, four",
        "batches of calibration data, and compares the results on a fifth: signal over noise in decibels, of the reference form",
        f"and of the native program. {len(good)} of them can be quantized. Where random weights leave little but biases in the",
        "results, or nothing, the figure is high, or infinite.",
        "",
        "| | model | layers | SQNR, reference (dB) | SQNR, native (dB) | seconds |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
