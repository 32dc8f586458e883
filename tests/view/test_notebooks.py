"""What a notebook shows of programs and results: well-formed pictures and tables, and nothing that runs scripts."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import torch
from torch import nn

import torchgraft
from tests.view.programs import MLP


def test_a_program_shows_itself_as_a_drawing() -> None:
    svg = torchgraft.symbolic_trace(MLP())._repr_svg_()
    assert ElementTree.fromstring(svg).tag.endswith("svg") and "fc1" in svg


def test_a_huge_program_is_left_to_its_text() -> None:
    graph = torchgraft.Graph()
    value = graph.placeholder("x")
    for _ in range(3000):
        value = graph.call_function(torch.neg, (value,))
    graph.output(value)
    assert torchgraft.GraphModule(nn.Module(), graph)._repr_svg_() is None


def test_names_of_a_model_cannot_become_markup() -> None:
    model = nn.Sequential()
    model.add_module("<script>alert(1)</script>", nn.ReLU())
    for html in (torchgraft.summary(model, torch.ones(2))._repr_html_(), torchgraft.diff(model, MLP())._repr_html_()):
        assert "<script" not in html and "&lt;script&gt;" in html
        ElementTree.fromstring(f"<div>{html}</div>")
