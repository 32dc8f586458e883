"""The command `python -m benchmarks.simulating FILES`: how far simulations are from what was measured, as tables and as a plot.

FILES are what `measure_gpu.py` wrote, or folders of it (default: `benchmarks/simulating/measured`). With --keep all their rows go
into one compressed file, with those that it has. With --write the tables and the plot go into docs/simulate.md, in the place of
those that are there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.simulating.comparing import measured_rows, pairs_of
from benchmarks.simulating.errors import WHATS, Pair, tables
from benchmarks.simulating.log import all_rows, keep
from benchmarks.simulating.scatter import scatter_svg
from torchgraft.analysis.simulate import Machine
from torchgraft.results.tables import seconds_text

HERE, PAGE = Path(__file__).parent, Path("docs/simulate.md")
PLOT = Path("docs/drawings/simulated.svg")
BEGIN, END = "<!-- measured: written by python -m benchmarks.simulating --write -->", "<!-- measured: end -->"


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print, and write where that is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulating",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path, default=[HERE / "measured"])
    parser.add_argument("--machine", default="h200", help="a name, or a .toml file (default: h200)")
    parser.add_argument("--models", help="some by name, with commas (default: all that were measured)")
    parser.add_argument("--worst", type=int, default=15, help="how many of the worst cases to print (default: 15)")
    parser.add_argument("--pairs", type=Path, help="also write every pair of figures, as JSON lines")
    parser.add_argument("--plot", type=Path, help="also write the plot of measured over simulated, as SVG")
    parser.add_argument("--keep", type=Path, help="also keep all rows in one file, such as measured/h200.jsonl.gz")
    parser.add_argument("--write", action="store_true", help=f"write the tables and the plot into {PAGE}")
    options = parser.parse_args(arguments)
    if missing := [str(path) for path in options.files if not path.exists()]:
        parser.error(
            f"{', '.join(missing)} is not there; python -m benchmarks.simulating.measure_gpu OUT writes such files"
        )
    machine = Machine.named(options.machine)
    if options.keep is not None:
        kept = [options.keep] if options.keep.exists() else []
        keep(all_rows([*kept, *options.files]), options.keep)
        options.files = [*options.files, options.keep]
    rows = measured_rows(options.files)
    if not rows:
        parser.error(
            f"no measured models in {', '.join(map(str, options.files))}; python -m benchmarks.simulating.measure_gpu writes them"
        )
    names = None if options.models is None else options.models.split(",")
    pairs = list(pairs_of(rows, machine, names))
    if not pairs:
        parser.error("nothing that was measured could be simulated here")
    text = tables(pairs)
    print(text)
    print("\n" + _worst(pairs, options.worst))
    if options.pairs is not None:
        options.pairs.write_text("".join(json.dumps(asdict(pair)) + "\n" for pair in pairs))
    if options.plot is not None:
        options.plot.write_text(plot(pairs, machine))
    if options.write:
        PLOT.write_text(plot(pairs, machine))
        picture = f"![Measured over simulated, on {machine.name}](drawings/{PLOT.name})"
        PAGE.write_text(
            with_section(
                PAGE.read_text(),
                f"Measured on {machine.name}; errors are means of absolute values.\n\n{text}\n\n{picture}",
            )
        )


def plot(pairs: Sequence[Pair], machine: Machine) -> str:
    """Measured over simulated times, as SVG: held-out models by what was measured, and the others."""
    series: dict[str, list[tuple[float, float]]] = {}
    for pair in pairs:
        if "memory" not in pair.what:
            name = WHATS[pair.what] + (" (fitted)" if pair.fit else "")
            series.setdefault(name, []).append((pair.simulated, pair.measured))
    return scatter_svg(f"Models on {machine.name}", "simulated", "measured", series, seconds_text)


def with_section(page: str, text: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """A page with the text between its two marks replaced.

    >>> with_section(f"before {BEGIN} old {END} after", "new").replace(chr(10), " ")
    'before <!-- measured: written by python -m benchmarks.simulating --write -->  new  <!-- measured: end --> after'
    """
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise SystemExit(f"{PAGE} has no place for the tables: it lacks {marks[0]} or {marks[1]}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def _worst(pairs: Sequence[Pair], most: int) -> str:
    ordered = sorted((pair for pair in pairs if "memory" not in pair.what), key=lambda pair: -pair.error)[:most]
    lines = [
        f"  {pair.error:6.1%}  {pair.model} batch {pair.batch} {pair.precision}, {WHATS[pair.what]}: "
        f"{seconds_text(pair.measured)}, simulated {seconds_text(pair.simulated)}"
        for pair in ordered
    ]
    return "\n".join(["farthest off:", *lines])


if __name__ == "__main__":
    main()
