"""Tries a trap: captures it in one of four ways, runs model and program in every variation, and gives a verdict on each.
What is compared is said in `observation.py`; the traps are data, in the files named after what they trap.
"""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

import torchgraft
from tests.traps.observation import (
    Observation,
    attributes_of,
    difference,
    first_difference,
    frozen,
    observe,
    random_states,
    reset_switches,
    seed,
    state_tensors,
    switches,
)
from tests.traps.trap import Call, Trap
from torchgraft import GraftError, GraphModule
from torchgraft.capturing.program import capture

RIGHT, REFUSED, WRONG, CRASH, SKIPPED = "right", "refused", "WRONG", "CRASH", "skipped"
LEFT_ALONE = "the model is left alone"


class Verdict(NamedTuple):
    """How a program did in one variation, and what happened."""

    kind: str
    reason: str = ""


def _symbolic(model: Any, call: Call) -> GraphModule:
    return torchgraft.symbolic_trace(model)


def _watched(level: str) -> Callable[[Any, Call], GraphModule]:
    return lambda model, call: capture(model, call.args, call.kwargs, level=level)


WAYS: dict[str, Callable[[Any, Call], GraphModule]] = {
    "symbolic": _symbolic,
    "module": _watched("module"),
    "function": _watched("function"),
    "aten": _watched("aten"),
}


@dataclass(frozen=True)
class Variation:
    """What is different from running the program as it was captured."""

    name: str
    inputs: Callable[[], Any]
    values: int = 0
    captured_with: Callable[[], Any] | None = None
    captured_under: Callable[[], AbstractContextManager[Any]] = nullcontext
    run_under: Callable[[], AbstractContextManager[Any]] = nullcontext
    calls: int = 1
    other_mode: bool = False
    dtype: torch.dtype | None = None
    device: str | None = None
    gradients: bool = False
    edit: Callable[[Any], Any] | None = None
    is_copy: bool = False


def _without_dead_code(module: GraphModule) -> GraphModule:
    module.graph.eliminate_dead_code()
    return module


def _pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def variations(trap: Trap) -> Iterator[Variation]:
    """Everything a trap is tried on; the first is the example it was captured with."""
    example = functools.partial(trap.inputs, trap.example)
    yield Variation("example", example)
    yield Variation("other values", example, values=1)
    for size in trap.sizes:
        if size != trap.example:
            yield Variation(f"size {size}", functools.partial(trap.inputs, size), values=1)
    if trap.sizes:
        small, large = functools.partial(trap.inputs, 1), functools.partial(trap.inputs, max(trap.sizes))
        yield Variation("captured at size 1", large, captured_with=small)
    for name, inputs in trap.others.items():
        yield Variation(name, inputs, values=1)
        yield Variation(f"captured with {name}", example, captured_with=inputs)
    yield Variation("three calls", example, calls=3)
    yield Variation("gradients", example, values=1, gradients=True)
    yield Variation("captured without gradients", example, captured_under=torch.no_grad, gradients=True)
    yield Variation("run without gradients", example, run_under=torch.no_grad)
    yield Variation("double", example, dtype=torch.float64)
    if trap.is_module:
        yield Variation("other mode", example, other_mode=True)
    if trap.devices:
        yield Variation("on another device", example, device="meta")
    yield Variation("dead code removed", example, values=1, calls=2, edit=_without_dead_code)
    yield Variation("deep copy", example, values=1, calls=2, edit=copy.deepcopy, is_copy=True)
    yield Variation("pickled", example, values=1, calls=2, edit=_pickled, is_copy=True)


# ---- making models and inputs ----


def _model(trap: Trap) -> Any:
    reset_switches()
    seed(3)
    model = trap.build()
    if isinstance(model, nn.Module):
        model.train(trap.mode == "train")
    return model


def _changed(module: Any, trap: Trap, variation: Variation) -> Any:
    """The model or program as the variation wants it: in the other mode, cast, moved."""
    if not isinstance(module, nn.Module) or not trap.is_module:
        return module
    if variation.other_mode:
        module.train(trap.mode != "train")
    if variation.dtype is not None:
        module.to(variation.dtype)
    return module.to(variation.device) if variation.device is not None else module


def _calls(variation: Variation) -> list[Call]:
    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_floating_point():
            leaf = leaf if variation.dtype is None else leaf.to(variation.dtype)
            leaf.requires_grad_(leaf.requires_grad or variation.gradients)
        return leaf.to(variation.device) if variation.device is not None else leaf

    calls = []
    for number in range(variation.calls):
        seed(100 + variation.values * 10 + number)
        call = Call.of(variation.inputs())
        calls.append(Call(*pytree.tree_map(convert, (call.args, call.kwargs))))
    return calls


def _example(trap: Trap, variation: Variation) -> Call:
    seed(100)
    return Call.of((variation.captured_with or functools.partial(trap.inputs, trap.example))())


# ---- running ----


class Trial:
    """One trap in one variation; eager is run once for all the ways of capturing."""

    def __init__(self, trap: Trap, variation: Variation) -> None:
        self.trap, self.variation = trap, variation

    @functools.cached_property
    def expected(self) -> Observation:
        """What the model itself does."""
        model = _changed(_model(self.trap), self.trap, self.variation)
        with self.variation.run_under():
            return observe(model, _calls(self.variation), model, is_apart=self.is_apart)

    @property
    def is_apart(self) -> bool:
        """Whether the program no longer shares all that it has with the model."""
        return self.variation.is_copy or self.variation.dtype is not None or self.variation.device is not None

    @functools.cached_property
    def is_possible(self) -> bool:
        """Whether the model itself can be copied the way the program is to be, and runs on the inputs of the capture."""
        model = _model(self.trap)
        try:
            if self.variation.captured_with is not None:
                call = _example(self.trap, self.variation)
                model(*call.args, **call.kwargs)
            if self.variation.is_copy and self.variation.edit is not None and isinstance(model, nn.Module):
                self.variation.edit(model)
        except Exception:
            return False
        return True

    def capture(self, way: str) -> tuple[GraphModule | Exception, Any]:
        """The program, or what capturing raised; and the model."""
        model, call = _model(self.trap), _example(self.trap, self.variation)
        seed(5)
        with self.variation.captured_under():
            try:
                return WAYS[way](model, call), model
            except Exception as error:
                return error, model

    def verdict(self, way: str, known_failure: Exception | None) -> Verdict:
        """Capture, run and compare; there is no need to try a capture that is known to fail."""
        if not self.is_possible:
            return Verdict(SKIPPED, "the model itself cannot be copied or captured like this")
        expected = self.expected
        program, model = self.capture(way) if known_failure is None else (known_failure, None)
        if isinstance(program, Exception):
            if expected.error is not None:
                return Verdict(SKIPPED, f"eager raises {_named(expected.error)}")
            return _failure(program, "capturing")
        try:
            program = program if self.variation.edit is None else self.variation.edit(program)
            program = _changed(program, self.trap, self.variation)
        except Exception as error:
            return _failure(error, self.variation.name)
        with self.variation.run_under():
            found = observe(program, _calls(self.variation), model, program, self.is_apart)
        return _compare(expected, found)


def _compare(expected: Observation, found: Observation) -> Verdict:
    if expected.error is not None:
        if found.error is not None:
            return Verdict(SKIPPED, f"eager raises {_named(expected.error)}")
        return Verdict(WRONG, f"answers, although eager raises {_named(expected.error)}")
    if found.error is not None:
        return _failure(found.error, "running")
    if found.backward_error is not None and expected.backward_error is None:
        return _failure(found.backward_error, "differentiating")
    problem = difference(expected, found)
    return Verdict(RIGHT) if problem is None else Verdict(WRONG, problem)


def _failure(error: Exception, doing: str) -> Verdict:
    return Verdict(REFUSED if isinstance(error, GraftError) else CRASH, f"{doing} raises {_named(error)}")


def _named(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


# ---- judging ----

_trials: dict[tuple[str, str], Trial] = {}


@functools.cache
def _verdicts(name: str, way: str, find: Callable[[str], Trap]) -> dict[str, Verdict]:
    trap = find(name)
    result: dict[str, Verdict] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result[LEFT_ALONE], failure = _left_alone(trap, way)
        for variation in variations(trap):
            if variation.name not in trap.skip:
                trial = _trials.setdefault((name, variation.name), Trial(trap, variation))
                is_usual = variation.captured_with is None and variation.captured_under is nullcontext
                result[variation.name] = trial.verdict(way, failure if is_usual else None)
    return result


def judge(trap: Trap, way: str) -> dict[str, Verdict]:
    """The verdict on every variation of a trap; worked out once, because the summary asks again."""
    _known.setdefault(trap.name, trap)
    return _verdicts(trap.name, way, _known.__getitem__)


_known: dict[str, Trap] = {}


def captured_and_run(trap: Trap, way: str) -> GraphModule | GraftError:
    """The program of a trap, which runs on its example; or the refusal, of the capture or of the run. Anything else raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = Trial(trap, Variation("example", functools.partial(trap.inputs, trap.example)))
        program, _ = trial.capture(way)
        try:
            if isinstance(program, Exception):
                raise program
            call = _example(trap, trial.variation)
            program(*call.args, **call.kwargs)
        except GraftError as error:
            return error
        return program


def _left_alone(trap: Trap, way: str) -> tuple[Verdict, Exception | None]:
    """Capturing, even where it is refused, changes neither the model nor its inputs, and the model still runs as before.
    Also what capturing raised."""
    variation = Variation("the model afterwards", functools.partial(trap.inputs, trap.example), calls=2)
    expected = Trial(trap, variation).expected
    model, call = _model(trap), _example(trap, variation)
    seed(5)
    before = _surroundings(model, call)
    error: Exception | None = None
    try:
        WAYS[way](model, call)
    except Exception as problem:
        error = problem
    found = first_difference(before, _surroundings(model, call))
    if found is not None:
        return Verdict(WRONG, f"capturing changes {found}"), error
    return _compare(expected, observe(model, _calls(variation), model)), error


def _surroundings(model: Any, call: Call) -> dict[str, Any]:
    result = {
        **attributes_of(model, None),
        **random_states(),
        **switches(),
        **frozen("input", [call.args, call.kwargs]),
    }
    result.update(frozen("state", dict(state_tensors(model))))
    if isinstance(model, nn.Module):
        for path, module in model.named_modules():
            result[f"{path}.training"] = module.training
            result[f"{path} has"] = tuple(sorted(vars(module)))
            result[f"{path} hooks"] = (
                len(module._forward_hooks),
                len(module._forward_pre_hooks),
                type(module).__name__,
            )
        result["gradients"] = tuple([value.grad is None for value in model.parameters()])
    return result


def share_of_right(results: list[dict[str, Verdict]]) -> float:
    """The part of the variations that are right, of all in which the model itself runs."""
    kinds = [item.kind for result in results for name, item in result.items() if name != LEFT_ALONE]
    counted = [kind for kind in kinds if kind != SKIPPED]
    return counted.count(RIGHT) / max(len(counted), 1)
