"""Runs a program and writes down everything a user could notice: results, inputs, gradients, buffers, random state, aliases.
Two runs are the same if their observations are; `difference` says in words where they are not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass
class Observation:
    """Everything a run did."""

    error: str | None
    result: Any
    inputs: list[torch.Tensor]
    gradients: Any
    state: dict[str, torch.Tensor]
    random_state: tuple[Any, Any]
    aliases: list[tuple[int, int]]


def make_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf that needs a gradient, and a plain tensor that programs may write into."""
    x = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]], requires_grad=True)
    y = torch.tensor([[1.0, 2.0, -0.5], [-1.5, 0.75, 0.125]])
    return x, y


def observe(function: Callable[..., Any], model: nn.Module, seed: int) -> Observation:
    """Run `function` on fresh inputs; `model` holds the parameters and buffers it may touch."""
    inputs = make_inputs()
    torch.manual_seed(seed)
    random.seed(seed)
    result, error, gradients = None, None, None
    try:
        result = function(*inputs)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    random_state = (torch.get_rng_state(), random.getstate())
    state = {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    aliases = _aliases([*leaves, *inputs, *model.buffers()])
    if error is None:
        gradients = _gradients(leaves, [inputs[0], *model.parameters()])
    return Observation(error, result, inputs, gradients, state, random_state, aliases)


def _gradients(leaves: list[torch.Tensor], targets: list[torch.Tensor]) -> Any:
    try:
        losses = [(leaf.float() * (number + 1)).sum() for number, leaf in enumerate(leaves) if leaf.requires_grad]
        if not losses:
            return "nothing to differentiate"
        return torch.autograd.grad(sum(losses[1:], losses[0]), targets, allow_unused=True)
    except RuntimeError:
        return None


def _aliases(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Which of the tensors share memory."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [(i, j) for i in range(len(storages)) for j in range(i) if storages[i] == storages[j]]


def difference(expected: Observation, found: Observation) -> str | None:
    """The first thing in which two runs differ, or None."""
    if expected.error is not None and "multiple views" in expected.error:
        return None  # `a, b = value` is recorded as two views of their own, which may be written; eager's may not
    if found.error is not None and "a leaf Variable that requires grad" in found.error:
        return (
            None  # torch brings the history of a view up to date when it is next read, so a dead read can matter to it
        )
    if (expected.error is None) is not (found.error is None):
        return f"one raised: expected {expected.error}, found {found.error}"
    if expected.error is not None:
        return None
    parts = ["result", "inputs", "state"]
    if expected.gradients is not None:  # eager could not differentiate; that a program can is no harm
        parts.append("gradients")
    for part in parts:
        problem = _tree_difference(getattr(expected, part), getattr(found, part))
        if problem is not None:
            return f"{part}: {problem}"
    if not torch.equal(expected.random_state[0], found.random_state[0]):
        return "the state of torch's random numbers"
    if expected.random_state[1] != found.random_state[1]:
        return "the state of Python's random numbers"
    if expected.aliases != found.aliases:
        return f"what shares memory: expected {expected.aliases}, found {found.aliases}"
    return None


def _tree_difference(expected: Any, found: Any) -> str | None:
    if isinstance(expected, torch.Tensor):
        return None if _same_tensor(expected, found) else f"expected {expected!r}, found {found!r}"
    if isinstance(expected, dict):
        if not isinstance(found, dict) or list(expected) != list(found):
            return f"expected a dict of {list(expected)}, found {found!r}"
        return _first_difference([(expected[key], found[key]) for key in expected])
    if isinstance(expected, torch.Size):
        expected = tuple(expected)  # whether it stays a torch.Size is asked in test_found_programs.py
    if isinstance(expected, (tuple, list)):
        if not isinstance(found, type(expected)) or len(expected) != len(found):
            return f"expected a {type(expected).__name__} of {len(expected)}, found {found!r}"
        return _first_difference(list(zip(expected, found, strict=True)))
    return None if expected == found else f"expected {expected!r}, found {found!r}"


def _first_difference(pairs: list[tuple[Any, Any]]) -> str | None:
    for expected, found in pairs:
        problem = _tree_difference(expected, found)
        if problem is not None:
            return problem
    return None


def _same_tensor(expected: torch.Tensor, found: Any) -> bool:
    if not isinstance(found, torch.Tensor) or expected.dtype != found.dtype or expected.shape != found.shape:
        return False
    if expected.requires_grad != found.requires_grad:
        return False
    return torch.equal(torch.nan_to_num(expected.detach()), torch.nan_to_num(found.detach()))


@dataclass
class Snapshot:
    """A model, the random states and torch's switches as they are now, so that a trace can be shown to change none of it."""

    attributes: dict[str, dict[str, Any]]
    tensors: dict[str, tuple[torch.Tensor, int, torch.Tensor, bool, Any]]
    switches: tuple[Any, ...]
    random_state: tuple[torch.Tensor, Any]

    @classmethod
    def of(cls, model: nn.Module) -> Snapshot:
        """Take the picture."""
        attributes, tensors = {}, {}
        for path, module in model.named_modules():
            attributes[path] = {name: _content(value) for name, value in vars(module).items()}
            found = {**module._parameters, **module._buffers, **vars(module)}
            for name, value in found.items():
                if isinstance(value, torch.Tensor):
                    picture = (value, value._version, value.detach().clone(), value.requires_grad, value.grad)
                    tensors[f"{path}.{name}"] = picture
        switches = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
        )
        return cls(attributes, tensors, switches, (torch.get_rng_state(), random.getstate()))

    def difference(self, later: Snapshot) -> str | None:
        """What has changed since, in words, or None."""
        if self.attributes.keys() != later.attributes.keys() or self.tensors.keys() != later.tensors.keys():
            return "which modules and tensors there are"
        for path, before in self.attributes.items():
            after = later.attributes[path]
            names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            if names:
                return f"attributes {names} of module '{path}'"
        for path, (tensor, version, content, requires_grad, grad) in self.tensors.items():
            now = later.tensors[path]
            if now[0] is not tensor or now[1] != version or now[3] != requires_grad or now[4] is not grad:
                return f"the tensor {path}, its version, requires_grad or grad"
            if not torch.equal(torch.nan_to_num(now[2]), torch.nan_to_num(content)):
                return f"the values of {path}"
        if self.switches != later.switches:
            return f"switches: {self.switches} became {later.switches}"
        if not torch.equal(self.random_state[0], later.random_state[0]):
            return "the state of torch's random numbers"
        return None if self.random_state[1] == later.random_state[1] else "the state of Python's random numbers"


def _content(value: Any) -> Any:
    """Something that compares equal as long as nobody touched the value; containers are looked into."""
    if isinstance(value, dict):
        return (id(value), [(key, _content(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple, set)) or type(value).__name__ == "deque":
        return (id(value), [_content(item) for item in value])
    if isinstance(value, (int, float, str, bool, bytes, type(None))):
        return (type(value), value)
    if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, torch.Tensor, type)) and not callable(value):
        return (id(value), _content(vars(value)))
    return id(value)
