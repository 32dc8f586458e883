"""What each group sees when it arranges what is directly inside it: its elements and the values between them.
A value that crosses the frame of a group does so once, through a port at the top or at the bottom, however many use it inside.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchgraft.view.drawing.scene import ROOT, Scene

# An element of a level is a number: a box as its index, a group as ~index, so that one dict holds both.
Element = int


@dataclass(slots=True)
class Level:
    """The inside of one group."""

    elements: list[Element] = field(default_factory=list)  # in an order that respects the flow of values
    source: dict[int, Element] = field(default_factory=dict)  # who gives a value here; missing: it comes from outside
    targets: dict[int, dict[Element, None]] = field(default_factory=dict)  # who takes a value here
    leaves: dict[int, None] = field(default_factory=dict)  # values that go on to the outside
    constraints: list[tuple[Element, Element]] = field(default_factory=list)  # who is above whom without a line

    @property
    def enters(self) -> list[int]:
        """The values that come from outside, in the order in which they are first used."""
        return [value for value in self.targets if value not in self.source]


def make_levels(scene: Scene) -> list[Level]:
    """The levels of all groups, by their index."""
    levels = [Level() for _ in scene.groups]
    ancestors = [scene.path_to_root(group) for group in range(len(scene.groups))]
    _fill_elements(scene, levels, ancestors)
    for index, box in enumerate(scene.boxes):
        if box.removed:
            continue
        for source in box.inputs:
            _connect(scene, levels, ancestors, source, index)
        for source in box.far:
            group, above, below = _meeting(scene, ancestors, source, index)
            if above != below:
                levels[group].constraints.append((above, below))
    return levels


def _fill_elements(scene: Scene, levels: list[Level], ancestors: list[list[int]]) -> None:
    """Boxes come in order, so a group takes the place of its first box; boxes without inputs go to the front."""
    seen: set[int] = {ROOT}
    early: list[list[Element]] = [[] for _ in levels]
    late: list[int] = []
    for index, box in enumerate(scene.boxes):
        if box.removed:
            continue
        if box.inputs or box.far or box.kind not in ("parameter", "constant", "reference"):
            late.append(index)
        else:
            early[box.group].append(index)
    for index in late:
        box = scene.boxes[index]
        for group in reversed(ancestors[box.group]):
            if group not in seen:
                seen.add(group)
                levels[scene.groups[group].parent].elements.append(~group)
        levels[box.group].elements.append(index)
    for group, sources in enumerate(early):
        if sources:
            for outer in reversed(ancestors[group]):  # a group may hold nothing but parameters
                if outer not in seen:
                    seen.add(outer)
                    levels[scene.groups[outer].parent].elements.insert(0, ~outer)
            levels[group].elements[:0] = sources


def _meeting(scene: Scene, ancestors: list[list[int]], source: int, user: int) -> tuple[int, Element, Element]:
    """The innermost group around both boxes, and the elements of it that they are or are inside of."""
    up, down = ancestors[scene.boxes[source].group], ancestors[scene.boxes[user].group]
    common = 1
    while common < len(up) and common < len(down) and up[-common - 1] == down[-common - 1]:
        common += 1
    above = source if len(up) == common else ~up[-common - 1]
    below = user if len(down) == common else ~down[-common - 1]
    return up[-common], above, below


def _connect(scene: Scene, levels: list[Level], ancestors: list[list[int]], source: int, user: int) -> None:
    group, _, below = _meeting(scene, ancestors, source, user)
    inner: Element = source
    for outgoing in ancestors[scene.boxes[source].group]:
        level = levels[outgoing]
        level.source[source] = inner
        if outgoing == group:
            break
        level.leaves[source] = None
        level.targets.setdefault(source, {})
        inner = ~outgoing
    levels[group].targets.setdefault(source, {})[below] = None
    inner = user
    for incoming in ancestors[scene.boxes[user].group]:
        if incoming == group:
            break
        levels[incoming].targets.setdefault(source, {})[inner] = None
        inner = ~incoming
