"""Writing a drawing to a file: SVG always, PNG and PDF where the package cairosvg is there.
What a drawing looks like is decided in the other files of this folder.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from torchgraft.errors import GraftError
from torchgraft.results.files import write_whole

SUFFIXES = (".svg", ".png", ".pdf")


def check_suffix(path: str | os.PathLike[str]) -> str:
    """The kind of file that a path asks for, or an error before any work is done."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        found = f"the suffix {suffix!r}" if suffix else "no suffix"
        raise GraftError(f"cannot save a drawing as '{os.fspath(path)}': it has {found}\nuse .svg, .png or .pdf")
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
            f"cannot save a drawing as {suffix[1:].upper()}: the package cairosvg or the library cairo is missing ({error})\n"
            "install it with: pip install 'torchgraft[draw]', or save as .svg, which needs nothing"
        ) from error
