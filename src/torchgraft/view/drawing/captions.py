"""The words that fit in a box, and with them its size. What the words are about is in `labels.py`."""

from __future__ import annotations

from dataclasses import dataclass

from torchgraft.view.drawing.nesting import local_name
from torchgraft.view.drawing.scene import Box, Group, Scene
from torchgraft.view.drawing.text_width import shortened, shortened_in_the_middle, text_width

TITLE_SIZE = 12.0
DETAIL_SIZE = 10.0
SHAPE_SIZE = 10.0
GROUP_SIZE = 11.5
WIDEST = 172.0  # of the words in a box
SHAPE_STRIP = 15.0  # below a box, for the shape beside the line that leaves it

_PILLS = frozenset({"parameter", "constant", "input", "output", "tangent", "gradient", "update", "reference", "guard"})


@dataclass(slots=True, frozen=True)
class Caption:
    """The words of a box as drawn, and its size with them."""

    title: str
    detail: str
    shape: str
    width: float
    height: float
    pill: bool

    @property
    def right(self) -> float:
        """How far it reaches to the right of its middle, with the shape beside its line."""
        return max(self.width / 2, text_width(self.shape, SHAPE_SIZE) + 9 if self.shape else 0.0)


def caption_of(box: Box, scene: Scene) -> Caption:
    """Cut the words of a box to what a box of reasonable width holds."""
    group = scene.groups[box.group]
    pill = box.kind in _PILLS
    size = TITLE_SIZE - 1 if pill else TITLE_SIZE
    title, detail = _words(box, group)
    title = shortened_in_the_middle(title, size, WIDEST - (30 if pill else 0), bold=not pill)
    detail = shortened(detail, DETAIL_SIZE, WIDEST - (30 if pill else 0))
    if pill and detail:
        title, detail = shortened(f"{title}  {detail}", size, WIDEST), ""
    widest = max(text_width(title, size, not pill), text_width(detail, DETAIL_SIZE))
    height = 23.0 if pill else 39.0 if detail else 28.0
    width = max(widest + (22 if pill else 26), 44.0 if pill else 84.0)
    return Caption(title, detail, shortened(box.shape, SHAPE_SIZE, 160), round(width), height, pill)


def _words(box: Box, group: Group) -> tuple[str, str]:
    """Names are said as they are called inside the group, because the frame around says the rest."""
    if box.kind in ("parameter", "constant", "gradient", "update"):
        sign = "∂ " if box.kind == "gradient" else ""
        return sign + local_name(box.title.removeprefix("∂ "), group.module_path), box.detail
    if box.kind == "reference":
        return local_name(box.title, group.module_path), ""
    if box.kind in ("input", "output", "tangent"):
        return box.title, box.detail
    if box.kind == "guard":
        return box.detail or box.title, ""
    words = []
    if box.module_path and box.module_path != group.module_path:
        name = local_name(box.module_path, group.module_path)
        words.append(name if name != box.title else "")
    elif box.name != box.title:
        words.append(box.name)
    return box.title, " · ".join(filter(None, [*words, box.detail]))
