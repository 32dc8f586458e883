"""`graft draw MODEL -o FILE.svg`: a drawing of a program.
The work is done by `torchgraft.draw`.
"""

from __future__ import annotations

import argparse

from torchgraft.cli.models import add_model_arguments
from torchgraft.cli.programs import add_json, add_level, add_output, captured_with_shapes, json_text, positive_or_zero

NAME = "draw"
SUMMARY = "draw a program as SVG (as PNG or PDF where cairosvg is installed)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_level(parser)
    parser.add_argument(
        "--depth", type=positive_or_zero, metavar="N", help="one box for every module so many calls deep"
    )
    parser.add_argument("--fold", action="store_true", help="draw modules that repeat once, with a count")
    parser.add_argument(
        "--direction", choices=("down", "right"), default="down", help="which way it goes (default: down)"
    )
    parser.add_argument("--theme", choices=("auto", "light", "dark"), default="auto", help="colours (default: auto)")
    add_output(parser, "the file: .svg, .png or .pdf", required=True)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the drawing and say how large it is."""
    from torchgraft.results.tables import count
    from torchgraft.view.drawing import draw
    from torchgraft.view.drawing.drawing import check_suffix

    check_suffix(arguments.output)  # before the work, not after
    chosen, program = captured_with_shapes(arguments)
    options = {
        "depth": arguments.depth,
        "fold": arguments.fold,
        "direction": arguments.direction,
        "theme": arguments.theme,
    }
    drawing = draw(program, path=arguments.output, **options)
    if arguments.json:
        size = {"width": drawing.width, "height": drawing.height, "boxes": drawing.boxes}
        print(json_text({"model": chosen.name, "output": arguments.output, **size}))
    else:
        print(f"written: {arguments.output} ({count(drawing.boxes, 'box', 'boxes')}, {drawing.width}×{drawing.height})")
    return 0
