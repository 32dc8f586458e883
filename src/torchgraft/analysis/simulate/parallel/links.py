"""Links between devices: how long a transfer and an all-reduce take, and gradients reduced in buckets while backward still runs.
Machine files name the links that a machine has; links that belong to no machine are in the table here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

from torchgraft.analysis.simulate.machine import Machine
from torchgraft.errors import GraftError

BUCKET_BYTES = 25 * 2**20  # what DistributedDataParallel takes together unless told


@dataclass(frozen=True)
class Link:
    """A link from one device to another: bytes a second in one direction, and the seconds until the first byte is there.

    >>> Link("nvlink", 450e9, 3e-6).transfer(450_000_000) > 1e-3
    True
    """

    name: str
    bandwidth: float
    latency: float = 5e-6

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise GraftError(
                f"the link '{self.name}' has {self.bandwidth!r} bytes a second and a latency of {self.latency!r} s\n"
                "give a positive bandwidth, and a latency that is not negative"
            )

    def transfer(self, size: float) -> float:
        """Seconds to send so many bytes."""
        return self.latency + size / self.bandwidth if size else 0.0

    def all_reduce(self, size: float, devices: int, algorithm: str = "best") -> float:
        """Seconds until each of some devices has the sum of all: along a "ring", up and down a "tree", or the "best" of both.

        >>> link = Link("test", 1e9, 0.0)
        >>> link.all_reduce(1e9, 4, "ring"), link.all_reduce(1e9, 4, "tree"), link.all_reduce(1e9, 1)
        (1.5, 2.0, 0.0)
        """
        if devices < 2 or not size:
            return 0.0
        ring = 2 * (devices - 1) * (self.latency + size / devices / self.bandwidth)
        tree = 2 * (ceil(log2(devices)) * self.latency + size / self.bandwidth)
        try:
            return {"ring": ring, "tree": tree, "best": min(ring, tree)}[algorithm]
        except KeyError:
            raise GraftError(f'there is no all-reduce {algorithm!r}\nchoose one of "ring", "tree", "best"') from None


# One direction of what datasheets give for both; latencies are usual ones of a message through the stack, not from datasheets.
LINKS = {
    "nvlink3": Link("nvlink3", 300e9, 3e-6),  # A100: 12 links, 600 GB/s both ways
    "nvlink4": Link("nvlink4", 450e9, 3e-6),  # H100, H200: 18 links, 900 GB/s both ways
    "pcie3": Link("pcie3", 16e9, 5e-6),  # 16 lanes
    "pcie4": Link("pcie4", 32e9, 5e-6),
    "pcie5": Link("pcie5", 64e9, 5e-6),
    "infiniband-hdr": Link("infiniband-hdr", 25e9, 5e-6),  # 200 Gb/s
    "infiniband-ndr": Link("infiniband-ndr", 50e9, 5e-6),  # 400 Gb/s
    "ethernet-100": Link("ethernet-100", 12.5e9, 20e-6),
}
_LATENCY = {"nvlink": 3e-6, "pcie": 5e-6, "network": 5e-6}
IN_ONE_NODE = 8  # so many devices usually share the fast link of a machine; more are reached through the network

AnyLink = Link | str | float | int


def link_of(given: AnyLink | None, machine: Machine, devices: int) -> Link:
    """A link as it is, by a name of the machine's file or of the table, or by its bytes a second.

    Without one it is the machine's fastest, and its "network" where more than eight devices take part.

    >>> link_of("infiniband-ndr", Machine.named("h200"), 2).bandwidth
    50000000000.0
    """
    if isinstance(given, Link):
        return given
    if isinstance(given, (int, float)):
        return Link(f"{given:.3g} B/s", float(given))
    if given is None:
        if not machine.links:
            raise GraftError(
                f"{machine.name} has no links in its file\ngive links=, such as {', '.join(list(LINKS)[:3])}"
            )
        given = max(machine.links, key=machine.links.__getitem__)
        if devices > IN_ONE_NODE and "network" in machine.links:
            given = "network"
    if given in machine.links:
        return Link(given, machine.links[given], _LATENCY.get(given, 5e-6))
    if given in LINKS:
        return LINKS[given]
    names = [*machine.links, *LINKS]
    raise GraftError(f"there is no link {given!r}\nchoose one of {', '.join(names)}, or give a Link or bytes a second")


# ---- gradients ----


class Bucket(NamedTuple):
    """Gradients that are reduced together: how many bytes, when the last of them was ready, and when the sum began and ended."""

    size: int
    ready: float
    start: float
    end: float


def reduced_buckets(
    gradients: Iterable[tuple[float, int]],
    link: Link,
    devices: int,
    bucket_bytes: int = BUCKET_BYTES,
    algorithm: str = "best",
) -> list[Bucket]:
    """When gradients, each ready at a time and of a size, are summed over devices: in buckets, one after the other.

    >>> link = Link("test", 1e6, 0.0)
    >>> [bucket.end for bucket in reduced_buckets([(1.0, 10**6), (3.0, 10**6)], link, 2, bucket_bytes=10**6)]
    [2.0, 4.0]
    """
    found: list[Bucket] = []
    held, latest, free = 0, 0.0, 0.0

    def close() -> None:
        nonlocal held, free
        start = max(latest, free)
        free = start + link.all_reduce(held, devices, algorithm)
        found.append(Bucket(held, latest, start, free))
        held = 0

    for ready, size in gradients:
        held, latest = held + size, ready
        if held >= bucket_bytes:
            close()
    if held:
        close()
    return found
