"""`graft demo`: capture a model of the zoo, show its table and code, swap its activation, and check it against eager.
The models are in `torchgraft.zoo`, the clock for torch.fx in `torchgraft.bridge.torch_fx`.
"""

from __future__ import annotations

import argparse
import copy
from typing import TYPE_CHECKING

from torchgraft.cli.programs import positive
from torchgraft.version import __version__

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchgraft import GraphModule

NAME = "demo"
SUMMARY = "capture a model, show it, change it, check it against eager"

WIDTH = 118


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="resnet50", metavar="NAME", help="a model of the zoo (default: resnet50)")
    parser.add_argument(
        "--rows", type=positive, default=8, metavar="N", help="how many nodes and lines of code to show (default: 8)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the demo; fails if the captured or the changed program does not compute what eager computes."""
    import torch

    import torchgraft
    from torchgraft import zoo

    torch.manual_seed(0)
    model = zoo.create(arguments.model).eval()
    inputs = zoo.example_inputs(arguments.model)
    print(f"torchgraft {__version__} with torch {torch.__version__}")

    captured = torchgraft.symbolic_trace(model)
    _show_program(arguments.model, captured, arguments.rows)
    _show_trace_time(model)

    with torch.no_grad():
        _title("Check against eager")
        before = captured(*inputs)
        right = _agrees("the captured program and the model", before, model(*inputs))
        _title("Swap the activation")
        swapped = swap_relu_for_gelu(captured)
        print(f"calls of ReLU that became calls of GELU in the graph: {swapped} (no recompile() needed)")
        after = captured(*inputs)
        right &= _agrees("the changed program and the model with nn.GELU", after, eager_with_gelu(model)(*inputs))
        print(f"for scale: the swap itself moved the result by up to {_distance(before, after):.3g}")
    return 0 if right else 1


def swap_relu_for_gelu(program: GraphModule) -> int:
    """Put a call of gelu in the place of every call of an nn.ReLU module; says how many there were."""
    from torch.nn import ReLU
    from torch.nn.functional import gelu

    from torchgraft.errors import GraftError

    graph = program.graph
    calls = [
        node
        for node in graph.nodes
        if node.op == "call_module" and isinstance(program.get_submodule(str(node.target)), ReLU)
    ]
    if not calls:
        raise GraftError(
            "nothing to swap: the model calls no nn.ReLU module\nchoose another with --model, such as resnet18"
        )
    for node in calls:
        with graph.inserting_after(node):
            replacement = graph.call_function(gelu, node.args)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
    return len(calls)


def eager_with_gelu(model: nn.Module) -> nn.Module:
    """A copy of the model with the same swap made by hand, module by module."""
    from torch import nn

    changed = copy.deepcopy(model)
    for parent in changed.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ReLU):
                setattr(parent, name, nn.GELU())
    return changed


def _show_program(name: str, program: GraphModule, rows: int) -> None:
    from torchgraft.ir.printing import tabular_text
    from torchgraft.results.tables import count

    _title(f"Capture {name}: {count(len(program.graph.nodes), 'node')}")
    _head(tabular_text(program.graph), rows + 2, "nodes")
    _title("The code it runs")
    _head(program.code.strip(), rows + 1, "lines")


def _show_trace_time(model: nn.Module) -> None:
    import torchgraft
    from torchgraft.bridge.torch_fx import time_beside_torch_fx

    ours, theirs = time_beside_torch_fx(lambda: torchgraft.symbolic_trace(model).code, model)
    _title("Time to capture and generate code (median, side by side)")
    print(f"torchgraft {ours * 1e3:6.1f} ms")
    print(f"torch.fx   {theirs * 1e3:6.1f} ms, {theirs / ours:.1f} times as long")


def _agrees(what: str, result: Tensor, expected: Tensor) -> bool:
    import torch

    right = torch.allclose(result, expected, rtol=1e-4, atol=1e-5)
    verdict = "agree" if right else "DO NOT AGREE"
    print(f"{what} {verdict}: largest difference {_distance(result, expected):.3g}")
    return right


def _distance(first: Tensor, second: Tensor) -> float:
    return (first - second).abs().max().item()


def _title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def _head(text: str, shown: int, unit: str) -> None:
    lines = text.splitlines()
    for line in lines[:shown]:
        print(line.rstrip() if len(line) <= WIDTH else line[: WIDTH - 3] + "...")
    if len(lines) > shown:
        print(f"... and {len(lines) - shown} more {unit}")
