"""`graft show MODEL`: a program as text, with shapes and the lines it comes from.
The texts are made by the program itself; drawings are `graft draw`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from torchgraft.cli.models import add_model_arguments
from torchgraft.cli.programs import (
    add_json,
    add_level,
    add_output,
    captured_with_shapes,
    colours_wanted,
    json_text,
    put_out,
)

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule

NAME = "show"
SUMMARY = "show a program as text: with shapes and source lines, as a table, or as the code that runs"
FORMS = ("readable", "table", "code", "graph")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_level(parser)
    parser.add_argument("--as", dest="form", choices=FORMS, default="readable", help="which text (default: readable)")
    add_output(parser, "a file for the text (default: print it)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the program."""
    chosen, program = captured_with_shapes(arguments)
    if arguments.json:
        put_out(arguments, json_text({"model": chosen.name, "code": program.code, "nodes": _rows(program)}))
    else:
        put_out(arguments, _text(program, arguments.form, colours_wanted() and arguments.output is None))
    return 0


def _text(program: GraphModule, form: str, colored: bool) -> str:
    if form == "table":
        from torchgraft.ir.printing import tabular_text

        return tabular_text(program.graph)
    if form == "readable":
        return program.print_readable(print_output=False, colored=colored)
    return program.code.strip("\n").rstrip() if form == "code" else str(program.graph)


def _rows(program: GraphModule) -> list[dict[str, Any]]:
    from torchgraft.ir.origin import source_of
    from torchgraft.ir.printing import known_value, target_text, value_text
    from torchgraft.view.node_facts import module_path_of

    return [
        {
            "name": node.name,
            "op": node.op,
            "target": target_text(node.target),
            "args": str(node.args),
            "kwargs": str(node.kwargs),
            "value": value_text(known_value(node)),
            "module": module_path_of(node),
            "source": None if source_of(node) is None else str(source_of(node)),
        }
        for node in program.graph.nodes
    ]
