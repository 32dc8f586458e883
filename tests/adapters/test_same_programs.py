"""Every program of `programs.py` gives the same in both libraries, with only the name of the package changed."""

from __future__ import annotations

import linecache
from typing import Any

import pytest

from tests.adapters.programs import PRELUDE, PROGRAMS
from tests.torch_versions import TORCH


def run(name: str, package: str) -> Any:
    source = (PRELUDE + PROGRAMS[name]).replace("FX", package)
    source = source.replace(f"_{package}_CONST", "_FX_CONST")
    filename = f"<{name} with {package}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope: dict[str, Any] = {"__name__": "user"}
    exec(compile(source, filename, "exec"), scope)
    return scope["result"]


# What these ask of torch.fx it answers since 2.13.
_SINCE_2_13 = frozenset({"source_partitions", "tensor_type", "finder"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_program(name: str) -> None:
    result = run(name, "torchgraft")
    if name not in _SINCE_2_13 or TORCH >= (2, 13):
        assert result == run(name, "torch.fx")
