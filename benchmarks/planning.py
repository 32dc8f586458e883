"""A Llama of 70 billion parameters captured without data and cut for 8 machines, in a process of its own whose time and memory
are measured. Nothing of the 141 GB of weights exists here.

python -m benchmarks.planning
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time


def plan(size: str, stages: int, length: int, cost: str) -> None:
    """Capture and cut, and print the stages."""
    import torch

    from benchmarks.simulating.llama import SIZES, Llama
    from torchgraft.distributed import pipeline

    with torch.device("meta"):
        model = Llama(**SIZES[size]).to(torch.bfloat16)
    ids = torch.empty(1, length, dtype=torch.long, device="meta")
    found = pipeline(model, ids, stages=stages, cost=cost)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sys.stdout.write(f"{found}\n{parameters / 1e9:.1f} billion parameters\n")


def main() -> None:
    """Start the process that plans, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="70b", help="70b, 8b or tiny (default: 70b)")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--cost", default="flops")
    parser.add_argument("--here", action="store_true", help="plan in this process")
    chosen = parser.parse_args()
    if chosen.here:
        return plan(chosen.size, chosen.stages, chosen.length, chosen.cost)
    started = time.perf_counter()
    options = [
        "--size",
        chosen.size,
        "--stages",
        str(chosen.stages),
        "--length",
        str(chosen.length),
        "--cost",
        chosen.cost,
    ]
    subprocess.run([sys.executable, "-m", "benchmarks.planning", "--here", *options], check=True)
    seconds = time.perf_counter() - started
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    sys.stdout.write(f"{seconds:.1f} s and {most / 1e9:.2f} GB at most, with the start of Python and torch\n")
    return None


if __name__ == "__main__":
    main()
