"""The ways in which a captured program may be copied, cleaned, rewritten and run, and the check that each does what eager does.
What "the same" means is said in `observation.py`; the programs come from `strategies.py` and `test_found_programs.py`.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

from hypothesis import currently_in_test_context, note

import torchgraft
from tests.properties.observation import Snapshot, difference, observe
from tests.properties.strategies import Program
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


def capture(program: Program) -> tuple[GraphModule, Any]:
    """Trace a fresh copy of a program; also return the model whose state it shares."""
    subject, model = program.make()
    before = Snapshot.of(model)
    module = torchgraft.symbolic_trace(subject)
    change = before.difference(Snapshot.of(model))
    assert change is None, f"tracing changed {change}"
    return module, model


def observed(program: Program) -> tuple[Any, GraphModule, Any] | None:
    """What eager does with a program, its capture, and the model whose state that shares; None where either is refused."""
    subject, model = program.make()
    expected = observe(subject, model, program.seed)
    if expected.error is not None:
        return None
    try:
        return expected, *capture(program)
    except torchgraft.TraceError:
        return None


def _chosen(program: Program) -> set[str]:
    """Two ways that every program goes, and one that differs from program to program: each costs two traces."""
    names = list(WAYS)
    return {"as captured", "everything", names[program.seed % len(names)]}


def check(program: Program, all_ways: bool = False) -> None:
    """Every way of running the captured program does what eager does."""
    subject, model = program.make()
    expected = observe(subject, model, program.seed)
    try:
        module, _ = capture(program)
    except torchgraft.TraceError:
        assert expected.error is not None, "refused, although eager runs it"
        return
    if currently_in_test_context():
        note(f"{program!r}\n{module.code}")
    for name, way in WAYS.items():
        if not all_ways and name not in _chosen(program):
            continue
        module, model = capture(program)
        result = way(module)
        result.graph.lint()
        compare(expected, result, result, model, program, name)
    module, model = capture(program)
    compare(expected, Interpreter(module).run, module, model, program, "interpreted")


def compare(
    expected: Any, run: Callable[..., Any], module: GraphModule, model: Any, program: Program, way: str
) -> None:
    """Run a captured program and compare what it did with what eager did."""
    holder = StateHolder(model, module)
    found = observe(run, holder, program.seed)
    problem = difference(expected, found)
    if problem is not None:
        raise AssertionError(f"{way}: {problem}\n{program!r}\n{module.code}")


class StateHolder:
    """The parameters and buffers that a program has, under the model's names and in the model's order."""

    def __init__(self, model: Any, module: GraphModule) -> None:
        self._model, self._module = model, module

    def _own(self, kind: str) -> list[tuple[str, Any]]:
        own = dict(getattr(self._module, kind)(remove_duplicate=False))
        # A model that is kept whole is a submodule of its program.
        return [(name, own.get(name, own.get(f"model.{name}", value))) for name, value in getattr(self._model, kind)()]

    def named_parameters(self) -> list[tuple[str, Any]]:
        return self._own("named_parameters")

    def named_buffers(self) -> list[tuple[str, Any]]:
        return self._own("named_buffers")

    def parameters(self) -> list[Any]:
        return [value for _, value in self.named_parameters()]

    def buffers(self) -> list[Any]:
        return [value for _, value in self.named_buffers()]
