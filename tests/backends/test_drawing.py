"""The drawing of a lowered module says what runs where."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

import torchgraft


class Sorting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.last = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x).sort(dim=-1).values)


class NoSorting(torchgraft.Backend):
    name = "no-sorting"

    def supports(self, node: Any) -> bool | str:
        return node.target != "sort" or "nobody sorts here"

    def compile(self, part: Any, inputs: Any, options: Any) -> Any:
        return part.forward


def kinds_in(drawing: Any) -> dict[str, str]:
    """The kind of each box, by the name of its node."""
    return {
        name: kind for kind, name in re.findall(r'<g class="b (\w+)" id="[^"]*"><title>%?(\S+?)\n', drawing.svg) if name
    }


def test_what_runs_where() -> None:
    x = torch.randn(2, 4)
    lowered = torchgraft.lower(Sorting().eval(), x, backend=NoSorting())
    drawing = torchgraft.draw(lowered, x)
    kinds = kinds_in(drawing)
    assert (kinds["linear"], kinds["relu"], kinds["linear_1"]) == ("compiled",) * 3
    assert (kinds["sort"], kinds["getitem"]) == ("python", "python")
    assert "runs on no-sorting" in drawing.svg and "stays in Python" in drawing.svg
    assert "nobody sorts here" in drawing.svg  # behind the box
    assert "2×8" in drawing.svg


def test_a_module_that_runs_in_one_place_as_one_box() -> None:
    x = torch.randn(2, 4)
    lowered = torchgraft.lower(Sorting().eval(), x, backend=NoSorting())
    assert kinds_in(torchgraft.draw(lowered, x, depth=1))["first"] == "compiled"


def test_native_is_drawn_as_it_runs() -> None:
    x = torch.randn(2, 4)
    lowered = torchgraft.lower(Sorting().eval(), x, backend="native")
    before = [node.meta.get("drawn_as") for item in lowered._variants for node in item.program.graph.nodes]
    svg = torchgraft.draw(lowered).svg
    assert "runs on native" in svg and "addmm" in svg and "stays in Python" not in svg
    assert before == [node.meta.get("drawn_as") for item in lowered._variants for node in item.program.graph.nodes]
    torch.testing.assert_close(lowered(x), lowered._model(x).detach())


def test_a_model_that_stays_whole_is_drawn_as_it_is() -> None:
    class Lists(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.tensor(sorted(x.tolist()))

    lowered = torchgraft.lower(Lists().eval(), torch.randn(3), backend="native")
    assert torchgraft.draw(lowered).boxes > 0
