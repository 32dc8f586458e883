"""Weights that arrive one at a time: a program quantized without data (on the meta device) is filled from the shards of a float
checkpoint, each tensor rounded as it comes, so that there is never more than one in floats. Files are read by safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import QuantizeError
from torchgraft.quantize.native.weight_only import WeightOnlyLayer
from torchgraft.quantize.plan import Plan, plan_of
from torchgraft.quantize.weights import quantize_weight
from torchgraft.results.tables import listed


def load_weights(
    program: GraphModule,
    files: str | PathLike[str] | Iterable[str | PathLike[str]],
    *,
    others: Mapping[str, torch.Tensor] | None = None,
    progress: Callable[[str], None] | None = None,
) -> int:
    """Fill a quantized program with the weights of a float checkpoint, and return how many tensors were taken.

    `files` are safetensors files, or a folder of them. Each tensor is read, rounded and put in its place before the next is read.
    `others` are tensors that checkpoints do not hold, such as buffers that a model computes when it is made.

    >>> import tempfile, torchgraft, safetensors.torch
    >>> model = torchgraft.zoo.create("mlp").eval()
    >>> with torch.device("meta"):
    ...     empty = torchgraft.zoo.create("mlp").eval()
    >>> x = torch.randn(2, 16)
    >>> program = torchgraft.quantize.quantize(empty, [x.to("meta")], config="weight-int8")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     safetensors.torch.save_file(model.state_dict(), f"{folder}/model.safetensors")
    ...     load_weights(program, folder)
    4
    >>> bool((program(x) - model(x)).abs().max() < 0.05)
    True
    """
    plan = plan_of(program)
    taken = 0
    with torch.no_grad():
        for name, tensor in _tensors(files):
            taken += _take(program, plan, name, tensor)
            if progress is not None:
                progress(name)
        for name, tensor in (others or {}).items():
            taken += _take(program, plan, name, tensor)
    missing = [name for name, value in [*program.named_parameters(), *program.named_buffers()] if value.is_meta]
    if missing:
        raise QuantizeError(
            f"the checkpoint has no values for {listed(missing, 4)}\n"
            "give tensors that are not in the files as others={name: tensor}"
        )
    return taken


def _tensors(files: Any) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    paths: list[Any] = [files] if isinstance(files, (str, PathLike)) else list(files)
    if len(paths) == 1 and Path(paths[0]).is_dir():
        paths = sorted(Path(paths[0]).glob("*.safetensors"))
    if not paths:
        raise QuantizeError(f"there are no safetensors files in {files}\ngive the files, or a folder of them")
    for path in paths:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


def _take(program: GraphModule, plan: Plan, name: str, tensor: torch.Tensor) -> bool:
    used = False
    place = plan.stored.get(name)
    if place is not None:
        found = quantize_weight(tensor, place.numbers, place.axis, name)
        if place.layer is not None:
            layer = program.get_submodule(place.layer)
            assert isinstance(layer, WeightOnlyLayer)
            layer.fill(found.steps, found.scale, found.zero_point)
        else:
            for path, value in (
                (place.steps, found.steps),
                (place.scale, found.scale),
                (place.zero_point, found.zero_point),
            ):
                if path is not None and value is not None:
                    program._buffers[path] = value
        used = True
    name = plan.moved.get(name, name)
    holder_path, _, leaf = name.rpartition(".")
    try:
        holder = program.get_submodule(holder_path)
    except AttributeError:
        return used
    for table in (holder._parameters, holder._buffers):
        known = table.get(leaf)
        if known is not None:
            if known.shape != tensor.shape:
                raise QuantizeError(
                    f"'{name}' is {tuple(tensor.shape)} in the checkpoint and {tuple(known.shape)} in the program\n"
                    "give the files of this very model"
                )
            value = tensor.to(known.dtype).clone() if tensor.dtype == known.dtype else tensor.to(known.dtype)
            table[leaf] = torch.nn.Parameter(value, requires_grad=False) if table is holder._parameters else value  # type: ignore[assignment]
            used = True
    return used
