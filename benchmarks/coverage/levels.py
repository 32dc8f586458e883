"""The levels below functions: one function-level program lowered to ATen and core ATen, and to forward and backward as one.
How such programs are captured, and compared in evaluation and training mode, is in `examination`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import torchgraft
from benchmarks.coverage.cases import Case, Inputs
from benchmarks.coverage.comparison import difference, leaves
from benchmarks.coverage.judging import attempted, gradient_difference, judge, run, seeded
from benchmarks.coverage.rows import EQUAL, WRONG, Attempt


def lowered(owner: nn.Module, program: Any, example: Inputs, level: str, rounds: int) -> tuple[Attempt, Any]:
    """A function-level program at level "aten" or "core_aten"; the time is that of the lowering alone."""

    def make() -> Any:
        return torchgraft.lower(program, example.args, example.kwargs, level=level)

    attempt, made = attempted(owner, make)
    if made is not None:
        attempt.nodes, attempt.guards = len(made.graph.nodes), len(made.guards)
        attempt.kept = dict(made.meta.get("kept_calls", {}))
        attempt.seconds = _least_seconds(make, attempt, rounds)
    return attempt, made


def _least_seconds(make: Callable[[], Any], attempt: Attempt, rounds: int) -> float:
    """The least time that a lowering took, as it is taken for torch.export: the first of its kind pays for caches."""
    taken = [attempt.first_seconds or 0.0]
    while len(taken) < min(rounds, 2) and taken[0] <= 3:
        started = time.process_time()
        make()
        taken.append(time.process_time() - started)
    return min(taken)


# Forward and backward as one program


@dataclass(frozen=True)
class Step:
    """A step of training in eager: what it returned, the gradients of its results that it was given, and what came of them."""

    result: Any
    tangents: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]


def examine_joint(
    model: nn.Module, owner: nn.Module, program: Any, case: Case, example: Inputs, rounds: int
) -> Attempt | None:
    """Forward and backward as one program beside eager's; None where the model cannot be trained: the second step of those that
    cache what requires a gradient fails in evaluation mode."""
    steps = {name: _tried(model, seeded(make, name)) for name, make in {"example": case.example, **case.others}.items()}
    again = _tried(model, seeded(case.example, "example"))
    if not isinstance(steps["example"], Step) or not isinstance(again, Step) or not again.tangents:
        return None

    def make() -> Any:
        return torchgraft.capture_training(program, example.args, example.kwargs)

    attempt, made = attempted(owner, make)
    if made is None:
        return attempt
    attempt.nodes, attempt.guards = len(made.joint.graph.nodes), len(made.joint.guards)
    attempt.seconds = _least_seconds(make, attempt, rounds)
    for name, inputs in {"example": case.example, **case.others}.items():
        step = steps[name]
        if isinstance(step, Step) and not step.tangents:
            continue
        verdict, reason = judge(
            lambda step=step, name=name, inputs=inputs: _stepped(made, seeded(inputs, name), step),
            step,
            _step_difference,
        )
        if verdict == WRONG and isinstance(step, Step) and reason.startswith("gradient"):
            # Where two values are nearly the same, rounding decides which of them is the largest and gets the gradient.
            found = _stepped(made, seeded(inputs, name), step)
            if _is_nearer(model, seeded(inputs, name), found, step):
                verdict, reason = EQUAL, ""
        attempt.verdicts[name] = verdict
        if reason:
            attempt.reasons[name] = reason
    return attempt


def _is_nearer(model: nn.Module, inputs: Inputs, found: Step, step: Step) -> bool:
    """Whether gradients are nearer than eager's to those that the model has in double precision."""
    exact = copy.deepcopy(model).double()
    given = Inputs(*pytree.tree_map_only(torch.Tensor, _doubled, (inputs.args, inputs.kwargs)))
    tangents = {name: tangent.double() for name, tangent in step.tangents.items()}
    truth = _eager_step(exact, given, tangents).gradients

    def distance(gradients: dict[str, Any]) -> float:
        both = [(gradients[name], value) for name, value in truth.items() if value is not None]
        return max(float((one.double() - other).abs().max()) for one, other in both)

    return distance(found.gradients) <= distance(step.gradients)


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _tried(model: nn.Module, inputs: Inputs) -> Step | Exception:
    try:
        return _eager_step(model, inputs)
    except Exception as error:
        return error
    finally:
        model.zero_grad()


def _eager_step(model: nn.Module, inputs: Inputs, tangents: dict[str, torch.Tensor] | None = None) -> Step:
    result = run(model, inputs)[0]
    pairs, _ = pytree.tree_flatten_with_path(result)
    learning = {
        "result" + pytree.keystr(path): leaf
        for path, leaf in pairs
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    torch.manual_seed(2)
    # Not ones: the sum of a softmax or of a normalization has no gradient but rounding.
    tangents = tangents or {name: torch.randn_like(tensor) for name, tensor in learning.items()}
    if tangents:
        torch.autograd.backward(list(learning.values()), list(tangents.values()))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Step(_plain(result), tangents, gradients)


def _stepped(programs: Any, inputs: Inputs, step: Step | Exception) -> Step:
    """The same step by the captured programs."""
    nodes = programs.joint.graph.find_nodes(op="placeholder")
    names = [str(node.meta["origin_name"]) for node in nodes if node.meta["origin_kind"] == "tangent"]
    given = copy.deepcopy(inputs)
    tangents = None if isinstance(step, Exception) else {name: step.tangents[name] for name in names}
    torch.manual_seed(1)
    found = programs.run(*given.args, tangents=tangents and list(tangents.values()), **given.kwargs)
    return Step(_plain(found.results), tangents or {}, found.gradients)


def _plain(result: Any) -> Any:
    """The tensors and values of a result, detached: what a joint program returns has no history."""
    return {place: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for place, leaf in leaves(result)}


def _step_difference(expected: Step, found: Step) -> str:
    text = difference(expected.result, found.result)
    if text:
        return text
    if expected.tangents.keys() != found.tangents.keys():
        return f"takes gradients of {', '.join(found.tangents)}, not of {', '.join(expected.tangents)}"
    return gradient_difference(expected.gradients, {name: found.gradients.get(name) for name in expected.gradients})
