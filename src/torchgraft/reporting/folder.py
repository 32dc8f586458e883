"""A folder that appears whole or not at all: it is filled beside its place and moved there at the end.
What is written into it is decided by `report.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from torchgraft.errors import WriteError

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


@contextlib.contextmanager
def _explained(place: str | PathLike[str]) -> Iterator[None]:
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise WriteError(f"cannot write a report to '{place}': {reason}\nnothing was written") from error


__all__ = ["MARK", "whole_folder"]
