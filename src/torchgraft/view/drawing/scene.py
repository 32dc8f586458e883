"""What is to be drawn: boxes, the values that flow between them and the groups they stand in, made from a program.
Which groups there are is decided in `nesting.py`; sizes and places come later, in `layout.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchgraft.analysis.effects.calls import is_node
from torchgraft.ir.printing import known_value
from torchgraft.ir.verify import find_attribute
from torchgraft.view.drawing import labels
from torchgraft.view.node_facts import class_name
from torchgraft.view.plain import shape_text

ROOT = 0
MOST_UNUSED = 5


@dataclass(slots=True)
class Box:
    """One thing that is drawn as a box: mostly a node; also a collapsed module, or one entry of a result."""

    name: str
    kind: str
    title: str
    detail: str = ""
    tooltip: str = ""
    shape: str = ""
    inputs: list[int] = field(default_factory=list)  # boxes whose values this one takes, each once
    far: list[int] = field(default_factory=list)  # the same, for values that are named here instead of drawn as a line
    path: tuple[str, ...] = ()  # keys of the module calls around it, outermost first
    group: int = ROOT
    module_path: str = ""
    removed: bool = False
    holds: int = 1  # how many nodes of the program it shows
    scalar: bool = False  # its value is a number, not a tensor
    is_early: bool = False  # a number that modules share: it stands before them
    is_collapsed: bool = False  # a whole module as one box
    link: int = -1  # the box that a reference leads to


@dataclass(slots=True)
class Group:
    """A module call that is drawn as a frame around its boxes; group 0 is the whole drawing."""

    parent: int
    key: str
    title: str
    detail: str = ""
    module_path: str = ""
    backward: bool = False
    count: int = 1
    depth: int = 0


@dataclass(slots=True)
class Scene:
    """All boxes in an order in which every box comes after those it takes values from, and all groups."""

    title: str
    boxes: list[Box]
    groups: list[Group] = field(default_factory=lambda: [Group(-1, "", "")])
    node_count: int = 0
    # What the legend says of a kind of box, where that is more than it says of it in every drawing.
    words: dict[str, str] = field(default_factory=dict)

    def alive(self) -> list[int]:
        return [index for index, box in enumerate(self.boxes) if not box.removed]

    def users(self) -> list[list[int]]:
        """For every box those that take its value, in order."""
        result: list[list[int]] = [[] for _ in self.boxes]
        for index, box in enumerate(self.boxes):
            if not box.removed:
                for source in box.inputs:
                    result[source].append(index)
        return result

    def children(self) -> list[list[int]]:
        """For every group those directly inside it."""
        result: list[list[int]] = [[] for _ in self.groups]
        for index in range(1, len(self.groups)):
            result[self.groups[index].parent].append(index)
        return result

    def path_to_root(self, group: int) -> list[int]:
        """The group, its parent, and so on up to group 0."""
        result = [group]
        while group != ROOT:
            group = self.groups[group].parent
            result.append(group)
        return result


class SceneBuilder:
    """Turns the nodes of one graph into boxes."""

    def __init__(self, graph: Any, root: Any, title: str, shapes: bool, observed: Mapping[str, Any]) -> None:
        self.graph = graph
        self.root = root
        self.shapes = shapes
        self.observed = observed
        self.types: dict[str, str] = {}  # class names by module path
        self.module_paths: dict[str, str] = {}  # module paths by key of the call
        self.parameters = _parameters_of_export(root)
        self.is_joint = any(map(labels.is_backward, graph.nodes))
        self.scene = Scene(title, [])
        self.index_of: dict[Any, int] = {}
        self.kinds: set[int] = set()  # boxes that only ask for the dtype or device of a tensor
        self.copies: set[int] = set()  # boxes of a training program that come from no line of the model

    def build(self) -> Scene:
        nodes = list(self.graph.nodes)
        self.scene.node_count = len(nodes)
        self.scene.words = getattr(self.root, "meta", {}).get("legend", {})
        for node in nodes:
            entries = node.meta.get("entries") if node.op == "output" else None
            if entries and node.args and len(entries) == len(node.args[0]):
                self._entries(node, entries)
            else:
                self._node(node)
        self._absorb_into_guards()
        self._absorb_kinds()
        self._lift_sizes()
        self._place_sums_of_gradients()
        self._join_parameters()
        self._gather_unused()
        return self.scene

    def _node(self, node: Any) -> None:
        kind = labels.kind_of(node, self.root, self.parameters)
        value = self.observed[node.name] if node.name in self.observed else known_value(node)
        shape = shape_text(value) if self.shapes else ""
        if not shape and self.shapes and node.op == "get_attr":
            shape = shape_text(find_attribute(self.root, node.target)[0])
        box = Box(
            node.name,
            kind,
            labels.title_of(node, kind, self.root),
            labels.detail_of(node, kind, self.root),
            labels.tooltip_of(node, kind, self.root, shape),
            "" if kind in ("guard", "output") else shape,
        )
        self._place_in_modules(node, box)
        box.scalar = labels.is_number(node, value, self._is_scalar)
        box.inputs = [self.index_of[source] for source in node.all_input_nodes]
        self.index_of[node] = len(self.scene.boxes)
        if labels.is_kind(node):
            self.kinds.add(len(self.scene.boxes))
        if self.is_joint and node.target is torch.ops.aten.clone.default and "from_node" not in node.meta:
            self.copies.add(len(self.scene.boxes))
        self.scene.boxes.append(box)

    def _is_scalar(self, node: Any) -> bool:
        return self.scene.boxes[self.index_of[node]].scalar

    def _place_in_modules(self, node: Any, box: Box) -> None:
        stack = node.meta.get("nn_module_stack")
        if box.kind in ("input", "tangent", "output"):
            return
        path = ["backward" if labels.is_backward(node) else "forward"] if self.is_joint else []
        if isinstance(stack, Mapping):
            for key, (module_path, kind) in stack.items():
                if node.op == "call_module" and module_path == node.target:
                    break
                if module_path:
                    path.append(key)
                    self.module_paths[key] = module_path
                    self.types.setdefault(module_path, class_name(kind))
                    box.module_path = module_path
        box.path = tuple(path)
        if node.op == "call_module":
            box.module_path = node.target

    def _entries(self, node: Any, entries: Any) -> None:
        """The results of a training program one by one, each next to what computes it: there may be hundreds."""
        for entry, value in zip(entries, node.args[0], strict=True):
            if not is_node(value):
                continue
            kind = entry.kind if entry.kind in labels.LEAVING else "output"
            title = f"∂ {entry.name}" if kind == "gradient" else entry.name
            detail = "" if kind in labels.LEAVING or entry.kind == "result" else entry.kind
            source = self.index_of[value]
            tooltip = f"%{node.name}\n{entry.kind} {entry.name}\nis %{value.name}"
            box = Box(f"{node.name}.{entry.kind}.{entry.name}", kind, title, detail, tooltip, inputs=[source])
            self.scene.boxes.append(box)

    def _absorb_into_guards(self) -> None:
        """What is only fetched to be checked (a size, a mode) is not drawn by itself: the guard says it."""
        boxes = self.scene.boxes
        users = self.scene.users()
        only_checked: set[int] = set()
        for index in reversed(range(len(boxes))):
            box = boxes[index]
            if not users[index] or any(
                boxes[user].kind != "guard" and user not in only_checked for user in users[index]
            ):
                continue
            if box.scalar or (box.kind in ("constant", "method", "function") and len(box.inputs) < 2):
                only_checked.add(index)
                box.removed = True
        for index, box in enumerate(boxes):
            if box.kind == "guard" or index in only_checked:
                reads = [boxes[source].inputs if source in only_checked else [source] for source in box.inputs]
                sources = [source for group in reads for source in group]
                # Of the tensors that the model holds every check speaks, and a line from each would hide what is computed.
                box.inputs = [source for source in dict.fromkeys(sources) if boxes[source].kind not in labels.SOURCES]

    def _absorb_kinds(self) -> None:
        """A dtype or device is no value that flows; some layers ask for it and others use what was asked before."""
        for index in self.kinds:
            self.scene.boxes[index].removed = True
        for box in self.scene.boxes:
            box.inputs = [source for source in box.inputs if source not in self.kinds]

    def _lift_sizes(self) -> None:
        """Numbers stand around all of their users, unless what they are read from stands with one: repeated layers share them."""
        boxes = self.scene.boxes
        users = self.scene.users()
        for index in reversed(range(len(boxes))):
            box = boxes[index]
            if not box.scalar or box.removed:
                continue
            paths = [boxes[user].path for user in users[index] if boxes[user].kind != "guard"]
            if self.is_joint:
                paths = [path for path in paths if path[:1] == box.path[:1]]
            common = functools.reduce(common_start, [box.path, *paths])
            inside = {path[: len(common) + 1] for path in (box.path, *paths) if path != common}
            if common != box.path and inside.isdisjoint(
                [path[: len(common) + 1] for path in self._paths_of_origins(index)]
            ):
                box.is_early, box.path = True, common
                box.module_path = self.module_paths.get(common[-1], "") if common else ""

    def _paths_of_origins(self, index: int) -> Iterator[tuple[str, ...]]:
        """Where the values are that a number is computed from."""
        for source in self.scene.boxes[index].inputs:
            if self.scene.boxes[source].scalar:
                yield from self._paths_of_origins(source)
            elif self.scene.boxes[source].kind not in labels.SOURCES:
                yield self.scene.boxes[source].path

    def _place_sums_of_gradients(self) -> None:
        """Where a value is used twice its gradients are added, by nobody's code: the sum stands where its terms meet.

        That is the innermost call around the later term and either the other term or whoever takes the sum.
        """
        boxes = self.scene.boxes
        users = self.scene.users()
        for index, box in enumerate(boxes):
            if box.kind != "backward" or box.title != "add" or len(box.inputs) != 2:
                continue
            other, later = (boxes[source].path for source in sorted(box.inputs))
            if not (other[:1] == later[:1] == ("backward",)):
                continue
            near = [boxes[user].path for user in users[index][:1]]
            box.path = max((common_start(later, path) for path in (other, *near)), key=len)
            box.module_path = self.module_paths.get(box.path[-1], "")

    def _join_parameters(self) -> None:
        """Parameters and buffers stand where they are first used, whatever the order of the program; so do copies of buffers
        that a training program writes to, and what is written."""
        boxes, users = self.scene.boxes, self.scene.users()
        for index in reversed(range(len(boxes))):
            box = boxes[index]
            near = [user for user in users[index] if boxes[user].kind not in labels.LEAVING] or users[index]
            if near and (index in self.copies or (box.kind in labels.SOURCES and not box.inputs)):
                box.path = boxes[near[0]].path
        for box in boxes:
            if box.kind in labels.LEAVING:
                box.path = boxes[box.inputs[0]].path

    def _gather_unused(self) -> None:
        """Parameters and buffers that nothing uses, as one box where they are many."""
        users = self.scene.users()
        unused = [i for i, box in enumerate(self.scene.boxes) if box.kind in labels.SOURCES and not users[i]]
        unused = [index for index in unused if not self.scene.boxes[index].removed]
        if len(unused) <= MOST_UNUSED:
            return
        names = ", ".join(self.scene.boxes[index].title for index in unused[:60]) + ("…" if len(unused) > 60 else "")
        for index in unused[1:]:
            self.scene.boxes[index].removed = True
        kinds = {self.scene.boxes[index].kind for index in unused}
        title = f"{len(unused)} unused {'buffers' if kinds == {'constant'} else 'parameters'}"
        self.scene.boxes[unused[0]] = Box("unused", "constant", title, tooltip=names, holds=len(unused))


def common_start(one: tuple[str, ...], two: tuple[str, ...]) -> tuple[str, ...]:
    """What two paths have in common.

    >>> common_start(("a", "b", "c"), ("a", "b", "d"))
    ('a', 'b')
    """
    length = 0
    while length < min(len(one), len(two)) and one[length] == two[length]:
        length += 1
    return one[:length]


def _parameters_of_export(root: Any) -> dict[str, str]:
    """In an ExportedProgram parameters and buffers are inputs of the graph; its signature tells them apart."""
    signature = getattr(root, "graph_signature", None)
    result: dict[str, str] = {}
    for attribute, kind in (("inputs_to_parameters", "parameter"), ("inputs_to_buffers", "constant")):
        result.update(dict.fromkeys(getattr(signature, attribute, ()), kind))
    return result
