"""Every program of `programs.py` gives the same in both libraries, with only the name of the package changed."""

from __future__ import annotations

import linecache
from typing import Any

import pytest

from tests.adapters.programs import PRELUDE, PROGRAMS


def run(name: str, package: str) -> Any:
    source = (PRELUDE + PROGRAMS[name]).replace("FX", package)
    source = source.replace(f"_{package}_CONST", "_FX_CONST")
    filename = f"<{name} with {package}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope: dict[str, Any] = {"__name__": "user"}
    exec(compile(source, filename, "exec"), scope)
    return scope["result"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_program(name: str) -> None:
    assert run(name, "torchgraft") == run(name, "torch.fx")
