"""The command line as a whole: help without torch, exit codes, and one line for every error."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchgraft.cli import main as command_line
from torchgraft.errors import GraftError
from torchgraft.version import __version__

SOURCE = Path(command_line.__file__).parents[2]


def run_python(*arguments):
    """A new interpreter that finds this torchgraft, installed or not."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def command_raising(monkeypatch):
    """Add a command `fail` that raises what it is given."""

    def add(error):
        def run(arguments):
            raise error

        command = SimpleNamespace(NAME="fail", SUMMARY="raise an error", add_arguments=lambda parser: None, run=run)
        monkeypatch.setattr(command_line, "COMMANDS", (command,))

    return add


@pytest.mark.parametrize("options", ["--help", "--version", "report --help", "show --help", "compare --help"])
def test_help_and_version_import_nothing_that_is_slow(options):
    program = f"""
import sys
from torchgraft.cli.main import main
try:
    main({options.split()})
except SystemExit as end:
    print("code", end.code, [name for name in ("torch", "networkx", "rich", "numpy") if name in sys.modules])
"""
    result = run_python("-c", program)
    assert result.stdout.splitlines()[-1:] == ["code 0 []"], result.stderr


def test_python_m_torchgraft_is_the_same_command():
    result = run_python("-m", "torchgraft", "--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"torchgraft {__version__}\n", "")


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as end:
        command_line.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for command in command_line.COMMANDS:
        assert f"    {command.NAME}" in text
        assert command.SUMMARY in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["graft: ", "required: COMMAND", "see graft --help"]),
        (["dmeo"], ["graft: ", "invalid choice: 'dmeo'", "demo", "see graft --help"]),
        (["demo", "--rows", "many"], ["graft demo: ", "--rows", "'many'", "see graft demo --help"]),
        (["demo", "--rows", "0"], ["graft demo: ", "--rows: give a whole number, 1 or more, not '0'; see"]),
        (["demo", "--colour"], ["graft: ", "unrecognized arguments: --colour"]),
    ],
)
def test_wrong_command_line_is_one_line_and_code_2(arguments, parts, capsys):
    with pytest.raises(SystemExit) as end:
        command_line.main(arguments)
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (GraftError("no such model"), "graft fail: no such model\n"),
        (FileNotFoundError(2, "No such file", "model.py"), "graft fail: [Errno 2] No such file: 'model.py'\n"),
        (
            TypeError("bad"),
            f'graft fail: the code of the model raised TypeError: bad\n  at {__file__}:30 "raise error"\n'
            "  run again with --traceback to see more\n",
        ),
    ],
)
def test_failing_command_says_what_and_where_and_ends_with_code_1(error, line, command_raising, capsys):
    command_raising(error)
    assert command_line.main(["fail"]) == 1
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize("arguments", [["--traceback", "fail"], ["fail", "--traceback"]])
def test_traceback_lets_the_error_through(arguments, command_raising):
    command_raising(GraftError("no such model"))
    with pytest.raises(GraftError, match="no such model"):
        command_line.main(arguments)


def test_interrupt_ends_quietly(command_raising, capsys):
    command_raising(KeyboardInterrupt())
    assert command_line.main(["fail"]) == 130
    assert capsys.readouterr() == ("", "")


def test_reader_that_leaves_early_sees_no_traceback():
    program = """
import sys
from types import SimpleNamespace
from torchgraft.cli import main
def run(arguments):
    for number in range(100_000):
        print(number)
    return 0
main.COMMANDS = (SimpleNamespace(NAME="count", SUMMARY="", add_arguments=lambda parser: None, run=run),)
sys.exit(main.main(["count"]))
"""
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1
