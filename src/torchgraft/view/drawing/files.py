"""Writing a drawing to a file: SVG always, PNG and PDF where the package cairosvg is there.
A file is written beside its place and moved there when it is complete, so that a failure leaves what was there before.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from pathlib import Path
from typing import Any

from torchgraft.errors import GraftError

SUFFIXES = (".svg", ".png", ".pdf")


def check_suffix(path: str | os.PathLike[str]) -> str:
    """The kind of file that a path asks for, or an error before any work is done."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        found = f"the suffix {suffix!r}" if suffix else "no suffix"
        raise GraftError(f"cannot save a drawing as '{os.fspath(path)}': it has {found}; use .svg, .png or .pdf")
    if suffix != ".svg":
        _cairosvg(suffix)
    return suffix


def save(svg: str, path: str | os.PathLike[str], scale: float) -> None:
    suffix = check_suffix(path)
    write_whole(path, svg.encode("utf-8") if suffix == ".svg" else convert(svg, suffix, scale))


def convert(svg: str, suffix: str, scale: float) -> bytes:
    """The drawing as the bytes of a PNG or PDF file."""
    package = _cairosvg(suffix)
    function = package.svg2png if suffix == ".png" else package.svg2pdf
    result: bytes = function(bytestring=svg.encode("utf-8"), scale=scale, unsafe=True)  # unsafe: lift the limit of size
    return result


def _cairosvg(suffix: str) -> Any:
    try:
        return importlib.import_module("cairosvg")
    except (ImportError, OSError) as error:  # OSError: the package is there and the library cairo is not
        raise GraftError(
            f"cannot save a drawing as {suffix[1:].upper()}: the package cairosvg or the library cairo is missing ({error}); "
            "install it with: pip install 'torchgraft[draw]', or save as .svg, which needs nothing"
        ) from error


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Put a complete file in its place, or leave everything as it was and raise."""
    place = Path(os.path.realpath(path))
    part = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    try:
        if place.is_dir():
            raise IsADirectoryError("it is a folder")
        with open(part, "xb") as file:
            file.write(content)
        os.replace(part, place)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        reason = error.strerror or str(error)
        raise GraftError(
            f"cannot write the drawing to '{os.fspath(path)}': {reason}; give a path in a folder that exists and can be written"
        ) from error
