"""How far simulations are from what was measured: means of errors, ranks, and the tables of them.
What is compared is gathered in `comparing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

# What is compared, and what a reader calls it.
WHATS = {
    "device": "device time (CUDA graph)",
    "eager": "eager wall time",
    "training": "training step, eager wall time",
    "memory": "peak memory",
    "training memory": "peak memory of a training step",
}


@dataclass(frozen=True)
class Pair:
    """One figure of one case, as it was measured and as it was simulated; `what` is one of `WHATS`."""

    model: str
    kind: str
    fit: bool
    batch: int
    precision: str
    what: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """How far off the simulation is, as a share of what was measured.

        >>> Pair("resnet50", "residual", True, 1, "fp32", "eager", 2.0, 1.5).error
        0.25
        """
        return abs(self.simulated - self.measured) / self.measured


def mean_error(pairs: Iterable[Pair]) -> float:
    """The mean absolute error, as a share."""
    return mean(pair.error for pair in pairs)


def rank_correlation(pairs: Sequence[Pair]) -> float | None:
    """Spearman's: whether what takes longer is said to take longer; None for fewer than two cases, or all alike.

    >>> def pair(one, other): return Pair("m", "k", False, 1, "fp32", "eager", one, other)
    >>> rank_correlation([pair(1, 10), pair(2, 20), pair(3, 30)]), rank_correlation([pair(1, 2), pair(2, 1)])
    (1.0, -1.0)
    """
    first, second = ranks([pair.measured for pair in pairs]), ranks([pair.simulated for pair in pairs])
    if len(pairs) < 2 or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    middle = (len(pairs) + 1) / 2
    products = sum((one - middle) * (other - middle) for one, other in zip(first, second, strict=True))
    squares = [sum((rank - middle) ** 2 for rank in values) for values in (first, second)]
    return round(products / (squares[0] * squares[1]) ** 0.5, 12)


def ranks(values: Sequence[float]) -> list[float]:
    """The place of each value among all, from 1 on; equal values share the mean of their places.

    >>> ranks([30, 10, 10])
    [3.0, 1.5, 1.5]
    """
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values), 1):
        places.setdefault(value, []).append(place)
    return [mean(map(float, places[value])) for value in values]


# ---- tables ----


def tables(pairs: Sequence[Pair]) -> str:
    """All tables as Markdown: models that are held out first, then those that took part in fitting."""
    held, fitted = [pair for pair in pairs if not pair.fit], [pair for pair in pairs if pair.fit]
    parts = []
    if held:
        count = len({pair.model for pair in held})
        parts += [f"**Held out**: {count} models that took no part in fitting.", _by_precision_and_batch(held)]
        parts += ["By kind of model, held out:", _by_kind(held)]
    if fitted:
        names = ", ".join(dict.fromkeys(pair.model for pair in fitted))
        parts += [f"**Fitted**: what the host takes was found with {names}.", _by_precision_and_batch(fitted)]
    return "\n\n".join(parts)


def _by_precision_and_batch(pairs: Sequence[Pair]) -> str:
    """A row for each precision and batch, and one for all, for everything that was measured."""
    whats = [what for what in WHATS if any(pair.what == what for pair in pairs)]
    head = ["precision", "batch", "models", *_heads(whats)]
    groups = _grouped(pairs, lambda pair: (pair.precision, pair.batch))
    rows = [[name, str(batch), *_cells(group, whats)] for (name, batch), group in groups]
    return _markdown([head, *rows, ["all", "all", *_cells(pairs, whats)]])


def _by_kind(pairs: Sequence[Pair]) -> str:
    whats = [what for what in WHATS if any(pair.what == what for pair in pairs)]
    names = {
        kind: ", ".join(dict.fromkeys(p.model for p in pairs if p.kind == kind)) for kind in (p.kind for p in pairs)
    }
    rows = [[kind, names[kind], *_cells(group, whats)[1:]] for kind, group in _grouped(pairs, lambda pair: pair.kind)]
    return _markdown([["kind", "models", *_heads(whats)], *rows])


def _heads(whats: Sequence[str]) -> list[str]:
    found = []
    for what in whats:
        found += [WHATS[what], "worst"] if "memory" in what else [WHATS[what], "ranks"]
    return found


def _cells(pairs: Sequence[Pair], whats: Sequence[str]) -> list[str]:
    """How many models, and for each figure its mean error with the rank correlation, or with the largest error."""
    found = [str(len({pair.model for pair in pairs}))]
    for what in whats:
        these = [pair for pair in pairs if pair.what == what]
        if not these:
            found += ["-", "-"]
            continue
        ranked = rank_correlation(these)
        beside = (
            f"{max(pair.error for pair in these):.1%}"
            if "memory" in what
            else "-"
            if ranked is None
            else f"{ranked:.3f}"
        )
        found += [f"{mean_error(these):.1%}", beside]
    return found


def _grouped(pairs: Sequence[Pair], key: Callable[[Pair], object]) -> list[tuple[object, list[Pair]]]:
    found: dict[object, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(key(pair), []).append(pair)
    return list(found.items())


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
