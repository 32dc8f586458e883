"""Observers watch values go by and choose the range that integers shall cover. Each is a module that hands on what it is given,
so it stands in a program like any other. Where they are put is decided in `plan.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from torchgraft.errors import QuantizeError, suggestion
from torchgraft.quantize.operators import scale_of_range
from torchgraft.quantize.schemes import Numbers

# More values of one tensor than this say little more about its distribution; the extremes are always exact.
_SAMPLE = 1 << 16
_PRIME = 2_654_435_761


class Observer(torch.nn.Module):
    """Keeps the smallest and the largest value; other observers know more and choose narrower ranges."""

    name: ClassVar[str] = "min-max"

    def __init__(self, numbers: Numbers, where: str = "a value") -> None:
        super().__init__()
        self.numbers, self.where = numbers, where
        self.dtype: torch.dtype | None = None
        self.register_buffer("lowest", torch.tensor(float("inf")))
        self.register_buffer("highest", torch.tensor(float("-inf")))
        self.lowest: torch.Tensor
        self.highest: torch.Tensor

    @torch.no_grad()
    def forward(self, values: Any) -> Any:
        """Watch, and hand on."""
        if not isinstance(values, torch.Tensor) or not values.is_floating_point():
            self.dtype = getattr(values, "dtype", None)
            return values
        self.dtype = values.dtype
        if values.numel():
            floats = values.detach().float()
            lowest, highest = torch.aminmax(floats)
            if not bool(torch.isfinite(lowest + highest)):
                self._refuse(floats)
            self._watch(floats, lowest, highest)
        return values

    def _refuse(self, floats: torch.Tensor) -> None:
        count = int((~torch.isfinite(floats)).sum())
        raise QuantizeError(
            f"{count} of {floats.numel()} values are infinite or not numbers, so no range fits them\n"
            f"at {self.where}\ncheck the calibration data, or keep this part in floats"
        )

    def _watch(self, floats: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor) -> None:
        self.lowest = torch.minimum(self.lowest, lowest)
        self.highest = torch.maximum(self.highest, highest)

    @property
    def has_seen(self) -> bool:
        """Whether any value went by."""
        return bool(self.lowest <= self.highest)

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The range to cover."""
        return self.lowest, self.highest

    def scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale and zero point for the range, one that is zero throughout included."""
        lowest, highest = self.range()
        if bool((lowest == 0) & (highest == 0)):
            highest = torch.ones_like(highest)  # any scale holds nothing but zeros
        return scale_of_range(lowest, highest, *self.numbers.range, self.numbers.symmetric)


class MovingAverage(Observer):
    """Follows the extremes of each batch slowly, so that one odd batch does not decide."""

    name = "moving-average"
    momentum = 0.1

    def _watch(self, floats: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor) -> None:
        if not self.has_seen:
            self.lowest, self.highest = lowest, highest
        else:
            self.lowest = self.lowest + self.momentum * (lowest - self.lowest)
            self.highest = self.highest + self.momentum * (highest - self.highest)


class _Counting(Observer):
    """Counts values in bins, with the mean of each bin, so that values that are a few numbers stay just those."""

    bins = 2048

    def __init__(self, numbers: Numbers, where: str = "a value") -> None:
        super().__init__(numbers, where)
        self.register_buffer("counts", torch.zeros(self.bins, dtype=torch.float64))
        self.register_buffer("sums", torch.zeros(self.bins, dtype=torch.float64))
        self.counts: torch.Tensor
        self.sums: torch.Tensor

    def _watch(self, floats: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor) -> None:
        before = self.lowest, self.highest
        super()._watch(floats, lowest, highest)
        is_wider = bool((self.lowest < before[0]) | (self.highest > before[1]))
        if is_wider and bool(before[0] <= before[1]):
            means = self._means()
            self._count(means, self.counts, self.sums)
        flat = _sample(floats.reshape(-1))
        fresh = torch.ones(1, dtype=torch.float64).expand(flat.numel())
        counts, sums = self.counts, self.sums
        self._count(flat, fresh.to(flat.device), flat.double())
        self.counts, self.sums = self.counts + counts, self.sums + sums

    def _count(self, values: torch.Tensor, weights: torch.Tensor, sums: torch.Tensor) -> None:
        width = (self.highest - self.lowest).clamp(min=torch.finfo(torch.float32).tiny)
        index = ((values.to(width.dtype) - self.lowest) * (self.bins / width)).long().clamp(0, self.bins - 1)
        self.counts = torch.bincount(index, weights, self.bins)
        self.sums = torch.bincount(index, sums, self.bins)

    def _means(self) -> torch.Tensor:
        return torch.where(self.counts > 0, self.sums / self.counts.clamp(min=1), self._edges()[:-1].double())

    def _edges(self) -> torch.Tensor:
        steps = torch.arange(self.bins + 1, device=self.lowest.device) / self.bins
        return self.lowest + (self.highest - self.lowest) * steps


def _sample(flat: torch.Tensor) -> torch.Tensor:
    """Some of many values, scattered by a large prime: those at equal distances might all be of one place of an image."""
    count = flat.numel()
    if count <= _SAMPLE:
        return flat
    return flat[(torch.arange(_SAMPLE, device=flat.device) * _PRIME) % count]


class Percentile(_Counting):
    """Leaves out the outermost values: 0.01 percent of them on each side."""

    name = "percentile"
    part = 1e-4

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """From the first to the last value that is not left out."""
        share = self.counts.cumsum(0) / self.counts.sum()
        first = torch.searchsorted(share, torch.tensor(self.part, dtype=share.dtype, device=share.device))
        last = torch.searchsorted(share, torch.tensor(1 - self.part, dtype=share.dtype, device=share.device))
        edges = self._edges()
        return edges[first.clamp(max=self.bins - 1)], edges[(last + 1).clamp(max=self.bins)]


class Histogram(_Counting):
    """Chooses the range with the least squared error: cutting off few large values pays where it makes the steps finer."""

    name = "histogram"

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The best of many narrower ranges, found side by side for the upper end, then the lower, then the upper again."""
        filled = self.counts > 0
        means, counts = self._means()[filled], self.counts[filled]
        lowest, highest = self.lowest.clamp(max=0.0).double(), self.highest.clamp(min=0.0).double()
        parts = torch.linspace(0.2, 1.0, 81, dtype=torch.float64, device=lowest.device)
        ends = [lowest, highest]
        for side in (1, 0, 1, 0):
            if bool(ends[side] == 0):
                continue
            tried = [end.expand(parts.numel()) for end in ends]
            tried[side] = (lowest, highest)[side] * parts
            errors = self._errors(means, counts, *tried)
            # Of equal ranges the widest, which is the last.
            best = parts.numel() - 1 - int(errors.flip(0).argmin())
            ends[side] = tried[side][best]
        return ends[0].to(self.lowest.dtype), ends[1].to(self.lowest.dtype)

    def _errors(
        self, means: torch.Tensor, counts: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor
    ) -> torch.Tensor:
        low, high = self.numbers.range
        scale, zero_point = scale_of_range(lowest, highest, low, high, self.numbers.symmetric)
        scale, zero_point = scale.unsqueeze(1), zero_point.unsqueeze(1)
        steps = torch.clamp(torch.round(means / scale) + zero_point, low, high)
        return ((((steps - zero_point) * scale - means) ** 2) * counts).sum(1)


class Entropy(_Counting):
    """Chooses the range whose integers tell most about the values (least Kullback-Leibler divergence)."""

    name = "entropy"

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ranges that grow from the middle outwards, compared by what is lost."""
        edges, counts = self._edges().double(), self._counts_beside_zero()
        levels = self.numbers.range[1] - self.numbers.range[0] + 1
        best, chosen = float("inf"), 1.0
        for part in torch.linspace(0.3, 1.0, 36).tolist():
            inside = (edges[:-1] >= edges[0] * part - 1e-12) & (edges[1:] <= edges[-1] * part + 1e-12)
            lost = self._divergence(counts, inside, levels)
            if lost <= best:
                best, chosen = lost, part
        return self.lowest * chosen, self.highest * chosen

    def _counts_beside_zero(self) -> torch.Tensor:
        """The counts, with no more at zero than beside it: a step stands for zero exactly, so that the many zeros of a ReLU lose
        nothing, and would outweigh everything else."""
        counts = self.counts.clone()
        width = (self.highest - self.lowest).clamp(min=torch.finfo(torch.float32).tiny)
        place = int((torch.nan_to_num(-self.lowest / width) * self.bins).clamp(0, self.bins - 1))
        beside = counts[max(place - 1, 0) : place + 2].sum() - counts[place]
        counts[place] = torch.minimum(counts[place], beside)
        return counts

    def _divergence(self, counts: torch.Tensor, inside: torch.Tensor, levels: int) -> float:
        kept = counts[inside].clone()
        total = counts.sum()
        if kept.numel() < 2 or not bool(kept.sum() > 0):
            return float("inf")
        first, last = int(inside.to(torch.uint8).argmax()), self.bins - 1 - int(inside.flip(0).to(torch.uint8).argmax())
        plain = kept.clone()
        kept[0] += counts[:first].sum()
        kept[-1] += counts[last + 1 :].sum()
        bucket = torch.arange(kept.numel(), device=kept.device) * levels // kept.numel()
        sums = torch.zeros(levels, dtype=kept.dtype, device=kept.device).scatter_add(0, bucket, plain)
        filled = torch.zeros_like(sums).scatter_add(0, bucket, (plain > 0).to(kept.dtype))
        spread = torch.where(plain > 0, (sums / filled.clamp(min=1))[bucket], 0.0)
        expected, found = kept / total, spread / spread.sum()
        where = expected > 0
        return float((expected[where] * (expected[where] / found[where].clamp(min=1e-12)).log()).sum())


OBSERVERS: dict[str, type[Observer]] = {
    kind.name: kind for kind in (Observer, MovingAverage, Percentile, Histogram, Entropy)
}


def observer(name: str, numbers: Numbers, where: str = "a value") -> Observer:
    """A new observer of a kind.

    >>> watching = observer("min-max", Numbers(8))
    >>> _ = watching(torch.tensor([-1.0, 1.55]))
    >>> [round(item.item(), 3) for item in watching.scale()]
    [0.01, 100]
    """
    if name not in OBSERVERS:
        raise QuantizeError(f"no observer is called {name!r}\n{suggestion(name, OBSERVERS)}")
    return OBSERVERS[name](numbers, where)
