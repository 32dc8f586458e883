"""Every pass on every small model and on random programs: same results and gradients, well formed, honest, and done at once."""

from __future__ import annotations

import copy
import os
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import torchgraft
from tests.passes.contract import check_edit, check_program
from tests.passes.variations import doubled_programs, padded_programs
from tests.properties.observation import make_inputs
from tests.properties.strategies import Program, programs
from tests.properties.ways import capture as symbolic
from torchgraft import zoo
from torchgraft.passes import (
    FoldConstants,
    Functionalize,
    FuseActivations,
    FuseConvNorm,
    MergeCommon,
    MergeLinears,
    NormalizeArguments,
    PropagateShapes,
    RemoveDeadCode,
    RemoveNoOps,
    ReorderForMemory,
    ReplaceModule,
)

EXACT = (
    *(RemoveDeadCode(), MergeCommon(), FoldConstants(), NormalizeArguments(), NormalizeArguments(keywords=False)),
    *(RemoveNoOps(), Functionalize(), FuseActivations(), FuseConvNorm(), MergeLinears(), ReorderForMemory()),
    ReplaceModule(nn.Linear, copy.deepcopy),
)


# ---- small models ----


class Residual(nn.Module):
    """Writes in place, a shared module, a branch and a constant."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.other = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        y = self.relu(self.norm(self.first(x)))
        z = self.other(self.second(y))
        z += y
        z = self.drop(self.relu(z)) * torch.arange(8.0).view(1, 8, 1, 1).sqrt()
        z = z.clone().mean((2, 3))
        return self.head(z) + self.head(z) * torch.tensor(2.0)


class Attention(nn.Module):
    """Views, matmuls, a mask that is a buffer, and a region."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5 + self.mask
        with torch.no_grad():
            entropy = -(scores.softmax(-1) * scores.softmax(-1).clamp_min(1e-9).log()).sum(-1)
        return x + self.out(F.dropout(scores.softmax(-1), 0.1, self.training) @ v), entropy


class Counting(nn.Module):
    """State that is written, drawn noise, several outputs and one of them twice."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.count.add_(1)
        y = self.linear(x).mul_(2).add_(torch.rand(4))
        z = y.view(-1)
        z[0] = 5
        return {"y": y, "again": y, "z": z.sum() * self.count, "noise": (torch.rand(2), torch.rand(2))}


def recurrent():
    return nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(12, 4), nn.Tanh())


MODELS = {
    "mlp": (lambda: zoo.create("mlp"), lambda: zoo.example_inputs("mlp", batch=3)),
    "residual": (Residual, lambda: (torch.randn(2, 3, 6, 6),)),
    "attention": (Attention, lambda: (torch.randn(2, 5, 8),)),
    "counting": (Counting, lambda: (torch.randn(3, 4),)),
    "embedding": (recurrent, lambda: (torch.tensor([[0, 1, 2], [3, 4, 5]]),)),
    "transformer": (
        lambda: zoo.create("transformer", layers=1, width=16, heads=2, vocabulary=20),
        lambda: zoo.example_inputs("transformer", length=6, vocabulary=20),
    ),
}


def outcome(module, inputs):
    """Everything that a run gives: results, gradients and state."""
    torch.manual_seed(0)
    inputs = [x.clone().requires_grad_() if x.is_floating_point() else x.clone() for x in inputs]
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(module(*inputs)) if isinstance(leaf, torch.Tensor)]
    total = sum((leaf.float().sum() for leaf in leaves if leaf.requires_grad), torch.zeros(()))
    parameters = dict(module.named_parameters())
    targets = [x for x in inputs if x.requires_grad] + list(parameters.values())
    found = torch.autograd.grad(total, targets, allow_unused=True) if total.requires_grad else []
    gradients = dict(zip([*range(len(targets) - len(parameters)), *parameters], found, strict=False))
    return [leaf.detach() for leaf in leaves], gradients, {name: b.clone() for name, b in module.named_buffers()}


def captured(name, level, training=False):
    make, example = MODELS[name]
    torch.manual_seed(0)
    model = make().train(training)
    torch.manual_seed(1)
    inputs = example()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = (
            torchgraft.symbolic_trace(model) if level == "symbolic" else torchgraft.capture(model, inputs, level=level)
        )
    return program, inputs


@pytest.mark.parametrize("level", ["symbolic", "module", "function"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("edit", EXACT, ids=str)
def test_small_models(edit, name, level):
    training = name in ("counting", "residual") and not isinstance(edit, FuseConvNorm)
    plain, inputs = captured(name, level, training)
    results, gradients, buffers = outcome(plain, inputs)
    program, inputs = captured(name, level, training)
    if isinstance(edit, ReorderForMemory):
        PropagateShapes(inputs=inputs)(program)
    check_edit(edit, program)
    found, found_gradients, found_buffers = outcome(program, inputs)
    exactly = {"rtol": 1e-4, "atol": 1e-5} if isinstance(edit, FuseConvNorm) else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found, results, **exactly)
    for key, value in found_gradients.items():
        if key in gradients and value is not None and not isinstance(edit, FuseConvNorm):
            torch.testing.assert_close(value, gradients[key], rtol=1e-4, atol=1e-5)
    for key, value in found_buffers.items():
        if key in buffers:
            torch.testing.assert_close(value, buffers[key], rtol=0, atol=0)


def test_the_small_models_give_every_pass_something_to_do():
    changes = dict.fromkeys(map(str, EXACT), 0)
    for edit in EXACT:
        for name in MODELS:
            program, inputs = captured(name, "symbolic", training=False)
            if isinstance(edit, ReorderForMemory):
                PropagateShapes(inputs=inputs)(program)
            changes[str(edit)] += edit(program).changes
    idle = {name for name, count in changes.items() if count == 0}
    # A pass that finds nothing here has tests of its own with something to find.
    assert idle <= {"remove-dead-code", "reorder-for-memory"}, idle


# ---- random programs ----


def watched(level):
    def capture(program: Program):
        subject, model = program.make()
        return torchgraft.capture(subject, make_inputs(), level=level), model

    return capture


# `HYPOTHESIS_PROFILE=thorough` looks further.
EXAMPLES = 300 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 10
WAYS = {"symbolic": symbolic, "module": watched("module"), "function": watched("function")}
RANDOM = (
    *((MergeCommon(), doubled_programs), (FoldConstants(), doubled_programs), (RemoveDeadCode(), programs)),
    *((NormalizeArguments(), programs), (RemoveNoOps(), padded_programs), (Functionalize(), doubled_programs)),
    *((Functionalize(), padded_programs), (FuseActivations(), programs), (FuseConvNorm(), programs)),
)


@pytest.mark.parametrize(("edit", "strategy"), RANDOM, ids=lambda value: getattr(value, "__name__", str(value)))
def test_random_programs(edit, strategy):
    @given(strategy(), st.sampled_from(["symbolic", "symbolic", "module", "function"]))
    @settings(max_examples=EXAMPLES)
    def run(program: Program, way: str) -> None:
        capture = WAYS[way]
        try:
            capture(program)
        except Exception:  # refused, or the program raises in eager too
            return
        check_program(edit, program, capture)

    run()


@given(st.one_of(programs(), doubled_programs()), st.sampled_from(["symbolic", "function"]))
@settings(max_examples=2 * EXAMPLES)
def test_random_programs_reordered(program: Program, way: str) -> None:
    def capture(given_program: Program):
        module, model = WAYS[way](given_program)
        PropagateShapes(inputs=make_inputs(), compute=True)(module)
        return module, model

    try:
        capture(program)
    except Exception:  # refused, or the program raises in eager too
        return
    check_program(ReorderForMemory(), program, capture)


@given(st.one_of(doubled_programs(), padded_programs()))
@settings(max_examples=EXAMPLES)
def test_all_passes_in_a_row(program: Program) -> None:
    try:
        symbolic(program)
    except torchgraft.TraceError:
        return

    class Everything(RemoveDeadCode):
        def run(self, module):
            edits = (
                Functionalize(),
                NormalizeArguments(),
                MergeCommon(),
                FoldConstants(),
                RemoveNoOps(),
                RemoveDeadCode(),
            )
            total = 0
            while found := sum(edit(module).changes for edit in edits):
                total += found
            return total

    check_program(Everything(), program, symbolic)
