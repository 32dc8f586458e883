"""The command lines that pages and the README show: each is one that `graft` takes, and the page about it has every command.
What the commands do is tested in `tests/cli`.
"""

import re
import shlex
from pathlib import Path

import pytest

from torchgraft.cli.main import COMMANDS, build_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def command_lines(text: str) -> list[str]:
    """Lines of blocks that begin with `graft`, without their comments, and what stands in backquotes with an argument.

    What a command says begins with its name and a colon.
    """
    lines = re.findall(r"^(?:\$ )?graft (\S*[^\s:] .*)$", text, re.MULTILINE)
    return [line.partition("  #")[0].strip() for line in lines] + re.findall(r"`graft ([a-z-]+ [^`A-Z…]+)`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_graft_takes_the_command_lines_of_a_page(page: Path) -> None:
    for line in command_lines(page.read_text(encoding="utf-8")):
        arguments = build_parser().parse_args(shlex.split(line))
        assert callable(arguments.run)


def test_the_page_has_every_command() -> None:
    lines = command_lines((ROOT / "docs" / "command_line.md").read_text(encoding="utf-8"))
    assert sorted({line.split()[0] for line in lines}) == sorted(command.NAME for command in COMMANDS)
