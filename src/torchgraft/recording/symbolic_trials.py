"""Tracing a model symbolically past its first error: what fails is kept as a leaf, and the trace is tried again.
What is said about the result is decided in `doctor.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchgraft.capturing.symbolic.tracer import Tracer
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError, one_line
from torchgraft.ir.origin import SourceLine, line_of_error

_MOST_TRIALS = 10


@dataclass(frozen=True)
class Finding:
    """One thing to know: what it is, the user's line, what to do about it, and how often it occurs."""

    what: str
    where: str
    remedy: str
    count: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"what": self.what, "where": self.where, "remedy": self.remedy, "count": self.count}

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
        shown = ", ".join(map(repr, paths[:3])) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
        what += f" (in {type(module).__name__} at {shown})"
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
