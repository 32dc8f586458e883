"""The page docs/looking.md: its code runs in order and prints what stands there. Run this file to write the outputs anew."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "looking.md"
BLOCK = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```\n)?", re.DOTALL)
# Where the library is installed differs from machine to machine.
PLACE = re.compile(r"\S*[/\\]zoo[/\\]mlp.py:(\d+)")


def outputs(page: str) -> list[str]:
    scope: dict[str, object] = {}
    result = []
    for block in BLOCK.finditer(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(block[1], str(PAGE), "exec"), scope)
        lines = PLACE.sub(r"torchgraft/zoo/mlp.py:\1", printed.getvalue()).splitlines()
        result.append("".join(f"{line.rstrip()}\n" for line in lines))
    return result


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="operators differ a little in every torch")
def test_the_page_prints_what_it_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    # In a process of its own, as a reader would run it.
    command = [sys.executable, str(Path(__file__).resolve()), "--print"]
    source = os.pathsep.join([str(PAGE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [block[2] or "" for block in BLOCK.finditer(page)]


if __name__ == "__main__" and "--print" in sys.argv:
    print(json.dumps(outputs(PAGE.read_text(encoding="utf-8"))))
elif __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    found = iter(outputs(text))
    blocks = [(block, next(found)) for block in BLOCK.finditer(text)]
    for block, output in reversed(blocks):
        if block[2] is not None:
            text = f"{text[: block.start(2)]}{output}{text[block.end(2) :]}"
    PAGE.write_text(text, encoding="utf-8")
