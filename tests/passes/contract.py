"""What every pass must keep: results, gradients, state, random numbers and aliases, a well-formed program, a second run
that changes nothing, and an honest count. Used by the tests of single passes and by `test_contracts.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.properties.observation import Observation, difference, observe
from tests.properties.strategies import Program
from tests.properties.ways import StateHolder
from torchgraft import GraphModule
from torchgraft.passes import Pass


def check_program(edit: Pass, program: Program, capture: Callable[[Program], tuple[GraphModule, Any]]) -> int:
    """Run a pass on a random program and compare what it does with what it did; return the number of changes."""
    plain, plain_model = capture(program)
    expected = observe(plain, StateHolder(plain_model, plain), program.seed)
    module, model = capture(program)
    before = module.code
    changes = check_edit(edit, module)
    found = observe(module, StateHolder(model, module), program.seed)
    problem = close_difference(expected, found)
    assert problem is None, f"{edit}: {problem}\n{program!r}\nbefore:{before}\nafter:{module.code}"
    return changes


def check_edit(edit: Pass, module: GraphModule) -> int:
    """Run a pass twice: the count is honest, the program is well formed, metadata stays, the second run changes nothing."""
    before = _text(module)
    kept = {node.name: node.stack_trace for node in module.graph.nodes}
    report = edit(module)
    after = _text(module)
    assert (report.changes > 0) == (before != after), f"{edit} counts {report.changes} changes\n{before}\n{after}"
    for node in module.graph.nodes:
        if node.name in kept:
            assert node.stack_trace == kept[node.name]
    again = edit(module)
    assert again.changes == 0 and _text(module) == after, f"{edit} changed {again.changes} things again\n{after}"
    module.graph.lint()
    copy.deepcopy(module).graph.lint()
    return report.changes


def _text(module: GraphModule) -> str:
    """The program, with everything that passes may change."""
    modules = [f"{path}: {type(item).__name__} {id(item)}" for path, item in module.named_modules() if path]
    notes = [f"{node.name} {node.meta.get('tensor_meta')}" for node in module.graph.nodes]
    return "\n".join([module.code, *modules, *notes])


def close_difference(expected: Observation, found: Observation) -> str | None:
    """The first difference of two runs; gradients may be summed in another order."""
    first, second = expected.gradients, found.gradients
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        for one, other in zip(first, second, strict=True):
            if (one is None) != (other is None):
                # A gradient that is not there counts as zero.
                present = one if one is not None else other
                if not torch.equal(present, torch.zeros_like(present)):
                    return f"gradients: {one} and {other}"
            elif one is not None and not torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True):
                return f"gradients: expected {one}, found {other}"
        found = replace(found, gradients=first)
    return difference(expected, found)
