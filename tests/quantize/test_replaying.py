"""Runs of integer layers: the results of layer by layer, bit by bit, for every shape, after every change, wherever they run."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import torchgraft
from tests.quantize.test_flow import Residual, images
from torchgraft.quantize import explain_speed, join_layers, quantize
from torchgraft.quantize.native.replaying import Replay

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


class Sums(nn.Module):
    """The same value is added twice, after it was read, so that copies of it are written into."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Conv2d(4, 4, size, padding=size // 2) for size in (1, 3, 1, 1))

    def forward(self, x):
        x = torch.relu(self.one(x))
        y, z = torch.relu(self.two(x) + x), torch.relu(self.three(x) + x)
        return self.four(y), self.four(z), self.four(x)


def programs(model, data):
    native = quantize(model.eval(), data)
    return native, join_layers(native)


def same(native, joined, x):
    """Whether both give the same, also when what was written down runs."""
    with torch.no_grad():
        expected = native(x)
        pairs = [
            zip(*(value if isinstance(value, tuple) else (value,) for value in (expected, joined(x))), strict=True)
            for _ in range(3)
        ]
    return all(torch.equal(one, two) for pair in pairs for one, two in pair)


def replays(joined):
    """What the runs call: True for each shape where that was written down."""
    runs = [module for module in joined.modules() if isinstance(module, Replay)]
    return [call is not run.part for run in runs for call in run._calls.values()]


@pytest.mark.parametrize("make", [Residual, Sums])
def test_runs_are_their_layers(make):
    torch.manual_seed(0)
    channels = 3 if make is Residual else 4
    data = [torch.randn(4, channels, 12, 12) for _ in range(3)]
    native, joined = programs(make(), data)
    assert len(list(joined.graph.nodes)) < len(list(native.graph.nodes))
    shapes = [(4, 12), (1, 12), (2, 16), *([(0, 12)] if make is Sums else [])]
    for count, size in shapes:
        assert same(native, joined, torch.randn(count, channels, size, size))
    last = torch.randn(2, channels, 12, 12).to(memory_format=torch.channels_last)
    assert same(native, joined, last) and same(native, joined, torch.randn(2, channels, 12, 12).transpose(2, 3))
    assert any(replays(joined))


def test_more_shapes_than_are_kept():
    native, joined = programs(Residual(), [images(4)])
    for size in [*range(8, 30), 8]:
        assert same(native, joined, torch.randn(1, 3, size, size))


def test_layers_of_numbers_and_tables():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Hardtanh(-0.5, 1.5), nn.Linear(16, 8)]
    native, joined = programs(nn.Sequential(*layers), [torch.randn(32, 16)])
    for rows in (1, 7):
        assert same(native, joined, torch.randn(rows, 16))
    assert replays(joined) and all(replays(joined))


def test_what_cannot_be_written_down_runs_as_it_is():
    class Spread(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = (nn.Conv2d(4, 4, 1) for _ in range(3))

        def forward(self, x, y):
            y = torch.relu(self.one(y))
            return self.three(torch.relu(self.two(torch.relu(self.one(x))) + y))

    torch.manual_seed(0)
    data = [(torch.randn(2, 4, 6, 6), torch.randn(2, 4, 6, 6)) for _ in range(2)]
    native, joined = programs(Spread(), data)
    for x, y in (data[0], (data[0][0], data[0][1][:, :, :1, :1])):
        assert all(torch.equal(native(x, y), joined(x, y)) for _ in range(3))
    assert sorted(replays(joined)) == [False, True]


def test_copies_pickles_and_the_original():
    native, joined = programs(Residual(), [images(4)])
    before = str(native.graph)
    for again in (joined, copy.deepcopy(joined), pickle.loads(pickle.dumps(joined)), join_layers(joined)):
        assert same(native, again, images(2, 5))
    assert str(native.graph) == before


@pytest.mark.parametrize("through", ["joined", "native"])
def test_weights_that_are_loaded_later_count(through):
    torch.manual_seed(0)
    data = [images(4)]
    model = Residual().eval()
    native, joined = programs(model, data)
    x = images(2, 3)
    assert same(native, joined, x)
    changed = {name: -value if name.endswith(".weight") else value for name, value in joined.state_dict().items()}
    before = joined(x)
    if through == "joined":
        joined.load_state_dict(changed)
    else:  # which has the same layers
        inner = {name.partition(".part.")[2] or name: value for name, value in changed.items()}
        native.load_state_dict(inner)
    assert same(native, joined, x) and not torch.equal(before, joined(x))


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_of_gradients(first):
    native, joined = programs(Residual(), [images(4)])
    with first():
        expected = [joined(images(2, 1)).clone() for _ in range(2)]
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            assert torch.equal(joined(images(2, 1)), expected[0]) and torch.equal(native(images(2, 1)), expected[1])


def test_threads_may_run_one_program():
    native, joined = programs(Residual(), [images(4)])
    inputs = [images(1 + seed % 3, seed) for seed in range(6)]
    expected, found = [native(x) for x in inputs], {}

    def run(place):
        found[place] = [joined(inputs[place]) for _ in range(20)]

    threads = [threading.Thread(target=run, args=(place,)) for place in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(torch.equal(one, expected[place]) for place, results in found.items() for one in results)


def test_it_compiles_with_breaks_and_says_what_to_export():
    native, joined = programs(Residual(), [images(4)])
    with torch.no_grad():
        torch._dynamo.reset()
        assert torch.allclose(torch.compile(joined, backend="eager")(images(2, 3)), native(images(2, 3)), atol=1e-2)
        with pytest.raises(Exception, match="a program with packed weights cannot be exported"):
            torch.export.export(joined, (images(2, 3),))


def test_quantized_programs_run_on_when_lowered():
    torch.manual_seed(0)
    native, joined = programs(Residual(), [images(4)])
    for program in (native, joined):
        lowered = torchgraft.lower(program, images(4), backend="native")
        for count in (4, 1, 2, 4):
            assert torch.equal(lowered(images(count, 7)), native(images(count, 7)))


def test_where_the_time_goes_is_said_of_runs():
    model, data = (
        nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]),
        torch.randn(64, 64),
    )
    _, joined = programs(model, [data])
    found = explain_speed(model, joined, data)
    assert ("integer layers", "3 of them in one call") in [(node.kind, node.note) for node in found.nodes]
