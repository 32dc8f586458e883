"""The abstract machine that reads code for its effects: the questions its parts ask each other.
The parts live in `attributes.py`, `calls.py` and `statements.py`, each a layer on top of this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torchgraft.analysis.effects.values import OUTSIDE, Closure, Findings, Value, reachable

# Enough for the forward of a large model read statement by statement; beyond it the answer is "unknown".
STEP_LIMIT = 60_000
DEPTH_LIMIT = 60


@dataclass(slots=True)
class Arguments:
    """The arguments of a call; `rest` stands for any number more, from a star whose length is not known."""

    positional: list[Value] = field(default_factory=list)
    keyword: dict[str, Value] = field(default_factory=dict)
    rest: Value | None = None

    def all(self) -> list[Value]:
        return [*self.positional, *self.keyword.values(), *([] if self.rest is None else [self.rest])]

    def with_receiver(self, receiver: Value) -> Arguments:
        return Arguments([receiver, *self.positional], self.keyword, self.rest)


class ModuleRead:
    """Questions about a module that are no attribute, under names that no attribute has."""

    HOOKS = "<hooks>"
    CHILDREN = "<children>"
    CLASS = "<class>"


class Machine(Findings, ABC):
    """One analysis of one call."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        # The functions being read and the values of their parameters, innermost last.
        self.active: list[tuple[Any, dict[str, Value]]] = []

    @abstractmethod
    def call(self, site: Any, callee: Value, arguments: Arguments) -> Value:
        """Call a value."""

    @abstractmethod
    def call_method(self, site: Any, owner: Value, name: str, arguments: Arguments) -> Value:
        """Call a method by name."""

    @abstractmethod
    def call_python(self, site: Any, function: Any, arguments: Arguments) -> Value:
        """Call a Python function by reading its source."""

    @abstractmethod
    def call_closure(self, site: Any, closure: Closure, arguments: Arguments) -> Value:
        """Call a function that the analysed code defined."""

    @abstractmethod
    def call_program(self, site: Any, callee: Value, graph: Any, arguments: Arguments) -> Value:
        """Call a captured program, node by node."""

    @abstractmethod
    def read_attribute(self, site: Any, owner: Value, name: str) -> Value:
        """The value of `owner.name`."""

    @abstractmethod
    def items_of(self, value: Value) -> list[Value] | None:
        """What iterating over `value` gives, or None where that is not certain."""

    def unknown_result(self, values: Iterable[Value]) -> Value:
        """The result of something that may have kept or handed back anything."""
        return Value(places=reachable(values) | {OUTSIDE})
