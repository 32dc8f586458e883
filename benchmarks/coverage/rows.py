"""A row: what was found out about one model, and the file of rows that lets a sweep go on where it stopped.
How rows are found is in `examination`, how they are shown in `report`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The situations a program is tried in, in the order of the table.
SITUATIONS = ("example", "values", "batch", "size", "training")
# The ways a program is made: captured at two levels, lowered from the second to three more, and by the other libraries.
MODULE, FUNCTION = "capture", "capture, functions"
ATEN, CORE_ATEN, JOINT = LOWERINGS = ("aten", "core_aten", "joint")
SYMBOLIC, EXPORT, EXPORT_CORE = "torch.fx", "torch.export", "torch.export, decomposed"
OWN = (MODULE, FUNCTION, *LOWERINGS)
EQUAL, REFUSED, WRONG, FAILS, UNDEFINED = "equal", "refused", "WRONG", "fails", "undefined"


@dataclass
class Attempt:
    """What one way of capturing made of one model: a program with a verdict a situation, or the reason there is none.

    `kept` has the modules that were kept as one call that runs the original Python, with the reasons; "" is the model itself;
    None is for a row of a time when that was not written down.
    """

    captured: bool = False
    nodes: int = 0
    guards: int = 0
    seconds: float | None = None
    verdicts: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] | None = None
    first_seconds: float | None = None

    @property
    def is_wrong(self) -> bool:
        return WRONG in self.verdicts.values()

    @property
    def is_good(self) -> bool:
        """Captured, equal on the example, and never anything but equal or refused."""
        allowed = (EQUAL, REFUSED, UNDEFINED)
        return (
            self.captured
            and self.verdicts.get("example") == EQUAL
            and all(verdict in allowed for verdict in self.verdicts.values())
            and "untouched" not in self.reasons
        )


@dataclass
class Row:
    """One model. Where `eager` is not empty the model does not run at all, and that says why."""

    collection: str
    name: str
    eager: str = ""
    parameters: int = 0
    eager_seconds: float | None = None
    attempts: dict[str, Attempt] = field(default_factory=dict)
    note: str = ""
    seconds: float = 0.0
    peak_bytes: int | None = None

    def attempt(self, way: str) -> Attempt:
        return self.attempts.get(way, Attempt())

    def ratio(self, way: str, to: str = "eager") -> float | None:
        """How many times longer one way took than another, a lowering with the capture that it is made of."""
        longer = self.whole_seconds(way)
        shorter = self.eager_seconds if to == "eager" else self.whole_seconds(to)
        return longer / shorter if longer and shorter else None

    def whole_seconds(self, way: str) -> float | None:
        """The time from the model to the program."""
        seconds = self.attempt(way).seconds
        before = self.attempt(FUNCTION).seconds if way in LOWERINGS else 0.0
        return None if seconds is None or before is None else before + seconds

    def lowering_ratio(self, way: str) -> float | None:
        """How many eager runs a lowering took, without the capture."""
        seconds = self.attempt(way).seconds
        return seconds / self.eager_seconds if seconds and self.eager_seconds else None

    def shortfalls(self, way: str) -> dict[str, str]:
        """The situations in which the program at the level of functions is right and that of a lower level is not, and why.

        Training that is refused is none: operators such as those for dropout are other ones in the other mode.
        """
        attempt, right = self.attempt(way), self.attempt(FUNCTION).verdicts
        if way not in self.attempts:
            return {}
        if not attempt.captured:
            return {"captured": attempt.reasons.get("captured", "")}
        return {
            situation: f"{verdict}: {attempt.reasons.get(situation, '')}"
            for situation, verdict in attempt.verdicts.items()
            if verdict != EQUAL and right.get(situation) == EQUAL and (situation, verdict) != ("training", REFUSED)
        }

    def first_ratio(self, way: str) -> float | None:
        """How many eager runs the very first capture took, in a process that has not seen such a model."""
        longer = self.attempt(way).first_seconds
        return longer / self.eager_seconds if longer and self.eager_seconds else None


def to_json(row: Row) -> str:
    return json.dumps(dataclasses.asdict(row))


def from_json(line: str) -> Row:
    data: dict[str, Any] = json.loads(line)
    data["attempts"] = {way: Attempt(**attempt) for way, attempt in data["attempts"].items()}
    return Row(**data)


def read(file: Path) -> list[Row]:
    """The rows of a file; of several about one model the last counts, so that a model can be examined anew."""
    if not file.exists():
        return []
    rows: dict[tuple[str, str], Row] = {}
    for line in file.read_text().splitlines():
        row = from_json(line)
        rows[row.collection, row.name] = row
    return list(rows.values())


def append(file: Path, rows: Iterable[Row]) -> None:
    with file.open("a") as stream:
        for row in rows:
            stream.write(to_json(row) + "\n")
