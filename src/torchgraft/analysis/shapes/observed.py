"""`shapes`: the metadata of every value of a program for given inputs, on fake tensors or on real ones.
The program is not edited; the pass that notes the same in `node.meta` is `passes/shape_prop.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchgraft.analysis.dry_run import DryRun, program_of
from torchgraft.analysis.shapes.metadata import tree_metadata
from torchgraft.codegen.calling import example_inputs
from torchgraft.ir.node import Node
from torchgraft.ir.printing import tensor_text
from torchgraft.results.shown import NamedTexts


class Shapes(NamedTexts):
    """Metadata by the names of nodes; a tuple or list where the value is one. Values that hold no tensor are left out.

    >>> import torch, torchgraft
    >>> found = torchgraft.shapes(torch.nn.Linear(4, 2), torch.ones(3, 4))
    >>> found["output"].shape
    torch.Size([3, 2])
    """

    def _text_of(self, value: Any) -> str:
        return _text(value)


def shapes(program: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None, *, compute: bool = False) -> Shapes:
    """What every value of a program looks like when it runs on such inputs.

    Nothing is computed unless `compute` says so, which a program needs whose shapes depend on values (`nonzero`).

    >>> import torch
    >>> print(shapes(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()), torch.ones(2, 3)))
    input...  f32[2, 3]
    ...       f32[2, 4]
    ...       f32[2, 4]
    output    f32[2, 4]
    """
    values, keywords = example_inputs(args, kwargs)
    subject = program_of(program, values, keywords, compute)
    found = Shapes()

    def note(node: Node, value: Any) -> None:
        metadata = tree_metadata(value)
        if metadata is not None:
            found[node.name] = metadata

    DryRun(subject, values, keywords, node_done=note, compute=compute).forward()
    return found


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)) and tensor_text(value) is None:
        return f"({', '.join(map(_text, value))})"
    return tensor_text(value) or str(value)
