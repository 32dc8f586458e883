"""The words that fit in a box, and with them its size. What the words are about is in `labels.py`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torchgraft.view.drawing.nesting import local_name
from torchgraft.view.drawing.scene import Box, Group, Scene

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


# ---- the width of text ----


# Thousandths of the font size, for the characters from space to tilde.
_REGULAR = (
    "278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 "
    "556 556 278 278 584 584 584 556 1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 "
    "667 778 722 667 611 722 667 944 667 667 611 278 278 278 469 556 333 556 556 500 556 556 278 556 "
    "556 222 222 500 222 833 556 556 556 556 333 500 278 556 500 722 500 500 500 334 260 334 584"
)
_BOLD = (
    "278 333 474 556 556 889 722 238 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 "
    "556 556 333 333 584 584 584 611 975 722 722 722 722 667 611 778 722 278 556 722 611 833 722 778 "
    "667 778 722 667 611 722 667 944 667 667 611 333 278 333 584 556 333 556 611 556 611 556 333 611 "
    "611 278 278 556 278 889 611 611 611 611 389 556 333 611 556 778 556 556 500 389 280 389 584"
)
_OTHERS = {"×": 584, "·": 278, "∂": 494}
_UNKNOWN = 1000  # wide enough for Chinese, Japanese and Korean, which fill the square of the font

_TABLES = tuple(
    {**_OTHERS, **{chr(32 + place): int(width) for place, width in enumerate(table.split())}}
    for table in (_REGULAR, _BOLD)
)


@lru_cache(maxsize=20_000)
def text_width(text: str, size: float, bold: bool = False) -> float:
    """The width of a line of text in pixels.

    >>> text_width("abc", 10), text_width("abc", 10, bold=True)
    (16.12, 17.23)
    """
    table = _TABLES[bold]
    return sum(table.get(character, _UNKNOWN) for character in text) * size / 1000


@lru_cache(maxsize=20_000)
def shortened(text: str, size: float, width: float, bold: bool = False) -> str:
    """The text, cut at its end and given an ellipsis where it is wider than `width`.

    >>> shortened("a rather long name", 10, 60)
    'a rather lo…'
    """
    text = " ".join(text[:500].split())
    if text_width(text, size, bold) <= width:
        return text
    table = _TABLES[bold]
    left = width * 1000 / size - _UNKNOWN
    for place, character in enumerate(text):
        left -= table.get(character, _UNKNOWN)
        if left < 0:
            return text[:place].rstrip() + "…"
    return text


def shortened_in_the_middle(text: str, size: float, width: float, bold: bool = False) -> str:
    """The text without its middle where it is too wide: dotted paths differ at both ends.

    >>> shortened_in_the_middle("encoder.layers.11.attention.weight", 10, 90)
    'encoder.l…n.weight'
    """
    if text_width(text, size, bold) <= width:
        return text
    table = _TABLES[bold]
    left = width * 1000 / size - _UNKNOWN
    start, end = 0, len(text)
    while start < end:
        side = start if start <= len(text) - end else end - 1
        left -= table.get(text[side], _UNKNOWN)
        if left < 0:
            break
        if side == start:
            start += 1
        else:
            end -= 1
    return f"{text[:start]}…{text[end:]}"
