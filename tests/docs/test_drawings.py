"""The drawings on the pages are those that the code makes today; the rest are made by the same program."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.torch_versions import TORCH

FOLDER = Path(__file__).parents[2] / "docs" / "drawings"


@pytest.mark.skipif(TORCH != (2, 13), reason="operators are those of the release that the drawings were made with")
def test_drawings_of_the_pages() -> None:
    spec = importlib.util.spec_from_file_location("draw_them", FOLDER / "draw_them.py")
    assert spec is not None and spec.loader is not None
    draw_them = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_them)
    made = dict(draw_them.levels(["mlp", "transformer_block"]))
    assert len(made) == 11
    stale = [name for name, drawing in made.items() if drawing.svg != (FOLDER / f"{name}.svg").read_text("utf-8")]
    assert not stale, "run docs/drawings/draw_them.py"
