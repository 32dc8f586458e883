"""Regions, guards and other calls of our own inside programs that run under torch.fx."""

import contextlib
import pickle

import pytest
import torch
import torch.fx
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import torchgraft
from tests.bridge.comparison import assert_same_module, assert_same_outcome, outcome
from torchgraft import BridgeError, GuardError, from_fx, to_fx
from torchgraft.bridge.counterparts import enter_region
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.guards import check_training


def without_gradient(x):
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = x * 3
    return x * y + z


def other_regions(x):
    with torch.set_grad_enabled(False):
        y = x.relu()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):
        z = x @ x
    with torch.inference_mode(False):
        w = x.exp()
    return y + z.float() + w


@pytest.mark.parametrize("program", [without_gradient, other_regions])
def test_regions_run_under_torch_fx(program):
    ours = torchgraft.symbolic_trace(program)
    theirs = to_fx(ours)
    x = torch.randn(3, 3, requires_grad=True)
    expected = outcome(ours, (x,))
    assert_same_outcome(outcome(theirs, (x,)), expected)
    torch.testing.assert_close(torch.fx.Interpreter(theirs).run(x).detach(), expected["result"])
    assert torch.is_grad_enabled()
    back = from_fx(theirs)
    assert_same_module(back, ours)
    assert "with torch." in back.code


def test_dead_code_elimination_of_torch_fx_keeps_regions():
    theirs = to_fx(torchgraft.symbolic_trace(without_gradient))
    theirs.graph.eliminate_dead_code()
    targets = [node.target for node in theirs.graph.nodes]
    assert targets.count(enter_region) == targets.count(exit_context) == 2


def test_an_error_leaves_a_region_open_in_torch_fx_only():
    """Documented in to_fx: torch.fx has no `with` blocks."""

    def program(x):
        with torch.no_grad():
            return x @ x

    ours = torchgraft.symbolic_trace(program)
    theirs = to_fx(ours)
    with pytest.raises(RuntimeError):
        ours(torch.ones(2, 3))
    assert torch.is_grad_enabled()
    try:
        with pytest.raises(RuntimeError):
            theirs(torch.ones(2, 3))
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


class Outer:
    class Inner(contextlib.nullcontext):
        pass


def region_program(factory):
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    context = graph.call_function(enter_context, (factory,))
    y = graph.call_function(torch.relu, (x,))
    graph.call_function(exit_context, (context,))
    graph.output(y)
    return torchgraft.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("factory", [contextlib.nullcontext, Outer.Inner])
def test_any_importable_context_manager_crosses(factory):
    ours = region_program(factory)
    theirs = to_fx(ours)
    assert torch.equal(theirs(torch.ones(1)), torch.ones(1))
    assert_same_module(from_fx(theirs), ours)


def test_a_context_manager_without_a_name_is_refused():
    class Local(contextlib.nullcontext):
        pass

    with pytest.raises(
        BridgeError, match="cannot carry node 'enter_context' over to torch.fx: it enters the context manager"
    ):
        to_fx(region_program(Local))


class Switching(nn.Module):
    def forward(self, x):
        if self.training:
            return x + 1
        return x - 1


def test_guards_run_under_torch_fx():
    ours = torchgraft.symbolic_trace(Switching())
    assert ours.graph.find_nodes(op="call_function", target=check_training)
    theirs = to_fx(ours)
    theirs.graph.eliminate_dead_code()
    theirs.recompile()
    assert theirs(torch.ones(1)) == 2
    theirs.eval()
    with pytest.raises(GuardError, match="captured in training mode and the module is now in evaluation mode"):
        theirs(torch.ones(1))
    assert_same_module(from_fx(to_fx(ours)), ours)


def test_torch_fx_does_not_lose_regions_without_a_word():
    theirs = to_fx(torchgraft.symbolic_trace(without_gradient))
    for lose in (torch.fx.symbolic_trace, lambda module: pickle.loads(pickle.dumps(module))):
        with pytest.raises(BridgeError, match="torch.fx cannot trace a program that enters the region torch.no_grad"):
            lose(theirs)
    x = torch.randn(3, 3)
    assert torch.equal(make_fx(theirs)(x)(x), theirs(x))
    again = torchgraft.symbolic_trace(theirs)
    assert torch.equal(again(x), theirs(x))
    assert again.code.count("with torch.") == 2
