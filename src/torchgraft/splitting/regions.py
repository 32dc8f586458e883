"""The largest regions of one kind in a program of two kinds of nodes (supported, and not), without a cycle among the regions.
What the kinds mean is the caller's business.

Everything of one kind that is ready to run is taken into the current region until only the other kind is ready; then the kind
changes. So the regions are in an order in which they can run, there can be no cycle, and there are as few of them as
possible for the kind that comes first; both kinds are tried. It takes time linear in the program.
"""

from __future__ import annotations

from torchgraft.splitting.order import Order

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
        groups = min(
            (_drained(kinds, before, after, first) for first in (True, False)),
            key=lambda found: (sum(kind for kind, _ in found), len(found)),
        )
        groups = _postponed(groups, after, sizes, min_size)
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
    groups = min(
        (_drained(kinds, later, earlier, first) for first in (True, False)),
        key=lambda found: (sum(kind for kind, _ in found), len(found)),
    )
    return groups[::-1]


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


def _drained(kinds: list[bool], before: list[set[int]], after: list[list[int]], first: bool) -> list[Group]:
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
