"""What a backend is, and how it is found by its name: those of this folder, those registered in this process and those of
installed packages. How a program is cut by what a backend supports is in `parts.py`.

A backend of your own is a subclass of `Backend` with `compile`, and an entry point in the group `torchgraft.backends`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.errors import BackendError, one_line, suggestion
from torchgraft.ir.node import Node

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule

GROUP = "torchgraft.backends"
BUILT_IN = ("native", "inductor", "cudagraphs", "openvino", "onnxruntime")
PRECISIONS: dict[str, torch.dtype] = {
    "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
_registered: dict[str, type[Backend]] = {}


@dataclass(frozen=True)
class Options:
    """What the user has chosen: the precision to compute in, the layout of images, how long compiling may take, and whether
    the precision is another than the model's own."""

    precision: str = "fp32"
    layout: str = "auto"
    time_limit: float | None = None
    is_chosen: bool = False


class Backend:
    """A way to run programs. A subclass says what it supports and compiles parts of programs; see docs/lower.md.

    `name` is what users call it. `sizes_are_free` says that compiled code takes tensors of other sizes than those it was compiled
    with; otherwise it is compiled for each size in use. `takes_all` says that it is given whole programs, guards included.
    `takes_writes` says that parts may write their inputs. `min_size` is the least number of calls that is worth a part.

    >>> import torchgraft
    >>> class Eager(Backend):
    ...     name, sizes_are_free = "eager-for-show", True
    ...     def supports(self, node):
    ...         return node.op != "call_method" or "methods are not taken"
    ...     def compile(self, part, inputs, options):
    ...         return part.forward
    >>> register_backend(Eager)
    <class 'torchgraft.backends.backend.Eager'>
    >>> module = torchgraft.lower(lambda x: torch.relu(x).sin().cos(), torch.ones(2), backend="eager-for-show")
    >>> print(module.explain())
    <lambda> for float32[2] on eager-for-show: 1 of 3 calls, in 1 part
    2 calls stay in Python:
      sin: methods are not taken  (<doctest ...>:1)
      cos: methods are not taken  (<doctest ...>:1)
    """

    name = ""
    sizes_are_free = False
    takes_all = False
    takes_writes = False
    min_size = 1
    devices: tuple[str, ...] = ("cpu", "cuda")

    def problem(self) -> str | None:
        """Why this backend cannot be used here, with what to do about it; None where it can."""
        return None

    def supports(self, node: Node) -> bool | str:
        """Whether the backend takes a call: True, False, or a text that says why not."""
        return True

    def compile(self, part: GraphModule, inputs: tuple[Any, ...], options: Options) -> Callable[..., Any]:
        """A function that computes what a part of a program computes; `inputs` are those of the example."""
        raise NotImplementedError


def register_backend(cls: type[Backend]) -> type[Backend]:
    """Make a backend of your own known by its name in this process; a decorator.

    An installed package does the same for everybody with an entry point in the group `torchgraft.backends`.

    >>> import torch, torchgraft
    >>> @torchgraft.register_backend
    ... class Plain(torchgraft.Backend):
    ...     name = "plain-for-show"
    ...
    ...     def compile(self, part, inputs, options):
    ...         return part.forward
    >>> torchgraft.lower(torch.relu, torch.ones(2), backend="plain-for-show")(-torch.ones(2))
    tensor([0., 0.])
    """
    if not (isinstance(cls, type) and issubclass(cls, Backend)) or not cls.name:
        raise BackendError(f"cannot register {cls!r}: give a subclass of Backend that has a name")
    if cls.name in BUILT_IN or cls.name == "auto":
        raise BackendError(f"cannot register {cls.__name__}: torchgraft has a backend '{cls.name}' already")
    _registered[cls.name] = cls
    return cls


def backend_names() -> list[str]:
    """Every name that `lower` knows, installed or not.

    >>> backend_names()[:3]
    ['native', 'inductor', 'cudagraphs']
    """
    entries = [entry.name for entry in importlib.metadata.entry_points(group=GROUP)]
    return list(dict.fromkeys([*BUILT_IN, *_registered, *entries]))


def find_backend(wanted: str | Backend) -> Backend:
    """The backend of a name; raises with what to install where it cannot be used."""
    backend = wanted if isinstance(wanted, Backend) else _by_name(wanted)
    problem = backend.problem()
    if problem is not None:
        raise BackendError(f"the backend '{backend.name}' cannot be used here: {problem}")
    return backend


def _by_name(name: Any) -> Backend:
    if name in BUILT_IN:
        return importlib.import_module(f"torchgraft.backends.{name}").BACKEND()
    if name in _registered:
        return _registered[name]()
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == name:
            try:
                found = entry.load()
            except Exception as error:  # somebody else's package; nothing that does not use it may fail
                raise BackendError(
                    f"the entry point '{name}' ({entry.value}) cannot be loaded: {one_line(error)}"
                ) from error
            if not (isinstance(found, type) and issubclass(found, Backend)):
                raise BackendError(f"the entry point '{name}' is no subclass of torchgraft.Backend: {found!r}")
            return found()
    known = ["auto", *backend_names()]
    hint = suggestion(name, known, f"there are {', '.join(known)}")
    raise BackendError(f"no backend is called {name!r}; {hint}")


def missing(package: str, extra: str) -> str | None:
    """What to do where a package is not installed; None where it is."""
    try:
        found = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        found = False
    return None if found else f"{package} is not installed\n  pip install 'torchgraft[{extra}]'"
