"""The same model through `torch.jit.trace`, as the paper on torch.fx compares it (section 6.1): its text and what is in it.
It is there to be counted beside our programs; nothing is run from it.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from torchgraft.errors import one_line
from torchgraft.recording.runs import Surroundings
from torchgraft.reporting.levels import Counts


@dataclass(frozen=True)
class ScriptTrace:
    """What torch.jit.trace wrote; without a text, `failure` says why."""

    text: str = field(default="", repr=False)
    counts: Counts | None = None
    failure: str = ""


def script_trace(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ScriptTrace:
    """Trace a model with torch.jit.trace, everything inlined. Whatever goes wrong is noted, never raised.

    >>> script_trace(torch.nn.ReLU(), (torch.ones(2),), {}).counts.by_call
    {'aten::relu': 1}
    """
    surroundings = Surroundings(model)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            keyword_inputs = {"example_kwarg_inputs": kwargs} if kwargs and not args else {}
            if kwargs and args:
                return ScriptTrace(failure="torch.jit.trace takes inputs by place or by name, not both")
            traced = torch.jit.trace(
                model, None if keyword_inputs else args, check_trace=False, strict=False, **keyword_inputs
            )
            graph = traced.inlined_graph
            return ScriptTrace(str(graph), _counts(graph))
    except Exception as error:  # most models of transformers, and it raises nearly anything
        return ScriptTrace(failure=one_line(error))
    finally:
        surroundings.restore()


def _counts(graph: Any) -> Counts:
    kinds: Counter[str] = Counter()
    blocks = [graph]
    while blocks:
        for node in blocks.pop().nodes():
            kinds[node.kind()] += 1
            blocks.extend(node.blocks())
    state = kinds["prim::GetAttr"]
    calls = {kind: count for kind, count in kinds.most_common() if not kind.startswith("prim::")}
    inputs = len(list(graph.inputs())) - 1  # the first is the model itself
    return Counts(sum(kinds.values()), sum(calls.values()), inputs, state, 0, calls)


__all__ = ["ScriptTrace", "script_trace"]
