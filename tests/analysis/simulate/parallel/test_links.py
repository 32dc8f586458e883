"""Transfers, all-reduces along rings and trees, and gradients reduced in buckets while backward runs."""

import dataclasses

import pytest

from torchgraft.analysis.simulate import Link, Machine
from torchgraft.analysis.simulate.parallel.links import LINKS, link_of, reduced_buckets
from torchgraft.errors import GraftError

PLAIN = Link("plain", 1e9, 1e-3)


@pytest.mark.parametrize("devices", [2, 3, 8, 64])
def test_rings_and_trees(devices):
    size = 10**9
    ring = PLAIN.all_reduce(size, devices, "ring")
    assert ring == pytest.approx(2 * (devices - 1) / devices * size / 1e9 + 2 * (devices - 1) * 1e-3)
    tree = PLAIN.all_reduce(size, devices, "tree")
    levels = {2: 1, 3: 2, 8: 3, 64: 6}[devices]
    assert tree == pytest.approx(2 * size / 1e9 + 2 * levels * 1e-3)
    assert PLAIN.all_reduce(size, devices) == min(ring, tree)


def test_small_sums_of_many_devices_go_along_trees():
    assert PLAIN.all_reduce(8, 64) == PLAIN.all_reduce(8, 64, "tree") < PLAIN.all_reduce(8, 64, "ring")
    assert PLAIN.all_reduce(10**10, 4) == PLAIN.all_reduce(10**10, 4, "ring")


def test_nothing_to_send():
    assert PLAIN.transfer(0) == PLAIN.all_reduce(0, 8) == PLAIN.all_reduce(10**9, 1) == 0.0


def test_names_of_links():
    h200 = Machine.named("h200")
    assert link_of(None, h200, 2).name == "nvlink" and link_of(None, h200, 64).name == "network"
    assert link_of("pcie", h200, 2).bandwidth == h200.links["pcie"]
    assert link_of("infiniband-hdr", h200, 2) is LINKS["infiniband-hdr"]
    assert link_of(2e9, h200, 2).bandwidth == 2e9
    assert link_of(PLAIN, h200, 2) is PLAIN


def test_one_direction_of_nvlink():
    assert Machine.named("h200").links["nvlink"] == LINKS["nvlink4"].bandwidth == 450e9


def test_mistakes():
    h200 = Machine.named("h200")
    with pytest.raises(GraftError, match="there is no link 'nvlink9'\nchoose one of nvlink, pcie, network, nvlink3"):
        link_of("nvlink9", h200, 2)
    with pytest.raises(GraftError, match="the link 'x' has -1 bytes a second"):
        Link("x", -1)
    with pytest.raises(GraftError, match="a positive bandwidth"):
        Link("x", 1e9, -1)
    with pytest.raises(GraftError, match="there is no all-reduce 'star'"):
        PLAIN.all_reduce(1, 2, "star")
    with pytest.raises(GraftError, match="has no links in its file"):
        link_of(None, dataclasses.replace(h200, links={}), 2)


def test_buckets_wait_for_their_last_gradient_and_for_each_other():
    link = Link("plain", 1e6, 0.0)  # an all-reduce of two devices takes a second for a megabyte
    gradients = [(0.0, 600_000), (1.0, 600_000), (1.1, 1_000_000), (9.0, 10)]
    buckets = reduced_buckets(gradients, link, 2, bucket_bytes=1_000_000)
    assert [bucket.size for bucket in buckets] == [1_200_000, 1_000_000, 10]
    assert [bucket.ready for bucket in buckets] == [1.0, 1.1, 9.0]
    assert [bucket.start for bucket in buckets] == pytest.approx([1.0, 2.2, 9.0])
    assert sum(bucket.size for bucket in buckets) == sum(size for _, size in gradients)


def test_one_large_bucket_cannot_overlap():
    gradients = [(float(number), 10**6) for number in range(1, 9)]
    link = Link("plain", 4e6, 0.0)
    small = reduced_buckets(gradients, link, 4, bucket_bytes=10**6)
    large = reduced_buckets(gradients, link, 4, bucket_bytes=10**9)
    assert len(small) == 8 and len(large) == 1
    assert small[-1].end < large[-1].end
