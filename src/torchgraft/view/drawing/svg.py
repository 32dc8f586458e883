"""A finished layout as SVG text: frames, lines, boxes with tooltips, and the heading with the legend.
Nothing is measured or decided here; the same layout gives the same bytes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from torchgraft.view.drawing.captions import GROUP_SIZE, Caption, text_width
from torchgraft.view.drawing.labels import KINDS
from torchgraft.view.drawing.layout import Frame, Layout, Step
from torchgraft.view.drawing.scene import ROOT, Scene
from torchgraft.view.drawing.theme import style_sheet

MARGIN = 24.0
CORNER = 6.0  # radius where a line turns
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SPECIAL = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}


def escape(text: str) -> str:
    """Text as XML takes it.

    >>> escape("a < b & c" + chr(0))
    'a &lt; b &amp; c\ufffd'
    """
    if text.isalnum():
        return text
    return re.sub('[&<>"]', lambda match: _SPECIAL[match[0]], _NOT_IN_XML.sub("\ufffd", text))


def number(value: float) -> str:
    """A length with one digit behind the point, and none where it is whole."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


class Painter:
    """Writes one drawing."""

    def __init__(self, scene: Scene, layout: Layout, captions: Mapping[int, Caption], theme: str, legend: bool) -> None:
        self.scene = scene
        self.layout = layout
        self.captions = captions
        self.across = layout.across
        # What the walk over the frames collects, in the coordinates of the drawing.
        self.frames: list[str] = []
        self.words: list[str] = []
        self.boxes: list[str] = []
        self.lines: dict[int, list[str]] = {}
        self.arrows: dict[int, list[str]] = {}
        names = "\n".join(f"{box.name} {box.title} {box.inputs}" for box in scene.boxes if not box.removed)
        self.prefix = f"g{zlib.crc32(f'{scene.title}{theme}{names}'.encode('utf-8', 'replace')):08x}"
        self.theme = theme
        self.legend = legend
        frame = layout.frames[ROOT]
        self.inner = (frame.height, frame.width) if self.across else (frame.width, frame.height)
        self.top = MARGIN
        self.heading: list[str] = []
        self._write_heading()
        self._walk(frame, (self.wide - self.inner[0]) / 2, self.top)

    @property
    def size(self) -> tuple[float, float]:
        return round(self.wide), round(self.inner[1] + self.top + MARGIN)

    def text(self) -> str:
        """The whole file."""
        width, height = (number(value) for value in self.size)
        lines = []
        for value, paths in self.lines.items():
            arrows = "".join(self.arrows.get(value, ()))
            box = self.scene.boxes[value]
            tooltip = escape(f"%{box.name}" + (f"  {box.shape}" if box.shape else ""))
            head = f'<path class="a" d="{arrows}"/>' if arrows else ""
            look = "l n" if box.scalar else "l"
            lines.append(f'<g class="{look}"><title>{tooltip}</title><path d="{"".join(paths)}"/>{head}</g>')
        title = escape(self.scene.title)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="graft-{self.theme}" id="{self.prefix}" role="img" '
                f'aria-label="{title}" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
                f"<style>\n{style_sheet(self.theme, f'.graft-{self.theme}')}\n</style>",
                f'<rect class="paper" width="{width}" height="{height}"/>',
                *self.heading,
                *self.frames,
                *lines,
                *self.words,
                *self.boxes,
                "</svg>",
                "",
            ]
        )

    # ---- heading ----

    def _write_heading(self) -> None:
        """The name of the program and a sample of each kind of box in it, in as many rows as the width asks for."""
        title = self.scene.title
        count = f"{self.scene.node_count:,} node{'' if self.scene.node_count == 1 else 's'}"
        wide = max(self.inner[0], 330.0, text_width(title, 15, True) + text_width(count, 10) + 14)
        self.wide = wide + 2 * MARGIN
        if not self.legend:
            self.wide = self.inner[0] + 2 * MARGIN
            return
        x = MARGIN + text_width(title, 15, True) + 10
        self.heading.append(f'<text class="head" x="{number(MARGIN)}" y="34">{escape(title)}</text>')
        self.heading.append(f'<text class="q" x="{number(x)}" y="34">{count}</text>')
        x, y = MARGIN, 46.0
        for sample, words in self._samples():
            width = (21 if sample else 0) + text_width(words, 10)
            if x > MARGIN and x + width > MARGIN + wide:
                x, y = MARGIN, y + 18
            mark = f'<rect x="{number(x)}" y="{number(y)}" width="16" height="11" rx="3"/>' if sample else ""
            shift = 21 if sample else 0
            label = f'<text class="q" x="{number(x + shift)}" y="{number(y + 9)}">{escape(words)}</text>'
            self.heading.append(f'<g class="b {sample}">{mark}</g>{label}' if sample else label)
            x += width + 14
        self.top = y + 34

    def _samples(self) -> list[tuple[str, str]]:
        present = {self.scene.boxes[index].kind for index in self.captions}
        result = [(kind, self.scene.words.get(kind, words)) for kind, words in KINDS.items() if kind in present]
        if any(self.scene.boxes[index].scalar for index in self.captions):
            result.append(("", "dashed line: a number, not a tensor"))
        if any(caption.shape for caption in self.captions.values()):
            result.append(("", "2×3  shape of a value, float32 unless said"))
        return result

    # ---- the drawing ----

    def _walk(self, outer: Frame, x: float, y: float) -> None:
        """Write a frame and, below it on the paper, everything in it; `x` and `y` are those of the drawing."""
        stack = [(outer, x, y)]
        while stack:
            frame, x, y = stack.pop()
            if frame.group != ROOT:
                self._frame(frame, x, y)
            for value, line in frame.lines:
                self.lines.setdefault(value, []).append(self._path(line, x, y))
            for value, tip_x, tip_y, way in frame.arrows:
                self.arrows.setdefault(value, []).append(self._arrow(tip_x, tip_y, way, x, y))
            inner = []
            for element, place in frame.places.items():
                left, top = place[::-1] if self.across else place
                if element < 0:
                    inner.append((self.layout.frames[~element], x + left, y + top))
                else:
                    self._box(element, x + left, y + top)
            stack.extend(reversed(inner))

    def _frame(self, frame: Frame, x: float, y: float) -> None:
        group = self.scene.groups[frame.group]
        width, height = (frame.height, frame.width) if self.across else (frame.width, frame.height)
        look = "f back" if group.backward else "f"
        rect = f'width="{number(width)}" height="{number(height)}" rx="9"/>'
        for behind in (8, 4) if group.count > 1 else ():
            self.frames.append(f'<rect class="{look}" x="{number(x + behind)}" y="{number(y + behind)}" {rect}')
        tooltip = "\n".join(filter(None, (group.module_path or group.title, group.detail)))
        self.frames.append(
            f'<g><title>{escape(tooltip)}</title><rect class="{look}" x="{number(x)}" y="{number(y)}" {rect}</g>'
        )
        title_width = text_width(group.title, GROUP_SIZE, True)
        detail = f'<tspan class="gd q" dx="6">{escape(group.detail)}</tspan>' if group.detail else ""
        times = f"×{group.count}"
        wide = text_width(times, 10, True) + 12
        long = title_width + (6 + text_width(group.detail, GROUP_SIZE - 1) if group.detail else 0.0)
        start = x + self._free_place(frame, long + (8 + wide if group.count > 1 else 0.0))
        words = f'x="{number(start)}" y="{number(y + 18)}">{escape(group.title)}{detail}</text>'
        halo = "halo back" if group.backward else "halo"
        self.words.append(f'<text class="gt {halo}" aria-hidden="true" {words}<text class="gt" {words}')
        if group.count > 1:
            after = start + long + 8
            self.words.append(
                f'<rect class="badge" x="{number(after)}" y="{number(y + 7)}" width="{number(wide)}" height="15" rx="7.5"/>'
                f'<text class="badge-text" text-anchor="middle" font-weight="bold" x="{number(after + wide / 2)}" '
                f'y="{number(y + 18)}">{times}</text>'
            )

    def _free_place(self, frame: Frame, long: float) -> float:
        """Where the words of a frame begin: on the left, or on the right where a line comes in through the left."""
        left, right = 12.0, frame.width - 12.0 - long
        if self.across or right <= left:
            return left

        def is_free(start: float) -> bool:
            return not any(start - 5 < port < start + long + 5 for port in frame.in_ports.values())

        return right if is_free(right) and not is_free(left) else left

    def _box(self, index: int, x: float, y: float) -> None:
        box, caption = self.scene.boxes[index], self.captions[index]
        rect = f'width="{number(caption.width)}" height="{number(caption.height)}" rx="{"11.5" if caption.pill else "6"}"/>'
        parts = [f'<g class="b {box.kind}" id="{self.prefix}-{index}"><title>{escape(box.tooltip)}</title>']
        parts.append(f'<rect x="{number(x)}" y="{number(y)}" {rect}')
        if box.is_collapsed:
            inset = f'width="{number(caption.width - 6)}" height="{number(caption.height - 6)}" rx="4"/>'
            parts.append(f'<rect class="i" x="{number(x + 3)}" y="{number(y + 3)}" {inset}')
        middle = number(x + caption.width / 2)
        if caption.pill:
            parts.append(f'<text class="p" x="{middle}" y="{number(y + 15.5)}">{escape(caption.title)}</text>')
        else:
            base = 16.5 if caption.detail else 18.5
            parts.append(f'<text class="t" x="{middle}" y="{number(y + base)}">{escape(caption.title)}</text>')
            if caption.detail:
                parts.append(f'<text class="d" x="{middle}" y="{number(y + 31)}">{escape(caption.detail)}</text>')
        parts.append("</g>")
        text = "".join(parts)
        if box.link >= 0:
            text = f'<a href="#{self.prefix}-{box.link}">{text}</a>'
        if caption.shape:
            shape_x = x + caption.width + 6 if self.across else x + caption.width / 2 + 6
            shape_y = y + caption.height / 2 - 4 if self.across else y + caption.height + 12
            text += f'<text class="s" x="{number(shape_x)}" y="{number(shape_y)}">{escape(caption.shape)}</text>'
        self.boxes.append(text)

    def _path(self, line: list[Step], x: float, y: float) -> str:
        """A line as the data of a path; steps are in the coordinates of the layout, which go across where the drawing does."""
        result: list[str] = []
        last_a, last_b = line[0][1], line[0][2]
        straight_from: float | None = None  # where the straight piece that the last step ended began
        for place, (step, a, b) in enumerate(line):
            if step == "M":
                result.append("M" + self._point(a, b, x, y))
            elif step == "R":
                result.append(self._corner(line, place, x, y))
            elif step == "L" or abs(a - last_a) < 0.25:
                if straight_from == a and result[-1][0] == "L":
                    result.pop()
                result.append("L" + self._point(a, b, x, y))
            else:
                middle = (last_b + b) / 2
                points = (self._point(last_a, middle, x, y), self._point(a, middle, x, y), self._point(a, b, x, y))
                result.append("C" + " ".join(points))
            straight_from = a if step != "M" and abs(a - last_a) < 0.25 else None
            last_a, last_b = a, b
        return "".join(result)

    def _point(self, a: float, b: float, x: float, y: float) -> str:
        if self.across:
            a, b = b, a
        return f"{number(a + x)} {number(b + y)}"

    def _corner(self, line: list[Step], place: int, x: float, y: float) -> str:
        (_, a0, b0), (_, a, b), (_, a1, b1) = line[place - 1 : place + 2]
        before, after = max(abs(a - a0), abs(b - b0)), max(abs(a1 - a), abs(b1 - b))
        radius = min(CORNER, before / 2, after / 2)

        def towards(other_a: float, other_b: float, distance: float) -> str:
            share = radius / distance if distance else 0.0
            return self._point(a + (other_a - a) * share, b + (other_b - b) * share, x, y)

        return f"L{towards(a0, b0, before)}Q{self._point(a, b, x, y)} {towards(a1, b1, after)}"

    def _arrow(self, a: float, b: float, way: str, x: float, y: float) -> str:
        back = -6.5 if way == "down" else 6.5
        corners = ((a, b), (a - 3.4, b + back), (a + 3.4, b + back))
        return "M" + "L".join(self._point(one, two, x, y) for one, two in corners) + "Z"
