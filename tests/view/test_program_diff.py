"""`diff`: each kind of change, renaming, alignment in the face of insertions, and the four forms of the result."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
from torch import nn

import torchgraft
from tests.view.programs import MLP, Net
from torchgraft import diff
from torchgraft.errors import GraftError

X = torch.ones(2, 16)


def traced(function):
    return torchgraft.symbolic_trace(function)


def statuses(result):
    return [(change.status, change.before, change.after) for change in result if change.status != "same"]


@pytest.mark.parametrize("level", ["module", "aten", "joint"])
def test_a_program_does_not_differ_from_its_copy(level: str) -> None:
    program = torchgraft.capture(Net(), (torch.ones(2, 3, 4, 4),), level=level)
    result = diff(program, copy.deepcopy(program))
    assert not result and {change.status for change in result} == {"same"}
    assert str(result).splitlines()[1:] == [f"  ... {len(program.graph.nodes)} nodes the same"]


def test_replaced_added_removed_and_rewired() -> None:
    before = traced(lambda x: torch.relu(x).abs() + 1)
    after = traced(lambda x: torch.tanh(x) + 1 - x)
    result = diff(before, after)
    assert statuses(result) == [
        ("changed", "relu", "tanh"),
        ("removed", "abs_1", None),
        ("changed", "add", "add"),
        ("added", None, "sub"),
        ("changed", "output", "output"),
    ]
    details = {change.after: change.details for change in result}
    assert details["tanh"] == ("target: torch.relu -> torch.tanh",)
    assert details["add"] == ("a: %abs_1 -> %tanh",)
    assert details["output"] == ("result: %add -> %sub",)
    assert result.counts == {"same": 1, "renamed": 0, "changed": 3, "removed": 1, "added": 1}


def test_constants_keywords_and_defaults() -> None:
    before = traced(lambda x: torch.cat([x, x], dim=0))
    after = traced(lambda x: torch.cat([x, x], dim=1))
    assert [change.details for change in diff(before, after) if change.details] == [("dim: 0 -> 1",)]
    # Said as a default, by position or by name: it is the same call.
    assert not diff(before, traced(lambda x: torch.cat([x, x])))
    assert not diff(before, traced(lambda x: torch.cat([x, x], 0)))


def test_one_more_node_at_the_front_changes_nothing_behind_it() -> None:
    before = traced(lambda x: torch.relu(torch.relu(x) + 1) * 2)
    after = traced(lambda x: torch.relu(torch.relu(torch.relu(x)) + 1) * 2)
    result = diff(before, after)
    assert result.counts["added"] == 1 and result.counts["removed"] == 0
    assert result.counts["renamed"] == 1 and result.counts["changed"] <= 1


def test_names_alone_are_no_change() -> None:
    before, after = traced(lambda x: torch.relu(x) + 1), traced(lambda x: torch.relu(x) + 1)
    next(node for node in after.graph.nodes if node.name == "relu").name = "activation"
    result = diff(before, after)
    assert not result and statuses(result) == [("renamed", "relu", "activation")]
    assert "activation = torch.relu(x)    (was relu)" in result.text(context=None)


def test_settings_of_modules_and_tensors() -> None:
    before, after = MLP(), MLP()
    after.fc1 = nn.Linear(16, 32, bias=False)
    result = diff(torchgraft.symbolic_trace(before), torchgraft.symbolic_trace(after))
    assert [change.details for change in result if change.status == "changed"] == [
        (
            "module: Linear(in_features=16, out_features=32, bias=True) -> Linear(in_features=16, out_features=32, bias=False)",
        )
    ]
    before.w, after.w = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    left, right = [torchgraft.symbolic_trace(_adding(model.w)) for model in (before, after)]
    assert [change.details for change in diff(left, right) if change.details] == [
        ("value: parameter float32[2] -> parameter float32[3]",)
    ]


def _adding(weight):
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = weight

        def forward(self, x):
            return x + self.w

    return Adding()


def test_shapes_are_compared_where_they_are_known() -> None:
    before = torchgraft.capture(MLP(), (X,), level="aten")
    after = torchgraft.capture(MLP(), (torch.ones(5, 16),), level="aten")
    found = [detail for change in diff(before, after) for detail in change.details]
    assert "result: f32[2, 32] -> f32[5, 32]" in found
    # With examples both are looked at in the same way.
    functions = [traced(lambda x: x.sum(0)), traced(lambda x: x.sum(1))]
    assert "result: f32[16] -> f32[2]" in [detail for change in diff(*functions, X) for detail in change.details]


def test_models_are_captured_first_and_modes_are_told() -> None:
    result = diff(MLP(), MLP().eval())
    assert str(result).startswith("MLP in training mode -> MLP in evaluation mode: 5 same")
    with pytest.raises(GraftError, match="cannot look at str"):
        diff(MLP(), "program")


def test_a_pass_on_a_deep_model() -> None:
    program = torchgraft.symbolic_trace(Net())
    before = copy.deepcopy(program)
    torchgraft.replace_pattern(program, lambda x: torch.relu(x), lambda x: torch.sigmoid(x))
    result = diff(before, program)
    assert [(change.before, change.after) for change in result if change.status != "same"] == [
        *(("relu", "sigmoid"), ("relu_1", "sigmoid_1"))
    ]


# ---- forms ----


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_with_and_without_colours(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    result = diff(traced(lambda x: torch.relu(x)), traced(lambda x: torch.tanh(x)))
    plain = (
        "<lambda> -> <lambda>: 2 same, 1 changed\n"
        "  x = input('x')\n"
        "- relu = torch.relu(x)\n"
        "+ tanh = torch.tanh(x)\n"
        "    target: torch.relu -> torch.tanh\n"
        "  return tanh"
    )
    assert str(result) == plain and repr(result) == "<ProgramDiff: <lambda> -> <lambda>: 2 same, 1 changed>"
    terminal, file = Terminal(), io.StringIO()
    result.show(terminal)
    result.show(file)
    assert file.getvalue() == plain + "\n"
    assert "\033[31m- relu = torch.relu(x)\033[0m" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    quiet = Terminal()
    result.show(quiet)
    assert quiet.getvalue() == plain + "\n"


def test_far_away_nodes_are_left_out() -> None:
    def many(x, last):
        for _ in range(20):
            x = torch.relu(x)
        return last(x)

    result = diff(traced(lambda x: many(x, torch.tanh)), traced(lambda x: many(x, torch.sin)))
    lines = str(result).splitlines()
    assert lines[1] == "  ... 18 nodes the same" and len(lines) == 9
    assert len(result.text(context=None).splitlines()) == 1 + 22 + 3
    assert len(result.text(context=0).splitlines()) == 1 + 1 + 3 + 1


def test_json_rows_html_and_rich(tmp_path) -> None:
    result = diff(traced(lambda x: torch.relu(x)), traced(lambda x: x[x < 1]))
    data = json.loads(result.to_json(tmp_path / "diff.json"))
    assert json.loads((tmp_path / "diff.json").read_text()) == data
    assert data["counts"] == result.counts and len(data["changes"]) == len(result.rows()) == len(result)
    assert set(result.rows()[0]) == {"status", "before", "after", "before_line", "after_line", "details"}
    html = result._repr_html_()
    assert "operator.lt(x, 1)" in html and "<lambda>" not in html and html.count("<tr") == html.count("</tr>")
    from rich.console import Console

    console = Console(file=io.StringIO(), width=200)
    console.print(result)
    assert "- relu = torch.relu(x)" in console.file.getvalue()


def test_awkward_arguments_are_written() -> None:
    graph = torchgraft.Graph()
    x = graph.placeholder("x", default_value=None)
    y = graph.call_function(print, (x, (x,), {"a": [x]}, slice(x, None), "%s", torch.float16), {"end": float("nan")})
    graph.output(y)
    lines = [change.after_line for change in diff(graph, copy.deepcopy(graph))]
    assert lines[:2] == [
        "x = input('x', None)",
        "print_1 = builtins.print(x, (x,), {'a': [x]}, slice(x, None, None), '%s', torch.float16, end=nan)",
    ]
