"""`verify`: whether a program does what the model does, on the example inputs and in other situations.
The inputs of each situation come from `situations.py`, the runs from `runs.py`, and the search for the node at fault is in
`first_difference.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchgraft.analysis.comparison import Comparison, FrozenTensor, Tolerance, comparable, compare, has_values
from torchgraft.analysis.surroundings import Surroundings, modules_behind
from torchgraft.codegen.calling import example_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError, GuardError, one_line
from torchgraft.recording.first_difference import FirstDifference, first_difference
from torchgraft.recording.runs import Observation, observe
from torchgraft.recording.situations import Situation, situations
from torchgraft.results.progress import stage
from torchgraft.results.shown import Shown
from torchgraft.results.tables import painted

# What is compared: what model and program do with it, and what it is called.
_ASPECTS = {
    "outputs": ("returns", "result"),
    "inputs": ("leaves", "content of the inputs afterwards"),
    "gradients": ("gives", "backward"),
    "state": ("changes", "state afterwards"),
    "random": ("uses", "use of random numbers"),
}

# A gradient that is zero but for rounding (of the bias of attention's keys) is held against this part of the model's largest one.
_PART_OF_LARGEST = 0.1

RIGHT, WRONG, REFUSED, SKIPPED = "right", "wrong", "refused", "skipped"
# What the example says about a program that is wrong nowhere.
_VERDICTS = {
    RIGHT: "does what the model does",
    REFUSED: "REFUSES the example inputs",
    SKIPPED: "CANNOT BE COMPARED with the model",
}


@dataclass(frozen=True)
class Check:
    """How the program did in one situation; `reason` says why it was refused or skipped, or what is wrong."""

    situation: str
    status: str
    aspects: dict[str, Comparison]
    reason: str = ""
    first_difference: FirstDifference | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "situation": self.situation,
            "status": self.status,
            "aspects": {name: aspect.verdict for name, aspect in self.aspects.items()},
            "reason": self.reason,
            "node": self.first_difference.node if self.first_difference else None,
            "first_difference": str(self.first_difference) if self.first_difference else None,
        }


@dataclass(frozen=True, repr=False)
class Verification(Shown):
    """What `verify` found: one check for each situation. `str()` is a short table."""

    name: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether the program is right on the example and wrong nowhere; elsewhere it may refuse."""
        return self.checks[0].status == RIGHT and not any(check.status == WRONG for check in self.checks)

    def __bool__(self) -> bool:
        """`assert verify(...)` means what it says."""
        return self.ok

    @property
    def wrong(self) -> tuple[Check, ...]:
        """The situations in which the program does something else than the model."""
        return tuple([check for check in self.checks if check.status == WRONG])

    @property
    def first_difference(self) -> FirstDifference | None:
        """Where the program leaves the model, in the first situation in which it does."""
        return self.wrong[0].first_difference if self.wrong else None

    def raise_if_wrong(self) -> None:
        """Raise GraftError unless the program is right."""
        if not self.ok:
            raise GraftError(str(self))

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each situation."""
        return [check.to_dict() for check in self.checks]

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "checks": self.rows()}

    def text(self, color: bool = False) -> str:
        """A table of the situations, and what is wrong in the first that is."""
        rows = [("situation", *_ASPECTS)]
        rows += [(check.situation, *_cells(check)) for check in self.checks]
        widths = [max(len(row[column]) for row in rows if len(row) > 2) for column in range(len(rows[0]))]
        widths[0] = max(len(row[0]) for row in rows)
        table = [
            "  ".join(map(str.ljust, row, widths)).rstrip() if len(row) > 2 else f"{row[0]:<{widths[0]}}  {row[1]}"
            for row in rows
        ]
        return "\n".join([painted(self.headline(), "bold", color), *table, *self._explanation()])

    def _explanation(self) -> list[str]:
        if not self.wrong:
            return []
        lines = [f"wrong on {self.wrong[0].situation}: {self.wrong[0].reason}"]
        return lines + ([f"first difference: {self.first_difference}"] if self.first_difference else [])

    def headline(self) -> str:
        counts = [
            (status, sum(check.status == status for check in self.checks))
            for status in (RIGHT, WRONG, REFUSED, SKIPPED)
        ]
        summary = ", ".join(f"{count} {status}" for status, count in counts if count)
        if self.wrong:
            verdict = "DOES NOT DO what the model does"
        else:
            verdict = _VERDICTS[self.checks[0].status]
        return f"{self.name}: the program {verdict} ({summary})"


def _cells(check: Check) -> tuple[str, ...]:
    if check.aspects:
        return tuple([check.aspects[name].verdict if name in check.aspects else "-" for name in _ASPECTS])
    return (
        f"{check.status}: {check.reason}" if len(check.reason) < 100 else f"{check.status}: {check.reason[:97]}...",
    )


def verify(
    model: Callable[..., Any],
    program: torch.nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    gradients: bool = True,
    other_values: bool = True,
    other_sizes: bool | int = True,
    locate: bool = True,
    seed: int = 0,
) -> Verification:
    """Compare a program with the model it was captured from, in several situations.

    The situations are the example inputs; fresh values within the example's range and beyond it; inputs that require grad;
    and other sizes (or so many of them): another batch (the first dimension that inputs share), then other numbers among
    the sizes. Where the model itself fails the situation is skipped; where the program raises GuardError it has refused,
    which is not wrong.

    In each, model and program run on copies of the inputs from the same state and random seed, and five things are compared:
    outputs; what the inputs hold afterwards; the gradients of inputs and parameters for random gradients of the outputs, in the
    situations that add something to them; the parameters, buffers and attributes that changed; and the random generators.
    Numbers may differ by a small part of the largest element (1e-5 for float32), or by `rtol` and `atol`; gradients also by a
    tenth of that part of the largest gradient. Everything is restored afterwards.

    In the first situation that is wrong, the first node that differs is named (unless `locate` is False): the model is captured
    in that situation, and the two programs are compared node by node, as `compare` does.

    >>> from torchgraft import symbolic_trace
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    >>> program = symbolic_trace(model)
    >>> verify(model, program, (torch.ones(2, 3),)).ok
    True
    >>> program.graph.find_nodes(op="call_module", target="1")[0].target = "0"
    >>> verify(model, program, (torch.ones(2, 3),)).ok
    False
    """
    if not callable(program):
        raise TypeError(
            f"expected a program to compare with the model, got a {type(program).__name__}\n"
            "  verify(model, program, args) takes the model first"
        )
    values, keywords = example_inputs(args, kwargs)
    comparer = _Comparer(
        model, program, _input_names(model, values, keywords), Tolerance(rtol, atol), gradients, locate, seed
    )
    planned = situations(values, keywords, seed, other_values, other_sizes, gradients)
    checks = []
    for number, (name, make) in enumerate(planned, 1):
        with stage(f"verifying on {name}", number, len(planned)):
            checks.append(comparer.check(make()))
    return Verification(type(program).__name__, tuple(checks))


@dataclass
class _Comparer:
    """Runs model and program in one situation after the other."""

    _model: Callable[..., Any]
    _program: torch.nn.Module
    _names: list[str]
    _tolerance: Tolerance
    _gradients: bool
    _locate: bool
    _seed: int

    def __post_init__(self) -> None:
        self._surroundings = Surroundings(self._model, self._program)

    def check(self, situation: Situation) -> Check:
        """Compare in one situation."""
        expected = self._observe(self._model, situation)
        if expected.error is not None:
            if situation.name == "example":
                raise GraftError(
                    f"cannot verify: the model itself raises {one_line(expected.error)} on the example inputs\n"
                    "give inputs it accepts"
                ) from expected.error
            return Check(situation.name, SKIPPED, {}, f"the model itself raises {one_line(expected.error)}")
        found = self._observe(self._program, situation)
        if isinstance(found.error, GuardError):
            return Check(situation.name, REFUSED, {}, str(found.error))
        aspects = {} if found.error is not None else self._compare(expected, found)
        wrong = {name: aspect for name, aspect in aspects.items() if aspect.differences}
        if not wrong and found.error is None:
            return Check(situation.name, RIGHT, aspects)
        if self._is_unsteady(expected, situation):
            reason = "the model itself does something else when it is run twice from the same state and seed"
            return Check(situation.name, SKIPPED, {}, reason)
        if found.error is not None:
            reason = f"the program raises {one_line(found.error)}, and the model does not"
        else:
            reason = "; ".join(_summary(name, aspect) for name, aspect in wrong.items())
        difference = self._first_difference(situation, wrong) if self._locate else None
        self._locate = False  # once is enough: what is wrong in one situation is mostly wrong in the others
        return Check(situation.name, WRONG, aspects, reason, difference)

    def _observe(self, function: Callable[..., Any], situation: Situation) -> Observation:
        roots = modules_behind(self._model)
        if function is not self._model:  # where both have something under one name, the program's own counts
            roots = [*roots, *modules_behind(self._program)]
        wanted = self._gradients and situation.gradients
        return observe(function, roots, self._surroundings, situation, self._names, self._seed, wanted)

    def _compare(self, expected: Observation, found: Observation) -> dict[str, Comparison]:
        result: dict[str, Comparison] = {}
        for name, (verb, _) in _ASPECTS.items():
            if name == "gradients" and result["outputs"].differences:  # other outputs have other gradients
                result[name] = Comparison()
            else:
                tolerance = self._tolerance
                if name == "gradients":
                    tolerance = tolerance._replace(scale=_PART_OF_LARGEST * _largest(expected.gradients))
                result[name] = compare(getattr(expected, name), getattr(found, name), tolerance, verb)
        return result

    def _is_unsteady(self, expected: Observation, situation: Situation) -> bool:
        again = self._observe(self._model, situation)
        if again.error is not None:
            return True
        return any(aspect.differences for aspect in self._compare(expected, again).values())

    def _first_difference(self, situation: Situation, wrong: dict[str, Comparison]) -> FirstDifference | None:
        if not isinstance(self._program, GraphModule):
            return None
        others = "outputs" in wrong
        with stage("looking for the first difference"):
            return first_difference(self._model, self._program, situation, self._seed, self._tolerance, others)


def _largest(leaves: Mapping[str, Any]) -> float:
    """The largest finite element of some tensors."""
    tensors = [leaf.values for leaf in leaves.values() if isinstance(leaf, FrozenTensor) and leaf.values.numel()]
    found = [comparable(tensor).abs() for tensor in tensors if has_values(tensor)]
    return max((float(item[item.isfinite()].max()) for item in found if bool(item.isfinite().any())), default=0.0)


def _summary(name: str, aspect: Comparison) -> str:
    first, more = aspect.differences[0], len(aspect.differences) - 1
    return f"the {_ASPECTS[name][1]} differs, {first}" + (f" (and {more} more)" if more else "")


def _input_names(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """What the model calls its inputs: positional ones first."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [item.name for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    return [named[index] if index < len(named) else f"args[{index}]" for index in range(len(args))] + list(kwargs)
