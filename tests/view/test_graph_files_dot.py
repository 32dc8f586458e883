"""The DOT text: its grammar, read by a small parser of its own, clusters, and names that need quoting."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch

import torchgraft
from tests.view.programs import MLP, Net, Twice

IMAGE = torch.ones(2, 3, 4, 4)
STRING = r'"(?:[^"\\]|\\.)*"'
LINE = re.compile(
    rf"digraph {STRING} \{{|subgraph {STRING} \{{|\}}|label={STRING};"
    rf"|(?:graph|node|edge|{STRING}) \[.*\];|{STRING} -> {STRING} \[(?:\w+={STRING}(?:, )?)+\];"
)


@pytest.mark.parametrize("level", ["module", "aten", "joint"])
def test_every_line_is_dot(level: str) -> None:
    text = torchgraft.to_dot(torchgraft.capture(Net(), (IMAGE,), level=level))
    assert [line for line in text.splitlines() if not LINE.fullmatch(line.strip())] == []
    opened = [line for line in text.splitlines() if line.endswith("{")]
    assert len(opened) == len([line for line in text.splitlines() if line.strip() == "}"])
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tplain"], input=text.encode(), check=True, capture_output=True)


def test_nodes_edges_and_clusters() -> None:
    text = torchgraft.to_dot(torchgraft.capture(Net(), (IMAGE,), level="function"), IMAGE)
    assert 'subgraph "cluster_blocks.0.conv" {' in text and 'label="blocks.0.conv";' in text
    assert 'label="2x3x4x4"' in text
    assert text.index('subgraph "cluster_blocks" {') < text.index('subgraph "cluster_blocks.0" {')
    twice = torchgraft.to_dot(torchgraft.symbolic_trace(Twice()))
    assert twice.count('"x" -> "mul"') == 2


def test_texts_are_escaped() -> None:
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_method("split", (x, 'a"b\\c\nd')))
    text = torchgraft.to_dot(graph)
    assert r"split_size = a\"b\\c d" in text
    assert all(LINE.fullmatch(line.strip()) for line in text.splitlines())


def test_a_graph_of_networkx_is_taken_as_it_is() -> None:
    graph = torchgraft.to_networkx(MLP(), torch.ones(2, 16))
    graph.add_node("note")
    text = torchgraft.to_dot(graph)
    assert '"note" [label="note"' in text and "Linear(in_features=16" in text
