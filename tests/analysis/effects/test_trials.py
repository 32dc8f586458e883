"""Torch's own Python functions: what a run on tensors without data finds, where no shape is known and where some are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import torchgraft
from torchgraft.analysis.effects import effects_of
from torchgraft.ir.graph import Graph


def effects_of_call(function, *arguments, **keywords):
    """Strings of one letter are input nodes."""
    graph = Graph()
    nodes = {name: graph.placeholder(name) for name in "wxyz"}

    def node(value):
        if isinstance(value, list | tuple):
            return type(value)(map(node, value))
        return nodes.get(value, value) if isinstance(value, str) else value

    call = graph.call_function(function, tuple(map(node, arguments)), {k: node(v) for k, v in keywords.items()})
    return effects_of(call)


def named(places) -> str:
    return "".join(sorted(map(str, places)))


# A call, what it writes, whether it draws, whose memory its result may share.
CASES = [
    (F.relu, ("x",), {}, "", False, ""),
    (F.relu, ("x", "y"), {}, "x", False, "x"),  # a flag that is only known when the program runs
    (F.dropout, ("x", 0.5, "y"), {}, "", True, "x"),
    (F.dropout, ("x", "y", True), {}, "", True, ""),
    (F.batch_norm, ("x", "y", "z"), {"training": "w"}, "yz", False, ""),
    (F.layer_norm, ("x", (768,)), {}, "", False, ""),
    (F.layer_norm, ("x", ("y",)), {}, "", False, ""),
    (F.interpolate, ("x",), {"size": ("y", "z")}, "", False, ""),
    (F.interpolate, ("x",), {"scale_factor": 2, "mode": "bilinear"}, "", False, ""),
    (F.pad, ("x", (0, "y")), {}, "", False, ""),
    (F.max_pool2d, ("x", 3, 2, 1), {}, "", False, ""),
    (F.max_pool2d, ("x", 3), {"return_indices": True}, "", False, ""),
    (F.grid_sample, ("x", "y"), {}, "", False, ""),
    (F.fold, ("x", (4, 4), (2, 2)), {}, "", False, ""),
    (F.cross_entropy, ("x", "y"), {"ignore_index": -100}, "", False, ""),
    (F.nll_loss, ("x", "y"), {}, "", False, ""),
    (F.gumbel_softmax, ("x",), {"hard": True}, "", True, ""),
    (torch.split, ("x", [1, 2, "y"], 1), {}, "", False, "x"),
    (torch.split, ("x", [12, 16, 16]), {"dim": -1}, "", False, "x"),
    (torch.einsum, ("nhwpqc->nchpwq", "x"), {}, "", False, "x"),
    (torch.einsum, ("bij,bjk->bik", "x", "y"), {}, "", False, ""),
    (torch.einsum, ("bzch,bzhpn->bchpn", "x", "y"), {}, "", False, ""),
    (torch.einsum, ("bhij,hk->bkij", "x", "y"), {}, "", False, ""),
    (torch.meshgrid, ("x", "y"), {"indexing": "ij"}, "", False, "xy"),
    (torch.broadcast_tensors, ("x", "y"), {}, "", False, "xy"),
    (torch.unique, ("x",), {"return_inverse": True}, "", False, ""),
    (torch.Tensor.unflatten, ("x", 1, ("y", -1)), {}, "", False, "x"),
    (torch.Tensor.storage, ("x",), {}, "", False, "x"),
]


@pytest.mark.parametrize("function, arguments, keywords, written, random, shared", CASES)
def test_what_a_call_does(function, arguments, keywords, written, random, shared):
    effects = effects_of_call(function, *arguments, **keywords)
    assert not effects.unknown, effects.reasons
    assert (named(effects.writes), effects.random, named(effects.shares)) == (written, random, shared)


def test_a_copy_that_depends_on_the_layout_may_share_memory():
    assert named(effects_of_call(torch.atleast_2d, "x").shares) == "x"
    assert named(effects_of_call(torch.nn.Flatten.forward, "x").shares) != ""  # no function of a known home: anything


@pytest.mark.parametrize("function", [torch.manual_seed, torch.save, torch.set_num_threads, torch.autograd.backward])
def test_functions_that_change_the_process_are_not_tried(function):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    assert effects_of_call(function, 1)
    assert torch.equal(state, torch.get_rng_state()) and torch.get_num_threads() == threads


def test_known_shapes_are_used_where_a_guess_does_not_do():
    graph = Graph()
    nodes = [graph.placeholder(name) for name in "qkv"]
    weights = [graph.placeholder(name) for name in ("weight", "bias", "out_weight", "out_bias")]
    shapes = [(5, 2, 8)] * 3 + [(24, 8), (24,), (8, 8), (8,)]
    arguments = (*nodes, 8, 2, *weights[:2], None, None, False, 0.0, *weights[2:])
    call = graph.call_function(F.multi_head_attention_forward, arguments)
    for node, shape in zip([*nodes, *weights], shapes, strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")
    assert not effects_of(call)


def test_an_ambient_mode_sees_nothing_of_a_run():
    seen = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Spy():
        assert not effects_of_call(F.hardswish, "x")
    assert seen == []


def test_nothing_large_is_imported_for_a_run():
    code = """
import sys, torch, torchgraft
program = torchgraft.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.ReLU()))
program.graph.eliminate_dead_code()
[node.is_impure() for node in program.graph.nodes]
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(torchgraft.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == "[]"
