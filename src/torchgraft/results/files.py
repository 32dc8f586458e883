"""Files that are there whole or not at all: written under another name in the same folder, and renamed when they are complete.
What is written into them is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from torchgraft.errors import WriteError


@contextlib.contextmanager
def whole_file(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which gets its name when the block ends, and disappears when the block raises.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with whole_file(f"{folder}/a.bin") as file:
    ...         _ = file.write(b"abc"), os.path.exists(f"{folder}/a.bin")
    ...     os.listdir(folder)
    ['a.bin']
    """
    target = Path(os.path.realpath(path))  # a link keeps pointing where it did
    with named_errors(path):
        if target.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.part")
        file = open(temporary, "x+b")  # noqa: SIM115 (closed below, whatever happens)
    try:
        with file:
            yield file
        with named_errors(path):
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def refuse_unwritable(path: str | PathLike[str]) -> None:
    """Raise if `path` cannot be a file that is written: for use before long work."""
    target = Path(os.path.realpath(path))
    with named_errors(path):
        if target.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        if not target.parent.is_dir():
            raise FileNotFoundError(0, "its folder does not exist")
        if not os.access(target.parent, os.W_OK):
            raise PermissionError(0, "its folder may not be written to")


def write_whole(path: str | PathLike[str], content: bytes) -> None:
    """Write a file, whole or not at all."""
    with whole_file(path) as file, named_errors(path):
        file.write(content)


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write a text file, whole or not at all."""
    write_whole(path, text.encode())


def written(text: str, path: str | PathLike[str] | None) -> str:
    """A text, which is also written to `path` where one is given."""
    if path is not None:
        write_text(path, text.removesuffix("\n") + "\n")
    return text


@contextlib.contextmanager
def named_errors(
    path: str | PathLike[str],
    what: str = "",
    remedy: str = "give a path in a folder that exists and may be written to",
) -> Iterator[None]:
    """Errors of the operating system, said with the path they are about and what to do; `what` is to be written there."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise WriteError(f"cannot write {what}'{os.fspath(path)}': {reason}\n{remedy}") from error
