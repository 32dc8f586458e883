"""What a run can change besides its inputs, and how it is put back: attributes and tensors of modules, gradients, random states.
The keeper of a model's state is `capturing/state/`; what is run, and what its changes mean, is decided by who asks.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from torchgraft.analysis.comparison import frozen_leaves, has_values, plain_equal, same_tensor
from torchgraft.capturing.state.model_state import ModelState
from torchgraft.capturing.whole import modules_of
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError

Roots = list[tuple[str, torch.nn.Module]]

# What nn.Module keeps for itself. Parameters and buffers are looked at one by one, modules by walking the tree. Hooks are
# restored, but not compared: a program has what they do among its nodes.
_TABLES = frozenset(torch.nn.Module().__dict__) - {"training"}
_OF_TENSORS = ("_parameters", "_buffers")
# Two of these that are equal are no change, though one may be another object than the other.
_PLAIN = (int, float, str, bytes, bool, tuple, torch.dtype, torch.device, type(None))


class Surroundings:
    """Everything besides its inputs that a run of these modules, programs or functions can change."""

    def __init__(self, *callables: Any) -> None:
        self._paths: dict[torch.nn.Module, str] = {}
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        # Copies of tensors without a memory of the usual kind, such as sparse ones; of all others the state has copies.
        self._copies: dict[int, torch.Tensor] = {}
        # A tensor has one name, the first, whatever else it is called in a program.
        self._names: dict[int, str] = {}
        # Generators of random numbers that belong to a class; those of modules are part of their state.
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._grad_mode = torch.is_grad_enabled()
        for prefix, root in [root for item in callables for root in modules_behind(item)]:
            for path, module in root.named_modules(prefix=prefix):
                if isinstance(module, GraphModule):
                    _ = module.code  # generating code sets attributes that must outlive the first run
                if module not in self._paths:
                    self._paths[module] = path
                    self._remember(path, module)
        self._state = ModelState(self._paths)
        for module in self._paths:
            self._state.watch(module)
        for key, (tensor, _) in self._tensors.items():
            self._state.tensors.know(tensor)
            self._state.tensors.keep_place(tensor)
            self._state.tensors.save(tensor)
            if not self._state.tensors.is_saved(tensor) and has_values(tensor):
                self._copies[key] = tensor.detach().clone()

    def _remember(self, path: str, module: torch.nn.Module) -> None:
        for value in vars(type(module)).values():
            if isinstance(value, torch.Generator) and id(value) not in self._generators:
                self._generators[id(value)] = value, value.get_state()
        attributes = vars(module)
        tables = [
            attributes,
            *[attributes.get(name) or {} for name in _OF_TENSORS],
        ]  # a script module has its own in C++
        for name, tensor in [item for table in tables for item in table.items()]:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self._tensors:
                if torch.nn.parameter.is_lazy(tensor):
                    raise GraftError(
                        f"cannot run the model and leave it as it was: '{joined(path, name)}' has no shape yet\n"
                        "run the model once, so that its lazy modules know their sizes"
                    )
                self._names[id(tensor)] = joined(path, name)
                self._tensors[id(tensor)] = tensor, tensor.grad if tensor.is_leaf else None

    # ---- around a run ----

    @contextlib.contextmanager
    def restored(self, seed: int = 0) -> Iterator[None]:
        """Let the block begin without gradients and with random numbers from the seed; what it changes is undone."""
        try:
            for tensor, _ in self._tensors.values():
                if tensor.is_leaf:
                    tensor.grad = None
            torch.manual_seed(seed)
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed)
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Undo everything that a run changed."""
        torch.set_grad_enabled(self._grad_mode)
        self._state.restore_all()
        for key, (tensor, gradient) in self._tensors.items():
            if key in self._copies and not same_tensor(tensor, self._copies[key]):
                tensor.data = self._copies[key].clone()
            if tensor.is_leaf:
                tensor.grad = gradient
        for generator, state in self._generators.values():
            generator.set_state(state)

    # ---- what a run did ----

    def changes(self) -> dict[str, Any]:
        """The parameters, buffers and attributes that are not what they were; of two with one path the last."""
        result: dict[str, Any] = {}
        for key, (tensor, _) in self._tensors.items():
            if self._is_written(key, tensor):
                result.update(frozen_leaves(tensor, self._names[key]))
        for module, name, entry in self._state.left():
            if name in _TABLES:
                if name not in _OF_TENSORS or entry is None:
                    continue
                name = entry.key
            if entry is not None and isinstance(entry.before, _PLAIN) and plain_equal(entry.before, entry.after):
                continue
            value = getattr(module, name, "deleted")
            result.update(frozen_leaves(value, self.name_of(value, joined(self._paths[module], name))))
        if torch.is_grad_enabled() != self._grad_mode:
            result["torch.is_grad_enabled()"] = torch.is_grad_enabled()
        return result

    def name_of(self, value: Any, path: str) -> str:
        """What to call something at a path: a tensor that was there before has its name already."""
        return self._names.get(id(value), path) if isinstance(value, torch.Tensor) else path

    def _is_written(self, key: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor does not hold what it held. All are looked at: a write through .data leaves no other trace."""
        if key in self._copies:
            return not same_tensor(tensor, self._copies[key])
        return has_values(tensor) and self._state.tensors.is_written(tensor)


def modules_behind(model: Any) -> Roots:
    """The module whose state a callable works on, or those that a plain function uses, with what to put before their paths."""
    root = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
    if isinstance(root, torch.nn.Module):
        return [("", root)]
    return list(modules_of(model).named_children())


def joined(path: str, name: str) -> str:
    """The path of something in a module."""
    return f"{path}.{name}" if path else name
