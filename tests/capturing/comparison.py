"""Comparing a traced program with the model it was traced from: results, inputs and buffers afterwards, call after call.
What must be the same is said in the tests.
"""

import _thread
import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import torchgraft as fx


def trace_like_eager(model: Callable, make_inputs: Callable[[], tuple], calls: int = 3) -> fx.GraphModule:
    """Trace `model`; run both on new inputs several times from the same random state; return the program."""
    eager = copy.deepcopy(model)
    program = fx.symbolic_trace(model)
    for number in range(calls):
        ours, theirs = make_inputs(), make_inputs()
        torch.manual_seed(number)
        answer = program(*ours)
        torch.manual_seed(number)
        expected = eager(*theirs)
        assert_same(answer, expected, f"result of call {number}")
        assert_same(ours, theirs, f"inputs after call {number}")
        if isinstance(model, nn.Module):
            assert_same(dict(model.named_buffers()), dict(eager.named_buffers()), f"buffers after call {number}")
    return program


def assert_same(found: Any, expected: Any, what: str) -> None:
    found_leaves, found_spec = pytree.tree_flatten(found)
    leaves, spec = pytree.tree_flatten(expected)
    assert found_spec == spec, what
    for one, other in zip(found_leaves, leaves, strict=True):
        if isinstance(other, torch.Tensor):
            assert isinstance(one, torch.Tensor), what
            assert one.dtype == other.dtype, what
            assert torch.equal(one, other), f"{what}: {one} instead of {other}"
        else:
            assert one == other, what


def names(program: fx.GraphModule) -> list[str]:
    return [node.name for node in program.graph.nodes]


def in_another_thread(work: Callable[[], Any]) -> None:
    """Run something in another thread, in a way that a trace does not refuse."""
    done = threading.Event()
    _thread.start_new_thread(lambda: (work(), done.set()), ())
    assert done.wait(timeout=120)
