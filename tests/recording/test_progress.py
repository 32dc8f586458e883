"""The progress bar: on a terminal, after a while, and nowhere else."""

from __future__ import annotations

import io

import pytest
import torch

import torchgraft
from torchgraft.recording import progress
from torchgraft.recording.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch) -> Terminal:
    # Not a fixture: pytest puts its own stream in place when the test itself begins.
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def test_a_terminal_shows_it(monkeypatch) -> None:
    stream = terminal(monkeypatch)
    torchgraft.record(torchgraft.symbolic_trace(lambda x: x + 1), torch.ones(2))
    assert "recording" in stream.getvalue()


def test_not_when_unwanted_or_short(monkeypatch) -> None:
    stream = terminal(monkeypatch)
    torchgraft.record(torchgraft.symbolic_trace(lambda x: x + 1), torch.ones(2), progress=False)
    monkeypatch.setattr(progress, "_PATIENCE", 100.0)
    torchgraft.record(torchgraft.symbolic_trace(lambda x: x + 1), torch.ones(2))
    assert stream.getvalue() == ""


def test_not_in_a_pipe(monkeypatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    with progress_bar(2, True) as step:
        step()
    assert stream.getvalue() == ""


def test_it_is_taken_away_when_something_fails(monkeypatch) -> None:
    stream = terminal(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        with progress_bar(2) as step:
            step()
            1 / 0
    shown, show_cursor = stream.getvalue(), "\x1b[?25h"
    assert "recording" in shown and show_cursor in shown
