"""`doctor`: captures a model, verifies the program, and says what was fixed, what was kept whole and what tracing cannot follow.
The comparison with eager comes from `verify.py`.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from torchgraft.capturing.program import capture
from torchgraft.capturing.symbolic.tracer import Tracer
from torchgraft.capturing.whole import eager_error, modules_of
from torchgraft.codegen.calling import example_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError, one_line
from torchgraft.ir.guards import Guard, find_guards
from torchgraft.ir.node import Node
from torchgraft.ir.origin import SourceLine, line_of_error, source_of
from torchgraft.recording.verify import Verification, verify
from torchgraft.results.progress import stage
from torchgraft.results.shown import Shown
from torchgraft.results.tables import count, listed, painted

_NUMBER_REMEDY = (
    "hand the size on to torch calls as it is, without if, range() or int(); or capture once for each size you need"
)
_VALUE_REMEDY = (
    "use torch.where or another tensor operation instead of asking in Python; or capture once for each answer"
)
_MODE_REMEDY = (
    "capture once in training mode and once in evaluation mode; or pass self.training on instead of branching on it"
)
_ARGUMENT_REMEDY = "capture once for each value of this argument; or make it a tensor"
_FACT_REMEDY = "capture once for each kind of input you need"


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """What `doctor` found. `str()` is a report, `to_dict()` the same for machines."""

    name: str
    way: str
    failure: str
    verification: Verification | None
    specialised: tuple[Finding, ...]
    leaves: tuple[Finding, ...]
    symbolic: tuple[Finding, ...]
    program: GraphModule | None = field(compare=False)

    @property
    def ok(self) -> bool:
        """Whether there is a program, and nothing says that it is wrong."""
        return self.program is not None and (self.verification is None or self.verification.ok)

    @property
    def node_count(self) -> int:
        """How many nodes the program has."""
        return 0 if self.program is None else len(self.program.graph.nodes)

    def _sections(self) -> dict[str, list[dict[str, Any]]]:
        sections = {"specialised": self.specialised, "leaves": self.leaves, "symbolic": self.symbolic}
        return {name: [asdict(finding) for finding in findings] for name, findings in sections.items()}

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each finding."""
        return [{"section": name, **finding} for name, findings in self._sections().items() for finding in findings]

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "ok": self.ok,
            "captured": {"way": self.way, "nodes": self.node_count, "failure": self.failure or None},
            "verification": None if self.verification is None else self.verification.to_dict(),
            **self._sections(),
        }

    def text(self, color: bool = False) -> str:
        """The findings, section by section."""
        lines = [painted(self.headline(), "bold", color)]
        if self.program is None:
            lines.append(textwrap.indent(self.failure, "  "))
        else:
            lines += self._verified()
            lines += _section("Specialised", self.specialised, "nothing: the program holds for every input of its kind")
            lines += _section("Kept as a leaf", self.leaves, "nothing")
        lines += _section("Fails symbolically", self.symbolic, "nothing: symbolic_trace captures the model too")
        return "\n".join(lines)

    def headline(self) -> str:
        if self.program is None:
            return f"{self.name}: not captured ({self.way})"
        verdict = "not verified" if self.verification is None else "right" if self.ok else "WRONG"
        return f"{self.name}: captured ({self.way}), {count(self.node_count, 'node')}, {verdict}"

    def _verified(self) -> list[str]:
        if self.verification is not None:
            return ["", "Verified", textwrap.indent(str(self.verification), "  ")]
        return ["", "Verified", "  no: give example inputs to run the model and its program"]


def _section(title: str, findings: tuple[Finding, ...], nothing: str) -> list[str]:
    if not findings:
        return ["", title, f"  {nothing}"]
    return ["", f"{title} ({len(findings)})", *[textwrap.indent(str(finding), "  ") for finding in findings]]


def doctor(model: Callable[..., Any], args: Any = None, kwargs: Mapping[str, Any] | None = None) -> Diagnosis:
    """Capture a model, verify the program, and list what to know about it, each with its line and a remedy.

    With example inputs the capture is a watched run; without, it is symbolic and nothing is verified.

    >>> diagnosis = doctor(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()), (torch.ones(2, 3),))
    >>> diagnosis.ok, len(diagnosis.specialised), diagnosis.leaves[0].what
    (True, 0, 'modules of torch.nn stay one call each: 1 Linear, 1 ReLU')
    """
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "function")
    total = 1 if args is None and kwargs is None else 4
    with stage("tracing symbolically", 1, total):
        symbolic_program, failures = try_symbolically(model)
    if args is None and kwargs is None:
        failure = "" if symbolic_program is not None else failures[0].what
        return diagnosis_of(name, symbolic_program, failure, None, failures, "symbolic")
    values, keywords = example_inputs(() if args is None else args, kwargs)
    with stage("capturing", 2, total):
        program, failure = _captured(model, values, keywords)
    with stage("checking the captured program", 3, total):
        verification = None if program is None else verify(model, program, values, keywords)
    if symbolic_program is not None:
        with stage("checking the symbolic trace", 4, total):
            failures += _silent_failures(model, symbolic_program, values, keywords)
    return diagnosis_of(name, program, failure, verification, failures)


def diagnosis_of(
    name: str,
    program: GraphModule | None,
    failure: str,
    verification: Verification | None,
    symbolic: Iterable[Finding] = (),
    way: str = "watched",
) -> Diagnosis:
    """What is to be said of a program that was captured and verified already."""
    fixed = () if program is None else tuple(specialised(program))
    leaves = () if program is None else tuple(_leaves(program))
    return Diagnosis(name, way, failure, verification, fixed, leaves, tuple(symbolic), program)


def _captured(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[GraphModule | None, str]:
    try:
        return capture(model, args, kwargs), ""
    except Exception as error:  # any failure of a capture is a finding, unless the model itself fails
        root = model if isinstance(model, torch.nn.Module) else modules_of(model)
        eager = eager_error(model, root, args, kwargs)
        if eager is not None:
            raise GraftError(
                f"cannot diagnose: the model itself raises {one_line(eager)}\ngive inputs it accepts"
            ) from eager
        return None, f"{type(error).__name__}: {error}"


def _silent_failures(
    model: Callable[..., Any], program: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> list[Finding]:
    """A symbolic trace that works and means something else."""
    verification = verify(model, program, args, kwargs, other_values=False, other_sizes=False)
    if verification.ok:
        return []
    first = verification.wrong[0] if verification.wrong else verification.checks[0]
    difference = first.first_difference
    where = difference.line if difference is not None else ""
    node = f" (node '{difference.node}')" if difference is not None and difference.node else ""
    what = f"the traced program is {first.status} on {first.situation}{node}: {first.reason}"
    return [Finding(what, where, "capture the model with example inputs: capture(model, args)")]


# ---- what was specialised ----


def specialised(program: GraphModule) -> list[Finding]:
    """What is checked on every run, one finding for each line: a loop over layers asks the same of each."""
    places: dict[tuple[str, str], list[str]] = {}
    for guard in find_guards(program.graph):
        places.setdefault((guard.where, _remedy(guard)), []).append(f"{guard.condition} is {guard.expected!r}")
    return [Finding(_some(facts), where, remedy, len(facts)) for (where, remedy), facts in places.items()]


def _some(facts: list[str]) -> str:
    """The first of the different facts."""
    different = list(dict.fromkeys(facts))
    return ", ".join(different[:2]) + (", …" if len(different) > 2 else "")


def _remedy(guard: Guard) -> str:
    condition = guard.condition
    if condition.endswith("training"):
        return _MODE_REMEDY
    if "argument" in condition or condition.endswith("is given"):
        return _ARGUMENT_REMEDY
    if ".item()" in condition or "()" in condition.split(" ")[0]:
        return _VALUE_REMEDY
    if ".size(" in condition or ".numel(" in condition:
        return _NUMBER_REMEDY
    return _VALUE_REMEDY if isinstance(guard.expected, (bool, float)) else _FACT_REMEDY


# ---- what was kept whole ----


def _leaves(program: GraphModule) -> list[Finding]:
    plain: Counter[str] = Counter()
    others: Counter[tuple[str, str, str]] = Counter()
    for node in program.graph.nodes:
        if node.op == "call_module":
            module = program.get_submodule(str(node.target))
            reason = _why_whole(program, str(node.target), module)
            if reason is None:
                plain[type(module).__name__] += 1
            else:
                others[
                    f"{type(module).__name__} at '{node.target}': {reason[0]}", str(source_of(node) or ""), reason[1]
                ] += 1
        elif node.op == "call_function" and _is_users_function(node):
            name = getattr(node.target, "__qualname__", str(node.target))
            others[
                f"the Python function {name} is called as a whole", str(source_of(node) or ""), _FUNCTION_REMEDY
            ] += 1
    result = [Finding(what, where, remedy, count) for (what, where, remedy), count in others.items()]
    if plain:
        kinds = ", ".join(f"{count} {kind}" for kind, count in plain.most_common())
        what = f"modules of torch.nn stay one call each: {kinds}"
        result.insert(0, Finding(what, "", 'capture(model, args, level="function") shows what happens inside'))
    return result


_FUNCTION_REMEDY = (
    "nothing to do: it runs as it is; to see inside, do not mark it with wrap, or write it with torch functions"
)


def _why_whole(program: GraphModule, path: str, module: torch.nn.Module) -> tuple[str, str] | None:
    """Why a module is one call, and what would open it; None for the modules of torch.nn that always are."""
    recorded = program.meta.get("kept_whole", {}).get(path)
    if recorded is not None:
        return f"kept whole because {recorded}", "change that line, if you need to see inside"
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return "kept whole so that its hooks run", "remove the hooks before capturing, if you need to see inside"
    if isinstance(module, torch.jit.ScriptModule):
        return (
            "kept whole, because compiled TorchScript cannot be watched",
            "capture the Python module it was made from",
        )
    if type(module).__module__.startswith(("torch.nn", "torch.ao.nn")):
        return None
    return (
        "kept whole, because it does something that cannot be written down as torch calls",
        "write its state into buffers in place, and stay with torch operations",
    )


def _is_users_function(node: Node) -> bool:
    home = str(getattr(node.target, "__module__", None) or "")
    if not home and not hasattr(node.target, "__self__"):
        return False
    known = ("torch", "_operator", "builtins", "math", "random", "operator", "torchgraft")
    return home.split(".")[0] not in known and not isinstance(node.target, type(len))


# ---- tracing past the first error ----


_MOST_TRIALS = 10


@dataclass(frozen=True)
class Finding:
    """One thing to know: what it is, the user's line, what to do about it, and how often it occurs."""

    what: str
    where: str
    remedy: str
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} in all)" if self.count > 1 else ""
        lines = [f"- {self.what}{times}", f"  at {self.where}" if self.where else "", f"  remedy: {self.remedy}"]
        return "\n".join(filter(None, lines))


class _Trial(Tracer):
    """A trace that keeps some modules whole and remembers in which module it failed."""

    def __init__(self, kept: list[Callable[[torch.nn.Module], bool]]) -> None:
        super().__init__()
        self._kept = kept
        self.failed_in: torch.nn.Module | None = None

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is kept whole."""
        return any(is_kept(m) for is_kept in self._kept) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module; the innermost one that raises is remembered."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or m
            raise


def try_symbolically(model: Callable[..., Any]) -> tuple[GraphModule | None, list[Finding]]:
    """The program of a symbolic trace that worked at once, and what stood in the way of others, ten things at most.

    A module that fails is kept as a leaf in the next trial, together with all others of its class.
    """
    kept: list[Callable[[torch.nn.Module], bool]] = []
    findings: list[Finding] = []
    while len(findings) < _MOST_TRIALS:
        trial = _Trial(kept)
        try:
            graph = trial.trace(model)
        except Exception as error:  # a model may raise anything when it is given proxies
            module = trial.failed_in
            findings.append(_finding(model, error, module))
            if module is None or module is model:
                break
            kept.append(_same_kind(module))
        else:
            return (None if findings else GraphModule(trial.root, graph)), findings
    return None, findings


def _same_kind(module: torch.nn.Module) -> Callable[[torch.nn.Module], bool]:
    cls = type(module)
    if cls.__module__.startswith("torch.nn"):  # one container that fails says nothing about the others
        return lambda other: other is module
    return lambda other: type(other) is cls


def _finding(model: Any, error: Exception, module: torch.nn.Module | None) -> Finding:
    line = line_of_error(error)
    root = model if isinstance(model, torch.nn.Module) else None
    what = _what(error, line)
    if root is not None and module is not None:
        paths = [path for path, other in root.named_modules() if path and _same_kind(module)(other)]
        what += f" (in {type(module).__name__} at {listed(list(map(repr, paths)), 3)})"
    leaf = (
        ""
        if module is None or module is root
        else f", or keep {type(module).__name__} as a leaf (Tracer.is_leaf_module)"
    )
    return Finding(what, str(line or ""), f"give example inputs: capture(model, args){leaf}")


def _what(error: Exception, line: SourceLine | None) -> str:
    """What happened, without the line (it is shown apart) and the advice that follows it."""
    text = str(error)
    if not isinstance(error, GraftError):
        return one_line(error)
    if line is not None:
        text = text.replace(f" at {line}", "")
    return re.split(r"; |\n", text)[0]
