"""The command `python -m benchmarks.quantizing`: times and SQNR of quantized programs beside their peers, in one run.
Who the peers are is in `peers.py`; the table of all models that quantize without configuration is in `models.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.quantizing.peers import PEERS, Made
from torchgraft import zoo

# Batches of the measured models, and of their calibration data.
MODELS: dict[str, tuple[list[int], int]] = {"deep_recommender": ([1, 16, 64, 128, 256], 64), "resnet50": ([1, 16], 4)}
TITLES = {"deep_recommender": "DeepRecommender", "resnet50": "ResNet-50"}
# Where the table stands in a page.
BEGINS, ENDS = "<!-- make bench-quantize -->\n", "<!-- end of make bench-quantize -->\n"
# Threads of other libraries go on spinning for a while after a call, so that the beginning of a turn is theirs, too.
SAMPLES, TURN_SECONDS = 4, 0.03


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantizing", description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each batch size is measured (default 10)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the table into this page, between its two comments")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for name in options.models:
        rows += measure(name, options.peers, options.seconds)
    lines = table(rows)
    print("\n" + "\n".join(lines))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.markdown is not None:
        text = options.markdown.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGINS)
        after = rest.partition(ENDS)[2]
        page = before + BEGINS + "\n".join(lines) + "\n" + ENDS + after
        options.markdown.write_text(page, encoding="utf-8")
    return 0


def measure(name: str, peers: list[str], seconds: float) -> list[dict[str, Any]]:
    """Make every program of a model, compare its results with floats, and time all of them in turn."""
    torch.manual_seed(0)
    model = zoo.create(name).eval()
    batches, calibration = MODELS[name]
    data = [inputs(name, calibration, seed) for seed in range(8)]
    probe = inputs(name, 8, 99)
    made: dict[str, Made] = {}
    rows = []
    with torch.no_grad():
        exact = model(probe)
        for peer in peers:
            try:
                made[peer] = PEERS[peer](model, data)
                quality = sqnr(exact, made[peer].run(probe))
            except Exception as error:  # one that fails shall not hide the others
                made.pop(peer, None)
                print(f"{name:18} {peer:18} fails: {type(error).__name__}: {str(error)[:150]}", flush=True)
                continue
            print(f"{name:18} {peer:18} made in {made[peer].seconds:5.2f} s, SQNR {quality:5.2f} dB", flush=True)
            rows.append({"model": name, "program": peer, "seconds": made[peer].seconds, "sqnr": quality})
        for batch in batches:
            x = inputs(name, batch, 1)
            arms: dict[str, Callable[[], Any]] = {"eager fp32": lambda x=x: model(x)}
            arms |= {peer: (lambda x=x, run=item.run: run(x)) for peer, item in made.items()}
            times = interleaved(arms, seconds)
            base = times["eager fp32"]
            texts = [f"{peer} {base / value:.2f}x" for peer, value in times.items() if peer != "eager fp32"]
            print(f"{name:18} batch {batch:4}: eager {base * 1e3:.2f} ms; {'; '.join(texts)}", flush=True)
            for peer, value in times.items():
                rows.append({"model": name, "batch": batch, "program": peer, "ms": value * 1e3, "times": base / value})
    return rows


def interleaved(arms: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The least of each arm's times, a few samples of each in turn, which a busy machine disturbs alike."""
    for run in arms.values():
        run()
    times = dict.fromkeys(arms, float("inf"))
    ends = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or time.perf_counter() < ends:
        for name, run in arms.items():
            samples, turn_ends = 0, time.perf_counter() + TURN_SECONDS
            while samples < SAMPLES or time.perf_counter() < turn_ends:
                started = time.perf_counter()
                run()
                times[name] = min(times[name], time.perf_counter() - started)
                samples += 1
        rounds += 1
    return times


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The figures as a table in Markdown: how many times faster than eager fp32."""
    sizes = sorted({row["batch"] for row in rows if "batch" in row})
    lines = [
        f"| times faster than eager fp32 | made in | SQNR | {' | '.join(f'batch {size}' for size in sizes)} |",
        f"|---|---:|---:|{'---:|' * len(sizes)}",
    ]
    for row in rows:
        if "sqnr" not in row:
            continue
        model, program = row["model"], row["program"]
        found = {
            item["batch"]: item["times"]
            for item in rows
            if item.get("program") == program and "batch" in item and item["model"] == model
        }
        cells = [f"{found[size]:.2f}" if size in found else "" for size in sizes]
        head = f"{TITLES[model]}: {program}" if program == "ours" else program
        lines.append(f"| {head} | {row['seconds']:.1f} s | {row['sqnr']:.1f} dB | {' | '.join(cells)} |")
    return lines


def inputs(name: str, batch: int, seed: int) -> torch.Tensor:
    """A batch of the zoo's own inputs, other ones for each seed."""
    return zoo._entry(name).inputs(torch.Generator().manual_seed(seed), batch)[0]


def sqnr(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The signal over the noise, in decibels."""
    expected, found = expected.double(), found.double()
    return float(10 * torch.log10((expected**2).sum() / ((expected - found) ** 2).sum()))


if __name__ == "__main__":
    sys.exit(main())
