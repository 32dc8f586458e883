"""Model Explorer's JSON: the fields it asks for and no others, ids that resolve, layers, and shapes on edges."""

from __future__ import annotations

import json

import pytest
import torch

import torchgraft
from tests.view.programs import MLP, Net, Twice

IMAGE = torch.ones(2, 3, 4, 4)
# The fields of Model Explorer's data classes that are used here.
NODE = {"id", "label", "namespace", "attrs", "incomingEdges", "inputsMetadata", "outputsMetadata"}


@pytest.mark.parametrize("level", ["module", "function", "core_aten", "joint"])
def test_the_form(level: str) -> None:
    program = torchgraft.capture(Net(), (IMAGE,), level=level)
    collection = json.loads(json.dumps(torchgraft.to_model_explorer(program)))
    assert set(collection) == {"label", "graphs"} and len(collection["graphs"]) == 1
    nodes = {node["id"]: node for node in collection["graphs"][0]["nodes"]}
    assert list(nodes) == [node.name for node in program.graph.nodes]
    for node in nodes.values():
        assert set(node) == NODE
        assert all(type(pair["key"]) is str and type(pair["value"]) is str for pair in node["attrs"])
        assert all(
            set(edge) == {"sourceNodeId", "sourceNodeOutputId", "targetNodeInputId"} for edge in node["incomingEdges"]
        )
        assert all(edge["sourceNodeId"] in nodes for edge in node["incomingEdges"])
        ids = [edge["targetNodeInputId"] for edge in node["incomingEdges"]]
        assert len(ids) == len(set(ids)) and ids == [item["id"] for item in node["inputsMetadata"]]


def test_layers_arguments_and_shapes() -> None:
    nodes = {n["id"]: n for n in torchgraft.to_model_explorer(MLP(), torch.ones(2, 16))["graphs"][0]["nodes"]}
    assert nodes["fc1"]["label"] == "Linear" and nodes["fc1"]["namespace"] == ""
    assert nodes["fc1"]["outputsMetadata"] == [
        {"id": "0", "attrs": [{"key": "tensor_shape", "value": "float32[2,32]"}]}
    ]
    assert nodes["fc1"]["inputsMetadata"][0]["attrs"] == [{"key": "__tensor_tag", "value": "input"}]
    program = torchgraft.capture(Net().eval(), (IMAGE,), level="aten")
    nodes = {n["id"]: n for n in torchgraft.to_model_explorer(program)["graphs"][0]["nodes"]}
    assert {"blocks/0/conv", "blocks/1/norm", "head", ""} <= {node["namespace"] for node in nodes.values()}


def test_two_uses_are_two_edges() -> None:
    nodes = torchgraft.to_model_explorer(torchgraft.symbolic_trace(Twice()))["graphs"][0]["nodes"]
    assert len(nodes[1]["incomingEdges"]) == 2
