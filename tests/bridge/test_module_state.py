"""What a module holds beside its program, on both sides of the bridge: shared, not copied, and nothing forgotten."""

import copy
import pickle
import types

import pytest
import torch
import torch.fx
from torch import nn

import torchgraft
from tests.bridge.comparison import assert_same_module, assert_shared_state, outcome
from torchgraft import BridgeError, from_fx, to_fx

LIBRARIES = pytest.mark.parametrize(
    ("fx", "convert", "back"), [(torch.fx, from_fx, to_fx), (torchgraft, to_fx, from_fx)], ids=["from_fx", "to_fx"]
)


CONSTANT = torch.tensor([1.0, 2.0])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("lost", torch.zeros(2), persistent=False)
        self.plain = torch.full((2,), 3.0)

    def forward(self, x):
        return self.block(x) * self.scale + self.kept + self.lost + self.plain + CONSTANT


@LIBRARIES
def test_parameters_buffers_and_submodules_are_shared(fx, convert, back):
    source = fx.symbolic_trace(Model())
    result = convert(source)
    assert_shared_state(result, source)
    assert result.get_submodule("block.0") is source.get_submodule("block.0")
    assert isinstance(result.scale, nn.Parameter)
    assert_same_module(back(result), source)


@LIBRARIES
def test_buffers_keep_their_persistence(fx, convert, back):
    source = fx.symbolic_trace(Model())
    source.register_buffer("mine", torch.zeros(1), persistent=False)
    result = convert(source)
    assert list(result.state_dict()) == list(source.state_dict())
    assert "mine" in dict(result.named_buffers())
    # The GraphModule of torch.fx itself forgets that this one is not to be saved, up to 2.13 at least.
    assert fx is torch.fx or "lost" not in result.state_dict()


@LIBRARIES
def test_constants_of_the_trace_cross(fx, convert, back):
    source = fx.symbolic_trace(Model())
    result = convert(source)
    assert result._tensor_constant0 is source._tensor_constant0
    again = back(result)
    assert_same_module(again, source)
    assert getattr(again.graph, "_constants", {}).keys() == getattr(source.graph, "_constants", {}).keys()


def test_our_graph_knows_constants_that_came_from_torch_fx():
    model = Model()
    ours = from_fx(torch.fx.symbolic_trace(model))
    vars(model).pop("_tensor_constant0", None)  # torch.fx leaves its constants on the model
    x = torch.randn(3, 2)
    assert torch.equal(torchgraft.GraphModule(model, ours.graph)(x), ours(x))


@LIBRARIES
def test_containers_on_the_way_are_not_shared(fx, convert, back):
    source = fx.symbolic_trace(Model())
    result = convert(source)
    assert type(source.block) is nn.Module  # a container that leads to the leaves
    result.add_submodule("block.extra", nn.Tanh())
    assert "extra" not in dict(source.block.named_children())


@LIBRARIES
def test_aliases_stay_aliases(fx, convert, back):
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.linear = nn.Linear(2, 2)
    model.again = model.inner
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("again.linear", (graph.call_module("inner.linear", (x,)),)))
    source = fx.GraphModule(nn.Module(), fx.Graph())
    source.inner, source.again = model.inner, model.again
    source.graph = graph
    result = convert(source)
    assert result.inner is result.again and result.inner is not source.inner
    assert_same_module(back(result), source)


@LIBRARIES
def test_training_flags_cross(fx, convert, back):
    model = Model().eval()
    source = fx.symbolic_trace(model)
    source.block.training = True
    source.get_submodule("block.1").train()
    result = convert(source)
    assert [module.training for module in result.modules()] == [module.training for module in source.modules()]
    assert not result.training and result.block.training


@LIBRARIES
def test_class_name_metadata_and_attributes_cross(fx, convert, back):
    model = Model()
    source = fx.GraphModule(model, fx.Tracer().trace(model), "Renamed")
    source.meta["key"] = value = object()
    source.note, source.nothing = ["mine"], None
    result = convert(source)
    assert type(result).__name__ == "Renamed" and "Renamed(" in str(result)
    assert result.meta == {"key": value} and result.meta is not source.meta
    assert result.note is source.note and result.nothing is None
    assert_same_module(back(result), source)


@LIBRARIES
def test_bound_methods_on_the_instance_are_bound_anew(fx, convert, back):
    source = fx.symbolic_trace(Model())
    source.who = types.MethodType(lambda self: self, source)
    result = convert(source)
    assert result.who() is result and source.who() is source


@LIBRARIES
def test_hooks_cross(fx, convert, back):
    source = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    calls = []
    source.register_forward_pre_hook(lambda module, args, kwargs: calls.append((module, kwargs)), with_kwargs=True)
    source.register_forward_hook(lambda module, args, result: result + 1)
    result = convert(source)
    assert result(torch.zeros(1)) == 1
    assert calls == [(result, {})]
    result._forward_hooks.clear()
    assert source(torch.zeros(1)) == 1


@LIBRARIES
def test_compiled_code_stays_behind(fx, convert, back):
    source = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    source.compile(backend="eager")
    assert convert(source)._compiled_call_impl is None


@LIBRARIES
def test_modules_can_be_copied_and_saved(fx, convert, back):
    result = convert(fx.symbolic_trace(Model()))
    result.meta["key"] = "value"
    x = torch.randn(3, 2)
    for again in (copy.deepcopy(result), copy.copy(result), pickle.loads(pickle.dumps(result))):
        assert torch.equal(again(x), result(x))
        assert again.code == result.code
    # Pickling is where torch.fx itself forgets the metadata of a module.
    assert copy.deepcopy(result).meta == result.meta


def test_the_parameters_train_on_both_sides():
    model = Model()
    theirs = torch.fx.symbolic_trace(model)
    ours = from_fx(theirs)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(theirs(torch.ones(1, 2)), ours(torch.ones(1, 2)))
    assert model.scale.grad is not None


# ---- modules in modules ----


def nested(fx):
    inner = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_module("inner", (x,))
    graph.output(graph.call_module("box.inner", (first,)))
    box = nn.Module()
    box.inner = inner
    outer = nn.Module()
    outer.inner, outer.box = inner, box
    return fx.GraphModule(outer, graph)


@LIBRARIES
def test_nested_programs_are_shared_by_default(fx, convert, back):
    source = nested(fx)
    result = convert(source)
    assert result.inner is source.inner and result.box.inner is source.inner
    assert_same_module(back(result), source)


@LIBRARIES
def test_nested_programs_are_converted_on_request(fx, convert, back):
    source = nested(fx)
    result = convert(source, nested=True)
    kind = torchgraft.GraphModule if fx is torch.fx else torch.fx.GraphModule
    assert isinstance(result.inner, kind) and result.box.inner is result.inner
    assert result.inner.get_parameter("0.weight") is source.inner.get_parameter("0.weight")
    again = back(result, nested=True)
    assert_same_module(again, source)
    assert_same_module(again.inner, source.inner)
    assert torch.equal(outcome(result, (torch.ones(1, 2),))["result"], outcome(source, (torch.ones(1, 2),))["result"])


# ---- what cannot cross ----


class Special(torch.fx.GraphModule):
    def greet(self):
        return "hello"


class Attributes(torchgraft.GraphModule):
    def __init__(self, root, graph, class_name="Attributes"):
        super().__init__(root, graph, class_name)
        self.extra = 1


def test_methods_of_a_subclass_are_warned_of():
    source = torch.fx.symbolic_trace(lambda x: x)
    with pytest.warns(
        UserWarning, match="from_fx converts the program and the state of Special, but not .*: greet"
    ) as caught:
        from_fx(Special(source, source.graph))
    assert caught[0].filename == __file__


def test_a_subclass_that_adds_no_behaviour_crosses(recwarn):
    source = torchgraft.symbolic_trace(lambda x: x)
    assert to_fx(Attributes(source, source.graph)).extra == 1
    assert not recwarn.list


@LIBRARIES
def test_a_replaced_forward_is_refused(fx, convert, back):
    source = fx.symbolic_trace(lambda x: x)
    source.forward = lambda x: x + 1
    with pytest.raises(BridgeError, match="its forward was replaced on the instance"):
        convert(source)


def test_lazy_modules_of_torch_fx_cross(recwarn):
    from torch.fx._lazy_graph_module import _LazyGraphModule

    source = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    lazy = _LazyGraphModule(source, source.graph)
    assert from_fx(lazy).code == source.code
    assert not recwarn.list
