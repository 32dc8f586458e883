"""One run of a model or program, observed from outside: what it returns, writes, draws and passes back as gradients.
Whatever a run changes is restored afterwards; comparing two observations is left to `verify.py`.
"""

from __future__ import annotations

import inspect
import operator
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torchgraft.analysis.comparison import (
    FrozenTensor,
    RandomState,
    frozen_leaves,
    has_values,
    named_tensors_in,
    tensors_in,
)
from torchgraft.capturing.state.model_state import ModelState
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError
from torchgraft.recording.situations import Situation

Roots = list[tuple[str, torch.nn.Module]]

_CONTAINERS = frozenset({list, dict, set, OrderedDict})
_PLAIN = (int, float, str, bytes, bool, tuple, torch.dtype, torch.device, type(None))
# What nn.Module keeps for itself. Parameters and buffers are looked at one by one, modules by walking the tree. Hooks are
# restored, but not compared: a program has what they do among its nodes.
_TABLES = frozenset(torch.nn.Module().__dict__) - {"training"}


@dataclass
class Observation:
    """What one run did; every value is a copy, by the path it had, made before anything was restored."""

    outputs: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None


class Surroundings:
    """Everything besides its inputs that a run can change: tensors and attributes of modules, gradients, random states.

    Attributes are remembered one level deep: values, and what lists, dicts and sets hold.
    """

    def __init__(self, *callables: Any) -> None:
        roots = [root for item in callables for root in modules_behind(item)]
        self._modules: dict[torch.nn.Module, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        # Copies of tensors without a memory of the usual kind, such as sparse ones; of all others the state has copies.
        self._copies: dict[int, torch.Tensor] = {}
        # A tensor or module has one name, the first, whatever else it is called in a program.
        self._names: dict[int, str] = {}
        self._paths: dict[torch.nn.Module, str] = {}
        # Generators of random numbers that belong to a class; those of modules are part of their state.
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._grad_mode = torch.is_grad_enabled()
        for prefix, root in roots:
            for path, module in root.named_modules(prefix=prefix):
                if isinstance(module, GraphModule):
                    _ = module.code  # generating code sets attributes that must outlive the first run
                if module not in self._modules:
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
        attributes = dict(module.__dict__)
        contents = {name: value.copy() for name, value in attributes.items() if type(value) in _CONTAINERS}
        self._modules[module], self._paths[module] = (attributes, contents), path
        for value in vars(type(module)).values():
            if isinstance(value, torch.Generator) and id(value) not in self._generators:
                self._generators[id(value)] = value, value.get_state()
        for name, tensor in _values(module.__dict__).items():
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self._tensors:
                if torch.nn.parameter.is_lazy(tensor):
                    raise GraftError(
                        f"cannot run the model and leave it as it was: '{_joined(path, name)}' has no shape yet\n"
                        "run the model once, so that its lazy modules know their sizes"
                    )
                self._names[id(tensor)] = _joined(path, name)
                self._tensors[id(tensor)] = tensor, tensor.grad if tensor.is_leaf else None

    # ---- around a run ----

    def prepare(self, seed: int) -> None:
        """No gradients, and random numbers from the seed."""
        for tensor, _ in self._tensors.values():
            if tensor.is_leaf:
                tensor.grad = None
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)

    def restore(self) -> None:
        """Undo everything that a run changed."""
        torch.set_grad_enabled(self._grad_mode)
        self._state.restore_all()
        for key, (tensor, gradient) in self._tensors.items():
            if key in self._copies and not _same_values(tensor, self._copies[key]):
                tensor.data = self._copies[key].clone()
            if tensor.is_leaf:
                tensor.grad = gradient
        for generator, state in self._generators.values():
            generator.set_state(state)

    # ---- what a run did ----

    def _written(self) -> set[int]:
        """The tensors that do not hold what they held. All are looked at: a write through .data leaves no other trace."""
        return {key for key, (tensor, _) in self._tensors.items() if self._is_written(key, tensor)}

    def _is_written(self, key: int, tensor: torch.Tensor) -> bool:
        if key in self._copies:
            return not _same_values(tensor, self._copies[key])
        return has_values(tensor) and self._state.tensors.is_written(tensor)

    def changes(self, roots: Roots) -> dict[str, Any]:
        """The parameters, buffers and attributes that are not what they were; of two with one path the last root's."""
        result: dict[str, Any] = {}
        written = self._written()
        for prefix, root in roots:
            for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
                known = self._paths.get(module, path)
                for name, value in self._changes_of(module, written):
                    result.update(frozen_leaves(value, self.name_of(value, _joined(known, name))))
        if torch.is_grad_enabled() != self._grad_mode:
            result["torch.is_grad_enabled()"] = torch.is_grad_enabled()
        return result

    def name_of(self, value: Any, path: str) -> str:
        """What to call something at a path: a tensor that was there before has its name already."""
        return self._names.get(id(value), path) if isinstance(value, torch.Tensor) else path

    def _changes_of(self, module: torch.nn.Module, written: set[int]) -> Iterator[tuple[str, Any]]:
        if module not in self._modules:
            return
        attributes, contents = self._modules[module]
        before, now = _values({**attributes, **contents}), _values(module.__dict__)
        for name, value in now.items():
            if name not in before:
                yield name, value
            elif isinstance(value, torch.Tensor):
                if before[name] is not value or id(value) in written:
                    yield name, value
            elif name in contents:
                if not _same_content(value, contents[name]):
                    yield name, value
            elif value is not before[name] and not (isinstance(value, _PLAIN) and value == before[name]):
                yield name, value
        for name in before.keys() - now.keys():
            yield name, "deleted"


def module_of(model: Any) -> torch.nn.Module | None:
    """The module whose state a callable works on, if there is one."""
    owner = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


def modules_behind(model: Any) -> Roots:
    """The module of a callable, or those that a plain function uses, with what to put before their paths."""
    root = module_of(model)
    if root is not None:
        return [("", root)]
    try:
        used = inspect.getclosurevars(model)
    except (TypeError, ValueError):  # no Python function, or one with a variable that has no value yet
        return []
    values = {**used.globals, **used.nonlocals}
    return [(name, value) for name, value in values.items() if isinstance(value, torch.nn.Module)]


def observe(
    function: Callable[..., Any],
    roots: Roots,
    surroundings: Surroundings,
    situation: Situation,
    names: list[str],
    seed: int,
    gradients: bool,
) -> Observation:
    """Run a function on copies of the inputs, look at everything it did, and put everything back.

    `roots` are the modules it works on, and `names` what to call its inputs.
    """
    args, kwargs = situation.copied()
    inputs = dict(zip(names, [*args, *kwargs.values()], strict=True))
    result = Observation()
    surroundings.prepare(seed)
    try:
        try:
            value = function(*args, **kwargs)
        except Exception as error:  # whatever a model raises, the question is what the program does then
            result.error = error
            return result
        result.random = {name: RandomState(_digest(state)) for name, state in _random_states().items()}
        result.outputs = frozen_leaves(value, "output")
        result.state = surroundings.changes(roots)
        for name, given in inputs.items():
            result.inputs.update(frozen_leaves(given, name))
        if gradients:
            result.gradients = _gradients(value, inputs, roots, surroundings, seed)
        return result
    finally:
        surroundings.restore()


# ---- gradients ----


def backward(value: Any, seed: int) -> bool:
    """Pass random gradients back through every tensor of a result that asks for them; False where none does."""
    outputs = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
    if not outputs:
        return False
    generator = torch.Generator().manual_seed(seed)
    cotangents = [
        torch.randn(output.shape, generator=generator).to(device=output.device, dtype=output.dtype)
        for output in outputs
    ]
    torch.autograd.backward(outputs, cotangents)
    return True


def _gradients(
    value: Any, inputs: dict[str, Any], roots: Roots, surroundings: Surroundings, seed: int
) -> dict[str, Any]:
    try:
        if not backward(value, seed):
            return {}
    except Exception as error:  # a model may have no backward at all; then the program must have none either
        return {"backward": f"raises {type(error).__name__}"}
    leaves = [item for name, given in inputs.items() for item in named_tensors_in(given, name)]
    for prefix, root in roots:
        for path, module in root.named_modules(prefix=prefix):
            for name, parameter in [*module._parameters.items(), *module._buffers.items()]:
                if parameter is not None:
                    leaves.append((surroundings.name_of(parameter, _joined(path, name)), parameter))
    # Gradients need no copies: nobody else has them, and they are taken away when the state is restored.
    return {
        f"gradient of {name}": None if leaf.grad is None else FrozenTensor(leaf.grad, leaf.grad.requires_grad)
        for name, leaf in leaves
        if leaf.requires_grad and leaf.is_leaf
    }


# ---- random states ----


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def _digest(state: Any) -> int:
    """A state as something short that compares."""
    if isinstance(state, torch.Tensor):
        return hash(bytes(state.tolist()))
    if isinstance(state, (tuple, list)):
        return hash(tuple([_digest(item) for item in state]))
    return hash(state.tobytes() if hasattr(state, "tobytes") else state)


# ---- attributes ----


def _values(attributes: dict[str, Any]) -> dict[str, Any]:
    """Parameters, buffers and plain attributes in one table."""
    plain = {name: value for name, value in attributes.items() if name not in _TABLES}
    return {**plain, **(attributes.get("_parameters") or {}), **(attributes.get("_buffers") or {})}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _same_entries(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(now) == len(before) and all(map(operator.eq, now, before)) and _all_same(now.values(), before.values())


def _all_same(first: Any, second: Any) -> bool:
    return all(map(operator.is_, first, second))


def _same_content(container: Any, content: Any) -> bool:
    if type(container) is not type(content) or len(container) != len(content):
        return False
    if isinstance(content, dict):
        return _same_entries(container, content)
    return container == content if isinstance(content, set) else _all_same(container, content)


def _same_values(tensor: torch.Tensor, copied: torch.Tensor) -> bool:
    if tensor.shape != copied.shape or tensor.dtype != copied.dtype or tensor.device != copied.device:
        return False
    try:
        return torch.equal(tensor, copied)
    except (RuntimeError, NotImplementedError):  # not every layout and dtype can be compared
        return False
