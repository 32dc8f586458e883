"""Which frames there are."""

import torch

import torchgraft
from tests.view.drawing.geometry import read
from tests.view.drawing.programs import Tower
from torchgraft.view.drawing.nesting import local_name


def frames_of(program, **options):
    return [frame.tooltip.split("\n")[0] for frame in read(torchgraft.draw(program, **options).svg).frames]


def test_a_frame_for_every_call_of_a_module():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = Tower(1)

        def forward(self, x):
            return self.tower(self.tower(x) + 1)

    frames = frames_of(torchgraft.symbolic_trace(Twice()))
    assert frames.count("tower") == 2
    assert frames.count("tower.blocks.0") == 2


def test_a_frame_around_one_box_is_left_out():
    program = torchgraft.capture(
        torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()), (torch.ones(1),), level="function"
    )
    picture = read(torchgraft.draw(program).svg)
    assert picture.frames == []
    assert picture.titled("tanh")[0].words == "tanh\n1"


def test_interleaved_calls_are_frames_in_turn():
    """Two modules that need each other's values in turn cannot both be one frame."""
    graph = torchgraft.Graph()
    value = graph.placeholder("x")
    for path in ("a", "b", "a", "b"):
        for _ in range(2):
            value = graph.call_function(torch.relu, (value,))
            value.meta["nn_module_stack"] = {path: (path, torch.nn.Module)}
    graph.output(value)
    assert frames_of(graph) == ["a", "b", "a", "b"]


def test_what_another_step_interrupts_by_chance_is_one_frame():
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.relu, (x,))
    other = graph.call_function(torch.neg, (x,))
    second = graph.call_function(torch.tanh, (first,))
    for node in (first, second):
        node.meta["nn_module_stack"] = {"a": ("a", torch.nn.Module)}
    graph.output((second, other))
    assert frames_of(graph) == ["a"]


def test_forward_and_backward_are_frames():
    program = torchgraft.capture(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), (torch.ones(1, 2),), level="joint"
    )
    frames = frames_of(program)
    assert frames[0] == "Forward"
    assert "Backward" in frames


def test_names_inside_of_frames():
    assert local_name("a.b.c", "a.b") == "c"
    assert local_name("a.b.0", "a.b") == "b.0"
    assert local_name("ab.c", "a") == "ab.c"
    assert local_name("a", "") == "a"
