"""The backend `inductor`: torch.compile on the whole program, with its weights frozen; on a GPU inside a CUDA graph.
torch.compile takes everything, guards included; sizes that change are its own business.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.backends.backend import Backend, Options
from torchgraft.backends.cudagraphs import GraphOfPart, on_gpu, written_inputs
from torchgraft.backends.prepacking import channels_last_weights
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.passes.layer_calls import is_layer
from torchgraft.passes.merge_linears import MergeLinears
from torchgraft.passes.views import has_written_views, reshape_instead, views_nobody_writes


class Inductor(Backend):
    """Compiles parts with torch.compile."""

    name = "inductor"
    takes_writes = True

    def problem(self) -> str | None:
        """On a CPU it writes C++."""
        if torch.cuda.is_available() or any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
            return None
        return "torch.compile needs a C++ compiler\n  install g++ or clang"

    def compile(self, part: GraphModule, inputs: tuple[Any, ...], options: Options) -> Callable[..., Any]:
        """Compile, which happens in the first call."""
        written = written_inputs(part)
        is_gpu = on_gpu(inputs)
        if options.layout != "contiguous" and not has_written_views(part) and channels_last_weights(part):
            for node in views_nobody_writes(part):
                reshape_instead(node)
            inputs = images_channels_last(part, inputs, written) if is_gpu else inputs
        if is_gpu:
            MergeLinears().run(part)
        part._ready()
        compiled = torch.compile(part, dynamic=False, options={} if is_gpu else {"freezing": True})
        if is_gpu:
            return GraphOfPart(compiled, inputs, written, options)
        compiled(*inputs)
        return compiled


def images_channels_last(part: GraphModule, inputs: tuple[Any, ...], written: list[int]) -> tuple[Any, ...]:
    """Inputs with their channels last where convolutions read them: copying them to where a graph reads lays them out."""
    placeholders = [node for node in part.graph.nodes if node.op == "placeholder"]
    result = list(inputs)
    for number, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        is_image = isinstance(value, torch.Tensor) and value.dim() == 4 and number not in written
        if is_image and any(is_layer(user, part) for user in node._users):
            result[number] = value.contiguous(memory_format=torch.channels_last)
    return tuple(result)


BACKEND = Inductor
