"""Which node of one program corresponds to which node of another: by name, by what is called, by value and by place.
Every likely pair is given a weight, and the heaviest chain of pairs that keeps the order of both programs is taken; what lies
between two links is then paired by what it calls and by shape. What the pairs are compared for is in `program_comparison.py`;
programs that are only read, whose names and values say nothing, are lined up in `view/alignment.py`.
"""

from __future__ import annotations

import bisect
import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchgraft.analysis.comparison import comparable, has_values, same_tensor, tensors_in
from torchgraft.ir.node import Node
from torchgraft.rewriting.meaning import coarse_key

# How much each agreement says. A path names one module; a number at the end of a name depends on what else is in the program.
_SAME_VALUE, _SAME_NAME, _SAME_CALL, _SAME_PATH = 4, 3, 2, 1
# Equal values beyond these are mostly copies of one thing.
_MOST_EQUAL_VALUES = 4


class Pair(NamedTuple):
    """Two nodes that correspond, and what says so."""

    first: Node
    second: Node
    how: str


def line_up(first: dict[Node, Any], second: dict[Node, Any]) -> list[Pair]:
    """The pairs of two programs, given the values of their nodes in order; in the order of the second.

    >>> from torchgraft import symbolic_trace
    >>> one, two = symbolic_trace(lambda x: x.relu() + 1), symbolic_trace(lambda x: (x * 2).relu() + 1)
    >>> nodes = [dict.fromkeys(program.graph.nodes) for program in (one, two)]
    >>> [(pair.first, pair.second, pair.how) for pair in line_up(*nodes)]
    [(x, x, 'name'), (relu, relu, 'name'), (add, add, 'name'), (output, output, 'name')]
    """
    if [(node.name, _called(node)) for node in first] == [(node.name, _called(node)) for node in second]:
        return [Pair(mine, theirs, "name") for mine, theirs in zip(first, second, strict=True)]
    alignment = _Alignment(first, second)
    return alignment.pairs()


class _Alignment:
    def __init__(self, first: dict[Node, Any], second: dict[Node, Any]) -> None:
        self._values = first, second
        self._partner: dict[Node, Pair] = {}
        self._taken: set[Node] = set()
        self._prints = {node: _print_of(value) for values in (first, second) for node, value in values.items()}

    def pairs(self) -> list[Pair]:
        """All pairs, in the order of the second program."""
        self._pair_sources()
        first, second = ([node for node in values if _is_call(node)] for values in self._values)
        chain = self._heaviest_chain(first, second)
        for mine, theirs in chain:
            self._join(mine, theirs, "name" if mine.name == theirs.name else "value")
        self._fill_gaps(first, second, chain)
        self._pair_moved(first, second)
        outputs = [[node for node in values if node.op == "output"] for values in self._values]
        if all(outputs):
            self._join(outputs[0][0], outputs[1][0], "name")
        return [self._partner[node] for node in self._values[1] if node in self._partner]

    def _join(self, mine: Node, theirs: Node, how: str) -> None:
        self._partner[theirs] = Pair(mine, theirs, how)
        self._taken.add(mine)

    def _pair_sources(self) -> None:
        """Inputs and attributes, whose order says nothing: by name, then attributes by path and inputs by position."""
        sides = [[node for node in values if node.op in ("placeholder", "get_attr")] for values in self._values]
        names = {(node.op, node.name): node for node in sides[0]}
        for node in sides[1]:
            if (node.op, node.name) in names:
                self._join(names[node.op, node.name], node, "name")
        rest = [[node for node in side if node not in self._partner and node not in self._taken] for side in sides]
        paths = {node.target: node for node in rest[0] if node.op == "get_attr"}
        for node in rest[1]:
            if node.op == "get_attr" and node.target in paths:
                self._join(paths.pop(node.target), node, "name")
        inputs = [[node for node in side if node.op == "placeholder"] for side in rest]
        if len(inputs[0]) == len(inputs[1]):
            for mine, theirs in zip(*inputs, strict=True):
                self._join(mine, theirs, "position")

    # ---- the chain ----

    def _heaviest_chain(self, first: list[Node], second: list[Node]) -> list[tuple[Node, Node]]:
        """Of the likely pairs, the chain that keeps both orders and weighs most."""
        best = _BestChains(len(first))
        places = {node: place for place, node in enumerate(first)}
        candidates = self._candidates(first)
        for theirs in second:
            # Candidates of one node do not follow one another, so all are weighed before any is entered.
            weighed = [(places[mine], mine, self._weight(mine, theirs)) for mine in candidates(theirs)]
            best.extend([(place, weight, (mine, theirs)) for place, mine, weight in weighed if weight > _SAME_CALL])
        return best.heaviest()

    def _candidates(self, first: list[Node]) -> Any:
        names = {node.name: node for node in first}
        by_shape: dict[Any, list[tuple[float, int, Node]]] = defaultdict(list)
        for place, node in enumerate(first):
            printed = self._prints[node]
            if printed is not None and printed.sums is not None:
                by_shape[printed.shape, printed.dtype].append((printed.sums[0], place, node))
        for entries in by_shape.values():
            entries.sort(key=lambda entry: entry[:2])

        def candidates(node: Node) -> Iterator[Node]:
            named = names.get(node.name)
            if named is not None:
                yield named
            printed = self._prints[node]
            if printed is None or printed.sums is None:
                return
            entries = by_shape.get((printed.shape, printed.dtype), [])
            slack = 1e-4 * abs(printed.sums[0])
            start = bisect.bisect_left(entries, printed.sums[0] - slack, key=lambda entry: entry[0])
            found = 0
            for size, _, other in entries[start:]:
                if size > printed.sums[0] + slack or found == _MOST_EQUAL_VALUES:
                    return
                if other is not named and self._same_value(other, node):
                    found += 1
                    yield other

        return candidates

    def _same_value(self, mine: Node, theirs: Node) -> bool:
        first, second = self._prints[mine], self._prints[theirs]
        if first is None or second is None or first.sums is None or second.sums is None:
            return False
        return (first.shape, first.dtype) == (second.shape, second.dtype) and first.same_values(second)

    def _weight(self, mine: Node, theirs: Node) -> int:
        if self._are_numbers(mine, theirs):
            return 0  # sizes are read here in one program and there in another; tensors say which way is the order
        if not self._are_alike(mine, theirs):
            return 0  # a name with a number at its end is another's in a program of another level
        same_value = self._same_value(mine, theirs)
        # Other weights make another call of it: a convolution that took up the norm after it is what that norm was.
        same_call = _called(mine) == _called(theirs) and (same_value or _same_state(mine, theirs))
        weight = _SAME_NAME * (mine.name == theirs.name) + _SAME_VALUE * same_value
        return weight + _SAME_CALL * same_call + _SAME_PATH * (same_call and mine.op == "call_module")

    # ---- what is left ----

    def _fill_gaps(self, first: list[Node], second: list[Node], chain: list[tuple[Node, Node]]) -> None:
        places = [{node: place for place, node in enumerate(side)} for side in (first, second)]
        start = 0, 0
        for end in [*[(places[0][mine], places[1][theirs]) for mine, theirs in chain], (len(first), len(second))]:
            self._fill_gap(first[start[0] : end[0]], second[start[1] : end[1]])
            start = end[0] + 1, end[1] + 1

    def _fill_gap(self, mine: list[Node], theirs: list[Node]) -> None:
        """Pair in order what makes the same call; then, from the end, what has the same shape: the end is where values meet."""
        position = 0
        for node in theirs:
            match = next((place for place in range(position, len(mine)) if self._may_be(mine[place], node)), None)
            if match is not None:
                self._join(mine[match], node, "structure")
                position = match + 1
        before = len(mine)
        for node in reversed(theirs):
            if node in self._partner:
                before = mine.index(self._partner[node].first)
                continue
            free = [place for place in range(before - 1, -1, -1) if mine[place] not in self._taken]
            match = next((place for place in free if self._same_shape(mine[place], node)), None)
            if match is not None:
                self._join(mine[match], node, "position")
                before = match

    def _may_be(self, mine: Node, theirs: Node) -> bool:
        """Whether two nodes make the same call; two numbers that differ are two reads of sizes, of which programs have many."""
        return _called(mine) == _called(theirs) and self._are_alike(mine, theirs)

    def _are_alike(self, mine: Node, theirs: Node) -> bool:
        """Whether two nodes give the same kind of thing, and the same part of it where they take one of several results."""
        same_kind = (self._prints[mine] is None) == (self._prints[theirs] is None)
        if not same_kind or _part(mine) != _part(theirs):
            return False
        return not self._are_numbers(mine, theirs) or bool(self._values[0][mine] == self._values[1][theirs])

    def _are_numbers(self, mine: Node, theirs: Node) -> bool:
        kind = type(self._values[0][mine])
        return kind in (int, bool) and kind is type(self._values[1][theirs])

    def _same_shape(self, mine: Node, theirs: Node) -> bool:
        first, second = self._prints[mine], self._prints[theirs]
        same = first is not None and second is not None and first.shape == second.shape
        return same and _part(mine) == _part(theirs)

    def _pair_moved(self, first: list[Node], second: list[Node]) -> None:
        """What changed its place: the same name and call."""
        free = {(node.name, _called(node)): node for node in first if node not in self._taken}
        for node in second:
            found = free.get((node.name, _called(node)))
            if node not in self._partner and found is not None and self._are_alike(found, node):
                self._join(found, node, "name")


class _BestChains:
    """For every place in the first program the heaviest chain that ends before it; a tree of maxima, so that asking is quick."""

    def __init__(self, size: int) -> None:
        self._tree: list[tuple[int, Any]] = [(0, None)] * (size + 1)

    def _before(self, place: int) -> tuple[int, Any]:
        best: tuple[int, Any] = (0, None)
        while place > 0:
            if self._tree[place][0] > best[0]:
                best = self._tree[place]
            place -= place & -place
        return best

    def extend(self, links: list[tuple[int, int, tuple[Node, Node]]]) -> None:
        """Enter the chains that end with one of the links."""
        longer = []
        for place, weight, link in links:
            total, chain = self._before(place)
            longer.append((place + 1, (total + weight, (chain, link))))
        for place, entry in longer:
            while place < len(self._tree):
                if entry[0] > self._tree[place][0]:
                    self._tree[place] = entry
                place += place & -place

    def heaviest(self) -> list[tuple[Node, Node]]:
        """The links of the heaviest chain, in order."""
        chain = self._before(len(self._tree) - 1)[1]
        links = []
        while chain is not None:
            chain, link = chain
            links.append(link)
        return links[::-1]


def _is_call(node: Node) -> bool:
    return node.op.startswith("call_")


def _called(node: Node) -> str:
    """What a node calls, the same for a function, a method and an operator that do one thing."""
    if node.op == "call_module":
        return f"module {node.target}"
    if not _is_call(node):
        return node.op
    key = coarse_key(node)
    return key if isinstance(key, str) else getattr(node.target, "__name__", "")


def _part(node: Node) -> int | None:
    """Which of several results a node takes."""
    index = node.args[1] if node.target is operator.getitem and len(node.args) == 2 else None
    return index if isinstance(index, int) else None


def _same_state(mine: Node, theirs: Node) -> bool:
    """Whether two nodes that call one thing do so with the same parameters and buffers."""
    first, second = (_module_of(node) for node in (mine, theirs))
    return first is second or first is None or second is None or _same_tensors(first, second)


def _module_of(node: Node) -> torch.nn.Module | None:
    owner = node.graph.owning_module
    return owner.get_submodule(str(node.target)) if node.op == "call_module" and owner is not None else None


def _same_tensors(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    mine, theirs = (dict([*side.named_parameters(), *side.named_buffers()]) for side in (first, second))
    return mine.keys() == theirs.keys() and all(same_tensor(mine[name], theirs[name]) for name in mine)


def _print_of(value: Any) -> Fingerprint | None:
    tensors = tensors_in(value)
    return fingerprint(tensors[0]) if tensors and isinstance(tensors[0], torch.Tensor) else None


# ---- what is told of a value ----


class Fingerprint(NamedTuple):
    """What is remembered of a tensor: enough to know it again; `sums` is None where there are no values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sums: tuple[float, ...] | None

    def same_values(self, other: Fingerprint) -> bool:
        """Whether the values are the same, up to what another order of additions can change."""
        if self.sums is None or other.sums is None:
            return True
        unit = torch.finfo(self.dtype).eps if self.dtype.is_floating_point or self.dtype.is_complex else 0.0
        allowed = 32 * unit * self.sums[0]
        return all(abs(mine - theirs) <= allowed for mine, theirs in zip(self.sums, other.sums, strict=True))


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """The fingerprint of a tensor as it is now."""
    sums: tuple[float, ...] | None = None
    # A tensor inside vmap and the like has no values that Python may see.
    if has_values(tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        with torch.no_grad():
            values = comparable(tensor).reshape(-1)
            odd = float((~torch.isfinite(values)).sum())
            values = torch.nan_to_num(values, nan=0.5, posinf=2.0, neginf=-2.0)
            sums = (float(values.abs().sum()), float(values.sum()), float(values @ _weights(values)), odd)
    return Fingerprint(tuple(tensor.shape), tensor.dtype, sums)


_longest_weights: dict[torch.device, torch.Tensor] = {}


def _weights(values: torch.Tensor) -> torch.Tensor:
    """Numbers that make a sum depend on the order; the longest ones made are kept, because they take long to compute."""
    known = _longest_weights.get(values.device)
    if known is None or known.numel() < values.numel():
        known = torch.arange(values.numel(), dtype=torch.float64, device=values.device).mul_(0.7).cos_()
        _longest_weights[values.device] = known
    return known[: values.numel()]
