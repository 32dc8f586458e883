"""`to_networkx`: every sentence that describes the graph, the snippet of the converter it replaces, and awkward programs."""

from __future__ import annotations

import json

import networkx as nx
import pytest
import torch
from torch import nn

import torchgraft
from tests.view.programs import MLP, Net, Twice
from torchgraft.errors import GraftError
from torchgraft.view import networkx_graph
from torchgraft.view.networkx_graph import EDGE_ATTRIBUTES, NODE_ATTRIBUTES

X = torch.ones(2, 16)


def test_one_edge_for_every_use_keyed_by_position() -> None:
    graph = torchgraft.to_networkx(torchgraft.symbolic_trace(Twice()), torch.ones(2, 3))
    assert isinstance(graph, nx.MultiDiGraph)
    assert list(graph.edges(keys=True)) == [("x", "mul", 0), ("x", "mul", 1), ("mul", "output", 0)]
    assert [data["argument"] for _, _, data in graph.in_edges("mul", data=True)] == ["a", "b"]
    assert graph.edges["x", "mul", 1] == {
        "argument": "b",
        "shape": (2, 3),
        "dtype": "float32",
        "memory_format": "contiguous_format",
    }


def test_nodes_carry_what_the_issue_names() -> None:
    graph = torchgraft.to_networkx(torchgraft.capture(MLP(), (X,), level="function"), X)
    node = graph.nodes["linear"]
    assert list(node) == list(NODE_ATTRIBUTES)
    assert (node["op"], node["target"]) == ("call_function", "torch._C._nn.linear")
    assert node["args"] == [{"input": 0}, {"input": 1}, {"input": 2}]
    assert node["node_call_info"]["args"] == {"input": "%x", "weight": "%fc1_weight", "bias": "%fc1_bias"}
    assert node["module_path"] == "fc1" and node["module_stack"] == [["", "MLP"], ["fc1", "Linear"]]
    assert node["source"].endswith("programs.py:17") and node["source_text"] == "x = self.relu(self.fc1(x))"
    assert (node["shape"], node["dtype"], node["memory_format"]) == ((2, 32), "float32", "contiguous_format")
    assert all(list(data) == list(EDGE_ATTRIBUTES) for _, _, data in graph.edges(data=True))


def test_defaults_of_the_signature_are_filled_in() -> None:
    graph = torchgraft.to_networkx(torchgraft.capture(MLP(), (X,), level="core_aten"))
    info = graph.nodes["addmm"]["node_call_info"]
    assert info["args"] == {"input": "%fc1_bias", "mat1": "%x", "mat2": "%permute", "beta": 1, "alpha": 1}
    assert info["signature"].startswith("aten::addmm(Tensor self, Tensor mat1")
    assert info["bound"]


def test_inputs_parameters_buffers_and_outputs_are_marked() -> None:
    graph = torchgraft.to_networkx(torchgraft.capture(Net().eval(), (torch.ones(2, 3, 4, 4),), level="function"))
    roles = nx.get_node_attributes(graph, "role")
    assert roles["x"] == "input" and roles["output"] == "output"
    assert roles["blocks_0_conv_weight"] == "parameter" and roles["scale"] == "buffer"
    assert roles["blocks_0_norm_running_mean"] == "buffer"
    assert graph.nodes["blocks_0_conv_weight"]["shape"] == (3, 3, 3, 3)  # known without a run
    assert {roles[name] for name in graph if graph.nodes[name]["op"] == "call_function"} <= {"operation", "guard"}


@pytest.mark.parametrize("model", [MLP(), nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.ReLU())])
def test_the_snippet_of_the_converter_on_a_joint_program(model: nn.Module) -> None:
    nx_g = torchgraft.to_networkx(torchgraft.capture(model, (X,), level="joint"))
    source_nodes = [x for x in nx_g.nodes if "primals" in x]
    source_nodes += [x for x in nx_g.nodes if "tangents" in x]
    edge_shapes = [nx_g.edges[x]["shape"] for x in nx.edge_bfs(nx_g, source=source_nodes)]
    assert len(edge_shapes) == nx_g.number_of_edges()  # every edge is reached from an input
    assert (2, 16) in edge_shapes
    # A size has no shape, and is known to be a number.
    numbers = {source for source, _, data in nx_g.edges(data=True) if data["shape"] is None}
    assert {nx_g.nodes[name]["result"] for name in numbers} <= {"int", "bool"}
    dtypes = {data["dtype"] for _, _, data in nx_g.edges(data=True) if isinstance(data["dtype"], str)}
    assert dtypes <= {"float32", "int64"}


def test_a_joint_program_says_what_its_inputs_and_outputs_are() -> None:
    graph = torchgraft.to_networkx(torchgraft.capture(MLP(), (X,), level="joint"))
    names = {name: (data["role"], data["origin_name"]) for name, data in graph.nodes(data=True) if data["origin_name"]}
    assert names["primals_1"] == ("parameter", "fc1.weight")
    assert names["primals_5"] == ("input", "x")
    assert names["tangents_1"] == ("tangent", "result")
    assert {data["argument"] for _, _, data in graph.in_edges("output", data=True)} == {
        *("result result", "gradient fc1.weight", "gradient fc1.bias", "gradient fc2.weight", "gradient fc2.bias")
    }
    phases = nx.get_node_attributes(graph, "phase")
    assert phases["addmm"] == "forward" and phases["threshold_backward"] == phases["tangents_1"] == "backward"


def test_everything_in_it_is_plain_data() -> None:
    for level in ("module", "function", "aten", "joint"):
        graph = torchgraft.to_networkx(torchgraft.capture(Net(), (torch.ones(2, 3, 4, 4),), level=level))
        json.dumps(nx.node_link_data(graph, edges="edges"), allow_nan=False)


def test_names_of_arguments_inside_lists_and_keywords() -> None:
    def forward(x, n):
        return torch.cat([x, x], dim=n), x[:n], x.view(n, -1), torch.add(x, other=x)

    graph = torchgraft.to_networkx(torchgraft.symbolic_trace(forward))
    arguments = {(u, v, k): data["argument"] for u, v, k, data in graph.edges(keys=True, data=True)}
    assert arguments["x", "cat", 1] == "tensors[1]" and arguments["n", "cat", 2] == "dim"
    assert arguments["n", "getitem", 1] == "b.stop"
    assert arguments["n", "view", 1] == "size[0]"
    assert arguments["x", "add", 1] == "other"
    assert arguments["getitem", "output", 1] == "result[1]"


def test_memory_formats_and_tuples_are_observed() -> None:
    def forward(x):
        return torch.max(x, dim=1), x.contiguous(memory_format=torch.channels_last), x.transpose(0, 1), x.shape[0]

    program = torchgraft.symbolic_trace(forward)
    graph = torchgraft.to_networkx(program, torch.ones(2, 3, 4, 5))
    assert graph.nodes["max_1"]["shape"] == ((2, 4, 5), (2, 4, 5))
    assert graph.nodes["max_1"]["dtype"] == ("float32", "int64")
    assert graph.nodes["contiguous"]["memory_format"] == "channels_last"
    assert graph.nodes["transpose"]["memory_format"] is None
    assert graph.nodes["getitem"]["shape"] is None and graph.nodes["getitem"]["result"] == "int"


def test_without_examples_and_notes_shapes_are_none() -> None:
    graph = torchgraft.to_networkx(torchgraft.symbolic_trace(Twice()))
    assert all(data["shape"] is None and data["dtype"] is None for _, _, data in graph.edges(data=True))


def test_symbolic_sizes_keep_their_names() -> None:
    exported = torch.export.export(
        nn.Linear(4, 2), (torch.ones(3, 4),), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    program = torchgraft.from_export(exported)
    shapes = [data["shape"] for _, data in torchgraft.to_networkx(program).nodes(data=True) if data["role"] == "input"]
    assert isinstance(shapes[0][0], str) and shapes[0][1] == 4


def test_a_model_is_captured_first() -> None:
    graph = torchgraft.to_networkx(MLP(), X)
    assert [data["target"] for _, data in graph.nodes(data=True) if data["op"] == "call_module"] == [
        "fc1",
        "relu",
        "fc2",
    ]
    assert graph.nodes["fc1"]["module"] == "Linear(in_features=16, out_features=32, bias=True)"
    assert torchgraft.to_networkx(MLP()).nodes["fc1"]["shape"] is None


def test_looking_leaves_no_trace() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.drop = nn.Dropout(0.5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return self.drop(self.norm(x.add_(1)))

    model, x = Counts(), torch.zeros(3, 4)
    program = torchgraft.symbolic_trace(model)
    notes = {node.name: set(node.meta) for node in program.graph.nodes}
    random = torch.get_rng_state()
    assert torchgraft.to_networkx(program, x).nodes["drop"]["shape"] == (3, 4)
    assert torch.equal(torch.get_rng_state(), random)
    assert not x.any() and model.calls == 0 and model.norm.num_batches_tracked == 0
    assert {node.name: set(node.meta) for node in program.graph.nodes} == notes


def test_what_fake_tensors_cannot_do_is_run_on_copies() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return x[x > 0]

    model = Reads()
    graph = torchgraft.to_networkx(torchgraft.symbolic_trace(model), torch.tensor([1.0, -1.0, 2.0]))
    assert graph.nodes["getitem"]["shape"] == (2,)
    assert model.calls == 0


def test_a_failing_program_raises_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied|linear"):
        torchgraft.to_networkx(torchgraft.symbolic_trace(MLP()), torch.ones(2, 5))


def test_functions_without_a_name_to_import_are_shown() -> None:
    def local(x):
        return x + 1

    graph = torchgraft.Graph()
    graph.output(graph.call_function(local, (graph.placeholder("x"),)))
    shown = torchgraft.to_networkx(graph)
    assert shown.nodes["local"]["target"].endswith("local")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.fx.symbolic_trace(MLP()), "of torch.fx: bring it in first, with torchgraft.from_fx"),
        (lambda: torch.export.export(MLP(), (X,)), "of torch.export: bring it in first, with torchgraft.from_export"),
        (lambda: 7, "cannot look at int: give a program"),
    ],
)
def test_what_is_no_program(make, text: str) -> None:
    with pytest.raises(GraftError, match=text):
        torchgraft.to_networkx(make())


def test_an_empty_program() -> None:
    graph = torchgraft.Graph()
    graph.output(None)
    assert list(torchgraft.to_networkx(graph).nodes) == ["output"]


def test_without_networkx_the_error_says_what_to_do(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "networkx", None)
    with pytest.raises(GraftError, match="pip install networkx"):
        networkx_graph.to_networkx(torchgraft.symbolic_trace(Twice()))
