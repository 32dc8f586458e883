"""Plots as SVG in our own style: panels of lines over sizes, or of bars where there is one; no scripts, no fonts.
What is plotted is decided by the result that asks.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchgraft.results.tables import amount

COLOURS = ("#3d6fb4", "#c0563f", "#4f8f6b", "#7d5ba6", "#d9a441", "#4aa3a2", "#b0557f", "#86713f", "#9aa0a6")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 360, 220, 70, 34, 44
_INK, QUIET, LINE = "#1e293b", "#64748b", "#e2e8f0"


@dataclass(frozen=True)
class Panel:
    """One plot: for each series the points (x, y); `text` writes a number of the y axis."""

    title: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    text: Callable[[float], str]


def panels_svg(title: str, x_title: str, panels: Sequence[Panel]) -> str:
    """Panels in two columns under a title, with one legend for all; both axes in powers.

    >>> text = panels_svg("a model", "batch", [Panel("seconds", {"h200": [(1, 0.1), (8, 0.2)]}, str)])
    >>> text.startswith("<svg"), text.count("<circle")
    (True, 2)
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    columns = min(2, len(panels)) or 1
    rows = math.ceil(len(panels) / columns)
    width = columns * (_WIDTH + _LEFT + 20)
    parts, below = legend(names, width)
    height = below + rows * (_HEIGHT + _GAP + _TOP) + 8
    for number, panel in enumerate(panels):
        x = _LEFT + (number % columns) * (_WIDTH + _LEFT + 20)
        y = below + _TOP + (number // columns) * (_HEIGHT + _GAP + _TOP)
        parts.append(f'<g transform="translate({x} {y})">{_panel(panel, names, x_title)}</g>')
    return picture_svg(title, width, height, parts)


def legend(names: Sequence[str], width: int) -> tuple[list[str], int]:
    """The names of all series below the title, in as many lines as it takes, and where they end."""
    longest = max(map(len, names), default=1)
    beside = max(int((width - 20) / (longest * 6.6 + 44)), 1)  # how many names stand in a line
    parts = []
    for number, name in enumerate(names):
        x, y = 14 + (number % beside) * (longest * 6.6 + 44), _TOP + 16 + 18 * (number // beside)
        mark = f'<path d="M{x:.0f} {y}h22" stroke="{colour_of(number)}" stroke-width="3"{_dashes(number)}/>'
        parts.append(f'{mark}<text x="{x + 28:.0f}" y="{y + 4}">{html.escape(name)}</text>')
    return parts, _TOP + 14 + 18 * math.ceil(len(names) / beside)


def picture_svg(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """The whole file around its parts, with the title on top."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}">'
    )
    heading = f'<text x="14" y="26" font-size="16">{html.escape(title)}</text>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', heading, *parts, "</svg>"]) + "\n"


def rate_text(value: float) -> str:
    """So many a second, in few figures.

    >>> rate_text(12345.6), rate_text(12.3456)
    ('12.3 k', '12.3')
    """
    return amount(value) if value >= 1000 else f"{value:.3g}"


def colour_of(number: int) -> str:
    """The colour of a series; they begin anew after the last one."""
    return COLOURS[number % len(COLOURS)]


def _dashes(number: int) -> str:
    """Lines whose colour was used already are dashed."""
    turn = number // len(COLOURS)
    return f' stroke-dasharray="{6 if turn == 1 else 2} 3"' if turn else ""


def _panel(panel: Panel, names: list[str], x_title: str) -> str:
    points = [point for series in panel.series.values() for point in series]
    values = [y for _, y in points if y > 0]
    places = sorted({x for x, _ in points})
    parts = [f'<text x="0" y="-12" font-weight="bold">{html.escape(panel.title)}</text>']
    if not values:
        return parts[0] + f'<text x="0" y="20" fill="{QUIET}">nothing to show</text>'
    low, high = axis_ends(values)

    def height(value: float) -> float:
        return _HEIGHT * (1 - (math.log10(value) - low) / (high - low))

    def across(value: float) -> float:
        first, last = math.log2(places[0]), math.log2(places[-1])
        return 10 + (_WIDTH - 20) * (math.log2(value) - first) / ((last - first) or 1.0)

    for power in round_ticks(low, high):
        y = height(power)
        parts.append(f'<path d="M0 {y:.1f}H{_WIDTH}" stroke="{LINE}"/>')
        parts.append(
            f'<text x="-6" y="{y + 4:.1f}" text-anchor="end" fill="{QUIET}">{html.escape(panel.text(power))}</text>'
        )
    parts.append(f'<path d="M0 0V{_HEIGHT}H{_WIDTH}" fill="none" stroke="{QUIET}"/>')
    parts.append(
        f'<text x="{_WIDTH}" y="{_HEIGHT + 34}" text-anchor="end" fill="{QUIET}">{html.escape(x_title)}</text>'
    )
    if len(places) == 1:
        return "".join([*parts, _label(_WIDTH / 2, places[0]), *_bars(panel, names, height)])
    parts += [_label(across(place), place) for place in places]
    for name, series in panel.series.items():
        colour, dashes = colour_of(names.index(name)), _dashes(names.index(name))
        dots = [(across(x), height(y), y) for x, y in series if y > 0]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in dots)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>' if dots else "")
        for x, y, value in dots:
            tip = f"<title>{html.escape(f'{name}: {panel.text(value)}')}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">{tip}</circle>')
    return "".join(parts)


def _bars(panel: Panel, names: list[str], height: Callable[[float], float]) -> list[str]:
    width = min(_WIDTH / (len(panel.series) + 1), 60)
    found = []
    for number, (name, series) in enumerate(panel.series.items()):
        for _, value in series:
            if value > 0:
                x, y = 10 + number * (width + 4), height(value)
                tip = f"<title>{html.escape(f'{name}: {panel.text(value)}')}</title>"
                colour = colour_of(names.index(name))
                found.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_HEIGHT - y:.1f}" fill="{colour}">{tip}</rect>'
                )
    return found


def _label(x: float, place: float) -> str:
    return f'<text x="{x:.1f}" y="{_HEIGHT + 16}" text-anchor="middle" fill="{QUIET}">{place:g}</text>'


def axis_ends(values: list[float]) -> tuple[float, float]:
    """The ends of an axis in powers of ten, with some room around the values."""
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max((high - low) * 0.1, 0.15)
    return low - room, high + room


def round_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two powers of ten: 1, 2, 5 where there is room, powers alone where there is not."""
    steps = (1, 2, 5) if high - low < 3 else (1,)
    every = max(round((high - low) / 8), 1)
    powers = [power for power in range(math.floor(low), math.ceil(high) + 1) if power % every == 0]
    return [step * 10.0**power for power in powers for step in steps if low <= math.log10(step * 10.0**power) <= high]
