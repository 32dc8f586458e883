"""Progress on a real terminal: a line that says what is being done, nothing in pipes, and a clean end by Ctrl-C."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchgraft.cli import main as command_line

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")

SOURCE = Path(command_line.__file__).parents[2]
MODEL = """
import time

import torch


class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.4)
        return torch.relu(x)
"""


@pytest.fixture
def slow(tmp_path):
    (tmp_path / "slow.py").write_text(MODEL)
    return [sys.executable, "-m", "torchgraft"], {
        "cwd": tmp_path,
        "env": os.environ | {"PYTHONPATH": str(SOURCE), "COLUMNS": "120", "TERM": "xterm"},
    }


def on_terminal(slow, *arguments, until=""):
    """Run a command whose standard error is a terminal; with `until`, Ctrl-C is pressed when that has appeared."""
    command, options = slow
    ours, theirs = pty.openpty()
    # A shell has what it runs in the background ignore Ctrl-C, and so would the command, if these tests run there.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=theirs, **options)
    finally:
        signal.signal(signal.SIGINT, before)
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux says so that the other side is closed
                break
            if not piece:
                break
            shown += piece
        if until and until.encode() in shown:
            process.send_signal(signal.SIGINT)
            until = ""
    os.close(ours)
    output = process.stdout.read()
    process.stdout.close()
    return process.wait(30), output.decode(), shown.decode()


def test_a_line_on_a_terminal(slow):
    code, output, shown = on_terminal(slow, "doctor", "slow.py:Slow", "--input", "2x3")
    assert code == 0 and output.startswith("Slow: captured (watched), ") and "\033" not in output
    assert "checking the captured program (3 of 4): verifying on fresh values (2 of 7), " in shown
    assert shown.endswith("\033[2K"), "the line is taken away in the end"
    assert "\033[2m, " not in shown


def test_nothing_in_a_pipe(slow):
    command, options = slow
    result = subprocess.run(
        [*command, "doctor", "slow.py:Slow", "--input", "2x3"], capture_output=True, text=True, check=False, **options
    )
    assert result.returncode == 0 and result.stderr == "" and "\033" not in result.stdout


@pytest.mark.parametrize(
    ("command", "until"),
    [
        (("doctor", "-o", "out.txt"), "verifying on"),
        (("capture", "-o", "out"), "watching the model run"),
        (("record", "-o", "out.safetensors"), "watching the model run"),
        (("report", "-o", "out"), "capturing"),
    ],
)
def test_ctrl_c_is_clean(slow, tmp_path, command, until):
    name, *rest = command
    code, output, shown = on_terminal(slow, name, "slow.py:Slow", "--input", "2x3", *rest, until=until)
    assert code == 130 and output == "" and "Traceback" not in shown
    assert {path.name for path in tmp_path.iterdir()} <= {"slow.py", "__pycache__"}
