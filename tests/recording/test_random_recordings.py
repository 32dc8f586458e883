"""Random programs, full of views and writes: what is recorded of each node is what it was when it had just run."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchgraft
from tests.properties.observation import make_inputs
from tests.properties.strategies import Program, programs
from tests.properties.ways import capture
from torchgraft.analysis.comparison import frozen_leaves
from torchgraft.recording import snapshots


class Copying(torchgraft.Interpreter):
    """Copies every value at once."""

    def __init__(self, module: torchgraft.GraphModule) -> None:
        super().__init__(module)
        self.leaves: dict[str, dict[str, Any]] = {}

    def run_node(self, n):
        result = super().run_node(n)
        self.leaves[n.name] = frozen_leaves(result, "value")
        return result


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


def expected_leaves(program: torchgraft.GraphModule, seed: int) -> dict[str, dict[str, Any]] | None:
    run = Copying(copy.deepcopy(program))
    seed_everything(seed)
    try:
        run.run(*make_inputs())
    except Exception:
        return None
    return run.leaves


def assert_same(expected: dict[str, Any], value: Any, name: str, code: str) -> None:
    found = frozen_leaves(value, "value")
    for path, leaf in expected.items():
        if isinstance(leaf, torchgraft.analysis.comparison.FrozenTensor):
            assert torch.equal(leaf.values.nan_to_num(), found[path].values.nan_to_num()), f"{name}{path}\n{code}"


def is_without_value(name: str) -> bool:
    """Memory that nobody has written yet differs from run to run; what is returned is an alias of other nodes."""
    return "empty" in name or name == "output"


def captured(program: Program) -> torchgraft.GraphModule | None:
    try:
        return capture(program)[0]
    except torchgraft.TraceError:
        return None


@pytest.fixture(params=["copied", "shared", "borrowed"], autouse=True)
def sizes(request, monkeypatch) -> None:
    """Random programs are small; with these limits their values are handled as large ones are, or as on an accelerator."""
    if request.param == "borrowed":
        monkeypatch.setattr(snapshots, "_PLAIN_TYPES", frozenset())
    if request.param == "shared":
        monkeypatch.setattr(snapshots, "_SMALL", 0)
        monkeypatch.setattr(snapshots, "_LARGE", 64)
        monkeypatch.setattr(snapshots, "_LARGE_INPUT", 0)


@given(programs())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_every_value_is_what_it_was(program: Program) -> None:
    module = captured(program)
    expected = None if module is None else expected_leaves(module, program.seed)
    if module is None or expected is None:
        return
    seed_everything(program.seed)
    recording = torchgraft.record(copy.deepcopy(module), make_inputs())
    for name, leaves in expected.items():
        if not is_without_value(name):
            assert_same(leaves, recording[name], name, module.code)


@given(programs(), st.integers(0, 1000))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_one_node_alone_has_the_value_it_has_among_all(program: Program, choice: int) -> None:
    module = captured(program)
    expected = None if module is None else expected_leaves(module, program.seed)
    if module is None or expected is None:
        return
    name = list(expected)[choice % len(expected)]
    seed_everything(program.seed)
    recording = torchgraft.record(copy.deepcopy(module), make_inputs(), nodes=name)
    if not is_without_value(name):
        assert_same(expected[name], recording[name], name, module.code)
