"""Drawings of programs as SVG, in pure Python: `draw` makes a `Drawing`.
The steps, in order: scene, nesting, folding, long_lines, levels, layering, ordering, coordinates, layout, svg.
"""

from torchgraft.view.drawing.drawing import Drawing, draw

__all__ = ["Drawing", "draw"]
