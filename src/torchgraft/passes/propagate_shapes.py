"""Note on every node what its value looks like: shape, type, strides, memory format, whether it needs a gradient.
The finding out is done in `analysis/shapes`, on fake tensors unless `compute` says otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import torch

from torchgraft.analysis.dry_run import computing_if_needed
from torchgraft.analysis.shapes import shapes
from torchgraft.analysis.surroundings import Surroundings
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.codegen.source import PyTreeCodeGen
from torchgraft.errors import GraftError, PassError
from torchgraft.ir.printing import known_value
from torchgraft.passes.definition import Pass

_INPUT = re.compile(r"(?P<shape>\d+(?:x\d+)*|scalar)(?::(?P<dtype>\w+))?")


@dataclass(frozen=True)
class PropagateShapes(Pass):
    """Note `meta["tensor_meta"]` on every node whose value is a tensor or holds some.

    `inputs` are example inputs, or their sizes as text: "1x3x224x224:float32 1x16:int64". Without them the shapes that the
    inputs of the program already have are used. Nothing is computed unless `compute` says so, which a program needs whose
    shapes depend on values; the state of the module is put back afterwards.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: x.reshape(-1))
    >>> PropagateShapes(inputs="2x3")(program).changes, tuple(program.graph.output_node().meta["tensor_meta"].shape)
    (3, (6,))
    """

    inputs: Any = ""
    compute: bool = False

    def run(self, module: GraphModule) -> int:
        """Note the shapes, and return how many nodes have another note than before."""
        try:
            return note_shapes(module, self._arguments(module), compute=self.compute)
        except GraftError:
            raise
        except Exception as error:  # whatever a program can raise
            raise PassError(_refusal(error)) from error

    def with_example(self, args: tuple[Any, ...]) -> Pass:
        """The same for these inputs, unless it was given its own."""
        return self if self._is_given else dataclasses.replace(self, inputs=args)

    @property
    def _is_given(self) -> bool:
        return not isinstance(self.inputs, str) or bool(self.inputs)

    def _arguments(self, module: GraphModule) -> tuple[Any, ...]:
        if isinstance(self.inputs, str) and self.inputs:
            return tuple([_tensor(text) for text in self.inputs.split()])
        if self._is_given:
            return tuple(self.inputs)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        known = [known_value(node) for node in placeholders]
        is_flat = not isinstance(module.graph._codegen, PyTreeCodeGen)
        if not is_flat or not all(hasattr(value, "shape") and hasattr(value, "dtype") for value in known):
            raise PassError(
                "cannot propagate shapes: nothing is known about the inputs of the program; "
                'give inputs="1x3x224x224:float32", example tensors, or check=args to the pipeline'
            )
        return tuple([torch.empty(tuple(value.shape), dtype=value.dtype) for value in known])


def note_shapes(program: GraphModule, args: Any = (), kwargs: Any = None, *, compute: bool | None = None) -> int:
    """Note the shapes of a program's values on its nodes, and return how many have another note than before.

    `compute` None tries fake tensors first, and copies of the real ones where the shapes depend on values.
    """
    if compute is None:
        return computing_if_needed(lambda computes: note_shapes(program, args, kwargs, compute=computes), True)
    with Surroundings(program).restored() if compute else contextlib.nullcontext():
        found = shapes(program, args, kwargs, compute=compute)
    changed = 0
    for node in program.graph.nodes:
        metadata = found.get(node.name)
        if metadata is not None and node.meta.get("tensor_meta") != metadata:
            node.meta["tensor_meta"] = metadata
            changed += 1
    return changed


def _refusal(error: Exception) -> str:
    lines = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
    places = [line for line in lines if line.startswith("While executing")]
    text = "; ".join([f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", *places[:1]])
    return f"cannot propagate shapes: on these inputs the program raises {text}; give inputs that it runs on"


def _tensor(text: str) -> torch.Tensor:
    match = _INPUT.fullmatch(text)
    dtype = None if match is None else getattr(torch, match["dtype"] or "float32", None)
    if match is None or not isinstance(dtype, torch.dtype):
        raise PassError(
            f"cannot read the input {text!r}; write sizes and type, such as 2x3x64x64:float32 or scalar:int64"
        )
    return torch.zeros(() if match["shape"] == "scalar" else tuple(map(int, match["shape"].split("x"))), dtype=dtype)
