"""The best cut, against trying every one of them."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgraft.analysis.simulate.parallel.chain import Times, Unit, Weight
from torchgraft.analysis.simulate.parallel.cuts import MOST_CUTS, StageLimit, best_cuts
from torchgraft.errors import GraftError


class ChainOf:
    """A chain of given units."""

    def __init__(self, units):
        self.units = units


def sums(values):
    return [0.0, *itertools.accumulate(values)]


def limit_of(seconds, memory=float("inf"), in_flight=1, **rest):
    return StageLimit(Times(sums(seconds), sums([0.0] * len(seconds)), 0.0), memory, in_flight, **rest)


def slowest(seconds, cuts):
    return max(sum(seconds[start:end]) for start, end in itertools.pairwise([*cuts, len(seconds)]))


@settings(max_examples=80, deadline=None)
@given(seconds=st.lists(st.integers(0, 20), min_size=3, max_size=9), stages=st.integers(1, 3))
def test_no_cut_is_better(seconds, stages):
    chain = ChainOf([Unit(str(number)) for number in range(len(seconds))])
    found = best_cuts(chain, [limit_of([float(item) for item in seconds])] * stages)
    assert found[0] == 0 and found == sorted(set(found)) and len(found) == stages
    ways = itertools.combinations(range(1, len(seconds)), stages - 1)
    assert slowest(seconds, found) == min(slowest(seconds, [0, *way]) for way in ways)


def test_among_equals_the_least_passes():
    units = [Unit(str(number), sent=sent) for number, sent in enumerate([0, 100, 100, 1, 100, 100])]
    seconds = [0.0, 0.0, 5.0, 0.0, 0.0, 5.0]
    assert best_cuts(ChainOf(units), [limit_of(seconds)] * 2) == [0, 3]


def test_memory_moves_the_cut():
    units = [Unit(str(number), weights=[Weight(number, 10, True)]) for number in range(4)]
    seconds = [1.0, 1.0, 1.0, 3.0]
    free = best_cuts(ChainOf(units), [limit_of(seconds)] * 2)
    tight = best_cuts(ChainOf(units), [limit_of(seconds, memory=20)] * 2)
    assert free == [0, 3] and tight == [0, 2]
    assert best_cuts(ChainOf(units), [limit_of(seconds, memory=20, bytes_per_weight=1.0)] * 2) is None
    assert best_cuts(ChainOf(units), [limit_of(seconds, memory=5)] * 2) is None


def test_what_is_under_way_counts():
    units = [Unit(str(number), saved=10) for number in range(4)]
    limits = [limit_of([1.0] * 4, memory=30, in_flight=count) for count in (3, 1)]
    assert best_cuts(ChainOf(units), limits) == [0, 1]
    again = [limit_of([1.0] * 4, memory=30, in_flight=count, recompute=True) for count in (3, 1)]
    assert best_cuts(ChainOf(units), again) == [0, 2]


def test_different_machines_get_different_shares():
    slow, quick = [3.0] * 8, [1.0] * 8
    chain = ChainOf([Unit(str(number)) for number in range(8)])
    assert best_cuts(chain, [limit_of(slow), limit_of(quick)]) == [0, 2]


def test_a_long_chain_is_cut_where_little_passes():
    total = 20_000
    units = [Unit(str(number), sent=1 if number % 10 == 0 else 1000) for number in range(total)]
    found = best_cuts(ChainOf(units), [limit_of([1.0] * total)] * 4)
    assert all(place % 10 == 0 for place in found)
    assert slowest([1.0] * total, found) <= total / 4 + 2 * total / MOST_CUTS


def test_more_stages_than_calls():
    with pytest.raises(GraftError, match="cannot cut 2 calls into 3 stages"):
        best_cuts(ChainOf([Unit("a"), Unit("b")]), [limit_of([1.0, 1.0])] * 3)
