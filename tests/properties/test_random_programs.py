"""Random programs: whatever way a captured program is copied, cleaned, rewritten or run, it does what the model did in eager.
The programs are drawn in `strategies.py`; what "the same" means is said in `observation.py`.
"""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, note, settings

import torchgraft
from tests.properties.observation import Snapshot, difference, observe
from tests.properties.strategies import Program, programs
from torchgraft import GraphModule, Interpreter, Transformer


def _pickled(module: GraphModule) -> GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes made by exec are left out of the metadata, which is said in a warning
        return pickle.loads(pickle.dumps(module))


def _without_dead_code(module: GraphModule) -> GraphModule:
    module.graph.eliminate_dead_code()
    return module


def _edited(module: GraphModule) -> GraphModule:
    module.recompile()
    for node in module.graph.nodes:
        if node.op == "call_method" and node.target == "sigmoid":
            node.target = "tanh"
            node.target = "sigmoid"
    return module


def _everything(module: GraphModule) -> GraphModule:
    cleaned = _without_dead_code(torchgraft.symbolic_trace(_pickled(copy.deepcopy(Transformer(module).transform()))))
    return copy.copy(cleaned)


WAYS: dict[str, Callable[[GraphModule], GraphModule]] = {
    "as captured": lambda module: module,
    "dead code removed": _without_dead_code,
    "deep copy": copy.deepcopy,
    "shallow copy": copy.copy,
    "pickled": _pickled,
    "transformed": lambda module: Transformer(module).transform(),
    "captured again": torchgraft.symbolic_trace,
    "edited": _edited,
    "everything": _everything,
}


def _capture(program: Program) -> tuple[GraphModule, Any]:
    subject, model = program.make()
    before = Snapshot.of(model)
    module = torchgraft.symbolic_trace(subject)
    change = before.difference(Snapshot.of(model))
    assert change is None, f"tracing changed {change}"
    return module, model


def _state_of(module: GraphModule, model: Any) -> Any:
    """The model if the program shares its tensors; else whatever stands for it in the program."""
    return model if any(True for _ in model.named_parameters()) else module


def check(program: Program) -> None:
    """Every way of running the captured program does what eager does."""
    note(repr(program))
    subject, model = program.make()
    expected = observe(subject, model, program.seed)
    try:
        module, _ = _capture(program)
    except torchgraft.TraceError:
        assert expected.error is not None, "refused, although eager runs it"
        return
    note(module.code)
    for name, way in WAYS.items():
        module, model = _capture(program)
        result = way(module)
        result.graph.lint()
        _compare(expected, result, result, model, program, name)
    module, model = _capture(program)
    _compare(expected, Interpreter(module).run, module, model, program, "interpreted")


def _compare(expected: Any, run: Callable[..., Any], module: GraphModule, model: Any, program: Program, way: str) -> None:
    holder = _Holder(model, module)
    found = observe(run, holder, program.seed)
    problem = difference(expected, found)
    if problem is not None:
        raise AssertionError(f"{way}: {problem}\n{program!r}\n{module.code}")


class _Holder:
    """The parameters and buffers that a program has, under the model's names and in the model's order."""

    def __init__(self, model: Any, module: GraphModule) -> None:
        self._model, self._module = model, module

    def _own(self, kind: str) -> list[tuple[str, Any]]:
        own = dict(getattr(self._module, kind)(remove_duplicate=False))
        return [(name, own.get(name, value)) for name, value in getattr(self._model, kind)()]

    def named_parameters(self) -> list[tuple[str, Any]]:
        return self._own("named_parameters")

    def named_buffers(self) -> list[tuple[str, Any]]:
        return self._own("named_buffers")

    def parameters(self) -> list[Any]:
        return [value for _, value in self.named_parameters()]

    def buffers(self) -> list[Any]:
        return [value for _, value in self.named_buffers()]


_EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "120"))


@given(programs(is_function=False))
@settings(max_examples=_EXAMPLES)
def test_models(program: Program) -> None:
    check(program)


@given(programs(is_function=True))
@settings(max_examples=_EXAMPLES // 2)
def test_functions(program: Program) -> None:
    check(program)


@pytest.mark.slow
@given(programs())
@settings(max_examples=1500)
def test_many_programs(program: Program) -> None:
    check(program)


@given(programs())
@settings(max_examples=_EXAMPLES // 2)
def test_two_captures_are_the_same(program: Program) -> None:
    try:
        first, second = _capture(program)[0], _capture(program)[0]
    except torchgraft.TraceError:
        return
    assert first.code == second.code
    assert str(first.graph) == str(second.graph)
    assert [node.name for node in first.graph.nodes] == [node.name for node in copy.deepcopy(first).graph.nodes]
