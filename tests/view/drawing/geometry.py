"""Reads a drawing back from its SVG: boxes, frames and lines with their places, so that tests can ask what overlaps what."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from itertools import pairwise

SVG = "{http://www.w3.org/2000/svg}"
_COMMAND = re.compile(r"([MLCQZ])([^MLCQZ]*)")


@dataclass(frozen=True)
class Rect:
    left: float
    top: float
    width: float
    height: float
    kind: str = ""
    words: str = ""
    tooltip: str = ""
    identity: str = ""

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def overlaps(self, other: Rect) -> bool:
        return (
            self.left < other.right - 0.2
            and other.left < self.right - 0.2
            and self.top < other.bottom - 0.2
            and other.top < self.bottom - 0.2
        )

    def contains(self, other: Rect) -> bool:
        return (
            self.left <= other.left + 0.2
            and self.top <= other.top + 0.2
            and self.right >= other.right - 0.2
            and self.bottom >= other.bottom - 0.2
        )

    def holds_point(self, x: float, y: float) -> bool:
        return self.left + 1 < x < self.right - 1 and self.top + 1 < y < self.bottom - 1


@dataclass
class Picture:
    width: float
    height: float
    boxes: list[Rect] = field(default_factory=list)
    frames: list[Rect] = field(default_factory=list)
    lines: list[tuple[str, list[tuple[float, float]]]] = field(default_factory=list)  # tooltip, points
    words: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)

    def titled(self, words: str) -> list[Rect]:
        return [box for box in self.boxes if box.words.split("\n")[0] == words]


def read(svg: str) -> Picture:
    """Everything in a drawing; the samples of the legend have no id and are left out."""
    root = ET.fromstring(svg)
    picture = Picture(float(root.get("width", 0)), float(root.get("height", 0)))
    for group in root.iter(f"{SVG}g"):
        look = (group.get("class") or "").split()
        if look[:1] == ["b"] and group.get("id"):
            picture.boxes.append(_rect(group.findall(f"{SVG}rect")[0], group, look[1]))
        elif look[:1] == ["l"]:
            tooltip = group.findtext(f"{SVG}title") or ""
            picture.lines.append((tooltip, points(group.findall(f"{SVG}path")[0].get("d", ""))))
        elif group.find(f"{SVG}rect") is not None and not look:
            picture.frames.append(_rect(group.findall(f"{SVG}rect")[0], group, "frame"))
    picture.words = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    picture.links = [link.get("href", "") for link in root.iter(f"{SVG}a")]
    return picture


def _rect(rect: ET.Element, group: ET.Element, kind: str) -> Rect:
    words = "\n".join("".join(text.itertext()) for text in group.findall(f"{SVG}text"))
    left, top, width, height = (float(rect.get(name, 0)) for name in ("x", "y", "width", "height"))
    return Rect(left, top, width, height, kind, words, group.findtext(f"{SVG}title") or "", group.get("id") or "")


def points(data: str) -> list[tuple[float, float]]:
    """Many points along a path."""
    result: list[tuple[float, float]] = []
    here = (0.0, 0.0)
    for command, text in _COMMAND.findall(data):
        numbers = [float(number) for number in text.split()]
        corners = list(zip(numbers[::2], numbers[1::2], strict=True))
        if command == "M":
            here = corners[0]
            result.append(here)
            continue
        for step in range(1, 13):
            result.append(_on_curve([here, *corners], step / 12))
        here = corners[-1] if corners else here
    return result


def _on_curve(corners: list[tuple[float, float]], share: float) -> tuple[float, float]:
    while len(corners) > 1:
        corners = [(a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share) for a, b in pairwise(corners)]
    return corners[0]


CELL = 240


def faults(picture: Picture) -> list[str]:
    """What is wrong with the places in a drawing: nothing may overlap, and no line may run through a box."""
    result = []
    paper = Rect(0, 0, picture.width, picture.height)
    cells: dict[tuple[int, int], list[Rect]] = {}  # boxes by where they are, so that only close ones are compared
    for box in picture.boxes:
        for cell in _cells(box):
            cells.setdefault(cell, []).append(box)
    for box in picture.boxes + picture.frames:
        if not paper.contains(box):
            result.append(f"{box.kind} {box.words!r} is off the paper")
    for near in cells.values():
        for number, box in enumerate(near):
            for other in near[number + 1 :]:
                if box.overlaps(other):
                    result.append(f"boxes {box.words!r} and {other.words!r} overlap")
    for number, frame in enumerate(picture.frames):
        for cell in _cells(frame):
            for box in cells.get(cell, ()):
                if frame.overlaps(box) and not frame.contains(box):
                    result.append(f"box {box.words!r} is half in frame {frame.tooltip!r}")
        for other in picture.frames[number + 1 :]:
            if frame.overlaps(other) and not frame.contains(other) and not other.contains(frame):
                result.append(f"frames {frame.tooltip!r} and {other.tooltip!r} overlap")
    for tooltip, way in picture.lines:
        for x, y in way:
            for box in cells.get((int(x // CELL), int(y // CELL)), ()):
                if box.holds_point(x, y):
                    result.append(f"the line of {tooltip!r} runs through {box.words!r}")
    return sorted(set(result))


def _cells(rect: Rect) -> list[tuple[int, int]]:
    return [
        (column, row)
        for column in range(int(rect.left // CELL), int(rect.right // CELL) + 1)
        for row in range(int(rect.top // CELL), int(rect.bottom // CELL) + 1)
    ]
