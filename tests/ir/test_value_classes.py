"""Classes of values: what is most likely, what is certain, and what is taken for a tensor."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

import torchgraft
from torchgraft.ir.guards import check_value
from torchgraft.ir.value_classes import is_surely_of_class, is_tensor, likely_class


def nodes(function: Any) -> dict[str, torchgraft.Node]:
    return {node.name: node for node in torchgraft.symbolic_trace(function).graph.nodes}


def test_annotations_and_defaults_of_inputs() -> None:
    def function(x, n: int, m=3, sizes: list[int] = (), mask: torch.Tensor = None, either: int | None = 2):
        return x

    found = nodes(function)
    classes = {name: likely_class(node) for name, node in found.items() if node.op == "placeholder"}
    assert classes == {
        "x": torch.Tensor, "n": int, "m": int, "sizes": list, "mask": torch.Tensor, "either": int,
    }  # fmt: skip
    assert [name for name in classes if is_surely_of_class(found[name])] == ["n", "sizes"]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: torch.relu(x), torch.Tensor),
        (lambda x: torch.ops.aten.relu.default(x), torch.Tensor),
        (lambda x: x.size(0), int),
        (lambda x: x.shape, torch.Size),
        (lambda x: x.is_floating_point(), bool),
    ],
)
def test_what_is_certain(function: Any, kind: type) -> None:
    last = torchgraft.symbolic_trace(function).graph.output_node().args[0]
    assert likely_class(last) is kind and is_surely_of_class(last)


def test_metadata_decides() -> None:
    x = nodes(lambda x: x)["x"]
    assert is_tensor(x)
    x.meta["val"] = 3
    assert not is_tensor(x)
    x.meta["val"] = torch.ones(1)
    assert is_tensor(x)


@pytest.mark.parametrize("kind", [int, "int", 3, "float"])
def test_a_guard_that_wants_a_number_is_believed(kind: Any) -> None:
    graph = torchgraft.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n")
    graph.call_function(check_value, ({"x": torch.Tensor, "n": kind}, {"x": x, "n": n}, "", ""))
    assert is_tensor(x) and not is_tensor(n) and is_tensor(graph.call_function(operator.add, (n, x)))


def test_a_long_chain_is_taken_for_a_tensor() -> None:
    graph = torchgraft.Graph()
    value = graph.placeholder("x")
    for _ in range(5_000):
        value = graph.call_function(operator.add, (value, 1))
    assert is_tensor(value) and not is_tensor(1)
