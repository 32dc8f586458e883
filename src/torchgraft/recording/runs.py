"""One run of a model or program, observed from outside: what it returns, writes, draws and passes back as gradients.
What a run changes is restored by `analysis/surroundings.py`; comparing two observations is left to `verify.py`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torchgraft.analysis.comparison import FrozenTensor, RandomState, frozen_leaves, named_tensors_in, tensors_in
from torchgraft.analysis.surroundings import Roots, Surroundings, joined
from torchgraft.recording.situations import Situation


@dataclass
class Observation:
    """What one run did; every value is a copy, by the path it had, made before anything was restored."""

    outputs: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None


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
    with surroundings.restored(seed):
        try:
            value = function(*args, **kwargs)
        except Exception as error:  # whatever a model raises, the question is what the program does then
            result.error = error
            return result
        result.random = {name: RandomState(_digest(state)) for name, state in _random_states().items()}
        result.outputs = frozen_leaves(value, "output")
        result.state = surroundings.changes()
        for name, given in inputs.items():
            result.inputs.update(frozen_leaves(given, name))
        if gradients:
            result.gradients = _gradients(value, inputs, roots, surroundings, seed)
        return result


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
                    leaves.append((surroundings.name_of(parameter, joined(path, name)), parameter))
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
