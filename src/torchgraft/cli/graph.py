"""`graft graph MODEL -o FILE`: a program as a graph for NetworkX, Graphviz or Model Explorer.
The work is done by `torchgraft.save_graph`.
"""

from __future__ import annotations

import argparse

from torchgraft.cli.models import add_model_arguments
from torchgraft.cli.programs import add_json, add_level, add_output, captured_with_shapes, json_text

NAME = "graph"
SUMMARY = "write a program as a graph: pickle, GraphML, node-link JSON, DOT or Model Explorer's JSON"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_level(parser)
    parser.add_argument(
        "--format",
        choices=("pickle", "graphml", "json", "dot", "model-explorer"),
        help="the format (default: by the suffix .pickle, .graphml, .json or .dot)",
    )
    add_output(parser, "the file", required=True)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the graph and say what is in it."""
    chosen, program = captured_with_shapes(arguments)

    from torchgraft.results.tables import count
    from torchgraft.view.graph_files import save_graph
    from torchgraft.view.networkx_graph import to_networkx

    graph = to_networkx(program)
    save_graph(graph, arguments.output, format=arguments.format)
    nodes, edges = graph.number_of_nodes(), graph.number_of_edges()
    if arguments.json:
        print(json_text({"model": chosen.name, "output": arguments.output, "nodes": nodes, "edges": edges}))
    else:
        print(f"written: {arguments.output} ({count(nodes, 'node')}, {count(edges, 'edge')})")
    return 0
