"""`graft diff MODEL [OTHER]`: what is different in the text of two programs, node by node.
The work is done by `torchgraft.diff`; which two programs is decided in `programs.py`.
"""

from __future__ import annotations

import argparse

from torchgraft.cli.programs import add_json, add_output, add_pair_arguments, chosen_pair, put_out_result, with_shapes

NAME = "diff"
SUMMARY = "show what is different between two programs, node by node"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    add_output(parser, "a file for the differences (default: print them)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the differences; like diff(1) it fails if there are any."""
    from torchgraft.view.program_diff import diff

    (chosen, first), (other, second) = chosen_pair(arguments)
    difference = diff(with_shapes(first, chosen), with_shapes(second, other))
    put_out_result(arguments, difference)
    return 1 if difference else 0
