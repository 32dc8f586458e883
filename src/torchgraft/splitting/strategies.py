"""The ways to choose parts: by what a backend supports, by size, by balanced cost. Each is a small frozen dataclass.
What they return is a plan, parts in an order in which they can run, and for each node why it is where it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchgraft.errors import GraphError
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute
from torchgraft.results.tables import amount
from torchgraft.splitting.balance import balanced_cuts, reach_within
from torchgraft.splitting.order import Order, is_guard, is_mark

Supports = Callable[[Node], bool | str]
Cost = Callable[[Node], float]


@dataclass
class Plan:
    """Parts as lists of nodes, in an order in which they can run; `supported` says for each whether the backend takes it."""

    parts: list[list[Node]]
    reasons: dict[Node, str]
    supported: list[bool | None] = field(default_factory=list)
    costs: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class Supported:
    """The largest parts that a backend can take, and between them what it cannot.

    `supports` is asked for every call and answers True, False, or a text that says why not. A part with fewer than `min_size`
    calls is given back: crossing over to the backend and back costs more than it brings.

    >>> import torch, torchgraft
    >>> from torchgraft.splitting.split import split
    >>> program = torchgraft.symbolic_trace(lambda x: x.relu().sort().values.tanh())
    >>> parts = split(program, Supported(lambda node: node.target != "sort", min_size=1)).parts
    >>> len(parts)
    3
    """

    supports: Supports
    min_size: int = 1

    def plan(self, order: Order) -> Plan:
        """The parts of one program."""
        reasons: dict[Node, str] = {}
        kinds = [self._unit_is_supported(unit, reasons) for unit in order.units]
        groups, given_back = regions_of_two_kinds(order, kinds, self.min_size)
        for group in given_back:
            size = sum(len(order.units[number]) for number in group)
            for number in group:
                for node in order.units[number]:
                    reasons[node] = (
                        f"supported, but given back: its part would have {size} of at least {self.min_size} nodes"
                    )
        parts = [_in_order(order, [order.units[number] for number in numbers]) for _, numbers in groups]
        _say_why(order, parts, reasons)
        return Plan(parts, reasons, [kind for kind, _ in groups])

    def _unit_is_supported(self, unit: list[Node], reasons: dict[Node, str]) -> bool:
        """What is taken apart or checked goes where it is made, so the first node decides."""
        is_bookkeeping = is_guard(unit[0]) or is_mark(unit[0])
        answer = False if is_bookkeeping else self.supports(unit[0])
        is_supported = answer is True or (not isinstance(answer, str) and bool(answer))
        first = unit[0].name
        if is_bookkeeping:
            reasons[unit[0]] = f"a {'guard' if is_guard(unit[0]) else 'region'} is not the business of a backend"
        else:
            reasons[unit[0]] = "supported" if is_supported else f"not supported: {answer or 'the predicate says no'}"
        for node in unit[1:]:
            reasons[node] = (
                f"checks the value of '{first}'" if is_guard(node) else f"takes the result of '{first}' apart"
            )
        return is_supported


@dataclass(frozen=True)
class Size:
    """Parts of at most `nodes` calls each, in the order of the program. What belongs together stays so, even if that is more.

    >>> import torchgraft
    >>> from torchgraft.splitting.split import split
    >>> program = torchgraft.symbolic_trace(lambda x: x.relu().tanh().exp().neg())
    >>> [len(part.nodes) for part in split(program, Size(nodes=2)).parts]
    [2, 2]
    """

    nodes: int

    def plan(self, order: Order) -> Plan:
        """The parts of one program."""
        if self.nodes < 1:
            raise GraphError(f"cannot split into parts of {self.nodes} nodes: give a size of at least 1")
        parts: list[list[list[Node]]] = []
        filled = 0
        for unit in order.units:
            if not parts or filled + len(unit) > self.nodes:
                parts.append([])
                filled = 0
            parts[-1].append(unit)
            filled += len(unit)
        return _contiguous(order, parts, lambda number, _: f"part {number + 1} in the order of the program")


@dataclass(frozen=True)
class Stages:
    """`count` parts in the order of the program, the most expensive of them as cheap as it can be.

    `cost` says what one call costs (`parameter_bytes` unless told). Of the places that are as good, the one is taken where the
    fewest values pass from one part to the next. With `limit`, the parameters of no part take more bytes than that.

    >>> import torch, torchgraft
    >>> from torchgraft.splitting.split import split
    >>> program = torchgraft.symbolic_trace(torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)]))
    >>> [len(part.nodes) for part in split(program, Stages(2)).parts]
    [2, 2]
    """

    count: int
    cost: Cost | None = None
    limit: int | None = None

    def plan(self, order: Order) -> Plan:
        """The parts of one program."""
        units = order.units
        if not 1 <= self.count <= max(len(units), 1):
            raise GraphError(
                f"cannot split into {self.count} stages: the program has {len(units)} pieces that can be told apart; "
                f"ask for 1 to {max(len(units), 1)}"
            )
        cost = self.cost or parameter_bytes
        weights = [sum(_checked_cost(cost, node) for node in unit) for unit in units]
        reach = None if self.limit is None else self._reach(units, self.limit)
        bounds = [0, *balanced_cuts(weights, self.count, _values_crossing(order), reach), len(units)]
        stages = [units[start:end] for start, end in itertools.pairwise(bounds)] if units else []
        costs = [float(sum(weights[start:end])) for start, end in itertools.pairwise(bounds)] if units else []
        total = sum(costs) or 1.0

        def reason(number: int, node: Node) -> str:
            share = f"{100 * costs[number] / total:.0f}% of the cost"
            return f"stage {number + 1} of {self.count}, which has {share}; this node {_checked_cost(cost, node):g}"

        plan = _contiguous(order, stages, reason)
        plan.costs = list(costs)
        return plan

    def _reach(self, units: list[list[Node]], limit: int) -> list[int]:
        """For a part that begins at each place how far it may go."""
        sizes = [{id(item): _bytes(item) for node in unit for item in parameters_of_call(node)} for unit in units]
        reach = reach_within(sizes, limit)
        for place, unit in enumerate(units):
            if reach[place] == place:
                raise GraphError(
                    f"cannot split: '{unit[0].name}' alone takes {amount(sum(sizes[place].values()), 'B')} of weights, more than "
                    f"the limit of {amount(limit, 'B')}\n  ask for a higher limit, or share this layer by tensor parallelism"
                )
        needed, place = 0, 0
        while place < len(units):
            needed, place = needed + 1, reach[place]
        if needed > self.count:
            whole = {key: size for unit in sizes for key, size in unit.items()}
            raise GraphError(
                f"cannot split into {self.count} stages of at most {amount(limit, 'B')} of weights: the whole has "
                f"{amount(sum(whole.values()), 'B')}\n  ask for {needed} stages or more, or for a higher limit"
            )
        return reach


def parameter_bytes(node: Node) -> float:
    """The bytes of the parameters that a call uses, and 1 for the call itself: what can be said without shapes.

    >>> import torchgraft
    >>> module = torchgraft.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()))
    >>> [parameter_bytes(node) for node in module.graph.nodes]
    [1.0, 33.0, 1.0, 1.0]
    """
    return 1.0 + sum(map(_bytes, parameters_of_call(node)))


def parameters_of_call(node: Node) -> list[torch.nn.Parameter]:
    """The parameters of the module that a node calls, and those that it is given."""
    root = node.graph.owning_module
    if root is None:
        return []
    found = list(root.get_submodule(node.target).parameters()) if node.op == "call_module" else []
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            value = find_attribute(root, source.target)[0]
            found += [value] if isinstance(value, torch.nn.Parameter) else []
    return found


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _values_crossing(order: Order) -> list[int]:
    """For a cut before each unit, how many values would pass it."""
    home = {node: number for number, unit in enumerate(order.units) for node in unit}
    change = [0] * (len(order.units) + 2)
    for node, number in home.items():
        last = max([home[user] for user in node._users if user in home], default=number)
        change[number + 1] += 1
        change[last + 1] -= 1
    return list(itertools.accumulate(change))


def _checked_cost(cost: Cost, node: Node) -> float:
    value = float(cost(node))
    if not 0 <= value < float("inf"):
        raise GraphError(
            f"cannot balance stages: the cost of node '{node.name}' is {value}; let the cost function answer a number from 0 on"
        )
    return value


def _contiguous(order: Order, stages: list[list[list[Node]]], reason: Callable[[int, Node], str]) -> Plan:
    parts = [_in_order(order, stage) for stage in stages]
    reasons = {node: reason(number, node) for number, part in enumerate(parts) for node in part}
    for unit in order.units:
        for node in unit[1:]:
            verb = "takes the result apart"
            if is_guard(node):
                verb = "checks the value" if order.values(node) else "checks inputs or the model's mode"
            reasons[node] = f"goes with '{unit[0].name}': it {verb}"
    return Plan(parts, reasons)


def _in_order(order: Order, units: list[list[Node]]) -> list[Node]:
    return sorted(itertools.chain.from_iterable(units), key=order.position.__getitem__)


def _say_why(order: Order, parts: list[list[Node]], reasons: dict[Node, str]) -> None:
    """Add to the reasons what keeps a node from running in an earlier part of the same kind."""
    home = {node: number for number, part in enumerate(parts) for node in part}
    for node, number in home.items():
        binding = [earlier for earlier in order.before(node) if home[earlier] == number - 1]
        if binding:
            reasons[node] += f"; {order.why(binding[0], node)} of the part before"


# ---- regions of two kinds ----


Group = tuple[bool, list[int]]


def regions_of_two_kinds(order: Order, kinds: list[bool], min_size: int) -> tuple[list[Group], list[list[int]]]:
    """The regions in order, as (kind, unit numbers), and the regions of kind True that were too small and became False.

    A small region first tries to wait for the next one of its kind.
    """
    before, after = _edges(order)
    sizes = [len(unit) for unit in order.units]
    kinds = list(kinds)
    given_back: list[list[int]] = []
    while True:
        groups = _postponed(_drained(kinds, before, after), after, sizes, min_size)
        small = [numbers for kind, numbers in groups if kind and sum(sizes[number] for number in numbers) < min_size]
        if not small:
            return groups, given_back
        for numbers in small:
            given_back.append(numbers)
            for number in numbers:
                kinds[number] = False


def regions_from_the_end(order: Order, kinds: list[bool]) -> list[Group]:
    """The regions with every node in the last one that it can be in, where the others have it in the first one."""
    before, after = _edges(order)
    later = [set(numbers) for numbers in after]
    earlier = [sorted(numbers) for numbers in before]
    return _drained(kinds, later, earlier)[::-1]


def _edges(order: Order) -> tuple[list[set[int]], list[list[int]]]:
    home = {node: number for number, unit in enumerate(order.units) for node in unit}
    before: list[set[int]] = []
    after: list[list[int]] = [[] for _ in order.units]
    for number, unit in enumerate(order.units):
        earlier = {home[source] for node in unit for source in order.before(node)} - {number}
        before.append(earlier)
        for other in sorted(earlier):
            after[other].append(number)
    return before, after


def _drained(kinds: list[bool], before: list[set[int]], after: list[list[int]]) -> list[Group]:
    """The regions in order, begun with the kind that makes fewer of kind True, and fewer altogether."""
    found = [_drained_from(first, kinds, before, after) for first in (True, False)]
    return min(found, key=lambda groups: (sum(kind for kind, _ in groups), len(groups)))


def _drained_from(first: bool, kinds: list[bool], before: list[set[int]], after: list[list[int]]) -> list[Group]:
    waiting = [len(earlier) for earlier in before]
    ready: dict[bool, list[int]] = {True: [], False: []}
    for number, count in enumerate(waiting):
        if not count:
            ready[kinds[number]].append(number)
    groups: list[Group] = []
    kind = first
    while ready[True] or ready[False]:
        taken: list[int] = []
        pending = ready[kind]
        while pending:
            number = pending.pop()
            taken.append(number)
            for other in after[number]:
                waiting[other] -= 1
                if not waiting[other]:
                    ready[kinds[other]].append(other)
        if taken:
            groups.append((kind, taken))
        kind = not kind
    return groups


def _postponed(groups: list[Group], after: list[list[int]], sizes: list[int], min_size: int) -> list[Group]:
    """Small regions joined with the next one of their kind, where nothing in between needs them."""
    result: list[Group] = []
    groups = list(groups)
    number = 0
    while number < len(groups):
        kind, units = groups[number]
        is_small = kind and sum(sizes[unit] for unit in units) < min_size
        if is_small and number + 2 < len(groups):
            between = set(groups[number + 1][1])
            if between.isdisjoint(other for unit in units for other in after[unit]):
                groups[number + 2] = (True, units + groups[number + 2][1])
                number += 1
                continue
        if result and result[-1][0] == kind:
            result[-1] = (kind, result[-1][1] + units)
        else:
            result.append((kind, units))
        number += 1
    return result
