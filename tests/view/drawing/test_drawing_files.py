"""Writing drawings."""

import os
import sys

import pytest
import torch

import torchgraft
from torchgraft.view.drawing import drawing as files

PROGRAM = torchgraft.symbolic_trace(torch.nn.ReLU())


def test_svg_is_written_and_returned(tmp_path):
    path = tmp_path / "out.svg"
    drawing = torchgraft.draw(PROGRAM, path=path)
    assert path.read_text(encoding="utf-8") == drawing.svg
    assert os.listdir(tmp_path) == ["out.svg"]
    assert drawing.save(str(tmp_path / "OTHER.SVG")) == tmp_path / "OTHER.SVG"
    assert path.stat().st_mode & 0o777 == (tmp_path / "OTHER.SVG").stat().st_mode & 0o777 != 0o600


@pytest.mark.parametrize(("name", "found"), [("out.gif", "the suffix '.gif'"), ("out", "no suffix"), ("", "no suffix")])
def test_an_unknown_suffix_is_refused_before_the_work(tmp_path, name, found, monkeypatch):
    monkeypatch.setattr("torchgraft.view.drawing.drawing.require_graph", lambda program: pytest.fail("work was done"))
    with pytest.raises(torchgraft.GraftError) as error:
        torchgraft.draw(PROGRAM, path=name)
    assert str(error.value) == f"cannot save a drawing as '{name}': it has {found}\nuse .svg, .png or .pdf"


def test_a_folder_that_is_not_there(tmp_path):
    path = tmp_path / "missing" / "out.svg"
    with pytest.raises(torchgraft.GraftError) as error:
        torchgraft.draw(PROGRAM, path=path)
    assert str(error.value) == (
        f"cannot write '{path}': No such file or directory\ngive a path in a folder that exists and may be written to"
    )
    assert os.listdir(tmp_path) == []


def test_a_folder_in_the_place_of_the_file(tmp_path):
    (tmp_path / "out.svg").mkdir()
    with pytest.raises(torchgraft.GraftError, match="it is a folder"):
        torchgraft.draw(PROGRAM, path=tmp_path / "out.svg")
    assert os.listdir(tmp_path) == ["out.svg"]


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "out.svg"
    path.write_text("before")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(torchgraft.GraftError, match="No space left on device"):
        torchgraft.draw(PROGRAM, path=path)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["out.svg"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real.svg").write_text("before")
    (tmp_path / "link.svg").symlink_to(tmp_path / "real.svg")
    torchgraft.draw(PROGRAM, path=tmp_path / "link.svg")
    assert (tmp_path / "link.svg").is_symlink()
    assert (tmp_path / "real.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_without_the_package_the_message_says_what_to_do(tmp_path, suffix, monkeypatch):
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(torchgraft.GraftError) as error:
        torchgraft.draw(PROGRAM, path=tmp_path / f"out.{suffix}")
    assert str(error.value).startswith(
        f"cannot save a drawing as {suffix.upper()}: the package cairosvg or the library cairo is missing"
    )
    assert str(error.value).endswith(
        "install it with: pip install 'torchgraft[draw]', or save as .svg, which needs nothing"
    )
    assert os.listdir(tmp_path) == []


def test_png_and_pdf_with_the_package(tmp_path):
    pytest.importorskip("cairosvg")
    drawing = torchgraft.draw(PROGRAM, path=tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(drawing.to_png(2.0)[16:20], "big") == 2 * drawing.width
    drawing.save(tmp_path / "out.pdf")
    assert (tmp_path / "out.pdf").read_bytes()[:4] == b"%PDF"


def test_suffixes():
    assert [files.check_suffix(f"a.b{suffix}") for suffix in (".svg", ".SVG")] == [".svg", ".svg"]
