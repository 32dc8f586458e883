"""Files that are there whole or not at all."""

from __future__ import annotations

import os

import pytest

from torchgraft.errors import GraftError, WriteError
from torchgraft.results.files import whole_file, write_text, write_whole


def test_a_file_appears_when_it_is_complete(tmp_path) -> None:
    with whole_file(tmp_path / "a") as file:
        file.write(b"abc")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_bytes() == b"abc" and len(list(tmp_path.iterdir())) == 1


def test_a_failure_leaves_the_old_file(tmp_path) -> None:
    write_text(tmp_path / "a", "old")
    with pytest.raises(ZeroDivisionError):
        with whole_file(tmp_path / "a") as file:
            file.write(b"new")
            1 / 0
    assert (tmp_path / "a").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_permissions_are_the_usual_ones(tmp_path) -> None:
    write_text(tmp_path / "a", "x")
    (tmp_path / "b").write_text("x")
    assert os.stat(tmp_path / "a").st_mode == os.stat(tmp_path / "b").st_mode


def test_a_relative_path_and_a_long_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_text("a" * 200, "x")
    assert os.listdir() == ["a" * 200]


def test_errors_name_the_path() -> None:
    with pytest.raises(
        WriteError, match="cannot write '/no/such/folder/a': No such file or directory\ngive a path"
    ) as e:
        write_text("/no/such/folder/a", "x")
    assert isinstance(e.value, GraftError) and isinstance(e.value, OSError)


def test_a_link_is_followed(tmp_path) -> None:
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", b"after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "after"


def test_a_folder_in_the_place_of_the_file(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(WriteError, match="it is a folder\ngive a path"):
        write_whole(tmp_path / "a", b"x")
    assert os.listdir(tmp_path) == ["a"]


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    def full(*args) -> None:
        raise OSError(28, "No space left on device")

    write_text(tmp_path / "a", "old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(WriteError, match="No space left on device"):
        write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path) == ["a"]
