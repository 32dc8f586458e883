"""`report`: look at a model in every way there is and write a folder with a page about it.
The looking is in `seen.py`, the files in `files.py`, the page in `page.py`; here is their order, and the folder that appears
whole or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from torchgraft.codegen.calling import example_inputs
from torchgraft.errors import GraftError, WriteError
from torchgraft.reporting.facts import Fact, interesting_facts, short
from torchgraft.reporting.files import write_files
from torchgraft.reporting.page import page
from torchgraft.reporting.seen import STEPS, Failure, Seen, look
from torchgraft.results.files import named_errors
from torchgraft.results.progress import stage
from torchgraft.results.shown import Shown
from torchgraft.results.tables import painted


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """Where the page is, the most interesting facts, and what is unavailable.

    >>> import tempfile, torch, torchgraft
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = report(torch.nn.ReLU(), torch.ones(2), folder=f"{folder}/relu")
    ...     result.page.name, result.page.exists()
    ('index.html', True)
    """

    page: Path
    facts: list[Fact]
    failures: list[Failure]
    seen: Seen

    def headline(self) -> str:
        return f"{self.seen.name}, {self.page}"

    def text(self, color: bool = False) -> str:
        """The facts, what is unavailable, and the page."""
        lines = [painted(f"The {len(self.facts)} most interesting facts about {self.seen.name}", "bold", color)]
        for place, fact in enumerate(self.facts, 1):
            lines.append(f"{place}. {painted(fact.headline, 'blue', color)}: {fact.text}")
        for failure in self.failures:
            lines.append(painted(f"unavailable: {failure.what}: {short(failure.reason)}", "yellow", color))
        return "\n".join([*lines, f"page: {painted(str(self.page.absolute()), 'bold', color)}"])

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each fact."""
        return [{"headline": fact.headline, "text": fact.text} for fact in self.facts]

    def to_dict(self) -> dict[str, Any]:
        failures = [failure._asdict() for failure in self.failures]
        return {"model": self.seen.name, "page": str(self.page), "facts": self.rows(), "failures": failures}


def report(
    model: torch.nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    folder: str | PathLike[str] = "report",
    name: str | None = None,
) -> Report:
    """Write a folder with `index.html` and everything that it shows: programs, drawings, graphs, calls, statistics.

    The page needs no server and no network. What is unavailable is listed on it, with the reason, and stops nothing; only a model
    that does not run on the inputs, or a folder that cannot be written, raises, and then nothing is left behind. An older
    report in the folder is replaced. `follow_progress` says how far it is.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as home:
    ...     made = report(torch.nn.Linear(2, 3), torch.ones(1, 2), folder=f"{home}/linear")
    ...     made.page.name, made.failures
    ('index.html', [])
    """
    if not isinstance(model, torch.nn.Module):
        raise GraftError(f"cannot report on a {type(model).__name__}\ngive a torch.nn.Module")
    values, keywords = example_inputs(args, kwargs)
    with whole_folder(folder) as place:
        seen = look(name or type(model).__name__, model, values, keywords)
        with stage("drawing and writing", STEPS, STEPS):
            written = write_files(seen, place)
            facts = interesting_facts(seen)
            (place / "index.html").write_text(page(seen, written, facts), encoding="utf-8")
    return Report(Path(folder) / "index.html", facts, seen.failures, seen)


# ---- the folder ----


MARK = ".graft-report"  # a folder that holds this file is a report, and may be replaced by a new one


@contextlib.contextmanager
def whole_folder(place: str | PathLike[str]) -> Iterator[Path]:
    """A new folder to fill; after the block it stands at `place`, and if the block raises nothing does.

    An older report at `place` is replaced; a folder with anything else in it is refused before the work begins.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as home:
    ...     with whole_folder(f"{home}/out") as folder:
    ...         _ = (folder / "index.html").write_text("<p>")
    ...     sorted(entry.name for entry in Path(home, "out").iterdir())
    ['.graft-report', 'index.html']
    """
    target = Path(os.path.realpath(place))
    _refuse_foreign(target, place)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    made = _make_parents(target.parent, place)
    try:
        with _explained(place):
            temporary.mkdir()
            (temporary / MARK).write_text("A report of torchgraft: replaced as a whole by the next one written here.\n")
        with _explained(place):
            yield temporary
            _put_in_place(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def _refuse_foreign(target: Path, place: str | PathLike[str]) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise WriteError(f"cannot write a report to '{place}': it is a file\ngive the name of a folder")
    with _explained(place):
        entries = os.listdir(target)
    if entries and MARK not in entries:
        raise WriteError(
            f"cannot write a report to '{place}': the folder holds other files, such as '{min(entries)}'\ngive a new folder"
        )


def _make_parents(parent: Path, place: str | PathLike[str]) -> list[Path]:
    """The folders that had to be made, innermost first."""
    missing = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    made: list[Path] = []
    with _explained(place):
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            made.insert(0, folder)
    return made


def _put_in_place(temporary: Path, target: Path) -> None:
    if not target.exists():
        os.rename(temporary, target)
        return
    old = target.with_name(f"{temporary.name}.old")
    os.rename(target, old)
    try:
        os.rename(temporary, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


_explained = functools.partial(named_errors, what="a report to ", remedy="nothing was written")
