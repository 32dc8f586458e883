"""Lowered modules in files: the captured program with its weights, the example inputs and the options, without the model's class.
What a backend has compiled is made again when the file is loaded; it belongs to one machine and one version.
"""

from __future__ import annotations

import io
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.capturing.program import capture
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BackendError
from torchgraft.results.files import write_whole
from torchgraft.version import __version__

if TYPE_CHECKING:
    from torchgraft.backends.lowered import Lowered

_KIND = "torchgraft lowered module"


def save_lowered(module: Lowered, path: str | PathLike[str]) -> None:
    """Write a lowered module to a file, whole or not at all."""
    args, kwargs = module.example
    with torch.no_grad():
        program = capture(module._model, args, kwargs)
    if "" in program.meta.get("kept_whole", {}):
        raise BackendError(
            f"cannot save {module._name}: it is one call of the model's own Python\n  {program.meta['kept_whole']['']}"
        )
    content = {
        "kind": _KIND,
        "version": __version__,
        "program": program,
        "example": (args, kwargs),
        "backend": module.backend.name,
        "precision": module.options.precision if module.options.is_chosen else None,
        "layout": module.options.layout,
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_whole(path, buffer.getvalue())


def load_lowered(path: str | PathLike[str], *, backend: str | None = None, verify: bool = True) -> Any:
    """The module in a file that `save` of a lowered module has written, compiled again on this machine.

    `backend` is another one than it was lowered with. The file has the path that the example took; calls that take another raise
    GuardError. It is unpickled, so load only files that you trust.

    >>> import tempfile, torchgraft
    >>> fast = torchgraft.lower(torch.nn.Linear(2, 2).eval(), torch.ones(1, 2), backend="native")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fast.save(f"{folder}/linear.pt")
    ...     loaded = load_lowered(f"{folder}/linear.pt")
    >>> torch.equal(loaded(torch.ones(3, 2)), fast(torch.ones(3, 2)))
    True
    """
    from torchgraft.backends.lower import lower

    content = torch.load(path, weights_only=False)
    if not isinstance(content, dict) or content.get("kind") != _KIND or not isinstance(content["program"], GraphModule):
        raise BackendError(f"'{path}' is no lowered module\n  write one with lower(...).save(path) or graft lower")
    args, kwargs = content["example"]
    options = {name: content[name] for name in ("precision", "layout")}
    return lower(content["program"], args, kwargs, backend=backend or content["backend"], verify=verify, **options)
