"""Models that ask for the types of sizes: what a symbolic number answers is what a plain one does, or it is plain."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from torchgraft import GuardError, capture

ELSEWHERE = """
import torch

def doubled_if_int(value, size):
    return value * 2 if type(size) is int else value

def doubled_if_symbolic(value, size):
    return value * 2 if isinstance(size, torch.SymInt) else value

def by_name(value, size):
    return value * {"int": 2, "float": 3}.get(type(size).__name__, 5)
"""


@pytest.mark.parametrize("name", ["doubled_if_int", "doubled_if_symbolic", "by_name"])
def test_files_that_are_not_the_models_ask_for_types(name: str) -> None:
    elsewhere = ModuleType("elsewhere")
    exec(compile(ELSEWHERE, "elsewhere.py", "exec"), vars(elsewhere))
    function = getattr(elsewhere, name)

    def model(x: Any) -> Any:
        return function(x.reshape(x.shape[1], -1), x.shape[0])

    program = capture(model, (torch.ones(3, 4),))
    assert torch.equal(program(torch.ones(3, 4)), model(torch.ones(3, 4)))
    try:
        found = program(torch.ones(5, 4))
    except GuardError:
        return
    assert torch.equal(found, model(torch.ones(5, 4)))


def test_sizes_stay_free_where_their_types_are_asked_for() -> None:
    def model(x: Any) -> Any:
        size = x.shape[0]
        return x.reshape(size, -1) * (2 if type(size) is int else 3)

    program = capture(model, (torch.ones(3, 4),))
    assert torch.equal(program(torch.ones(5, 6)), torch.full((5, 6), 2.0))
