"""The program of a model at every level, with its shapes, how long it took, what is in it, or why it is unavailable.
What is written about a level on the page is in `level_section.py`.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torchgraft.capturing.program import capture
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError, one_line
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.ir.printing import argument_text, known_value, target_text, value_text
from torchgraft.lowering.lower import lower
from torchgraft.passes.propagate_shapes import note_shapes
from torchgraft.results.progress import stage
from torchgraft.results.tables import shortened
from torchgraft.view.node_facts import module_path_of

# name: (title, what it shows)
LEVELS = {
    "module": ("Modules", "One call for every layer of torch.nn: the shortest program, closest to the source."),
    "function": ("Functions", "What the layers call: functions of torch, with parameters fetched where they are used."),
    "aten": ("ATen", "The operators of torch below Python."),
    "core_aten": ("Core ATen", "The same in the smaller set of operators that backends have to implement."),
    "joint": ("Training", "Forward and backward of one training step as one program, in training mode."),
}


CAPTURED = ("module", "function")
_WIDEST = 160


@dataclass(frozen=True)
class Counts:
    """How many nodes of each kind a program has; `by_call` counts what is called, most often first."""

    nodes: int
    calls: int
    inputs: int
    state: int
    guards: int
    by_call: dict[str, int] = field(repr=False)

    @property
    def different_calls(self) -> int:
        """How many different things are called."""
        return len(self.by_call)


@dataclass
class Level:
    """A program at one level; without a program, `failure` says why."""

    name: str
    program: GraphModule | None = None
    seconds: float = 0.0
    counts: Counts | None = None
    failure: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """What the level is called on the page."""
        return LEVELS[self.name][0]

    @property
    def explanation(self) -> str:
        """One sentence about what the level shows."""
        return LEVELS[self.name][1]


def captured_levels(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Level]:
    """The programs of a model. It is captured once with its modules and once without; the deeper levels are lowered from these.

    Whatever goes wrong is noted on the level, never raised.

    >>> levels = captured_levels(torch.nn.Linear(2, 3), (torch.ones(1, 2),), {})
    >>> levels["aten"].counts.calls, levels["aten"].counts.by_call
    (1, {'aten.linear.default': 1})
    """
    levels: dict[str, Level] = {}
    for number, name in enumerate(LEVELS, 1):
        with stage(f"level {name}", number, len(LEVELS)):
            _capture_level(name, levels, model, args, kwargs)
    return levels


def _capture_level(
    name: str, levels: dict[str, Level], model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    level = levels[name] = Level(name)
    started = time.perf_counter()
    try:
        level.program = _program(name, levels, model, args, kwargs)
    except Exception as error:  # a level that is unavailable is a finding
        level.failure = one_line(error)
        return
    level.seconds = time.perf_counter() - started
    if name in CAPTURED:
        with contextlib.suppress(Exception):  # shapes are an addition
            note_shapes(level.program, args, kwargs)
    level.counts = counts_of(level.program)


def _program(
    name: str, levels: dict[str, Level], model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> GraphModule:
    if name in CAPTURED:
        return capture(model, args, kwargs, level=name)
    # Modules that are still whole can change their mode, so a training step comes from the program that has them.
    source = levels["module" if name == "joint" else "function"]
    if source.program is None:
        raise GraftError(f"it is made from level {source.name}, which is unavailable")
    if name != "joint":
        return lower(source.program, args, kwargs, level=name)
    try:
        with in_training_mode(source.program):
            return capture(source.program, args, kwargs, level=name)
    except Exception as error:  # batch norm, for one, refuses a batch of one in training mode
        reason = one_line(error)
        levels[name].notes.append(f"captured in the mode the model is in, because in training mode: {reason}")
        return capture(source.program, args, kwargs, level=name)


@contextlib.contextmanager
def in_training_mode(model: torch.nn.Module) -> Iterator[None]:
    """Every module in training mode, and afterwards in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.train()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def counts_of(program: GraphModule) -> Counts:
    """What is in a program."""
    kinds = Counter([_kind(node) for node in program.graph.nodes])
    calls = Counter([call_name(node, program) for node in program.graph.nodes if _kind(node) == "call"])
    return Counts(
        len(program.graph.nodes),
        kinds["call"],
        kinds["placeholder"],
        kinds["get_attr"],
        kinds["guard"],
        dict(calls.most_common()),
    )


class NodeRow(NamedTuple):
    """A node as texts, to be shown in a table; `place` is the file and number of the `line` it comes from."""

    name: str
    op: str
    target: str
    arguments: str
    value: str
    module: str
    place: str
    line: str


def node_rows(level: Level) -> list[NodeRow]:
    """Every node of a program as a row; long arguments are cut."""
    program = level.program
    assert program is not None
    rows = []
    for node in program.graph.nodes:
        arguments = [argument_text(value) for value in node.args]
        arguments += [f"{key}={argument_text(value)}" for key, value in node.kwargs.items()]
        source = source_of(node)
        target = call_name(node, program) if node.op != "call_module" else str(node.target)
        rows.append(
            NodeRow(
                node.name,
                node.op,
                target,
                shortened(", ".join(arguments), _WIDEST),
                shortened(value_text(known_value(node)) or "", _WIDEST),
                module_path_of(node) or "",
                "" if source is None else source.place,
                str(source or ""),
            )
        )
    return rows


def place_of(line: str) -> str:
    """The name of the file and the number of a source line."""
    return line.partition(' "')[0].replace("\\", "/").rsplit("/", 1)[-1]


def _kind(node: Node) -> str:
    if is_guard(node.target) or node.target == "_guards_fn":
        return "guard"
    if node.target is operator.getitem and isinstance(node.args[0], Node) and _returns_several(node.args[0]):
        return "part"  # one of several results; nothing is computed
    return "call" if node.op.startswith("call_") else node.op


def _returns_several(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and len(node.target._schema.returns) > 1


def call_name(node: Node, program: GraphModule) -> str:
    """What a node calls, in few characters: `Conv2d`, `relu`, `aten.add.Tensor`, `.view`."""
    if node.op == "call_module":
        return type(program.get_submodule(str(node.target))).__name__
    if node.op == "call_method":
        return f".{node.target}"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return target_text(node.target).removeprefix("torch.nn.functional.").removeprefix("_operator.")
