"""How a drawing gets smaller: modules below a depth become one box, and modules that repeat are drawn once.
Both work on a nested scene, before anything has a place.
"""

from __future__ import annotations

from typing import Any

from torchgraft.results.tables import count
from torchgraft.view.drawing.labels import LEAVING, SOURCES
from torchgraft.view.drawing.scene import ROOT, Box, Group, Scene

_TERMINALS = frozenset({"input", "tangent", "output"} | LEAVING)


def collapse(scene: Scene, depth: int) -> None:
    """Make one box of every module call that is `depth` calls deep; 0 leaves one box for the whole program."""
    members: dict[int, list[int]] = {}
    for index in scene.alive():
        box = scene.boxes[index]
        if depth == 0:
            if box.kind not in _TERMINALS:
                members.setdefault(_phase(scene, box.group), []).append(index)
            continue
        for group in scene.path_to_root(box.group):
            if scene.groups[group].depth == depth:
                members.setdefault(group, []).append(index)
                break
    users = scene.users()
    representative = list(range(len(scene.boxes)))
    for group, indices in members.items():
        parent = group if depth == 0 else scene.groups[group].parent
        _merge(scene, group, parent, indices, users, representative)
    _redirect(scene, representative)


def _phase(scene: Scene, group: int) -> int:
    """The outermost group of a training program (forward or backward), or the whole drawing."""
    path = scene.path_to_root(group)
    return path[-2] if len(path) > 1 and not scene.groups[path[-2]].module_path else ROOT


def _merge(
    scene: Scene, group: int, parent: int, indices: list[int], users: list[list[int]], representative: list[int]
) -> None:
    # The first that takes values: parameters stand before everything, and what the box needs must come before the box.
    inside = set(indices)
    calls = [i for i in indices if scene.boxes[i].kind not in SOURCES] or indices
    first = scene.boxes[calls[0]]
    this = scene.groups[group]
    nodes = sum(scene.boxes[index].holds for index in indices)
    shapes = [scene.boxes[i].shape for i in indices if scene.boxes[i].shape and any(u not in inside for u in users[i])]
    shapes = list(dict.fromkeys(shapes))
    box = Box(
        this.module_path or this.key or "program",
        "backward" if this.backward else _common_kind([scene.boxes[index].kind for index in calls]),
        this.detail or this.title or scene.title,
        count(nodes, "node"),
        f"{this.module_path or scene.title}\n{this.detail}\n{count(nodes, 'node')} of the program",
        shapes[0] if len(shapes) == 1 else "",
        [source for index in indices for source in scene.boxes[index].inputs if source not in inside],
        path=first.path,
        group=parent,
        module_path=this.module_path,
        holds=nodes,
        is_collapsed=True,
    )
    for index in indices:
        representative[index] = calls[0]
        scene.boxes[index].removed = True
    scene.boxes[calls[0]] = box


def _common_kind(kinds: list[str]) -> str:
    """Where a part of a program runs is said of a module as of its calls, if it is the same for all of them."""
    found = {kind for kind in kinds if kind != "guard"}
    return next(iter(found)) if found in ({"compiled"}, {"python"}) else "module"


def _redirect(scene: Scene, representative: list[int]) -> None:
    """Let every box take its values from those that their sources were merged into."""
    for index, box in enumerate(scene.boxes):
        if not box.removed:
            sources = [representative[source] for source in box.inputs]
            box.inputs = [source for source in dict.fromkeys(sources) if source != index]


def fold(scene: Scene) -> None:
    """Draw modules that follow each other and do the same only once, with a count."""
    folder = _Folder(scene)
    # What is inside before what is around it, and in the order of the flow: what a group takes is folded by then.
    for group in _inside_out(folder.children):
        folder.fold_children(group)
    folder.finish()


def _inside_out(children: list[list[int]]) -> list[int]:
    result: list[int] = []
    stack = [ROOT]
    while stack:
        group = stack.pop()
        result.append(group)
        stack.extend(children[group])
    return result[::-1]


class _Folder:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.children = scene.children()
        self.entries: dict[int, int] = {}
        self.representative = list(range(len(scene.boxes)))
        self.own: list[list[int]] = [[] for _ in scene.groups]
        for index in scene.alive():
            self.own[scene.boxes[index].group].append(index)

    def boxes_in(self, group: int) -> list[int]:
        """Every box inside a group, in order."""
        result = [index for index in self.own[group] if not self.scene.boxes[index].removed]
        for child in self.children[group]:
            result += self.boxes_in(child)
        return sorted(result)

    def fold_children(self, group: int) -> None:
        run: list[int] = []
        contents: list[list[int]] = []
        forms: list[Any] = []
        for child in self.children[group]:
            # Guards are no part of what a module does; the first may ask what the others need not ask again.
            boxes = [index for index in self.boxes_in(child) if self.scene.boxes[index].kind != "guard"]
            if not boxes:
                continue
            form = self._form(child, boxes)
            if run and not (form == forms[0] and self._follows(contents, boxes)):
                self._fold(run, contents)
                run, contents, forms = [], [], []
            run.append(child)
            contents.append(boxes)
            forms.append(form)
        self._fold(run, contents)

    def _kept(self, index: int) -> int:
        """The box that this one was merged into."""
        while self.representative[index] != index:
            index = self.representative[index]
        return index

    def finish(self) -> None:
        _redirect(self.scene, [self._kept(index) for index in range(len(self.scene.boxes))])

    def _form(self, group: int, boxes: list[int]) -> Any:
        """What a group does, without names and without what comes from outside."""
        scene = self.scene
        this = scene.groups[group]
        place = {index: position for position, index in enumerate(boxes)}
        inner: dict[int, tuple[str, str]] = {}
        lines = []
        for index in boxes:
            box = scene.boxes[index]
            if box.group not in inner:
                owner = scene.groups[box.group]
                inner[box.group] = (owner.module_path.removeprefix(this.module_path), str(owner.count))
            title = box.title.replace(this.module_path, "", 1) if this.module_path else box.title
            sources = tuple(place.get(self._kept(source), -1) for source in box.inputs)
            lines.append((box.kind, title, box.detail, box.shape, inner[box.group], sources))
        # Only what is numbered repeats: query, key and value may be alike, and are three things.
        numbered = this.module_path.rstrip("0123456789")
        return numbered, this.detail, this.backward, tuple(lines)

    def _follows(self, contents: list[list[int]], boxes: list[int]) -> bool:
        """Whether a group takes from outside what the one before it takes, one step on."""
        scene, before = self.scene, contents[-1]
        inside, previous = set(boxes), {index: position for position, index in enumerate(before)}
        for mine, theirs in zip(boxes, before, strict=True):
            for raw, other_raw in zip(scene.boxes[mine].inputs, scene.boxes[theirs].inputs, strict=True):
                source, other = self._kept(raw), self._kept(other_raw)
                if source in inside or self._same(source, other):
                    continue
                position = previous.get(source)
                if position is None or (len(contents) > 1 and contents[-2][position] != other):
                    return False
        return True

    def _same(self, source: int, other: int) -> bool:
        return source == other or self.entries.get(source) == other or self.entries.get(other) == source

    def _note_entries(self, first: list[int], second: list[int]) -> None:
        """What the first group takes from outside is to it what the groups after it take from the one before."""
        inside = set(first)
        for one, two in zip(first, second, strict=True):
            for raw, other in zip(self.scene.boxes[one].inputs, self.scene.boxes[two].inputs, strict=True):
                source, previous = self._kept(raw), self._kept(other)
                if source not in inside and previous in inside:
                    self.entries[source] = previous

    def _fold(self, run: list[int], contents: list[list[int]]) -> None:
        if len(run) < 2:
            return
        scene = self.scene
        self._note_entries(contents[0], contents[1])
        for boxes in contents[1:]:
            for kept, folded in zip(contents[0], boxes, strict=True):
                self.representative[folded] = kept
                scene.boxes[kept].holds += scene.boxes[folded].holds
                scene.boxes[folded].removed = True
        for group in run[1:]:
            for index in self.boxes_in(group):
                scene.boxes[index].removed = True
        first, last = scene.groups[run[0]], scene.groups[run[-1]]
        first.count = len(run)
        first.title = folded_title(first, last)


def folded_title(first: Group, last: Group) -> str:
    """`layers.0 … layers.11`, or the name itself where one module is called again and again."""
    return first.title if first.title == last.title else f"{first.title} … {last.title}"
