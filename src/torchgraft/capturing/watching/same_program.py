"""Whether two watched runs of a model did the same: the same calls on the same values, with the same constants and results.
One of the runs may have been given plain numbers where the other had symbolic ones. Comparing what programs compute is the
business of `recording/`.
"""

from __future__ import annotations

import operator
from collections import deque
from typing import Any, NamedTuple

import torch

from torchgraft.ir.choices import add_if
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.structures import attributes_of, has_attributes, put_together

_MISSING = object()
_ADDITIONS = frozenset({"add_", "__iadd__"})
_QUESTIONS = frozenset({operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne})


class Record(NamedTuple):
    """What there is to compare of a run: its graph, the nodes of its calls in order, what it returns, and the plain values of
    the nodes that are numbers, dtypes, devices and modes."""

    graph: Graph
    calls: list[Node]
    output: Any
    plain: dict[Node, Any]


class Difference(NamedTuple):
    """Where two runs part: the first call that is not the same (None where only the results differ), and what is different.
    `is_made` says that both do the same with a tensor which each of them has made in a way that nobody has seen."""

    node: Node | None
    what: str
    is_made: bool = False


def first_difference(first: Record, second: Record) -> Difference | None:
    """Where the second run does something else than the first; None if it does the same."""
    return _Comparison(first, second).difference()


def has_checks_of(first: Record, second: Record) -> bool:
    """Whether the first of two runs that do the same also checks everything that the second checks."""
    comparison = _Comparison(first, second)
    return comparison.difference() is None and comparison.has_checks()


class _Comparison:
    def __init__(self, first: Record, second: Record) -> None:
        self._first, self._second = first, second
        # Calls of the second run and those of the first that are the same.
        self._same: dict[Node, Node] = {}
        self._calls = frozenset(first.calls), frozenset(second.calls)
        self._is_made = False
        # The objects that are being compared.
        self._open: set[tuple[int, int]] = set()

    def difference(self) -> Difference | None:
        ours = deque([node for node in self._first.calls if not node._erased and not self._does_nothing(node)])
        theirs = deque([node for node in self._second.calls if not node._erased and not self._does_nothing(node)])
        while ours and theirs:
            mine, other = ours.popleft(), theirs.popleft()
            if not self._is_usual(mine, other) and not self._is_same_call(mine, other):
                if (
                    mine._target in _QUESTIONS and not mine._users
                ):  # the first run looks at both sides of a choice by the mode
                    theirs.appendleft(other)
                    continue
                return Difference(mine, self._described(mine, other), self._is_made)
            self._same[other] = mine
        ours = deque([node for node in ours if node._target not in _QUESTIONS or node._users])
        if ours or theirs:
            node = ours[0] if ours else theirs[0]
            return Difference(node, f"only one of two runs calls {_name_of(node)}")
        if not self._is_same_argument(self._first.output, self._second.output):
            return Difference(None, "two runs do not return the same", self._is_made)
        return None

    def _is_usual(self, a: Node, b: Node) -> bool:
        """Whether two calls are seen to be the same at first sight, as most are."""
        if a._target is not b._target or a._kwargs or b._kwargs or len(a._args) != len(b._args):
            return False
        same = self._same
        return all(x is y or (type(y) is Node and same.get(y) is x) for x, y in zip(a._args, b._args, strict=True))

    def _does_nothing(self, node: Node) -> bool:
        """Whether this adds to a buffer in the other mode only."""
        return node._target is add_if and not self._plain_value(node._args[0])

    def _plain_value(self, value: Any) -> Any:
        return self._first.plain.get(value, self._second.plain.get(value, value)) if isinstance(value, Node) else value

    def _described(self, mine: Node, other: Node) -> str:
        if _name_of(mine) != _name_of(other):
            return f"one run calls {_name_of(mine)}, and the next {_name_of(other)}"
        return f"{_name_of(mine)} is not given the same in two runs"

    def has_checks(self) -> bool:
        """Whether the first run has all checks of the second; mostly they come in the same order."""
        first, second = _checks(self._first.graph), _checks(self._second.graph)
        place = 0
        for check in second:
            places = (*range(place, len(first)), *range(place))
            found = next((item for item in places if self._is_same_check(first[item], check)), None)
            if found is None:
                return False
            place = found + 1
        return True

    def _is_same_check(self, a: Node, b: Node) -> bool:
        # The last argument is mostly the line that asks; another line may have asked before, in the first run.
        end = -1 if isinstance(b.args[-1], str) else None
        return a._target is b._target and self._is_same_argument(a.args[:end], b.args[:end], is_check=True)

    def _is_same_call(self, a: Node, b: Node, is_check: bool = False) -> bool:
        if a._target is add_if and b._target is not add_if:
            return _is_addition(b) and self._is_same_argument(a._args[1:], b._args)
        if a._op == b._op == "get_attr" and b._target in self._second.graph._constants:
            constants = self._first.graph._constants
            found = constants.get(str(a._target), _MISSING), self._second.graph._constants[str(b._target)]
            return self._is_same_value(*found, depth=0)
        if a._op != b._op or (a._target is not b._target and a._target != b._target):
            return False
        return self._is_same_argument((a.args, a.kwargs), (b.args, b.kwargs), is_check)

    def _is_same_argument(self, a: Any, b: Any, is_check: bool = False) -> bool:
        if isinstance(a, Node) or isinstance(b, Node):
            return self._is_same_node(a, b, is_check)
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
            return (
                _kind(a) is _kind(b)
                and len(a) == len(b)
                and all(self._is_same_argument(x, y, is_check) for x, y in zip(a, b, strict=True))
            )
        if isinstance(a, dict) and isinstance(b, dict):
            return list(a) == list(b) and all(self._is_same_argument(a[key], b[key], is_check) for key in a)
        if isinstance(a, slice) and isinstance(b, slice):
            return self._is_same_argument((a.start, a.stop, a.step), (b.start, b.stop, b.step), is_check)
        return self._is_same_value(a, b, depth=0)

    def _is_same_node(self, a: Any, b: Any, is_check: bool) -> bool:
        """Whether two arguments, of which one is a node at least, are the same. What only fetches something is made where it is
        first needed, which may be earlier in one run."""
        if not is_check:
            mine, other = self._first.plain.get(a, a) if isinstance(a, Node) else a, b
            other = self._second.plain.get(b, b) if isinstance(b, Node) else b
            if not isinstance(mine, Node) and not isinstance(other, Node):
                return self._is_same_value(mine, other, depth=0)
        if not isinstance(a, Node) or not isinstance(b, Node):
            return False
        if a in self._calls[0] or b in self._calls[1]:
            return self._same.get(b) is a
        if a._target is put_together and b._target is put_together and not is_check:
            return self._is_same_value(_object(self._first, a), _object(self._second, b), depth=0)
        return self._is_same_call(a, b, is_check)

    def _is_same_value(self, a: Any, b: Any, depth: int) -> bool:
        """Whether two constants are the same. Objects are what they hold; a tensor that is another one was made by the run."""
        if a is b:
            return True
        if isinstance(a, Node) or isinstance(b, Node):
            return self._is_same_node(a, b, is_check=False)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            self._is_made = True
        if _kind(a) is not _kind(b) or depth > 20 or isinstance(a, torch.Tensor):
            return False
        if isinstance(a, dict):
            return list(a) == list(b) and all(self._is_same_value(a[key], b[key], depth + 1) for key in a)
        if isinstance(a, (tuple, list, deque)):
            return len(a) == len(b) and all(self._is_same_value(x, y, depth + 1) for x, y in zip(a, b, strict=True))
        if has_attributes(a) and not callable(a):
            pair = (id(a), id(b))
            if pair in self._open:  # an object that holds itself
                return True
            self._open.add(pair)
            try:
                return self._is_same_value(attributes_of(a), attributes_of(b), depth + 1)
            finally:
                self._open.remove(pair)
        return repr(a) == repr(b) and bool(a == b or a != a)  # 0.0 is not -0.0, and NaN is NaN


def _kind(value: Any) -> type:
    """The class of a value; a tuple of numbers may be the size of a tensor in one run."""
    return tuple if type(value) is torch.Size else type(value)


def _object(record: Record, node: Node) -> Any:
    """The object that a node puts together, with plain values in it and nodes for everything else."""
    template, *parts = node._args
    plain = [record.plain.get(part, part) if isinstance(part, Node) else part for part in parts]
    return put_together(record.graph._constants[str(template._target)], *plain)


def _name_of(node: Node) -> str:
    return str(getattr(node._target, "__name__", node._target))


def _is_addition(node: Node) -> bool:
    return _name_of(node) in _ADDITIONS or _name_of(node) == "iadd"


def _checks(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if is_guard(node._target)]
