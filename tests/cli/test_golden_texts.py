"""What the commands print, kept in `tests/golden/cli/`, so that it is read as text.

Times are replaced. To change a text, look at what has become different, then write them anew:

    python -m tests.cli.test_golden_texts
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pytest

from torchgraft.cli.main import main

GOLDEN = Path(__file__).parent.parent / "golden" / "cli"

COMMANDS = {
    "help": ["--help"],
    "help_show": ["show", "--help"],
    "help_report": ["report", "--help"],
    "help_simulate": ["simulate", "--help"],
    "help_calibrate": ["calibrate", "--help"],
    "capture": ["capture", "zoo:mlp"],
    "show": ["show", "zoo:mlp"],
    "show_table": ["show", "zoo:mlp", "--level", "core_aten", "--as", "table"],
    "show_code": ["show", "zoo:mlp", "--level", "function", "--as", "code"],
    "summary": ["summary", "zoo:transformer", "--depth", "2"],
    "calls_counts": ["calls", "zoo:mlp", "--level", "dispatch", "--counts"],
    "diff": ["diff", "zoo:mlp", "--against", "function"],
    "compare": ["compare", "zoo:mlp", "--against", "core_aten"],
    "no_such_model": ["show", "zoo:resnet49"],
    "no_such_level": ["show", "zoo:mlp", "--level", "atem"],
    "no_inputs": ["calls", "torch.nn:ReLU"],
    "nothing_to_compare": ["diff", "zoo:mlp"],
}


def text_of(arguments: list[str]) -> str:
    """The code, what goes to standard output and what goes to standard error, at the width of a usual terminal."""
    output, errors = io.StringIO(), io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                code: object = main(arguments)
            except SystemExit as end:
                code = end.code
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    text = f"$ graft {' '.join(arguments)}\n{output.getvalue()}{errors.getvalue()}[{code}]\n"
    text = re.sub(r"\d+(\.\d+)? (µs|ms|s)\b", "<time>", text)
    text = re.sub(r" *# .*test_golden_texts.*\n", "", text)  # the line that captured the model is one of this file
    return re.sub(r"(?:/[\w.-]+)+/(\w+\.py)", r"\1", text)


@pytest.mark.parametrize("name", COMMANDS)
def test_text(name):
    # The help of argparse is laid out differently by different versions of Python, its words are not.
    expected, found = (GOLDEN / f"{name}.txt").read_text(), text_of(COMMANDS[name])
    if name.startswith("help") or name == "no_such_level":
        expected, found = re.sub(r"[\s']+", " ", expected), re.sub(r"[\s']+", " ", found)
    assert found == expected


def test_there_are_no_other_texts():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(COMMANDS)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for file in GOLDEN.glob("*.txt"):
        file.unlink()
    for name, arguments in COMMANDS.items():
        (GOLDEN / f"{name}.txt").write_text(text_of(arguments))
