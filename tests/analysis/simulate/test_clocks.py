"""Two clocks on steps written by hand: the host issues, the device runs in order, and what the cache still holds."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchgraft import Machine
from torchgraft.analysis.simulate.clocks import Cache, Step, cached_share, run_clocks
from torchgraft.analysis.simulate.kernels import Kernel

FIGURES = {"elementwise": {"floor": 1e-6, "bandwidth": 1.0}}
MACHINE = dataclasses.replace(
    Machine.named("h200"),
    bandwidth=1e12,
    cache_bytes=10**6,
    cache_bandwidth=1e13,
    latency=0.0,
    kernels=FIGURES,
    host={"operator": 1e-5, "view": 2e-6, "module": 3e-6, "wait": 1e-5, "launch": 4e-6},
)


def step(size=10**8, memory=0, operator="aten.relu.default", **options):
    kernel = Kernel("aten.relu.default", "elementwise", "fp32", 0, size, 0)
    return Step(operator, kernel, ((memory, size, False),), "node", "forward", **options)


VIEW = Step("aten.view.default", None, (), "node", "forward")


def test_without_the_host_kernels_follow_one_another():
    ran = run_clocks([step(memory=number) for number in range(3)], MACHINE, "graph")
    assert [entry.start for entry in ran] == pytest.approx([0.0, 1.01e-4, 2.02e-4])  # 100 MB and the floor
    assert ran[-1].end == pytest.approx(3.03e-4) and all(entry.host == 0 for entry in ran)


def test_the_device_waits_for_the_host_and_the_host_does_not_wait():
    ran = run_clocks([step(10**6, 1), VIEW, step(10**6, 2), step(10**8, 3), step(10**6, 4)], MACHINE, "eager")
    assert [entry.issued for entry in ran] == pytest.approx([1e-5, 1.2e-5, 2.2e-5, 3.2e-5, 4.2e-5])
    assert ran[0].start == pytest.approx(1e-5) and ran[2].start == pytest.approx(2.2e-5)
    assert ran[4].start == ran[3].end > ran[4].issued  # the host is ahead by now


def test_modules_and_further_kernels_cost_the_host():
    ran = run_clocks([step(10, 1, calls=2), step(10, 1, operator="")], MACHINE, "eager")
    assert [entry.host for entry in ran] == pytest.approx([1.6e-5, 4e-6])


def test_a_number_that_is_read_is_waited_for():
    wait = Step(
        "aten._local_scalar_dense.default", Kernel("aten._local_scalar_dense.default", "wait"), (), "n", "forward"
    )
    ran = run_clocks([step(10**9, 1), wait, step(10, 2)], MACHINE, "eager")
    assert ran[1].start >= ran[0].end and ran[2].issued >= ran[0].end


def test_on_a_cpu_operators_run_where_they_are_issued():
    cpu = dataclasses.replace(MACHINE, kind="cpu", kernels={"elementwise": {"floor": 1e-6, "near": 1.0, "far": 1.0}})
    for mode in ("eager", "graph"):
        ran = run_clocks([step(10**8, 1), step(10**8, 2)], cpu, mode)
        assert ran[1].start == pytest.approx(ran[0].end + 1e-5) and ran[1].end == pytest.approx(2 * 1.11e-4)


# ---- the cache ----


def test_what_was_used_just_before_is_in_the_cache():
    cold = run_clocks([step(4 * 10**5, 1), step(10**8, 2), step(4 * 10**5, 1)], MACHINE, "graph")[-1]
    warm = run_clocks([step(10**8, 2), step(4 * 10**5, 1), step(4 * 10**5, 1)], MACHINE, "graph")[-1]
    assert warm.timing.seconds == pytest.approx(1e-6 + 4e-8) and cold.timing.seconds == pytest.approx(1e-6 + 4e-7)


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_less_is_in_the_cache_the_longer_it_is_ago(one, other):
    near, far = sorted((one, other))
    assert 0 <= cached_share(far, MACHINE) <= cached_share(near, MACHINE) <= 1
    assert cached_share(0, MACHINE) == 1 and cached_share(2e6, MACHINE) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 10**6), st.booleans()), max_size=20))
def test_no_more_is_in_the_cache_than_is_gone_through(touched):
    cache = Cache(MACHINE)
    for entry in touched:
        assert 0 <= cache.pass_over([entry]) <= entry[1]
