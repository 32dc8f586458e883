"""The colours and the style sheet of a drawing, for light and for dark surroundings.
Which element gets which class is decided in `svg.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchgraft.errors import GraftError

FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"


@dataclass(frozen=True)
class Palette:
    """Colours; of a kind of box: its fill, its edge and its words."""

    paper: str
    ink: str
    quiet: str
    line: str
    frame: str
    frame_edge: str
    backward_frame: str
    backward_edge: str
    glow: str
    kinds: dict[str, tuple[str, str, str]]


# The colours in light surroundings, and in dark ones.
_KINDS = {
    "input": (("#2563eb", "#1d4ed8", "#ffffff"), ("#2563eb", "#60a5fa", "#ffffff")),
    "tangent": (("#db2777", "#be185d", "#ffffff"), ("#be185d", "#f472b6", "#ffffff")),
    "parameter": (("#fef3c7", "#e0a82e", "#713f12"), ("#42351a", "#b98a2c", "#fde68a")),
    "constant": (("#f1f0ee", "#a8a29e", "#44403c"), ("#2c2e33", "#78716c", "#e7e5e4")),
    "module": (("#e4e8ff", "#7c86e8", "#272b6b"), ("#2b2f63", "#7c86e8", "#e0e4ff")),
    "function": (("#def5e5", "#5fb67f", "#14432a"), ("#173b2a", "#4aa06c", "#c9f2d8")),
    "method": (("#d9f3f4", "#4fb0b5", "#0f4246"), ("#123b40", "#3f9ba1", "#c8f0f2")),
    "compiled": (("#d5f2de", "#3f9d63", "#123f27"), ("#163f2a", "#4cae74", "#cdf4da")),
    "python": (("#ffe0d3", "#dd6a3c", "#6b240c"), ("#4d2112", "#e07a4d", "#fed9c8")),
    "integer": (("#fae8ff", "#c026d3", "#581c87"), ("#4a1259", "#d946ef", "#f5d0fe")),
    "conversion": (("#fefce8", "#ca8a04", "#713f12"), ("#3f2f06", "#ca8a04", "#fef08a")),
    "error-none": (("#dbeafe", "#3b82f6", "#1e3a8a"), ("#1e3a8a", "#3b82f6", "#dbeafe")),
    "error-little": (("#fef08a", "#ca8a04", "#713f12"), ("#713f12", "#eab308", "#fef9c3")),
    "error-some": (("#fdba74", "#ea580c", "#7c2d12"), ("#9a3412", "#fb923c", "#ffedd5")),
    "error-much": (("#f87171", "#b91c1c", "#450a0a"), ("#991b1b", "#f87171", "#fee2e2")),
    "backward": (("#fde3ee", "#e58bb0", "#6b1239"), ("#4a1d35", "#d06a97", "#fcd5e5")),
    "guard": (("#fff1e6", "#ea9a5b", "#7a3209"), ("#45280f", "#c77b3d", "#fed7aa")),
    "reference": (("#ffffff", "#94a3b8", "#475569"), ("#0f172a", "#64748b", "#cbd5e1")),
    "output": (("#0f766e", "#0b5b55", "#ffffff"), ("#0f766e", "#2dd4bf", "#ffffff")),
    "update": (("#cdeae6", "#0f766e", "#0b4f4a"), ("#123f3b", "#2dd4bf", "#ccfbf1")),
    "gradient": (("#9d2660", "#7f1d4e", "#ffffff"), ("#9d2660", "#f472b6", "#ffffff")),
}
_SURFACES = {
    "paper": ("#ffffff", "#0f172a"),
    "ink": ("#1e293b", "#e2e8f0"),
    "quiet": ("#64748b", "#94a3b8"),
    "line": ("#94a3b8", "#64748b"),
    "frame": ("#f8fafc", "#172136"),
    "frame_edge": ("#cbd5e1", "#37465f"),
    "backward_frame": ("#fff5f8", "#26182a"),
    "backward_edge": ("#f3c6d6", "#5b3450"),
    "glow": ("#2563eb", "#60a5fa"),
}
LIGHT, DARK = [
    Palette(
        **{name: colours[place] for name, colours in _SURFACES.items()},
        kinds={kind: colours[place] for kind, colours in _KINDS.items()},
    )
    for place in (0, 1)
]
THEMES = ("auto", "light", "dark")


def style_sheet(theme: str, scope: str) -> str:
    """The rules of a theme; every rule begins with `scope`, so that a page with several drawings mixes nothing up."""
    if theme not in THEMES:
        raise GraftError(
            f"cannot draw in the theme {theme!r}: it is not known\nuse one of {', '.join(map(repr, THEMES))}"
        )
    lasting = "\n".join(
        f"{scope} {rule}"
        for rule in (
            f"text{{font-family:{FONT};font-size:10px}}",
            ".t{font-size:12px;font-weight:bold;text-anchor:middle}",
            ".d{font-size:10px;text-anchor:middle}",
            ".p{font-size:11px;text-anchor:middle}",
            ".gt{font-size:11.5px;font-weight:bold}",
            ".gd{font-size:10.5px;font-weight:normal}",
            ".halo{stroke-width:5px;stroke-linejoin:round}",
            ".head{font-size:15px;font-weight:bold}",
            ".b rect{stroke-width:1.1}",
            ".b .i{stroke-width:.8}",
            ".l path{fill:none;stroke-width:1.3;stroke-linecap:round}",
            ".n path{stroke-width:1;stroke-dasharray:4 3}",
            ".l .a{stroke:none}",
            ".f{stroke-width:1}",
            ".reference rect,.guard rect{stroke-dasharray:3 2}".replace(",", f",{scope} "),
        )
    )
    light = _colours(LIGHT if theme != "dark" else DARK, scope)
    if theme != "auto":
        return f"{lasting}\n{light}"
    return f"{lasting}\n{light}\n@media (prefers-color-scheme: dark){{\n{_colours(DARK, scope)}\n}}"


def _colours(palette: Palette, scope: str) -> str:
    rules = [
        f".paper{{fill:{palette.paper}}}",
        f"text{{fill:{palette.ink}}}",
        f".q{{fill:{palette.quiet}}}",
        f".halo,{scope} .halo .q{{fill:{palette.frame};stroke:{palette.frame}}}",
        f".halo.back,{scope} .halo.back .q{{fill:{palette.backward_frame};stroke:{palette.backward_frame}}}",
        f".f{{fill:{palette.frame};stroke:{palette.frame_edge}}}",
        f".f.back{{fill:{palette.backward_frame};stroke:{palette.backward_edge}}}",
        f".badge{{fill:{palette.quiet}}}",
        f".badge-text{{fill:{palette.paper}}}",
        f".l path{{stroke:{palette.line}}}",
        f".l .a{{fill:{palette.line}}}",
        f".s{{fill:{palette.quiet}}}",
        f".l:hover path{{stroke:{palette.glow};stroke-width:2.2}}",
        f".l:hover .a{{fill:{palette.glow}}}",
    ]
    for kind, (fill, edge, words) in palette.kinds.items():
        rules.append(f".{kind} rect{{fill:{fill};stroke:{edge}}}")
        if kind in ("module", "backward"):
            rules.append(f".{kind} .i{{fill:none}}")
        rules.append(f".{kind} text{{fill:{words}}}")
    return "\n".join(f"{scope} {rule}" for rule in rules)
