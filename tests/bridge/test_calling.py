"""How programs are called, across the bridge: trees of inputs and outputs; code of one's own is refused."""

import copy
import pickle

import pytest
import torch
import torch.fx
from torch import nn
from torch.fx.graph import CodeGen as TheirCodeGen
from torch.fx.graph import _PyTreeCodeGen

import torchgraft
from tests.bridge.comparison import assert_same_module, assert_same_outcome, outcome
from torchgraft import BridgeError, CodeGen, GraphModule, from_fx, to_fx
from torchgraft.bridge.calling import CallTreeCodeGen
from torchgraft.codegen.source import PyTreeCodeGen


class Model(nn.Module):
    def forward(self, x, options):
        return {"sum": x + options["a"] * options["b"][0], "rest": (x,)}


def function(x, options):
    return [x + options["a"] * options["b"][0]]


def concrete(fx):
    return {"options": {"a": fx.PH, "b": [fx.PH, 3]}}


INPUTS = (torch.randn(2, requires_grad=True), {"a": torch.randn(2), "b": [torch.ones(2), 3]})


@pytest.mark.parametrize("root", [Model(), function], ids=["module", "function"])
def test_trees_of_torch_fx_cross(root):
    theirs = torch.fx.symbolic_trace(root, concrete_args=concrete(torch.fx))
    ours = from_fx(theirs)
    info = theirs.graph._codegen.pytree_info
    assert isinstance(ours.graph._codegen, PyTreeCodeGen)
    assert ours.graph._codegen.in_spec == info.in_spec and ours.graph._codegen.out_spec == info.out_spec
    assert ours.code == theirs.code
    assert_same_outcome(outcome(ours, INPUTS), outcome(theirs, INPUTS))
    back = to_fx(ours)
    assert type(back.graph._codegen) is _PyTreeCodeGen and back.graph._codegen.pytree_info == info
    assert_same_module(back, theirs)


@pytest.mark.parametrize("root", [Model(), function], ids=["module", "function"])
def test_trees_of_ours_cross(root):
    ours = torchgraft.symbolic_trace(root, concrete_args=concrete(torchgraft))
    theirs = to_fx(ours)
    assert_same_outcome(outcome(theirs, INPUTS), outcome(ours, INPUTS))
    back = from_fx(theirs)
    assert type(back.graph._codegen) is PyTreeCodeGen
    assert vars(back.graph._codegen) == vars(ours.graph._codegen)
    assert_same_module(back, ours)


@pytest.mark.parametrize("root", [Model(), function], ids=["module", "function"])
def test_interpreters_and_copies_know_the_tree(root):
    ours = from_fx(torch.fx.symbolic_trace(root, concrete_args=concrete(torch.fx)))
    expected = ours(*INPUTS)
    for result in (
        torchgraft.Interpreter(ours).run(*INPUTS),
        copy.deepcopy(ours)(*INPUTS),
        pickle.loads(pickle.dumps(ours))(*INPUTS),
    ):
        torch.testing.assert_close(result, expected)
    with pytest.raises(ValueError, match="does not have the structure"):
        ours(INPUTS[0], {"a": 1})


def test_positional_and_keyword_arguments_apart():
    from torch.utils import _pytree as pytree

    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output([graph.call_function(torch.sub, (x, y))])
    in_spec = pytree.tree_structure(((0,), {"y": 0}))
    graph._codegen = _PyTreeCodeGen(torch.fx.graph._PyTreeInfo(["x", "y"], in_spec, pytree.tree_structure([0])))
    theirs = torch.fx.GraphModule(nn.Module(), graph)
    ours = from_fx(theirs)
    assert type(ours.graph._codegen) is CallTreeCodeGen
    three, one = torch.tensor(3), torch.tensor(1)
    assert ours(three, y=one) == ours(three, one) == theirs(three, y=one) == [2]
    assert torchgraft.Interpreter(ours).run(three, one) == [2]
    assert_same_module(to_fx(ours), theirs)


# ---- code that users write themselves ----


class TheirOwn(TheirCodeGen):
    pass


class OurOwn(CodeGen):
    pass


def test_a_code_generator_of_the_users_own_is_refused():
    theirs = torch.fx.symbolic_trace(lambda x: x)
    theirs.graph.set_codegen(TheirOwn())
    with pytest.raises(BridgeError, match="^from_fx cannot carry over the TheirOwn, which writes code for one library"):
        from_fx(theirs)
    ours = torchgraft.symbolic_trace(lambda x: x)
    ours.graph.set_codegen(OurOwn())
    with pytest.raises(
        BridgeError, match="^to_fx cannot carry over the OurOwn, which writes code for one library only"
    ):
        to_fx(ours)


def test_a_function_over_generated_lines_is_refused():
    theirs = torch.fx.symbolic_trace(lambda x: x)
    theirs.graph.on_generate_code(lambda current: lambda lines: lines)
    with pytest.raises(BridgeError, match="^from_fx cannot carry over the function set with on_generate_code"):
        from_fx(theirs)
    ours = torchgraft.symbolic_trace(lambda x: x)
    ours.graph.on_generate_code(lambda current: lambda lines: lines)
    with pytest.raises(BridgeError, match="^to_fx cannot carry over the function set with on_generate_code"):
        to_fx(ours)


def test_the_default_stays_the_default():
    theirs = torch.fx.symbolic_trace(lambda x: x)
    assert from_fx(theirs).graph._code_generator is None
    assert type(to_fx(torchgraft.symbolic_trace(lambda x: x)).graph._codegen) is TheirCodeGen
    assert isinstance(from_fx(theirs), GraphModule)
