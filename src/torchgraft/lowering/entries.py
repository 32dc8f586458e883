"""What the inputs and outputs of training programs are called: primals, results, updates, gradients, saved values.
How such programs are written is in `joint.py`, how they are run in `training.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchgraft.capturing.flowing.sizes import unwrapped
from torchgraft.capturing.whole import whole_model
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import map_arg
from torchgraft.ir.structures import put_together, take_apart
from torchgraft.ir.verify import find_attribute
from torchgraft.lowering.tensors import TracedTensor

KINDS = ("result", "update", "gradient", "saved")


class OutputEntry(NamedTuple):
    """What one entry of the output of a training program is.

    `kind` is "result" (of the model, or of the loss), "update" (the new value of a buffer or input that the model writes in
    place), "gradient" (of a parameter or input) or "saved" (for the backward); `name` says of what.
    """

    kind: str
    name: str


class Primal(NamedTuple):
    """An input of the joint program: a tensor that the program holds, or one among its inputs."""

    kind: str
    name: str
    value: torch.Tensor


class Joint(NamedTuple):
    """A joint program, its primals, its results by name and structure, and the attributes that it took for granted."""

    program: GraphModule
    primals: list[Primal]
    results: list[Any]
    structure: Any
    attributes: dict[str, Any]


class Name(str):
    """The name of a result, in the place of a tensor among results."""


def finish(graph: Graph, outputs: list[tuple[OutputEntry, Any]]) -> None:
    """Add the output to a training program, with its entries named."""
    output = graph.output(tuple([value for _, value in outputs]))
    output.meta["entries"] = [entry for entry, _ in outputs]
    output.meta["val"] = map_arg(output.args[0], lambda node: node.meta.get("val"))


def named_parts(name: str, leaf: Any, results: dict[str, Any]) -> Any:
    """A part of the result with names in the places of what every run computes: tensors and sizes, added to the results.

    What is in an object of its own kind, as in a cache of keys and values, is returned; it is given no tangent.
    """
    template, parts = take_apart(leaf, lambda item: type(item) is TracedTensor or unwrapped(item) is not None)
    names = [Name(name if part is leaf else f"{name}: part {index}") for index, part in enumerate(parts)]
    results.update(zip(names, parts, strict=True))
    return put_together(template, *names)


def held_tensors(program: GraphModule) -> list[Primal]:
    """The tensors that a program uses: its parameters, its buffers, then constants; each once. What a module that is kept whole
    has besides parameters is its own business."""
    targets = dict.fromkeys(str(node.target) for node in program.graph.find_nodes(op="get_attr"))
    modules = tuple([f"{node.target}." for node in program.graph.find_nodes(op="call_module")])
    if whole_model(program) is not None:
        modules = ("",)
    kinds: dict[str, str] = {}
    for name, _ in program.named_parameters(remove_duplicate=False):
        if name in targets or name.startswith(modules):
            kinds[name] = "parameter"
    kinds |= {name: "buffer" for name, _ in program.named_buffers(remove_duplicate=False) if name in targets}
    kinds |= {name: "constant" for name in targets if name in program.graph._constants or name not in kinds}
    order = sorted(kinds, key=lambda name: ("parameter", "buffer", "constant").index(kinds[name]))
    found: dict[int, Primal] = {}
    for name in order:
        value, _ = find_attribute(program, name)
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), Primal(kinds[name], name, value))
    return list(found.values())


def by_kind(program: GraphModule, values: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """What a training program returned, by kind and name."""
    result: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for entry, value in zip(program.graph.output_node().meta["entries"], values, strict=True):
        result[entry.kind][entry.name] = value
    return result
