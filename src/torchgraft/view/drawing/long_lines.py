"""Which values are named where they are used instead of being drawn as a line from far above.
A training program uses hundreds of values of its forward half in its backward half; drawn as lines they would hide everything.
"""

from __future__ import annotations

import heapq

from torchgraft.view.drawing.layering import assign_rows
from torchgraft.view.drawing.levels import make_levels
from torchgraft.view.drawing.scene import ROOT, Box, Scene

LINES_ABREAST = 4  # how many lines may pass a row, on average
SHORTEST_NAMED = 9  # rows; shorter lines are always drawn
MOST_BETWEEN_PHASES = 8  # values that go from forward to backward as lines; where there are more, all are named
MOST_LINES_INTO_A_BOX = 24  # a box that takes more values names them all
MOST_NAMES = 6  # beyond that one box says how many values there are


def name_far_values(scene: Scene) -> None:
    """Take away the longest lines until few enough pass each row, and put a small box with the name in their place."""
    chosen = _between_phases(scene)
    for user in scene.alive():
        if len(scene.boxes[user].inputs) > MOST_LINES_INTO_A_BOX:
            chosen[user] = set(scene.boxes[user].inputs)
    _longest(scene, _rows_from_top(scene), chosen)
    for user, sources in sorted(chosen.items()):
        box = scene.boxes[user]
        box.inputs = [source for source in box.inputs if source not in sources]
        box.far = sorted(sources)
        if len(sources) <= MOST_NAMES:
            references = [_reference(scene, user, [source]) for source in box.far]
        else:
            references = [_reference(scene, user, box.far)]
        for reference in references:
            box.inputs.append(len(scene.boxes))
            scene.boxes.append(reference)


def _reference(scene: Scene, user: int, sources: list[int]) -> Box:
    boxes = scene.boxes
    names = ", ".join(boxes[source].name for source in sources[:40]) + ("…" if len(sources) > 40 else "")
    target = boxes[sources[0]]
    if len(sources) > 1:
        title = f"{len(sources)} values from above"
        return Box(f"to {boxes[user].name}", "reference", title, "", names, group=boxes[user].group, link=sources[0])
    title = target.title if target.kind in ("parameter", "constant", "input", "tangent") else target.name
    tooltip = f"from above: {target.tooltip}"
    return Box(target.name, "reference", title, "", tooltip, target.shape, group=boxes[user].group, link=sources[0])


def _rows_from_top(scene: Scene) -> list[int]:
    """For every box how many rows of boxes there are above it in the whole drawing, groups opened."""
    levels = make_levels(scene)
    rows: list[dict[int, int]] = []
    counts: list[int] = []
    for level in levels:
        row_of, count = assign_rows(level)
        rows.append(row_of)
        counts.append(count)
    height = [0] * len(levels)
    tops: list[list[int]] = [[] for _ in levels]
    inside_out = sorted(range(len(levels)), key=lambda group: -len(scene.path_to_root(group)))
    for group in inside_out:
        tallest = [1] * counts[group]
        for element, row in rows[group].items():
            if element < 0:
                tallest[row] = max(tallest[row], height[~element])
        reached = 0
        for tall in tallest:
            tops[group].append(reached)
            reached += tall
        height[group] = reached
    result = [0] * len(scene.boxes)
    start = [0] * len(levels)
    for group in reversed(inside_out):
        for element, row in rows[group].items():
            top = start[group] + tops[group][row]
            if element < 0:
                start[~element] = top
            else:
                result[element] = top
    result.append(height[ROOT])
    return result


def _between_phases(scene: Scene) -> dict[int, set[int]]:
    """What the backward half of a training program takes from the forward half, for each box, where that is much."""
    result: dict[int, set[int]] = {}
    for user, box in enumerate(scene.boxes):
        if not box.removed and box.path[:1] == ("backward",):
            taken = {source for source in box.inputs if scene.boxes[source].path[:1] == ("forward",)}
            if taken:
                result[user] = taken
    return result if len({source for taken in result.values() for source in taken}) > MOST_BETWEEN_PHASES else {}


def _longest(scene: Scene, heights: list[int], chosen: dict[int, set[int]]) -> None:
    """Choose more values for boxes to name, so that what remains passes few rows."""
    lengths: dict[int, list[tuple[int, int]]] = {}  # by value: how far down each user is
    for user, box in enumerate(scene.boxes):
        if not box.removed:
            for source in box.inputs:
                if source in chosen.get(user, ()):
                    continue
                lengths.setdefault(source, []).append((heights[user] - heights[source], user))
    total = 0
    queue: list[tuple[int, int]] = []  # the longest line of each value
    for source, lines in lengths.items():
        lines.sort()
        total += max(lines[-1][0] - 1, 0)
        heapq.heappush(queue, (-lines[-1][0], source))
    budget = LINES_ABREAST * heights[-1] + 2 * len(scene.alive()) + 60
    while total > budget and queue:
        length, source = heapq.heappop(queue)
        if -length < SHORTEST_NAMED:
            break
        lines = lengths[source]
        _, user = lines.pop()
        chosen.setdefault(user, set()).add(source)
        following = lines[-1][0] if lines else 1
        total -= max(-length - max(following, 1), 0)
        if lines:
            heapq.heappush(queue, (-following, source))
