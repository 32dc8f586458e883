"""Whether two watched runs of a model made the same program, up to the names of nodes and to what is only checked.
Comparing what two programs compute is the business of `recording/`.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.structures import attributes_of, has_attributes


def does_the_same(first: Graph, second: Graph) -> bool:
    """Whether the second program does what the first does, and checks nothing that the first does not check."""
    return _Comparison(first, second).is_same()


class _Comparison:
    def __init__(self, first: Graph, second: Graph) -> None:
        self._first, self._second = first, second
        # Nodes of the second program and those of the first that are the same.
        self._same: dict[Node, Node] = {}

    def is_same(self) -> bool:
        first, second = _steps(self._first), _steps(self._second)
        if len(first) != len(second):
            return False
        for a, b in zip(first, second, strict=True):
            if not self._is_same_call(a, b):
                return False
            self._same[b] = a
        return self._has_checks(_checks(self._first), _checks(self._second))

    def _has_checks(self, first: list[Node], second: list[Node]) -> bool:
        """Whether the first has all checks of the second; mostly they come in the same order."""
        place = 0
        for check in second:
            places = (*range(place, len(first)), *range(place))
            found = next((item for item in places if self._is_same_check(first[item], check)), None)
            if found is None:
                return False
            place = found + 1
        return True

    def _is_same_call(self, a: Node, b: Node) -> bool:
        if a._op == b._op == "get_attr" and b._target in self._second._constants:
            found = self._first._constants.get(str(a._target)), self._second._constants[str(b._target)]
            return self._is_same_value(*found, depth=0)
        return (
            a._op == b._op and a._target == b._target and self._is_same_argument((a.args, a.kwargs), (b.args, b.kwargs))
        )

    def _is_same_check(self, a: Node, b: Node) -> bool:
        # The last argument is mostly the line that asks; another line may have asked before, in the first run.
        end = -1 if isinstance(b.args[-1], str) else None
        return a._target is b._target and self._is_same_argument(a.args[:end], b.args[:end])

    def _is_same_argument(self, a: Any, b: Any) -> bool:
        if isinstance(a, Node) and isinstance(b, Node):
            return self._same.get(b) is a or (_is_read(a) and _is_read(b) and self._is_same_call(a, b))
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
            return type(a) is type(b) and len(a) == len(b) and all(map(self._is_same_argument, a, b))
        if isinstance(a, dict) and isinstance(b, dict):
            return list(a) == list(b) and all(map(self._is_same_argument, a.values(), b.values()))
        if isinstance(a, slice) and isinstance(b, slice):
            return self._is_same_argument((a.start, a.stop, a.step), (b.start, b.stop, b.step))
        return self._is_same_value(a, b, depth=0)

    def _is_same_value(self, a: Any, b: Any, depth: int) -> bool:
        """Whether two constants are the same; objects are what they hold."""
        if a is b:
            return True
        if type(a) is not type(b) or depth > 20:
            return False
        if isinstance(a, torch.Tensor):
            return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
        if isinstance(a, dict):
            return list(a) == list(b) and all(self._is_same_value(a[key], b[key], depth + 1) for key in a)
        if isinstance(a, (tuple, list)):
            return len(a) == len(b) and all(self._is_same_value(x, y, depth + 1) for x, y in zip(a, b, strict=True))
        if has_attributes(a) and not callable(a):
            return self._is_same_value(attributes_of(a), attributes_of(b), depth + 1)
        return bool(a == b) and repr(a) == repr(b)  # 0.0 is not -0.0


def _is_read(node: Node) -> bool:
    """Whether a node only fetches something. It is made where it is first needed, which may be earlier in one run."""
    return node._op == "get_attr" or node._target is getattr or (node._op == "call_method" and node._target == "size")


def _steps(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if not _is_read(node) and not is_guard(node._target)]


def _checks(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if is_guard(node._target)]
