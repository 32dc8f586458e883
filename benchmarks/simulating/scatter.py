"""Points as SVG, in the style of `torchgraft/analysis/simulate/plot.py`: what was measured over what was simulated.
What is plotted is decided by who asks.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

from torchgraft.analysis.simulate.plot import LINE, QUIET, axis_ends, colour_of, legend, picture_svg, round_ticks


def scatter_svg(
    title: str,
    x_title: str,
    y_title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    text: Callable[[float], str],
) -> str:
    """Points in a square with equal axes in powers, the line on which both are the same, and those of half and twice."""
    points = [point for these in series.values() for point in these if min(point) > 0]
    side, left = 480, 70
    width = left + side + 24
    parts, below = legend(list(series), width)
    top = below + 16
    if not points:
        return picture_svg(title, width, top + 40, [*parts, f'<text x="14" y="{top + 20}">nothing to show</text>'])
    low, high = axis_ends([value for point in points for value in point])

    def place(value: float) -> float:
        return side * (math.log10(value) - low) / (high - low)

    inner = []
    for value in round_ticks(low, high):
        at, name = place(value), html.escape(text(value))
        inner.append(f'<path d="M0 {side - at:.1f}H{side}M{at:.1f} 0V{side}" stroke="{LINE}" fill="none"/>')
        inner.append(f'<text x="-6" y="{side - at + 4:.1f}" text-anchor="end" fill="{QUIET}">{name}</text>')
        inner.append(f'<text x="{at:.1f}" y="{side + 16}" text-anchor="middle" fill="{QUIET}">{name}</text>')
    inner.append(f'<path d="M0 {side}L{side} 0" stroke="{QUIET}"/>')
    half = min(side * math.log10(2) / (high - low), side)
    for path in (f"M0 {side - half:.1f}L{side - half:.1f} 0", f"M{half:.1f} {side}L{side} {half:.1f}"):
        inner.append(f'<path d="{path}" stroke="{QUIET}" stroke-dasharray="3 4"/>')
    inner.append(f'<path d="M0 0V{side}H{side}" fill="none" stroke="{QUIET}"/>')
    inner.append(f'<text x="{side}" y="{side + 36}" text-anchor="end" fill="{QUIET}">{html.escape(x_title)}</text>')
    inner.append(f'<text x="0" y="-8" fill="{QUIET}">{html.escape(y_title)}</text>')
    for number, (name, these) in enumerate(series.items()):
        for x, y in these:
            if min(x, y) > 0:
                tip = html.escape(f"{name}: {x_title} {text(x)}, {y_title} {text(y)}")
                inner.append(
                    f'<circle cx="{place(x):.1f}" cy="{side - place(y):.1f}" r="3" fill="{colour_of(number)}" '
                    f'fill-opacity="0.7"><title>{tip}</title></circle>'
                )
    parts.append(f'<g transform="translate({left} {top})">{"".join(inner)}</g>')
    return picture_svg(title, width, top + side + 48, parts)
