"""FxGraphDrawer and GraphTransformObserver. torch.fx's drawer needs pydot and Graphviz, so the two are not run side by side."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import torchgraft
from torchgraft.fx_passes.drawer import FxGraphDrawer
from torchgraft.fx_passes.observer import GraphTransformObserver
from torchgraft.splitting import Size, split


def traced() -> torchgraft.GraphModule:
    return torchgraft.symbolic_trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))


def test_files(tmp_path: Path) -> None:
    drawing = FxGraphDrawer(traced(), "small").get_dot_graph()
    assert drawing.write_svg(str(tmp_path / "a.svg")) and drawing.write_raw(tmp_path / "a.dot")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    text = (tmp_path / "a.dot").read_text()
    assert text.startswith('digraph "Sequential" {') and '"input_1" -> "_0"' in text
    with pytest.raises(torchgraft.GraftError, match="cannot write a drawing as 'gif'"):
        drawing.write(tmp_path / "a.gif", format="gif")


def test_programs_inside() -> None:
    module = split(traced(), by=Size(1)).module
    drawer = FxGraphDrawer(module, "split")
    assert list(drawer.get_all_dot_graphs()) == ["split", "split_submod_0", "split_submod_1"]
    assert "Linear" in drawer.get_submod_dot_graph("submod_0").create_svg().decode()
    assert drawer.get_dot_graph("submod_1") is drawer.get_submod_dot_graph("submod_1")


def test_observed_changes(tmp_path: Path) -> None:
    module = torchgraft.symbolic_trace(lambda x: torch.relu(x) + 1)
    observer = GraphTransformObserver(module, "swap", log_url=str(tmp_path))
    found = observer.apply_gm_pass(
        lambda gm: torchgraft.replace_pattern(gm, lambda a: torch.relu(a), lambda a: torch.sigmoid(a))
    )
    assert found is not None and len(found) == 1
    assert (observer.created_nodes, observer.erased_nodes) == ({"sigmoid"}, {"relu"})
    source = next(node for node in module.graph.nodes if node.name == "sigmoid").meta["from_node"]
    assert [(each.name, each.pass_name) for each in source] == [("relu", "swap")]
    count = GraphTransformObserver.get_current_pass_count()
    assert "relu" in (tmp_path / f"pass_{count}_swap_input_graph.dot").read_text()
    assert "sigmoid" in (tmp_path / f"pass_{count}_swap_output_graph.dot").read_text()


def test_nothing_is_left_behind() -> None:
    module = torchgraft.symbolic_trace(lambda x: torch.relu(x))
    with pytest.raises(ZeroDivisionError), GraphTransformObserver(module, "bad"):
        copied = copy.deepcopy(module)
        1 // 0
    observer = GraphTransformObserver(module, "later")
    assert observer.apply_graph_pass(lambda graph: len(graph.nodes)) == 3
    for each in (module, copied):
        assert not each._edit_hooks.create and not each._edit_hooks.erase and not each._edit_hooks.replace
