"""Shapes are noted on every node, from texts, tensors, what is known already, or the inputs of a check."""

import pytest
import torch
from torch import nn

import torchgraft
from tests.passes.contract import check_edit
from torchgraft.errors import PassError
from torchgraft.passes import Pipeline, PropagateShapes

MODEL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())


def shapes(program):
    return [tuple(node.meta["tensor_meta"].shape) for node in program.graph.nodes if "tensor_meta" in node.meta]


EXPECTED = [(2, 3, 8, 8), (2, 4, 6, 6), (2, 4, 6, 6), (2, 144), (2, 144)]


@pytest.mark.parametrize("inputs", ["2x3x8x8", "2x3x8x8:float32", (torch.ones(2, 3, 8, 8),), [torch.ones(2, 3, 8, 8)]])
def test_inputs(inputs):
    program = torchgraft.symbolic_trace(MODEL)
    assert check_edit(PropagateShapes(inputs=inputs), program) == 5
    assert shapes(program) == EXPECTED


@pytest.mark.parametrize("level", ["module", "function"])
def test_captured_programs(level):
    x = torch.ones(2, 3, 8, 8)
    program = torchgraft.capture(MODEL, (x,), level=level)
    report = Pipeline("propagate-shapes")(program, check=x)
    assert report.changes > 0 and shapes(program)[-1] == (2, 144)
    again = PropagateShapes()(program)  # from what the inputs have
    assert again.changes == 0


def test_state_and_random_numbers_are_left_alone():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5))
    for compute in (False, True):
        numbers = torch.get_rng_state()
        PropagateShapes(inputs="2x3x4x4", compute=compute)(torchgraft.symbolic_trace(model))
        assert int(model[0].num_batches_tracked) == 0 and torch.equal(torch.get_rng_state(), numbers)


def test_shapes_that_depend_on_values():
    program = torchgraft.symbolic_trace(lambda x: x.nonzero())
    PropagateShapes(inputs=(torch.tensor([0, 1, 1]),), compute=True)(program)
    assert shapes(program)[-1] == (2, 1)


def test_several_results_and_other_types():
    program = torchgraft.symbolic_trace(lambda x, y: (x.chunk(2), x[y]))
    PropagateShapes(inputs="4x3 2:int64")(program)
    notes = {node.name: node.meta.get("tensor_meta") for node in program.graph.nodes}
    assert notes["y"].dtype == torch.int64 and [tuple(part.shape) for part in notes["chunk"]] == [(2, 3), (2, 3)]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [("", "nothing is known about the inputs"), ("2by3", "cannot read the input '2by3'"), ("2x3:flat", "2x3:flat")],
)
def test_mistakes(inputs, message):
    with pytest.raises(PassError, match=message):
        PropagateShapes(inputs=inputs)(torchgraft.symbolic_trace(MODEL))


def test_inputs_that_do_not_fit_name_the_node():
    program = torchgraft.symbolic_trace(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)))
    with pytest.raises(
        PassError, match=r"expected input\[1, 4, 8, 8\] to have 3 channels.*While executing %_0 .*give inputs"
    ):
        PropagateShapes(inputs="1x4x8x8")(program)
    with pytest.raises(torchgraft.InputError, match="too many positional arguments"):
        PropagateShapes(inputs="1x3x8x8 2")(program)
