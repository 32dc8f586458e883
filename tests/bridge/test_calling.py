"""How programs are called, across the bridge: trees of inputs and outputs, code generators of one's own, edited lines."""

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


# ---- code generators that users wrote ----


class OneList:
    """What code that takes its inputs as one list is made of, in both libraries."""

    def generate_output(self, output_args):
        return f"return {{'only': {output_args!r}}}"

    def process_inputs(self, *args):
        return args[0]

    def process_outputs(self, outputs):
        return {"only": outputs}

    def additional_globals(self):
        return [("MAKE", list)]


class TheirList(OneList, TheirCodeGen):
    def gen_fn_def(self, free_vars, maybe_return_annotation, *, expanded_def=False):
        return f"def forward(self, values):\n    {', '.join(free_vars)}, = MAKE(values)"


class OurList(OneList, CodeGen):
    def gen_fn_def(self, free_vars, maybe_return_annotation):
        return f"def forward(self, values):\n    {', '.join(free_vars)}, = MAKE(values)"


def test_a_code_generator_written_for_torch_fx_works_here():
    theirs = torch.fx.symbolic_trace(lambda x, y: torch.relu(x) + y)
    theirs.graph.set_codegen(TheirList())
    theirs.recompile()
    ours = from_fx(theirs)
    assert ours([torch.ones(1), 2]) == theirs([torch.ones(1), 2]) == {"only": 3}
    assert torchgraft.Interpreter(ours).run([torch.ones(1), 2]) == {"only": 3}
    assert pickle.loads(pickle.dumps(ours))([torch.ones(1), 2]) == {"only": 3}
    assert copy.deepcopy(ours)([torch.ones(1), 2]) == {"only": 3}
    back = to_fx(ours)
    assert type(back.graph._codegen) is TheirList
    assert back.graph._codegen is not theirs.graph._codegen
    assert_same_module(back, theirs)


def test_a_code_generator_written_for_ours_works_there():
    ours = torchgraft.symbolic_trace(lambda x, y: torch.relu(x) + y)
    ours.graph.set_codegen(OurList())
    theirs = to_fx(ours)
    assert theirs([torch.ones(1), 2]) == ours([torch.ones(1), 2]) == {"only": 3}
    assert torch.fx.Interpreter(theirs).run([torch.ones(1), 2]) == {"only": 3}
    back = from_fx(theirs)
    assert type(back.graph._codegen) is OurList
    assert_same_module(back, ours)


@pytest.mark.skipif(not hasattr(torch.fx.graph, "_BoxedCodeGen"), reason="this version of torch has no boxed calls")
def test_boxed_calls_cross():
    theirs = torch.fx.symbolic_trace(lambda x, y: torch.relu(x) + y)
    theirs.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    theirs.recompile()
    values = [torch.ones(1), 2]
    ours = from_fx(theirs)
    assert ours(values) == 3 and values == []
    assert_same_module(to_fx(ours), theirs)


class TheirWhole(TheirCodeGen):
    def _gen_python_code(self, *args, **kwargs):
        return super()._gen_python_code(*args, **kwargs)


class OurWhole(CodeGen):
    def generate(self, *args, **kwargs):
        return super().generate(*args, **kwargs)


def test_a_code_generator_that_replaces_everything_is_refused():
    theirs = torch.fx.symbolic_trace(lambda x: x)
    theirs.graph.set_codegen(TheirWhole())
    with pytest.raises(
        BridgeError, match="from_fx cannot carry over the code generator TheirWhole: it overrides _gen_python"
    ):
        from_fx(theirs)
    ours = torchgraft.symbolic_trace(lambda x: x)
    ours.graph.set_codegen(OurWhole())
    with pytest.raises(BridgeError, match="to_fx cannot carry over the code generator OurWhole: it overrides generate"):
        to_fx(ours)


# ---- functions over generated lines ----


def double_the_relu(lines):
    return [line.replace("torch.relu(x)", "torch.relu(x) * 2") for line in lines]


def test_a_body_transformer_of_torch_fx_works_here():
    theirs = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    seen = []

    def watch(fragments):
        seen.append(fragments)
        return double_the_relu(fragments)

    theirs.graph.on_generate_code(lambda current: watch)
    theirs.recompile()
    ours = from_fx(theirs)
    assert ours(torch.ones(1)) == theirs(torch.ones(1)) == 3
    assert "torch.relu(x) * 2" in ours.code and "COUNTER" not in ours.code
    expected = [piece for piece in seen[0] if "COUNTER" not in piece]
    assert [piece for piece in seen[-1] if "COUNTER" not in piece] == expected
    back = to_fx(ours)
    assert back.graph._codegen._body_transformer is watch
    assert_same_module(back, theirs)


def test_a_body_transformer_of_ours_works_there():
    ours = torchgraft.symbolic_trace(lambda x: torch.relu(x) + 1)
    seen = []

    def watch(lines):
        seen.append(lines)
        return double_the_relu(lines)

    ours.graph.on_generate_code(lambda current: watch)
    theirs = to_fx(ours)
    assert theirs(torch.ones(1)) == ours(torch.ones(1)) == 3
    assert seen[0] == seen[1]
    back = from_fx(theirs)
    assert back.graph._codegen._body_transformer is watch
    assert_same_module(back, ours)


def test_the_default_stays_the_default():
    theirs = torch.fx.symbolic_trace(lambda x: x)
    assert from_fx(theirs).graph._code_generator is None
    assert type(to_fx(torchgraft.symbolic_trace(lambda x: x)).graph._codegen) is TheirCodeGen
    assert isinstance(from_fx(theirs), GraphModule)
