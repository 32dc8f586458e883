"""The kinds of calls: one table decides what is recorded as operators, and what stays a call."""

import math
import operator

import pytest
import torch
from torch.nn import functional as F

from torchgraft.ir.contexts import enter_context
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import check_value
from torchgraft.ir.structures import put_together
from torchgraft.lowering.kinds import Kind, kind_of
from torchgraft.lowering.recorder import Recorder
from torchgraft.lowering.values import Flow


class Scaled(torch.autograd.Function):
    """A function with a gradient of its own."""


def users(x):
    return x


RECORDER = Recorder(is_above_autograd=True)
TENSOR = RECORDER.traced(torch.ones(2, 3), RECORDER.create_node("placeholder", "x", (), {}))
FLAG = Flow(True, RECORDER.create_node("placeholder", "flag", (), {}))
SPARSE = Flow(torch.eye(2).to_sparse(), FLAG.node)
SIZE = TENSOR.symbolic_sizes()[0]


@pytest.mark.parametrize(
    ("target", "args", "kind"),
    [
        (check_value, (FLAG, True, "x", "here"), Kind.GUARD),
        (enter_context, (torch.no_grad,), Kind.REGION),
        (put_together, (None, TENSOR), Kind.RESULT),
        (isinstance, (TENSOR, torch.Tensor), Kind.QUESTION),
        (operator.add, (SIZE, 1), Kind.NUMBER),
        (math.ceil, (SIZE,), Kind.NUMBER),
        (operator.add, (TENSOR, 1), Kind.OPERATORS),
        (F.relu, (TENSOR,), Kind.OPERATORS),
        (torch.zeros, (2, 3), Kind.OPERATORS),
        (operator.getitem, (TENSOR, 0), Kind.OPERATORS),
        (operator.getitem, (FLAG, 0), Kind.READ),
        (getattr, (TENSOR, "shape"), Kind.OPERATORS),
        (getattr, (TENSOR, "dtype"), Kind.READ),
        (getattr, (TENSOR, "requires_grad"), Kind.GRADIENT),
        (setattr, (TENSOR, "data", TENSOR), Kind.WRITE),
        (len, (FLAG,), Kind.PLAIN),
        (print, (1,), Kind.PLAIN),
        (users, (TENSOR,), Kind.FOREIGN),
        (users, (1,), Kind.PLAIN),
        (Scaled.apply, (TENSOR,), Kind.FOREIGN),
        (torch.relu, (SPARSE,), Kind.PLAIN),
        (torch.autograd.grad, (TENSOR,), Kind.FOREIGN),
    ],
)
def test_functions(target, args, kind):
    assert kind_of(Graph().call_function(target), args, {}) is kind


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("relu", TENSOR, Kind.OPERATORS),
        ("tolist", TENSOR, Kind.READ),
        ("requires_grad_", TENSOR, Kind.FOREIGN),
        ("keys", FLAG, Kind.PLAIN),
    ],
)
def test_methods(name, value, kind):
    assert kind_of(Graph().call_method(name), (value,), {}) is kind


def test_modules():
    assert kind_of(Graph().create_node("call_module", "layer"), (TENSOR,), {}) is Kind.MODULE
