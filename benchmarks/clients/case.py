"""What a file of cases is made of: functions named `case_…`, repeated for several values with `@each(...)`.
A case raises when something is wrong; what it returns must be the same on torch.fx and on torchgraft.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

Body = Callable[..., Any]


def each(*values: Any, **named: Any) -> Callable[[Body], Body]:
    """Run the case once for each value; its name is the text of the value, or the keyword."""

    def mark(body: Body) -> Body:
        body.each = {**{str(value): value for value in values}, **named}  # type: ignore[attr-defined]
        return body

    return mark


def cases_of(module: ModuleType) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The cases in the order of the file, each with its name."""
    for name, body in list(vars(module).items()):
        if not name.startswith("case_"):
            continue
        label = name.removeprefix("case_").replace("_", " ")
        if not hasattr(body, "each"):
            yield label, body
            continue
        for text, value in body.each.items():
            yield f"{label}: {text}", lambda body=body, value=value: body(value)


def same(got: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Both are the same tree of the same numbers; NaN equals NaN."""
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)


def nodes(graph: Any) -> list[str]:
    """The nodes of a graph as lines, for comparing what both libraries record."""
    lines = []
    for node in graph.nodes:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        inputs = ", ".join(before.name for before in node.all_input_nodes)
        lines.append(f"{node.name} = {node.op}[{target}]({inputs})")
    return lines


def quiet() -> None:
    """Warnings of the clients say nothing about either library."""
    warnings.simplefilter("ignore")
