"""Small pieces of HTML: elements, tables, code in colours, bars and histograms.
Which pieces make the page is decided in `page.py`, `level_section.py` and `run_sections.py`.
"""

from __future__ import annotations

import html
import keyword
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torchgraft.results.tables import count

MOST_ROWS = 3000
MOST_LINES = 4000


class Cell(NamedTuple):
    """One cell of a table: HTML, and the value it is sorted by where that is not its text."""

    markup: str
    value: float | None = None
    classes: str = ""


def escape(value: Any) -> str:
    """Text that HTML shows as it is."""
    return html.escape(str(value))


def element(name: str, content: str = "", **attributes: Any) -> str:
    """An element around HTML; `class_` and the like lose their underscore, other underscores become dashes.

    >>> element("a", "x &lt; y", href="#top", class_="link", data_kind=None)
    '<a href="#top" class="link">x &lt; y</a>'
    """
    pairs = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    words = "".join([f" {key}" if value is True else f' {key}="{escape(value)}"' for key, value in pairs])
    return f"<{name}{words}>{content}</{name}>"


def text_cell(value: Any, classes: str = "") -> Cell:
    """A cell that shows a value as text."""
    return Cell(escape(value), None, classes)


def code_cell(value: Any, classes: str = "") -> Cell:
    """A cell in the letters of code."""
    title = value if classes == "long" else None  # it is cut on the page
    return Cell(element("code", escape(value), title=title) if value else "", None, classes)


def name_cell(name: str) -> Cell:
    """A cell with the name that a row goes by."""
    return Cell(element("code", escape(name), class_="strong"), None, "keep")


def line_cell(place: str, line: str) -> Cell:
    """A cell with the place of a source line, which is said whole where the mouse is."""
    return Cell(element("code", escape(place), title=line), None, "keep")


def number_cell(value: float | None, text: str | None = None) -> Cell:
    """A number, right-aligned and sorted by its value; without a text it is a count."""
    return Cell(escape(f"{value:,}" if text is None else text), value, "n")


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, find: str = "", more: str = "") -> str:
    """A table whose columns sort when clicked; `find` names a box to filter it with, `more` where rows left out are."""
    all_rows = list(rows)
    shown = all_rows[:MOST_ROWS]
    numeric = [bool(shown) and row.classes == "n" for row in (shown[0] if shown else ())] or [False] * len(columns)
    head = "".join([element("th", escape(name), scope="col", class_="n" if is_number else None)
                    for name, is_number in zip(columns, numeric, strict=True)])  # fmt: skip
    body = "".join([_row(row) for row in shown])
    box = element("label", f'Find <input type="search" placeholder="{escape(find)}">', class_="find") if find else ""
    left = len(all_rows) - len(shown)
    note = element("p", f"… and {count(left, 'more row')}, in {more}", class_="note") if left else ""
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return element("div", f'{box}<div class="scroll" tabindex="0">{inner}</div>{note}', class_="data")


def _row(row: Sequence[Cell]) -> str:
    cells = []
    for cell in row:
        value = None if cell.value is None else f"{cell.value:.12g}"
        cells.append(element("td", cell.markup, class_=cell.classes or None, data_value=value))
    return f"<tr>{''.join(cells)}</tr>"


# ---- code ----

_WORDS = "|".join(sorted(keyword.kwlist))
_TOKENS = re.compile(
    rf"""(?P<c>\#[^\n]*)|(?P<s>'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")|(?P<k>\b(?:{_WORDS})\b)|(?P<m>(?<![\w.])\d[\w.]*)|(?P<t>\b[fiubc]\d+\[[^\]]*\])"""
)


def python_markup(text: str) -> str:
    """Python in colours: comments, texts, keywords and numbers are marked.

    >>> python_markup("return x  # f32[2]")
    '<i class="k">return</i> x  <i class="c"># f32[2]</i>'
    """
    parts, end = [], 0
    for match in _TOKENS.finditer(text):
        parts.append(html.escape(text[end : match.start()], quote=False))
        parts.append(f'<i class="{match.lastgroup}">{html.escape(match[0], quote=False)}</i>')
        end = match.end()
    parts.append(html.escape(text[end:], quote=False))
    return "".join(parts)


def code_block(text: str, identity: str, source: str, is_python: bool = True) -> str:
    """A block of code with a button to copy it; a very long one is cut and says where the rest is."""
    lines = text.rstrip("\n").split("\n")
    shown = "\n".join(lines[:MOST_LINES])
    left = len(lines) - MOST_LINES
    note = f"… and {count(left, 'more line')}, in " if left > 0 else f"{count(len(lines), 'line')}, also in "
    markup = python_markup(shown) if is_python else html.escape(shown, quote=False)
    bar = element(
        "div",
        f'<span class="note">{note}{link(source)}</span><button type="button" class="copy">Copy</button>',
        class_="bar",
    )
    return element("div", f'{bar}<pre tabindex="0"><code id="{escape(identity)}">{markup}</code></pre>', class_="code")


def link(path: str, text: str | None = None) -> str:
    """A link to a file of the report."""
    return element("a", escape(text or path), href=path)


# ---- small charts ----


def bar(share: float, kind: str = "") -> str:
    """A horizontal bar, as long as its share of the whole."""
    return f'<span class="meter {escape(kind)}"><span style="width:{max(0.0, min(1.0, share)):.2%}"></span></span>'


def histogram(measured: Sequence[Any] | None) -> str:
    """Counts as a small chart: (counts, lowest, highest), as `record` measures them."""
    if not measured or not measured[0]:
        return ""
    counts, low, high = measured
    top = max(counts) or 1
    heights = [round(20 * (count / top) ** 0.5, 1) for count in counts]  # the root, so that rare values are seen too
    path = "".join([f"M{place * 3 + 1} 21v-{height:g}" for place, height in enumerate(heights) if height])
    title = f"{len(counts)} equal parts from {low:.4g} to {high:.4g}; heights are square roots of counts"
    width = len(counts) * 3 + 1
    return f'<svg class="histogram" viewBox="0 0 {width} 22" role="img"><title>{escape(title)}</title><path d="{path}"/></svg>'
