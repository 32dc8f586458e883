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
        if options.layout != "contiguous":
            channels_last_weights(part)
        written = written_inputs(part)
        part._ready()
        is_gpu = on_gpu(inputs)
        compiled = torch.compile(part, dynamic=False, options={} if is_gpu else {"freezing": True})
        if is_gpu:
            return GraphOfPart(compiled, inputs, written, options)
        compiled(*inputs)
        return compiled


BACKEND = Inductor
