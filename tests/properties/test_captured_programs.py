"""Random programs through the watched capture: with branches and loops on sizes and values, run on the example, on other values
and on other sizes, a captured program does what eager does, or raises GuardError. The grammar is in `strategies.py`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

import torchgraft
from tests.properties import observation
from tests.properties.observation import Snapshot, difference, observe
from tests.properties.strategies import Program, programs
from tests.properties.ways import StateHolder
from torchgraft import GraphModule, GuardError

# What a program may decide by reading sizes, values and kinds of its inputs, or compute with the numbers it reads.
_DECISIONS = (
    "c{n} = x * 2 if x.sum() > 0 else x - 1",
    "c{n} = y.abs() if y.max().item() > 0.9 else y + 1",
    "c{n} = x + 1 if x.shape[0] > 2 else x * 3",
    "c{n} = x.sum(0) if x.size(0) == x.size(1) else x.mean(0)",
    "c{n} = sum([x[i] * i for i in range(x.size(0))], y[0])",
    "c{n} = x * int(y.sum().abs())",
    "c{n} = x * y.mean().item()",
    "c{n} = torch.ones(x.shape[0], 2) * len(x)",
    "c{n} = x.view(x.size(0), -1).sum(1, keepdim=True) / x.shape[1]",
    "c{n} = torch.arange(x.shape[1] * 2).view(2, -1)[:, : x.shape[0]]",
    "c{n} = torch.stack([part * 2 for part in x.unbind(0)])",
    "c{n} = x.new_zeros(max(x.size(0), 2), min(x.size(1), 3))",
    "c{n} = x * 2.0 ** x.dim()",
    "c{n} = torch.cat([x, y]) if x.shape == y.shape else x",
    "c{n} = x[: x.shape[0] // 2 + 1]",
    "c{n} = x.relu() if x.requires_grad else y.relu()",
    "c{n} = {{'a': x * 2, 'b': [y, x.shape[0]]}}['a']",
    "c{n} = x + float(y.shape[1]) + (1 if bool((y > 0).any()) else 0)",
)


@st.composite
def deciding_programs(draw: Callable[..., Any]) -> Program:
    """A random program with decisions put in between its lines, and their results returned too."""
    program = draw(programs())
    lines = list(program.lines)
    chosen = draw(st.lists(st.sampled_from(_DECISIONS), min_size=1, max_size=3))
    for number, text in enumerate(chosen):
        top = [index for index, line in enumerate(lines) if not line.startswith(" ")]
        lines.insert(draw(st.sampled_from(top)), text.format(n=number))
    names = ", ".join(f"c{number}" for number in range(len(chosen)))
    lines[-1] = f"return ({lines[-1].removeprefix('return ')}, {names})"
    return dataclasses.replace(program, lines=tuple(lines))


def _values(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [(-0.7 * x.detach()).requires_grad_(), -y]


def _sizes(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [x.detach().repeat(2, 1).requires_grad_(), y.repeat(2, 1)]


OTHERS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "the example": lambda x, y: [x, y],
    "values": _values,
    "sizes": _sizes,
}


def _captured(program: Program, level: str) -> tuple[GraphModule, Any]:
    subject, model = program.make()
    before = Snapshot.of(model)
    module = torchgraft.capture(subject, tuple(observation.make_inputs()), level=level)
    change = before.difference(Snapshot.of(model))
    assert change is None, f"capturing changed {change}"
    return module, model


def _run(function: Any, model: Any, program: Program, inputs: Callable[..., list[torch.Tensor]]) -> Any:
    return observe(lambda x, y: function(*inputs(x, y)), model, program.seed)


def check_captured(program: Program, level: str) -> None:
    """On every input the captured program does what eager does, or refuses; on the example it does not refuse."""
    subject, model = program.make()
    if _run(subject, model, program, OTHERS["the example"]).error is not None:
        return
    for name, inputs in OTHERS.items():
        expected = _run(*program.make(), program, inputs)
        for way in (lambda module: module, _without_dead_code, copy.deepcopy):
            module, model = _captured(program, level)
            module = way(module)
            found = _run(module, StateHolder(model, module), program, inputs)
            if found.error is not None and found.error.startswith(GuardError.__name__):
                assert name != "the example", f"refuses the example: {found.error}\n{program!r}\n{module.code}"
                continue
            problem = difference(expected, found)
            assert problem is None, f"{level}, {name}: {problem}\n{program!r}\n{module.code}"


def _without_dead_code(module: GraphModule) -> GraphModule:
    module.graph.eliminate_dead_code()
    return module


@given(deciding_programs())
@settings(max_examples=40)
def test_modules(program: Program) -> None:
    note(repr(program))
    check_captured(program, "module")


@given(deciding_programs())
@settings(max_examples=40)
def test_functions(program: Program) -> None:
    note(repr(program))
    check_captured(program, "function")
