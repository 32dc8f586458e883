"""Files of graphs: what comes back, that a pickle needs no torch, and that a failure leaves nothing behind."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import networkx as nx
import pytest
import torch

import torchgraft
from tests.view.programs import MLP, Net
from torchgraft.errors import GraftError
from torchgraft.view import graph_files

X = torch.ones(2, 16)
IMAGE = torch.ones(2, 3, 4, 4)


def equal(left: nx.MultiDiGraph, right: nx.MultiDiGraph) -> bool:
    return (
        dict(left.nodes(data=True)) == dict(right.nodes(data=True))
        and {(u, v, k): d for u, v, k, d in left.edges(keys=True, data=True)}
        == {(u, v, k): d for u, v, k, d in right.edges(keys=True, data=True)}
        and left.graph == right.graph
    )


@pytest.mark.parametrize("suffix", ["pickle", "pkl", "graphml", "json"])
@pytest.mark.parametrize("level", ["module", "aten", "joint"])
def test_what_is_saved_comes_back(suffix: str, level: str, tmp_path: Path) -> None:
    program = torchgraft.capture(Net(), (IMAGE,), level=level)
    graph = torchgraft.to_networkx(program)
    path = torchgraft.save_graph(graph, tmp_path / f"net.{suffix}")
    again = torchgraft.load_graph(path)
    assert equal(again, graph)
    assert torchgraft.from_networkx(again, program).code == program.code
    assert [file.name for file in tmp_path.iterdir()] == [f"net.{suffix}"]


@pytest.mark.parametrize("suffix", ["graphml", "json", "pickle"])
@pytest.mark.parametrize(
    "text", ['[1, "x"', '{"a": 1}', '"quoted"', " trimmed ", "\x00\x1b\r", "é漢😀", "", "json:1", "\ud800"]
)
def test_texts_of_any_kind(suffix: str, text: str, tmp_path: Path) -> None:
    graph = nx.MultiDiGraph(name=text)
    graph.add_node("a", op="placeholder", target=text, note=[text, {text: None}])
    known = {name: graph.nodes["a"].get(name) for name in graph_files.NODE_ATTRIBUTES}
    graph.nodes["a"].update({name: value for name, value in known.items() if value is None})
    again = torchgraft.load_graph(torchgraft.save_graph(graph, tmp_path / f"a.{suffix}"))
    assert again.nodes["a"] == graph.nodes["a"] and again.graph == graph.graph


def test_a_pickle_is_read_without_torch(tmp_path: Path) -> None:
    program = torchgraft.capture(MLP(), (X,), level="joint")
    torchgraft.save_graph(program, tmp_path / "graph.pickle")
    reader = """
import sys
sys.modules["torch"] = sys.modules["torchgraft"] = None
import pickle
import networkx as nx
nx_g = pickle.load(open(sys.argv[1], "rb"))
source_nodes = [x for x in nx_g.nodes if 'primals' in x]
source_nodes += [x for x in nx_g.nodes if 'tangents' in x]
edge_shapes = [nx_g.edges[x]['shape'] for x in nx.edge_bfs(nx_g, source=source_nodes)]
print(len(edge_shapes), edge_shapes[0], nx_g.nodes["addmm"]["node_call_info"]["args"]["beta"])
"""
    command = [sys.executable, "-c", reader, str(tmp_path / "graph.pickle")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.split() == ["41", "(32,", "16)", "1"] or printed.split()[1:] == ["(32,", "16)", "1"]


def test_graphml_is_xml_with_plain_attributes(tmp_path: Path) -> None:
    torchgraft.save_graph(torchgraft.symbolic_trace(MLP()), tmp_path / "g.graphml", X)
    root = ElementTree.parse(tmp_path / "g.graphml").getroot()
    values = [element.text for element in root.iter() if element.tag.endswith("}data")]
    assert "float32" in values and "[2, 32]" in values and "call_module" in values


def test_json_is_node_link_and_strict(tmp_path: Path) -> None:
    program = torchgraft.symbolic_trace(lambda x: x.clamp(max=float("inf")))
    torchgraft.save_graph(program, tmp_path / "g.json")
    text = (tmp_path / "g.json").read_text()
    data = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert (
        data["multigraph"] and data["directed"] and {node["id"] for node in data["nodes"]} == {"x", "clamp", "output"}
    )
    assert torchgraft.from_networkx(torchgraft.load_graph(tmp_path / "g.json"))(X).equal(X)


def test_other_formats_by_suffix_or_name(tmp_path: Path) -> None:
    torchgraft.save_graph(MLP(), tmp_path / "g.dot", X)
    assert (tmp_path / "g.dot").read_text().startswith('digraph "MLP" {')
    torchgraft.save_graph(MLP(), tmp_path / "explorer.json", X, format="model-explorer")
    assert json.loads((tmp_path / "explorer.json").read_text())["label"] == "MLP"


@pytest.mark.parametrize(("name", "format"), [("g.xml", None), ("g", None), ("g.json", "yaml")])
def test_unknown_formats(name: str, format, tmp_path: Path) -> None:
    with pytest.raises(GraftError, match="the formats are pickle, graphml, json, dot, model-explorer"):
        torchgraft.save_graph(MLP(), tmp_path / name, format=format)
    assert not list(tmp_path.iterdir())


# ---- failures ----


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GraftError, match="No such file or directory\ngive a path in a folder that exists"):
        torchgraft.save_graph(MLP(), tmp_path / "missing" / "g.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(GraftError, match="Not a directory\ngive a path in a folder that exists"):
        torchgraft.save_graph(MLP(), tmp_path / "file" / "g.json")
    (tmp_path / "g.json").mkdir()
    with pytest.raises(GraftError, match="it is a folder"):
        torchgraft.save_graph(MLP(), tmp_path / "g.json")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "g.json"]


def test_a_failure_while_writing_keeps_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "g.json"
    path.write_text("old")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(GraftError, match=r"cannot write '.*g.json': No space left on device\ngive a path"):
        torchgraft.save_graph(MLP(), path)
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["g.json"]


def test_a_link_keeps_pointing_where_it_did(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    torchgraft.save_graph(MLP(), tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real.json").stat().st_size


def test_files_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(GraftError, match="No such file"):
        torchgraft.load_graph(tmp_path / "g.json")
    with pytest.raises(GraftError, match="only .pickle, .graphml and .json"):
        torchgraft.load_graph(tmp_path / "g.dot")
    for name in ("g.json", "g.graphml", "g.pickle"):
        (tmp_path / name).write_bytes(b"\x80 nonsense")
        with pytest.raises(GraftError, match="it is no (json|graphml|pickle) file of a graph"):
            torchgraft.load_graph(tmp_path / name)
    (tmp_path / "g.pickle").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(GraftError, match="it holds a dict, and save_graph"):
        torchgraft.load_graph(tmp_path / "g.pickle")
