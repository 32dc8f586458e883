"""The places in torch's dispatcher where operators are recorded: what torch hands over there, and that nothing stays behind."""

import threading

import pytest
import torch
from torch.nn import functional as F

from torchgraft import capture
from torchgraft.ir.guards import check_value
from torchgraft.lowering.modes import recording
from torchgraft.lowering.recorder import Recorder

X, WEIGHT = torch.randn(4, 6), torch.randn(3, 6)


def recorded(is_above_autograd, run):
    recorder = Recorder(is_above_autograd)
    x = recorder.traced(X, recorder.create_node("placeholder", "x", (), {}))
    weight = recorder.traced(WEIGHT, recorder.create_node("placeholder", "weight", (), {}))
    with recording(recorder):
        run(x, weight)
    return [str(node.target) for node in recorder.graph.nodes if node.op == "call_function"]


def test_before_autograd_operators_are_whole():
    assert recorded(True, F.linear) == ["aten.linear.default"]
    assert recorded(True, lambda x, weight: F.dropout(x, 0.5)) == ["aten.dropout.default"]


def test_after_autograd_composite_operators_are_taken_apart():
    assert recorded(False, F.linear) == ["aten.t.default", "aten.mm.default"]


def test_autocast_is_seen_after_it_only():
    def cast(x, weight):
        with torch.autocast("cpu", torch.bfloat16):
            F.linear(x, weight)

    assert recorded(True, cast) == ["aten.linear.default"]
    assert recorded(False, cast).count("aten._to_copy.default") == 2


@pytest.mark.parametrize("is_above_autograd", [True, False])
def test_nothing_stays_behind(is_above_autograd):
    recorder = Recorder(is_above_autograd)
    with pytest.raises(ValueError), recording(recorder):
        raise ValueError
    F.linear(X, WEIGHT)
    assert not list(recorder.graph.nodes)


def test_sizes_are_asked_of_the_tensor():
    recorder = Recorder(is_above_autograd=True)
    x = recorder.traced(X, recorder.create_node("placeholder", "x", (), {}))
    assert isinstance(x.shape[0], torch.SymInt)
    assert x.shape[0] * x.shape[1] == 24 and recorder.graph.find_nodes(op="call_function", target=check_value)
    with pytest.raises(NotImplementedError, match="where nobody records it"):
        x + 1


def test_operators_of_one_thread_are_not_heard_in_another():
    programs = []
    other = threading.Thread(
        target=lambda: programs.append(capture(lambda x: F.linear(x * 2, WEIGHT), (X,), level="aten"))
    )
    recorder = Recorder(True)
    with recording(recorder):
        other.start()
        other.join(0.2)
    other.join()
    assert programs[0].meta["kept_calls"] == {} and "aten.linear" in str(programs[0].graph)
    assert not list(recorder.graph.nodes)
