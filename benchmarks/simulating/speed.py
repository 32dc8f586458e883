"""How long `simulate` itself takes: ResNet-50, a Llama of 8 billion parameters, and chains of up to 200,000 nodes.

python -m benchmarks.simulating.speed
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from benchmarks.simulating.llama import SIZES, Llama
from torchgraft import Graph, GraphModule, simulate, zoo

LENGTHS = (2_000, 20_000, 200_000)


def chain(length: int) -> GraphModule:
    """A program of so many additions one after the other."""
    graph = Graph()
    value = graph.placeholder("x")
    for _ in range(length):
        value = graph.call_function(torch.add, (value, 1.0))
    graph.output(value)
    return GraphModule(torch.nn.Module(), graph)


def seconds(program: Any, args: Any, rounds: int, **options: Any) -> float:
    """The least of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        simulate(program, args, **options)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--only", nargs="*", default=("resnet50", "llama", "chain"))
    options = parser.parse_args()
    lines = ["| program | nodes | seconds | microseconds a node |", "|---|---|---|---|"]

    def add(name: str, nodes: int, found: float) -> None:
        lines.append(f"| {name} | {nodes:,} | {found:.2f} | {found / nodes * 1e6:.0f} |")

    if "resnet50" in options.only:
        model, image = zoo.resnet50().eval(), torch.empty(1, 3, 224, 224)
        found = simulate(model, image, machine=options.machine)
        add("ResNet-50, batch 1", len(found.nodes), seconds(model, image, 5, machine=options.machine))
    if "llama" in options.only:
        with torch.device("meta"):
            llama = Llama(**SIZES["8b"])
        ids = torch.empty(1, 2048, dtype=torch.long, device="meta")
        found = simulate(llama, ids, machine=options.machine, precision="bf16")
        add(
            "Llama, 8 billion parameters",
            len(found.nodes),
            seconds(llama, ids, 2, machine=options.machine, precision="bf16"),
        )
    if "chain" in options.only:
        x = torch.empty(64, 64, device="meta")
        for length in LENGTHS:
            add("chain", length, seconds(chain(length), x, 1, machine=options.machine))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
