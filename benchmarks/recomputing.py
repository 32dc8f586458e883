"""What the forward keeps for the backward, and what is computed again, beside torch's min-cut partitioner: `memory_budget` of
`capture_training` at the bytes that torch arrives at. Nothing is timed.

python -m benchmarks.recomputing
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._functorch import config
from torch._functorch.aot_autograd import aot_module
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils import _pytree as pytree

import torchgraft
from benchmarks.simulating.llama import SIZES, Llama
from torchgraft import zoo
from torchgraft.analysis.cost.count import traffic
from torchgraft.analysis.cost.elementwise import work_of
from torchgraft.errors import GraphError
from torchgraft.ir.node import map_arg
from torchgraft.results.tables import amount

BUDGETS = (0.5, 0.2)


def models() -> dict[str, tuple[nn.Module, Any]]:
    """Models in training mode and a batch for each."""
    torch.manual_seed(0)
    return {
        "DeepRecommender": (zoo.create("deep_recommender"), zoo.example_inputs("deep_recommender")),
        "ResNet-50, 4×3×96×96": (zoo.create("resnet50"), torch.randn(4, 3, 96, 96)),
        "Transformer": (zoo.create("transformer"), zoo.example_inputs("transformer")),
        "Llama of 8 layers, 2×64": (Llama(**SIZES["tiny"]), torch.randint(0, 1000, (2, 64))),
    }


def loss_of(result: Any) -> torch.Tensor:
    """A scalar of whatever a model returns."""
    return (result[0] if isinstance(result, tuple) else result).float().square().mean()


class WithLoss(nn.Module):
    """A model with its loss, as torch's partitioner wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return loss_of(self.model(*args))


class Again(NamedTuple):
    """Arithmetic, and bytes that are read and written."""

    flops: int
    moved: int

    def __str__(self) -> str:
        return f"{amount(self.flops, 'FLOPs')} | {amount(self.moved, 'B')}"


def work_in(nodes: Iterable[Any], mapped: Callable[[Any, Any], Any]) -> Again:
    """The work of nodes, of torch's or ours, by the tensors noted at them."""
    known = lambda node: node.meta.get("val")  # noqa: E731
    flops = moved = 0
    for node in nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            call = node.target, mapped(node.args, known), mapped(node.kwargs, known), node.meta["val"]
            work = work_of(*call)
            flops += work[0] if work else 0
            moved += sum(traffic(*call))
    return Again(flops, moved)


def torch_bytes(forward: Any, results: int) -> int:
    """What a forward of torch's keeps besides its inputs."""
    storage = lambda tensor: tensor.untyped_storage()  # noqa: E731
    inputs = [node.meta["val"] for node in forward.graph.find_nodes(op="placeholder")]
    there = {storage(tensor)._cdata for tensor in inputs if isinstance(tensor, torch.Tensor)}
    kept = [node.meta["val"] for node in next(iter(forward.graph.find_nodes(op="output"))).args[0][results:]]
    memory = {storage(t)._cdata: t.numel() * t.element_size() for t in kept if isinstance(t, torch.Tensor)}
    return sum(size for key, size in memory.items() if key not in there)


def by_torch(model: nn.Module, args: tuple[Any, ...]) -> dict[str, tuple[int, Again]]:
    """(bytes kept, work done again) by torch's partitioners."""
    found: dict[str, tuple[int, Again]] = {}
    mapped = torch.fx.node.map_arg

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        whole = work_in(joint.graph.nodes, mapped)

        def note(name: str, function: Any) -> Any:
            pair = function(copy.deepcopy(joint), inputs, num_fwd_outputs=num_fwd_outputs, **options)
            one, two = [work_in(half.graph.nodes, mapped) for half in pair]
            again = Again(one.flops + two.flops - whole.flops, one.moved + two.moved - whole.moved)
            found[name] = torch_bytes(pair[0], num_fwd_outputs), again
            return pair

        result = note("default", default_partition)
        del found["default"]
        note("min-cut", min_cut_rematerialization_partition)
        for budget in BUDGETS:
            with config.patch(activation_memory_budget=budget):
                note(f"min-cut, budget {budget}", min_cut_rematerialization_partition)
        return result

    same = lambda program, inputs: program  # noqa: E731
    compiled = aot_module(WithLoss(model), fw_compiler=same, bw_compiler=same, partition_fn=partition)
    compiled(*args).backward()
    return found


def by_us(model: nn.Module, args: tuple[Any, ...], budget: int | None) -> tuple[int, Again] | None:
    """(bytes kept, work done again) under a budget."""
    try:
        programs = torchgraft.capture_training(model, args, loss=loss_of, memory_budget=budget)
    except GraphError:
        return None
    again = [node for node in programs.joint.graph.nodes if "recomputes" in node.meta]
    return programs.saved_bytes, work_in(again, map_arg)


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    lines = [
        "| | torch's partitioner | keeps | computes again | moves again | torchgraft keeps | computes again | moves again |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (model, example) in models().items():
        args = pytree.tree_map(lambda leaf: leaf, example if isinstance(example, tuple) else (example,))
        for way, (size, again) in by_torch(copy.deepcopy(model), args).items():
            ours = by_us(copy.deepcopy(model), args, size)
            mine = "cannot | | " if ours is None else f"{amount(ours[0], 'B')} | {ours[1]}"
            lines.append(f"| {name} | {way} | {amount(size, 'B')} | {again} | {mine} |")
            name = ""
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
