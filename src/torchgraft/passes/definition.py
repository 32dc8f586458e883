"""What a pass is: a small frozen dataclass whose fields are its options and whose `run` edits a program in place.
Finding a pass by its text name is in `registry.py`, running several in `pipeline.py`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import PassError
from torchgraft.results.tables import count

_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# What can stand in the text form of a pipeline without quotes and is still read as text.
_PLAIN_TEXT = re.compile(r"(?!(?:true|false|none)$)[A-Za-z_./][\w./:*-]*", re.IGNORECASE)


@dataclass(frozen=True)
class PassReport:
    """What one pass did. `notes` are what it left alone that somebody may have expected it to change, and why.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x.relu() + x.relu())
    >>> report = torchgraft.passes.MergeCommon()(program)
    >>> report.name, report.changes
    ('merge-common', 1)
    """

    name: str
    changes: int
    seconds: float
    nodes_before: int
    nodes_after: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = (
            f"{self.name}: {count(self.changes, 'change')} in {self.seconds * 1e3:.1f} ms, "
            f"{self.nodes_before} -> {count(self.nodes_after, 'node')}"
        )
        return "\n".join([text, *[f"  {note}" for note in self.notes]])


@dataclass(frozen=True)
class Pass:
    """An edit of programs. A subclass is a frozen dataclass; its fields are its options, each with a default.

    `run` edits the program in place and says how many changes it made. Calling the pass runs it, verifies the program and
    reports. One name has three spellings: `fold_constants.py`, `FoldConstants`, `fold-constants`.

    >>> import torch, torchgraft
    >>> @dataclass(frozen=True)
    ... class UseSigmoid(Pass):
    ...     def run(self, module):
    ...         relus = module.graph.find_nodes(op="call_function", target=torch.relu)
    ...         for node in relus:
    ...             node.target = torch.sigmoid
    ...         return len(relus)
    >>> program = torchgraft.symbolic_trace(lambda x: torch.relu(x) + 1)
    >>> UseSigmoid()(program).changes, program(torch.zeros(1))
    (1, tensor([1.5000]))
    """

    @property
    def name(self) -> str:
        """The text name: `FoldConstants` is `fold-constants`."""
        return text_name(type(self))

    def run(self, module: GraphModule) -> int:
        """Edit the program in place and return the number of changes."""
        raise NotImplementedError(f"{type(self).__name__} must define run(module)")

    def notes(self, module: GraphModule) -> Sequence[str]:
        """What the program, as it is now, has that this pass looks for and must leave alone, and why."""
        return ()

    def with_example(self, args: tuple[Any, ...]) -> Pass:
        """The pass to run where example inputs are at hand; most passes need none."""
        return self

    def __call__(self, module: GraphModule) -> PassReport:
        """Run, verify and report."""
        graph = getattr(module, "graph", None)
        if graph is None:
            raise PassError(
                f"cannot run {self.name} on {type(module).__name__}: it has no graph; "
                "capture it first with torchgraft.capture() or torchgraft.symbolic_trace()"
            )
        before = len(graph.nodes)
        started = time.perf_counter()
        changes = self.run(module)
        seconds = time.perf_counter() - started
        if type(changes) is not int or changes < 0:
            raise PassError(f"{self.name} returned {changes!r} instead of the number of its changes; fix its run()")
        try:
            module.graph.lint()
        except Exception as error:
            raise PassError(f"{self.name} left a program that is not well formed; fix the pass: {error}") from error
        return PassReport(self.name, changes, seconds, before, len(module.graph.nodes), tuple(self.notes(module)))

    def __str__(self) -> str:
        given = [
            f"{field.name}={option_text(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}{{{', '.join(given)}}}" if given else self.name


def text_name(cls: type[Pass]) -> str:
    """The text name of a pass class.

    >>> class ReorderForMemory(Pass): ...
    >>> text_name(ReorderForMemory)
    'reorder-for-memory'
    """
    return _WORD.sub("-", cls.__name__).lower()


def option_text(value: Any) -> str:
    """An option as it stands in the text form of a pipeline.

    >>> [option_text(value) for value in (4096, 0.5, True, "torch.nn.ReLU", "two words", None)]
    ['4096', '0.5', 'true', 'torch.nn.ReLU', '"two words"', 'none']
    """
    if value is None or type(value) is bool:
        return str(value).lower()
    if type(value) in (int, float):
        return repr(value)
    text = value if isinstance(value, str) else object_path(value)
    return text if _PLAIN_TEXT.fullmatch(text) else json.dumps(text)


def object_path(value: Any) -> str:
    """The path under which a class or function can be imported; other objects as Python shows them."""
    if isinstance(value, type) or callable(value):
        home, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if home and name:
            return f"{home}:{name}"
    return repr(value)
