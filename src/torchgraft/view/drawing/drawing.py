"""`draw` and the `Drawing` it returns: the way of a program through the steps of this folder.
Each step lives in a file of its own; this one says their order, and writes the result to a file.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchgraft.analysis.shapes.metadata import tree_metadata
from torchgraft.codegen.calling import example_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError
from torchgraft.results.files import write_whole
from torchgraft.results.progress import stage
from torchgraft.view.drawing.captions import caption_of
from torchgraft.view.drawing.folding import collapse
from torchgraft.view.drawing.folding import fold as fold_repeated
from torchgraft.view.drawing.labels import require_graph
from torchgraft.view.drawing.layout import Layout
from torchgraft.view.drawing.levels import make_levels
from torchgraft.view.drawing.long_lines import name_far_values
from torchgraft.view.drawing.nesting import dissolve_small_groups, nest
from torchgraft.view.drawing.scene import Scene, SceneBuilder
from torchgraft.view.drawing.svg import Painter
from torchgraft.view.drawing.theme import style_sheet
from torchgraft.view.node_facts import observe

DIRECTIONS = ("down", "right")


@dataclass(frozen=True)
class Drawing:
    """A drawing of a program: `svg` is the text of it. It shows itself in notebooks.

    >>> import torch, torchgraft
    >>> drawing = torchgraft.draw(torch.nn.ReLU(), torch.ones(2))
    >>> drawing.svg.startswith("<svg"), drawing.boxes
    (True, 4)
    """

    svg: str = field(repr=False)
    width: int
    height: int
    boxes: int

    def save(self, path: str | os.PathLike[str], scale: float = 1.0) -> Path:
        """Write the drawing as SVG, or as PNG or PDF where the package cairosvg is installed; the suffix says which."""
        write_whole(path, _converted(self.svg, check_suffix(path), scale))
        return Path(path)

    def to_png(self, scale: float = 1.0) -> bytes:
        """The drawing as PNG; needs the package cairosvg."""
        return _converted(self.svg, ".png", scale)

    def _repr_svg_(self) -> str:
        return self.svg


def draw(
    program: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    depth: int | None = None,
    fold: bool = False,
    shapes: bool = True,
    direction: str = "down",
    legend: bool = True,
    theme: str = "auto",
    title: str | None = None,
) -> Drawing:
    """Draw a program, with modules as nested frames, and write the drawing to `path` where one is given.

    `program` is what `capture` or `symbolic_trace` returns, a graph, a program of torch.fx or torch.export, or a plain
    module, which is captured first; of a lowered module it is what runs where. Shapes come from its metadata, or from one run
    where `args` (and `kwargs`) are given. `depth` makes one box of every module that is so many calls deep, `fold` draws
    modules that repeat once, with a count. `direction` is "down" or "right", `theme` "auto" (light or dark, as the reader
    has it), "light" or "dark".

    >>> import torch, torchgraft
    >>> drawing = draw(torchgraft.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())))
    >>> drawing.boxes, drawing.svg[:4]
    (4, '<svg')
    """
    if path is not None:
        check_suffix(path)
    if direction not in DIRECTIONS:
        raise GraftError(f'cannot draw in the direction {direction!r}: it is not known\nuse "down" or "right"')
    if depth is not None and (not isinstance(depth, int) or depth < 0):
        raise GraftError(f"cannot draw to the depth {depth!r}: it is no count of module calls\nuse 0, 1, 2, … or None")
    style_sheet(theme, "")  # an unknown theme is refused before the work, not after
    args, kwargs = example_inputs(args, kwargs)
    program = _captured(program, args, kwargs)
    graph = require_graph(program)
    observed = _observed(program, args, kwargs) if (args or kwargs) and shapes else {}
    root = program if program is not graph else getattr(graph, "owning_module", None)
    builder = SceneBuilder(graph, root, title or _name_of(root), shapes, observed)
    scene = builder.build()
    nest(scene, builder.module_paths, builder.types)
    if depth is not None:
        collapse(scene, depth)
    if fold:
        fold_repeated(scene)
    dissolve_small_groups(scene)
    name_far_values(scene)
    with stage("laying out the drawing"):
        drawing = _arranged(scene, direction, legend, theme)
    if path is not None:
        drawing.save(path)
    return drawing


def _captured(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain module or function as a program; anything that has a graph as it is, or knows itself how it is drawn."""
    if (drawn := getattr(type(program), "drawn_program", None)) is not None:
        return drawn(program)
    if hasattr(program, "graph") or hasattr(program, "nodes") or not callable(program):
        return program
    if not args and not kwargs:
        from torchgraft.capturing.symbolic.tracer import symbolic_trace

        return symbolic_trace(program)
    from torchgraft.capturing.program import capture

    return capture(program, args, kwargs)


def _observed(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What every node gives on example inputs, with metadata in the place of tensors, by name."""
    if not isinstance(program, GraphModule):
        raise GraftError(
            f"cannot run a {type(program).__name__} to see its shapes: example inputs need a torchgraft program\n"
            "convert it with from_fx() or from_export(), or leave args out"
        )

    def described(value: Any) -> Any:
        metadata = tree_metadata(value)
        return value if metadata is None else metadata

    return {node.name: value for node, value in observe(program, args, kwargs, described).items()}


def _name_of(root: Any) -> str:
    graph_module = getattr(root, "graph_module", None)  # an ExportedProgram
    if graph_module is not None:
        root = graph_module
    return type(root).__name__ if isinstance(root, torch.nn.Module) else "Graph"


def _arranged(scene: Scene, direction: str, legend: bool, theme: str) -> Drawing:
    captions = {index: caption_of(scene.boxes[index], scene) for index in scene.alive()}
    layout = Layout(scene, make_levels(scene), captions, direction == "right")
    painter = Painter(scene, layout, captions, theme, legend)
    width, height = painter.size
    return Drawing(painter.text(), int(width), int(height), len(captions))


# ---- files ----


SUFFIXES = (".svg", ".png", ".pdf")


def check_suffix(path: str | os.PathLike[str]) -> str:
    """The kind of file that a path asks for, or an error before any work is done."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        found = f"the suffix {suffix!r}" if suffix else "no suffix"
        raise GraftError(f"cannot save a drawing as '{os.fspath(path)}': it has {found}\nuse .svg, .png or .pdf")
    if suffix != ".svg":
        _cairosvg(suffix)
    return suffix


def _converted(svg: str, suffix: str, scale: float) -> bytes:
    """The drawing as the bytes of a file."""
    if suffix == ".svg":
        return svg.encode("utf-8")
    package = _cairosvg(suffix)
    function = package.svg2png if suffix == ".png" else package.svg2pdf
    result: bytes = function(bytestring=svg.encode("utf-8"), scale=scale, unsafe=True)  # unsafe: lift the limit of size
    return result


def _cairosvg(suffix: str) -> Any:
    try:
        return importlib.import_module("cairosvg")
    except (ImportError, OSError) as error:  # OSError: the package is there and the library cairo is not
        raise GraftError(
            f"cannot save a drawing as {suffix[1:].upper()}: the package cairosvg or the library cairo is missing ({error})\n"
            "install it with: pip install 'torchgraft[draw]', or save as .svg, which needs nothing"
        ) from error
