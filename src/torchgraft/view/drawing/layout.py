"""Where everything stands: each group arranges what is directly inside it, from the inside out, and is one element outside.
Lines run straight through the rows they pass and bend only between rows, so that they never cross a box.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from torchgraft.view.drawing.captions import GROUP_SIZE, SHAPE_STRIP, Caption, text_width
from torchgraft.view.drawing.columns import LANE, break_rows, way_around
from torchgraft.view.drawing.coordinates import place_across
from torchgraft.view.drawing.labels import LEAVING, SOURCES
from torchgraft.view.drawing.layering import assign_rows
from torchgraft.view.drawing.levels import Element, Level
from torchgraft.view.drawing.ordering import Rows, reduce_crossings
from torchgraft.view.drawing.scene import ROOT, Scene

PADDING = 14.0  # inside of a frame
TITLE_ROOM = 20.0  # for the words of a frame
ROW_GAP = 20.0
COLUMN_GAP = 26.0
LEAST_COLUMN = 1100.0  # no column is made to be lower than this

# Boxes that stand beside the main flow of a program: their lines may bend so that others are straight.
_ASIDE = SOURCES | LEAVING | {"reference", "guard"}

# A line is a list of steps: "M" starts, "L" goes straight, "C" bends smoothly, "R" turns a rounded corner.
Step = tuple[str, float, float]


@dataclass(slots=True)
class Frame:
    """A group with everything directly inside it placed, from its upper left corner."""

    group: int
    width: float = 0.0
    height: float = 0.0
    places: dict[Element, tuple[float, float]] = field(default_factory=dict)  # upper left corners
    lines: list[tuple[int, list[Step]]] = field(default_factory=list)
    arrows: list[tuple[int, float, float, str]] = field(default_factory=list)  # value, tip, direction
    in_ports: dict[int, float] = field(default_factory=dict)  # where values come in at the top, from the left
    out_ports: dict[int, float] = field(default_factory=dict)


class Layout:
    """The frames of all groups of a scene."""

    def __init__(self, scene: Scene, levels: list[Level], captions: Mapping[int, Caption], across: bool) -> None:
        self.scene = scene
        self.levels = levels
        self.captions = captions
        self.across = across  # rows are columns: the drawing goes from left to right
        self.column_height = float("inf")
        self.frames: dict[int, Frame] = {}
        self.arrangers: dict[int, _Arranger] = {}
        children = [~e for level in levels for e in level.elements if e < 0]
        inside_out = sorted({ROOT, *children}, key=lambda group: -len(scene.path_to_root(group)))
        for group in inside_out:
            self._arrange(group)
        self._wrap(inside_out)

    def _wrap(self, inside_out: list[int]) -> None:
        """Arrange again in columns what is too high, so that the whole comes out about as wide as high."""
        whole = self.frames[ROOT]
        self.column_height = max(LEAST_COLUMN, (whole.width * whole.height) ** 0.5)
        changed: set[int] = set()
        for group in inside_out:
            if group in changed:
                self._arrange(group)
            elif self.frames[group].height < 1.4 * self.column_height or not self.arrangers[group].break_up():
                continue
            self.frames[group] = self.arrangers[group].build()
            if group != ROOT:
                changed.add(self.scene.groups[group].parent)

    def _arrange(self, group: int) -> None:
        arranger = self.arrangers[group] = _Arranger(self, group)
        if self.column_height < float("inf"):
            arranger.break_up()
        self.frames[group] = arranger.build()

    def size(self, element: Element) -> tuple[float, float, float]:
        """How far an element reaches to the left and right of its middle, and how high it is."""
        if element < 0:
            frame = self.frames[~element]
            return frame.width / 2, frame.width / 2, frame.height
        caption = self.captions[element]
        strip = SHAPE_STRIP if caption.shape else 0.0
        if self.across:
            reach = caption.height / 2
            return reach, reach, caption.width + (text_width(caption.shape, 10.0) + 12 if caption.shape else 0.0)
        return caption.width / 2, caption.right, caption.height + strip


class _Arranger:
    """Arranges one level."""

    def __init__(self, layout: Layout, group: int) -> None:
        self.layout = layout
        self.level = layout.levels[group]
        self.group = group
        self.breaks: list[int] = []
        self.straight: list[float] = []  # places from left to right before columns are shifted
        self.connected, self.alone = self._split()
        if self.connected.elements:
            self._order(self.connected)

    def break_up(self) -> bool:
        """Decide where columns begin; False where the level stays in one."""
        if self.connected.elements:
            self.x = list(self.straight)
            self.breaks = break_rows(*self._rows_and_lines(), self.layout.column_height)
            if self.breaks:
                self.straight = place_across(self.rows, self.left, self.right, self._gap, self.breaks)
        return bool(self.breaks)

    def build(self) -> Frame:
        """Give everything its place, and lines their way."""
        self.frame = Frame(self.group)
        if not self.level.elements:
            self.frame.width, self.frame.height = 60.0, 30.0
            return self.frame
        if self.connected.elements:
            self.x = list(self.straight)
            self._place_down()
            self._place_elements()
            self._draw_lines()
        if self.alone:
            self._shelve(self.alone)
        if self.group != ROOT:
            self._add_border()
        return self.frame

    def _split(self) -> tuple[Level, list[Element]]:
        """Elements that no line meets stand in rows below the others."""
        level = self.level
        met: set[Element] = set(level.source.values())
        for targets in level.targets.values():
            met.update(targets)
        alone = [element for element in level.elements if element not in met]
        if not alone:
            return level, []
        connected = Level([e for e in level.elements if e in met], level.source, level.targets, level.leaves)
        connected.constraints = [(a, b) for a, b in level.constraints if a in met and b in met]
        return connected, alone

    def _order(self, level: Level) -> None:
        """Rows, the order in them, and places from left to right: what does not depend on columns."""
        layout, scene = self.layout, self.layout.scene
        row_of, count = assign_rows(level)
        groups = [element for element in level.elements if element < 0]
        ins = {e: _centred(layout.frames[~e].in_ports, layout.frames[~e].width) for e in groups}
        outs = {e: _centred(layout.frames[~e].out_ports, layout.frames[~e].width) for e in groups}
        weak = {e for e in level.elements if e >= 0 and (scene.boxes[e].kind in _ASIDE or scene.boxes[e].scalar)}
        rows = Rows(level, row_of, count, ins, outs, weak)
        sizes = [(3.0, 3.0, 0.0) if element is None else layout.size(element) for element in rows.element]
        self.left = [size[0] for size in sizes]
        self.right = [size[1] for size in sizes]
        self.high = [size[2] for size in sizes]
        reduce_crossings(rows, self.right)
        self.rows = rows
        self.straight = place_across(rows, self.left, self.right, self._gap)

    def _gap(self, one: int, two: int) -> float:
        element = self.rows.element
        passing = (element[one] is None) + (element[two] is None)
        return (22.0, 15.0, 8.0)[passing]

    # ---- from top to bottom ----

    def _place_down(self) -> None:
        """The top of every row, in columns where one would be too high, and the shift of each column to the side."""
        rows, x = self.rows, self.x
        steps, crossing = self._rows_and_lines()
        heights = self.row_height
        self.column_of: list[int] = []
        self.row_top: list[float] = []
        self.column_shift: list[float] = []
        self.column_bounds: list[tuple[float, float]] = []  # left and right edge
        breaks = self.breaks
        bounds = [0, *breaks, rows.count]
        reached = 0.0
        lanes = [crossing[start - 1] for start in breaks]
        head = max(lanes, default=0) * LANE + (ROW_GAP if breaks else 0.0)
        for column, (start, end) in enumerate(pairwise(bounds)):
            vertices = [v for layer in rows.layers[start:end] for v in layer]
            low = min(x[v] - self.left[v] for v in vertices)
            high = max(x[v] + self.right[v] for v in vertices)
            self.column_shift.append(reached - low)
            self.column_bounds.append((reached, reached + high - low))
            reached += high - low + COLUMN_GAP + (lanes[column] * LANE if column < len(lanes) else 0.0)
            y = head if column else 0.0
            for row in range(start, end):
                self.column_of.append(column)
                self.row_top.append(y)
                y += steps[row]
        self.frame.width = self.column_bounds[-1][1]
        bottoms = [top + height for top, height in zip(self.row_top, heights, strict=True)]
        self.foot = max(bottoms)
        self.frame.height = self.foot + (head if breaks else 0.0)

    def _rows_and_lines(self) -> tuple[list[float], list[int]]:
        """The height of every row with the gap below it, and how many values cross that gap."""
        rows = self.rows
        self.row_height = [max((self.high[v] for v in layer), default=0.0) for layer in rows.layers]
        gaps = [self._row_gap(row) for row in range(rows.count - 1)] + [0.0]
        crossing = [len({end[3] for v in layer for end in rows.up[v]}) for layer in rows.layers[1:]] + [0]
        return [height + gap for height, gap in zip(self.row_height, gaps, strict=True)], crossing

    def _row_gap(self, row: int) -> float:
        """More room where lines go far to the side, so that they do not lie flat."""
        furthest = 0.0
        for vertex in self.rows.layers[row] if row + 1 not in self.breaks else ():
            for other, there, here, _ in self.rows.down[vertex]:
                furthest = max(furthest, abs(self.x[vertex] + here - self.x[other] - there))
        ports = all(self.rows.element[v] is None for v in self.rows.layers[row]) or all(
            self.rows.element[v] is None for v in self.rows.layers[row + 1]
        )
        least = ROW_GAP * 0.4 if ports and furthest < 1 else ROW_GAP
        return round(least + min(46.0, furthest * 0.09), 1)

    def _place_elements(self) -> None:
        rows = self.rows
        self.top = [0.0] * len(rows.row)
        for vertex, element in enumerate(rows.element):
            row = rows.row[vertex]
            self.x[vertex] += self.column_shift[self.column_of[row]]
            slack = self.row_height[row] - self.high[vertex]
            if element is None:
                self.top[vertex] = self.row_top[row]
                continue
            share = 1.0 if not rows.up[vertex] else 0.5 if self.row_height[row] < 90 else 0.0
            self.top[vertex] = self.row_top[row] + slack * share
            self.frame.places[element] = (self.x[vertex] - self.left[vertex], self.top[vertex])

    # ---- lines ----

    def _draw_lines(self) -> None:
        rows, frame = self.rows, self.frame
        lanes = self._lanes()
        for value, trunk in rows.trunks.items():
            start = trunk[0]
            offset = next(end[2] for end in rows.down[start] if end[3] == value)
            x, y = self.x[start] + offset, self._foot_of(start)
            line: list[Step] = [("M", x, y)]
            forks: list[tuple[float, float, int]] = []  # where the trunk leaves each row, and the row
            for place, vertex in enumerate(trunk):
                row = rows.row[vertex]
                if place:
                    self._cross(line, value, row, self.x[vertex], lanes)
                    x = self.x[vertex]
                line.append(("L", x, self.row_top[row] + self.row_height[row]))
                forks.append((x, self.row_top[row] + self.row_height[row], row))
            if len(line) > 2 or any(line[0][2] != step[2] for step in line[1:]):
                frame.lines.append((value, line))
            for place, end in rows.branches[value]:
                self._branch(value, forks[place], end, lanes)
        for value, vertex in rows.in_ports.items():
            frame.in_ports[value] = self.x[vertex]
        for value, vertex in rows.out_ports.items():
            frame.out_ports[value] = self.x[vertex]

    def _foot_of(self, vertex: int) -> float:
        """Where the line of a vertex begins: below the box, not below the shape beside the line."""
        element = self.rows.element[vertex]
        if element is not None and element >= 0 and not self.layout.across:
            return self.top[vertex] + self.layout.captions[element].height
        if element is not None and element >= 0:
            return self.top[vertex] + self.layout.captions[element].width
        return self.top[vertex] + self.high[vertex]

    def _branch(self, value: int, fork: tuple[float, float, int], end: int, lanes: dict[tuple[int, int], int]) -> None:
        rows = self.rows
        offset = next(line[2] for line in rows.up[end] if line[3] == value)
        x, row = self.x[end] + offset, rows.row[end]
        line: list[Step] = [("M", fork[0], fork[1])]
        self._cross(line, value, row, x, lanes)
        line.append(("L", x, self.top[end]))
        self.frame.lines.append((value, line))
        element = rows.element[end]
        if element is not None and element >= 0:
            self.frame.arrows.append((value, x, self.top[end], "down"))

    def _lanes(self) -> dict[tuple[int, int], int]:
        """For each break between columns the lane of each value that crosses it; the line furthest right is lane 0."""
        rows = self.rows
        result: dict[tuple[int, int], int] = {}
        self.lane_count: dict[int, int] = {}
        self.landing: dict[tuple[int, int], float] = {}  # where in the next column a line comes down
        for row in self.breaks:
            at: dict[int, float] = {}
            ends: dict[int, list[float]] = {}
            for vertex in rows.layers[row]:
                for end in rows.up[vertex]:
                    value = end[3]
                    at[value] = self.x[end[0]] + end[1]
                    ends.setdefault(value, []).append(self.x[vertex] + end[2])
            for lane, value in enumerate(sorted(at, key=lambda value: -at[value])):
                result[row, value] = lane
                self.landing[row, value] = sorted(ends[value])[len(ends[value]) // 2]
            self.lane_count[row] = len(at)
        return result

    def _cross(self, line: list[Step], value: int, row: int, x: float, lanes: dict[tuple[int, int], int]) -> None:
        """Lead a line from the foot of the row above to the top of `row`, around a column where one ends between them."""
        top = self.row_top[row]
        if row not in self.breaks:
            line.append(("C", x, top))
            return
        lane, count = lanes[row, value], self.lane_count[row]
        start, landing = line[-1], self.landing[row, value]
        gutter = self.column_bounds[self.column_of[row] - 1][1] + COLUMN_GAP / 2
        # Every column after the first begins at the same height, below the room for the lanes.
        high, low = top - ROW_GAP, self.foot + ROW_GAP / 2
        around = way_around((start[1], start[2]), (landing, top - ROW_GAP / 2), lane, count, gutter, low, high)
        line.extend(("R", corner_x, corner_y) for corner_x, corner_y in around[1:-1])
        line.append(("L", *around[-1]))
        line.append(("C", x, top))
        self.frame.arrows.append((value, gutter + lane * LANE, (low + high) / 2, "up"))

    # ---- the rest ----

    def _shelve(self, alone: list[Element]) -> None:
        """Put what stands alone in rows below everything else."""
        sizes = {element: self.layout.size(element) for element in alone}
        area = sum((left + right + 16) * (high + 16) for left, right, high in sizes.values())
        widest = max(self.frame.width, (1.6 * area) ** 0.5, max(left + right for left, right, _ in sizes.values()))
        x, y, tallest = 0.0, self.frame.height + (ROW_GAP if self.frame.height else 0.0), 0.0
        for element, (left, right, high) in sizes.items():
            x = self._past_lines(x, left + right)
            if x and x + left + right > widest:
                x, y, tallest = self._past_lines(0.0, left + right), y + tallest + 12, 0.0
            self.frame.places[element] = (x, y)
            x += left + right + 14
            tallest = max(tallest, high)
            self.frame.width = max(self.frame.width, x - 14)
        self.frame.height = y + tallest

    def _past_lines(self, x: float, width: float) -> float:
        """The first place from `x` on where something so wide is not in the way of lines that leave the frame."""
        for port in sorted(self.frame.out_ports.values()):
            if x - 8 < port < x + width + 8:
                x = port + 10
        return x

    def _add_border(self) -> None:
        """Move everything inside a frame with room for its words."""
        frame = self.frame
        group = self.layout.scene.groups[frame.group]
        words = text_width(group.title, GROUP_SIZE, True) + text_width(group.detail, GROUP_SIZE - 1) + 34
        words += 34 if group.count > 1 else 0
        across = self.layout.across
        x = PADDING + (TITLE_ROOM if across else 0.0)
        y = PADDING + (0.0 if across else TITLE_ROOM)
        inner_height = frame.height
        frame.width, frame.height = frame.width + x + PADDING, frame.height + y + PADDING
        if across:
            extra = max(0.0, words - frame.height) / 2
            frame.height += 2 * extra
            y += extra
        else:
            extra = max(0.0, words - frame.width) / 2
            frame.width += 2 * extra
            x += extra
        frame.places = {element: (left + x, top + y) for element, (left, top) in frame.places.items()}
        frame.lines = [(value, [(step, a + x, b + y) for step, a, b in line]) for value, line in frame.lines]
        frame.arrows = [(value, a + x, b + y, way) for value, a, b, way in frame.arrows]
        frame.in_ports = {value: place + x for value, place in frame.in_ports.items()}
        frame.out_ports = {value: place + x for value, place in frame.out_ports.items()}
        # From the frame to the ports, which stand at the edge of what is inside.
        for value, place in frame.in_ports.items():
            frame.lines.append((value, [("M", place, 0.0), ("L", place, y)]))
        for value, place in frame.out_ports.items():
            foot = min(self.top[self.rows.out_ports[value]], inner_height)
            frame.lines.append((value, [("M", place, y + foot), ("L", place, frame.height)]))


def _centred(ports: Mapping[int, float], width: float) -> dict[int, float]:
    return {value: place - width / 2 for value, place in ports.items()}
