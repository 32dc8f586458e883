"""How figures are shown: aligned text for a terminal, a page in Markdown, and plain data for a file.
What they mean is in `measure`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.measure import Figure

COLUMNS = ("measure", "torch.fx", "ours", "ratio", "by minima", "required", "")
WIDTHS = (62, 11, 11, 9, 10, 9, 6)


@dataclass(frozen=True)
class Environment:
    """Where the figures were taken; ratios of different machines are not to be compared."""

    python: str
    torch: str
    processors: int
    machine: str

    @classmethod
    def current(cls) -> Environment:
        return cls(platform.python_version(), torch.__version__, os.cpu_count() or 1, _processor())

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}, {self.processors} cores, {self.machine}; one torch thread"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def cells(figure: Figure) -> tuple[str, ...]:
    """The texts of one row, in the order of COLUMNS."""
    theirs = "" if figure.theirs is None else quantity(figure.theirs, figure.meter)
    ratio = "" if figure.ratio is None else times(figure.ratio)
    minima = "" if figure.ratio_of_minima is None else times(figure.ratio_of_minima)
    required = ""
    if figure.row.required is not None:
        required = f"{'<=' if figure.row.is_growth else '>='} {figure.row.required:g}"
    verdict = ", ".join(filter(None, (figure.verdict, figure.note)))
    return figure.row.name, theirs, quantity(figure.ours, figure.meter), ratio, minima, required, verdict


def quantity(value: float, meter: str) -> str:
    if meter == "bytes":
        return f"{value:,.0f} B"
    if meter == "ratio":
        return f"{value:.2f}"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.2f} {unit}"
    return f"{value * 1e6:.2f} µs"


def times(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def header_line() -> str:
    return _aligned(COLUMNS) + "\n" + "-" * (sum(WIDTHS) + len(WIDTHS))


def line(figure: Figure) -> str:
    return _aligned(cells(figure))


def _aligned(texts: Sequence[str]) -> str:
    first, *middle, last = texts
    padded = [text.rjust(width) for text, width in zip(middle, WIDTHS[1:-1], strict=True)]
    return " ".join([first.ljust(WIDTHS[0]), *padded, last])


def summary(figures: Sequence[Figure]) -> str:
    asked = [figure for figure in figures if figure.verdict]
    short = [figure for figure in asked if figure.verdict == "short"]
    text = f"{len(asked) - len(short)} of {len(asked)} required ratios reached."
    return text + "".join(f"\n  short: {figure.row.name}" for figure in short)


NOTES = """\
A ratio is torch.fx's figure over ours, by medians and by minima: 5 means five times faster, or five times smaller. The
rows "200,000 over 2,000" and the like are the cost of a node at the large size over that at the small size. Where 1 is
required 0.97 passes, which is the noise of a quiet machine. torchgraft makes code when it is first needed and torch.fx
at once, so rows with "and code" or "and compile" end by asking both for `.forward` and `.code`; about half of torch.fx's
time in those is Python's own `compile()`, so that no library can be more than twice as fast there. The two
libraries are sampled in turn in one process, by the time of the process, with the garbage collector off unless the row
says otherwise. What takes torch.fx longest is measured only with `--full`, and once. The rows about `capture` have
torch.export in the place of torch.fx. "In runs of the model" is the time of a capture over that of one eager run. A capture is
itself a run: the more there is to calculate, the nearer that is to 1, and the nearer to torch.export, which calculates
nothing. "Two watched runs alone" is what no capture by the contract can do without: the model runs twice under an empty function
mode, and nothing is written down, compared or put back."""


def markdown(environment: Environment, command: str, figures: Sequence[Figure]) -> str:
    """The page docs/benchmarks.md."""
    rows = ["| " + " | ".join((*COLUMNS[:-1], "verdict")) + " |", "|---|" + "---:|" * 5 + "---|"]
    rows += ["| " + " | ".join(cells(figure)) + " |" for figure in figures]
    return "\n".join(
        [
            "# Speed beside torch.fx",
            "",
            f"Made by `{command}`. Do not edit by hand.",
            "",
            f"Taken with {environment}.",
            "",
            NOTES,
            "",
            *rows,
            "",
            summary(figures).replace("\n  ", "\n- "),
            "",
        ]
    )


def data(environment: Environment, figures: Sequence[Figure]) -> dict[str, Any]:
    """The figures as plain data, for comparing one run with another."""
    return {
        "environment": vars(environment),
        "figures": [
            {
                "measure": figure.row.name,
                "unit": figure.meter,
                "torch.fx": figure.theirs,
                "ours": figure.ours,
                "ratio": figure.ratio,
                "ratio of minima": figure.ratio_of_minima,
                "required": figure.row.required,
                "verdict": figure.verdict,
                "note": figure.note,
            }
            for figure in figures
        ],
    }
