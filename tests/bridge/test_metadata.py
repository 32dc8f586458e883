"""Metadata across the bridge: shapes, origins, and whatever users and passes noted, with nodes mapped."""

import copy
import operator
import pickle
from collections import OrderedDict, defaultdict

import pytest
import torch
import torch.fx
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.shape_prop import ShapeProp

import torchgraft
from tests.bridge.comparison import assert_same_module
from tests.bridge.models import Pair, small
from torchgraft import from_fx, to_fx


@pytest.mark.parametrize("name", ["mlp", "resnet18"])
def test_shape_metadata_crosses(name):
    model, inputs = small(name)
    module = torch.fx.symbolic_trace(model)
    ShapeProp(module).propagate(*inputs)
    ours = from_fx(module)
    assert all(node.meta["tensor_meta"].shape for node in ours.graph.nodes)
    assert f"# f32[{', '.join(map(str, model(*inputs).shape))}]" in ours.print_readable(print_output=False)
    assert_same_module(to_fx(ours), module)


def test_fake_tensors_cross():
    model, inputs = small("mlp")
    module = torch.fx.symbolic_trace(model)
    FakeTensorProp(module, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs)
    ours = from_fx(module)
    for mine, theirs in zip(ours.graph.nodes, module.graph.nodes, strict=True):
        assert mine.meta["val"] is theirs.meta["val"]
    assert_same_module(to_fx(ours), module)
    assert copy.deepcopy(ours).code == ours.code
    again = pickle.loads(pickle.dumps(ours))
    assert again.code == ours.code
    for mine, theirs in zip(again.graph.nodes, module.graph.nodes, strict=True):
        if isinstance(theirs.meta["val"], torch.Tensor):
            assert mine.meta["val"].device.type == "meta" and mine.meta["val"].dtype is theirs.meta["val"].dtype
            assert mine.meta["val"].shape == theirs.meta["val"].shape


def test_where_nodes_came_from_is_in_the_metadata_of_torch_fx():
    ours = torchgraft.symbolic_trace(nn.Sequential(nn.Sequential(nn.ReLU())))
    node = to_fx(ours).graph.find_nodes(op="call_module")[0]
    assert node.meta["nn_module_stack"] == {"0": ("0", nn.Sequential), "0.0": ("0.0", nn.ReLU)}
    assert (
        "stack_trace"
        in to_fx(torchgraft.symbolic_trace(lambda x: x + 1))
        .graph.find_nodes(op="call_function", target=operator.add)[0]
        .meta
    )


def test_metadata_that_mentions_nodes_is_mapped():
    module = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    x, relu, add, _ = module.graph.nodes
    by_kind = defaultdict(list, {"kind": [relu]})
    add.meta.update(
        alone=x,
        nested=[{"key": (relu, 1)}, Pair(x, add)],
        keys={relu: "value"},
        ordered=OrderedDict(a=x),
        by_kind=by_kind,
        a_set={x},
        frozen=torch.fx.immutable_collections.immutable_list([x, 1]),
        plain=[1, 2],
        part=slice(x, None),
    )
    module.meta["nodes"] = [relu]
    ours = from_fx(module)
    mine_x, mine_relu, mine, _ = ours.graph.nodes
    assert mine.meta["alone"] is mine_x
    assert mine.meta["nested"] == [{"key": (mine_relu, 1)}, Pair(mine_x, mine)]
    assert type(mine.meta["nested"][1]) is Pair
    assert mine.meta["keys"] == {mine_relu: "value"}
    assert mine.meta["ordered"] == {"a": mine_x} and type(mine.meta["ordered"]) is OrderedDict
    assert mine.meta["by_kind"] == {"kind": [mine_relu]} and mine.meta["by_kind"].default_factory is list
    assert by_kind["kind"] == [relu]
    assert mine.meta["a_set"] == {mine_x}
    assert type(mine.meta["frozen"]) is torchgraft.immutable_list and mine.meta["frozen"] == [mine_x, 1]
    assert mine.meta["plain"] is add.meta["plain"]
    assert mine.meta["part"].start is mine_x
    assert ours.meta["nodes"] == [mine_relu]
    assert_same_module(to_fx(ours), module)


def test_metadata_dicts_are_not_shared():
    module = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    ours = from_fx(module)
    ours.graph.output_node().meta["mine"] = 1
    ours.meta["mine"] = 1
    assert "mine" not in module.graph.output_node().meta
    assert "mine" not in module.meta


def test_a_node_of_a_third_graph_stays_in_the_metadata():
    other = torch.fx.symbolic_trace(lambda y: y)
    foreign = next(iter(other.graph.nodes))
    module = torch.fx.symbolic_trace(lambda x: x)
    module.graph.output_node().meta["foreign"] = foreign
    assert from_fx(module).graph.output_node().meta["foreign"] is foreign


def test_attributes_set_on_nodes_cross():
    module = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    x, relu, _ = module.graph.nodes
    relu.partner, relu.color = x, "red"
    mine = list(from_fx(module).graph.nodes)
    assert mine[1].partner is mine[0] and mine[1].color == "red"
    assert_same_module(to_fx(from_fx(module)), module)
