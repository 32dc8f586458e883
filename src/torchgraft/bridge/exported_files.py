"""Reading programs that torch.export saved: a .pt2 file as a program of ours, with the example inputs it was exported with.
Bringing in an exported program that is in memory is `from_export`.
"""

from __future__ import annotations

import os
import zipfile
from typing import Any

import torch

from torchgraft.bridge.torch_export import from_export
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BridgeError


def load_exported(path: str | os.PathLike[str]) -> tuple[GraphModule, tuple[Any, ...], dict[str, Any]]:
    """The program in a .pt2 file, and its example inputs by place and by name.

    >>> import tempfile
    >>> exported = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.export.save(exported, f"{folder}/relu.pt2")
    ...     program, args, kwargs = load_exported(f"{folder}/relu.pt2")
    >>> program(torch.tensor([-1.0, 1.0])), [tuple(value.shape) for value in args], kwargs
    (tensor([0., 1.]), [(2,)], {})
    """
    place = os.fspath(path)
    if not os.path.isfile(place):
        raise BridgeError(f"no file '{place}'; give a file that torch.export.save() wrote")
    if not zipfile.is_zipfile(place):
        raise BridgeError(f"cannot read '{place}': it is no file that torch.export.save() wrote")
    try:
        exported = torch.export.load(place)
    except Exception as error:  # a damaged file, or one of another version, makes torch raise nearly anything
        reason = (str(error).splitlines() or [""])[0]
        raise BridgeError(
            f"cannot read '{place}' with torch.export.load(): {type(error).__name__}: {reason}"
        ) from error
    args, kwargs = exported.example_inputs or ((), {})
    return from_export(exported), tuple(args), dict(kwargs)


__all__ = ["load_exported"]
