"""Which frames there are: boxes are put in an order that keeps module calls together, and every run of them gets a group.
A run is unbroken in an order that respects the flow of values, so no group can need a value that it helped to make outside:
the groups of a level flow one way, like boxes. Collapsing and folding of groups is in `folding.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from torchgraft.view.drawing.labels import LEAVING, SOURCES
from torchgraft.view.drawing.scene import ROOT, Box, Group, Scene

LOOK_AHEAD = 4
PHASES = {"forward": "Forward", "backward": "Backward"}


def nest(scene: Scene, module_paths: Mapping[str, str], types: Mapping[str, str]) -> None:
    """Reorder the boxes of a scene and make its groups."""
    order = _with_sources(scene, _affine_order(scene))
    scene.boxes = _reordered(scene.boxes, order)
    stack = [ROOT]  # the groups that are open
    for box in scene.boxes:
        if _floats(box):
            continue
        common = 0
        while (
            common < len(stack) - 1
            and common < len(box.path)
            and (scene.groups[stack[common + 1]].key == box.path[common])
        ):
            common += 1
        del stack[common + 1 :]
        for key in box.path[common:]:
            scene.groups.append(_group(scene, stack[-1], key, module_paths, types))
            stack.append(len(scene.groups) - 1)
        box.group = stack[-1]
    for users, box in zip(scene.users(), scene.boxes, strict=True):
        if _floats(box) and users:
            box.group = scene.boxes[users[0]].group


def _floats(box: Box) -> bool:
    """Parameters and constants are at home with whoever uses them first."""
    return box.kind in SOURCES and not box.inputs


def _group(scene: Scene, parent: int, key: str, module_paths: Mapping[str, str], types: Mapping[str, str]) -> Group:
    outer = scene.groups[parent]
    if key in PHASES and parent == ROOT and key not in module_paths:
        return Group(parent, key, PHASES[key], backward=key == "backward")
    path = module_paths[key]
    title = local_name(path, outer.module_path)
    return Group(parent, key, title, types.get(path, ""), path, outer.backward, 1, outer.depth + 1)


def local_name(path: str, outer: str) -> str:
    """A dotted path as it is said inside of another; a bare number says nothing, so it keeps the word before it.

    >>> local_name("encoder.layers.3.norm", "encoder.layers.3"), local_name("encoder.layers.3", "encoder.layers")
    ('norm', 'layers.3')
    """
    if outer and path.startswith(outer + "."):
        short = path[len(outer) + 1 :]
        return f"{outer.rpartition('.')[2]}.{short}" if short[0].isdigit() else short
    return path


class _Place:
    """A module call in the tree of all calls, with the boxes inside it that could come next."""

    __slots__ = ("children", "parent", "ready")

    def __init__(self, parent: _Place | None) -> None:
        self.parent = parent
        self.children: dict[str, _Place] = {}
        self.ready: list[tuple[float, int]] = []


def _affine_order(scene: Scene) -> list[int]:
    """An order close to that of the program in which a module call goes on as long as it can.

    A backward half has what one module needs scattered among the steps of others; but what could run long before it is
    needed must not be drawn there, so nothing is brought forward by more than a few places.
    """
    boxes = scene.boxes
    waiting = [0] * len(boxes)
    users: list[list[int]] = [[] for _ in boxes]
    for index, box in enumerate(boxes):
        if not box.removed:
            for source in box.inputs:
                if not _floats(boxes[source]):
                    waiting[index] += 1
                    users[source].append(index)
    # Gradients and new state stand at the end of a program, and belong to the step that makes them.
    rank = [box.inputs[0] + 0.5 if box.kind in LEAVING else float(index) for index, box in enumerate(boxes)]
    rank = [place - len(boxes) if box.is_early else place for place, box in zip(rank, boxes, strict=True)]
    top = _Place(None)
    places = [_place(top, box.path) for box in boxes]
    done = [box.removed or _floats(box) for box in boxes]
    for index, count in enumerate(waiting):
        if count == 0 and not done[index]:
            _offer(places[index], rank[index], index)
    result: list[int] = []
    here: _Place | None = top
    while here is not None:
        while here.ready and done[here.ready[0][1]]:
            heapq.heappop(here.ready)
        while top.ready and done[top.ready[0][1]]:
            heapq.heappop(top.ready)
        if not here.ready or here.ready[0][0] - top.ready[0][0] > LOOK_AHEAD:
            here = here.parent
            continue
        _, index = heapq.heappop(here.ready)
        done[index] = True
        result.append(index)
        here = places[index]
        for user in users[index]:
            waiting[user] -= 1
            if waiting[user] == 0:
                _offer(places[user], rank[user], user)
    return result


def _place(top: _Place, path: tuple[str, ...]) -> _Place:
    place = top
    for key in path:
        child = place.children.get(key)
        if child is None:
            child = place.children[key] = _Place(place)
        place = child
    return place


def _offer(place: _Place | None, rank: float, index: int) -> None:
    """Every call around the box knows of it, so that the nearest one can be asked."""
    while place is not None:
        heapq.heappush(place.ready, (rank, index))
        place = place.parent


def _with_sources(scene: Scene, order: list[int]) -> list[int]:
    """Put each parameter and constant just before its first user."""
    result: list[int] = []
    placed: set[int] = set()
    for index in order:
        for source in scene.boxes[index].inputs:
            if _floats(scene.boxes[source]) and source not in placed:
                placed.add(source)
                result.append(source)
        result.append(index)
    unused = [i for i, box in enumerate(scene.boxes) if not box.removed and _floats(box) and i not in placed]
    return unused + result


def _reordered(boxes: list[Box], order: list[int]) -> list[Box]:
    place = {index: position for position, index in enumerate(order)}
    result = [boxes[index] for index in order]
    for box in result:
        box.inputs = [place[source] for source in box.inputs]
    return result


def dissolve_small_groups(scene: Scene) -> None:
    """Take away frames around a single thing: they say nothing that the thing itself does not say."""
    inside = [0] * len(scene.groups)
    boxes_of: list[list[int]] = [[] for _ in scene.groups]
    for index in scene.alive():
        inside[scene.boxes[index].group] += 1
        boxes_of[scene.boxes[index].group].append(index)
    children = scene.children()
    for group in reversed(range(1, len(scene.groups))):
        this = scene.groups[group]
        parent = this.parent
        alive = [child for child in children[group] if inside[child]]
        total = len(boxes_of[group]) + len(alive)
        inside[group] = total
        if total != 1 or this.count > 1 or not this.module_path:
            continue
        for index in boxes_of[group]:
            scene.boxes[index].group = parent
            boxes_of[parent].append(index)
        for child in alive:
            scene.groups[child].parent = parent
            scene.groups[child].title = local_name(scene.groups[child].module_path, scene.groups[parent].module_path)
            children[parent].append(child)
        inside[group] = 0
