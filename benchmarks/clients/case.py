"""What a file of cases is made of: functions named `case_…`, repeated for several values with `@each(...)`.
A case raises when something is wrong; what it returns must be the same on torch.fx and on torchgraft.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
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


# What torchgraft records on purpose where torch.fx records nothing: docs/from_torch_fx.md says why for each.
_ON_PURPOSE = {"check_given", "check_kind", "check_training", "check_value", "enter_context", "exit_context"}
_IN_PLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}


def nodes(graph: Any) -> list[str]:
    """The nodes of a graph as lines, for comparing what both libraries record; without what differs on purpose."""
    left_out: set[Any] = set()
    for node in reversed(graph.nodes):
        readers = getattr(node, "_users", node.users)  # torchgraft's `users` have no guards among them
        if _is_on_purpose(node) or (readers and all(reader in left_out for reader in readers)):
            left_out.add(node)
    names: dict[Any, str] = {}
    parts: dict[Any, list[str]] = {}  # what a result of a class of its own is put together from
    counts: Counter[str] = Counter()
    lines = []
    for node in graph.nodes:
        if node in left_out and node.op != "placeholder":
            continue
        base = re.sub(r"_\d+$", "", node.name)  # the numbers of those left out are free for others
        names[node] = f"{base}_{counts[base]}" if counts[base] else base
        counts[base] += 1
        inputs = [
            name for source in node.all_input_nodes for name in parts.get(source, [names.get(source, "")]) if name
        ]
        if _target(node) == "put_together":
            parts[node] = inputs
            continue
        target = _IN_PLACE.get(_target(node), _target(node))
        lines.append(f"{names[node]} = {node.op}[{target}]({', '.join(inputs)})")
    return lines


def every_node(graph: Any) -> list[str]:
    """The nodes of a graph as lines, every one, with names and arguments as they are."""
    return [f"{node.name} = {node.op}[{_target(node)}](*{node.args}, **{dict(node.kwargs)})" for node in graph.nodes]


def _target(node: Any) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _is_on_purpose(node: Any) -> bool:
    if node.op == "get_attr":
        return node.target.rpartition(".")[2] == "training" or node.target.startswith("_template")
    return node.op == "call_function" and _target(node) in _ON_PURPOSE


def quiet() -> None:
    """Warnings of the clients say nothing about either library."""
    warnings.simplefilter("ignore")
