"""Nothing overlaps, nothing is off the paper, no line runs through a box: on random programs and on real models."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchgraft
from tests.view.drawing.geometry import Picture, Rect, faults, read
from tests.view.drawing.programs import Tower, chain, fan, random_program
from torchgraft import zoo


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 60),
    seed=st.integers(0, 10_000),
    modules=st.sampled_from([0, 2, 5]),
    direction=st.sampled_from(["down", "right"]),
)
def test_random_programs_have_no_faults(size, seed, modules, direction):
    drawing = torchgraft.draw(random_program(size, seed, modules), direction=direction)
    assert faults(read(drawing.svg)) == []


@pytest.mark.parametrize("level", ["module", "function", "aten", "core_aten", "joint"])
@pytest.mark.parametrize("direction", ["down", "right"])
def test_the_mlp_at_each_level(level, direction):
    model, inputs = zoo.create("mlp").eval(), zoo.example_inputs("mlp")
    program = torchgraft.capture(model, inputs, level=level)
    drawing = torchgraft.draw(program, direction=direction)
    assert faults(read(drawing.svg)) == []


@pytest.mark.parametrize(
    "options", [{}, {"fold": True}, {"depth": 1}, {"depth": 0}, {"fold": True, "direction": "right"}]
)
def test_a_transformer_has_no_faults(options):
    model, inputs = zoo.create("transformer", layers=2).eval(), zoo.example_inputs("transformer")
    drawing = torchgraft.draw(torchgraft.capture(model, inputs), args=inputs, **options)
    assert faults(read(drawing.svg)) == []


@pytest.mark.parametrize(("name", "level"), [("resnet50", "module"), ("resnet50", "function"), ("resnet18", "joint")])
def test_resnets_have_no_faults(name, level):
    model, inputs = zoo.create(name).eval(), zoo.example_inputs(name, size=64)
    picture = read(torchgraft.draw(torchgraft.capture(model, inputs, level=level)).svg)
    assert faults(picture) == []


def test_users_stand_below_what_they_use():
    picture = read(torchgraft.draw(torchgraft.symbolic_trace(Tower(2))).svg)
    by_name = {box.tooltip.split("\n")[0].lstrip("%"): box for box in picture.boxes}
    program = torchgraft.symbolic_trace(Tower(2))
    pairs = [(source.name, node.name) for node in program.graph.nodes for source in node.all_input_nodes]
    assert pairs
    for source, user in pairs:
        assert by_name[source].bottom < by_name[user].top


def test_right_is_down_turned():
    program = torchgraft.symbolic_trace(Tower(2))
    picture = read(torchgraft.draw(program, direction="right").svg)
    by_name = {box.tooltip.split("\n")[0].lstrip("%"): box for box in picture.boxes}
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            assert by_name[source.name].right < by_name[node.name].left


def test_modules_are_frames_around_their_boxes():
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Tower(2)

        def forward(self, x):
            return self.inner(x) * 2

    picture = read(torchgraft.draw(torchgraft.capture(Outer(), (torch.ones(1, 4),))).svg)
    frames = {frame.tooltip.split("\n")[0]: frame for frame in picture.frames}
    assert frames["inner"].contains(frames["inner.blocks.1"])
    inside = [box for box in picture.boxes if frames["inner.blocks.1"].contains(box)]
    assert sorted(box.words.split("\n")[0] for box in inside) == ["Linear", "Linear", "add", "relu"]
    assert not frames["inner"].contains(picture.titled("mul")[0])


def test_a_long_chain_goes_in_columns():
    picture = read(torchgraft.draw(chain(150)).svg)
    assert 0.4 < picture.width / picture.height < 2.5
    assert faults(picture) == []


def test_a_wide_fan_goes_in_rows():
    picture = read(torchgraft.draw(fan(100)).svg)
    assert picture.width < 2500
    assert faults(picture) == []
    assert len(picture.titled("100 values from above")) == 1


def test_shared_values_have_one_line_each():
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(torch.relu, (x,)) for _ in range(5)])
    picture = read(torchgraft.draw(graph).svg)
    assert [tooltip for tooltip, _ in picture.lines].count("%x") == 1


def test_the_faults_themselves_are_found():
    one, two = Rect(10, 10, 50, 20, words="one"), Rect(40, 15, 50, 20, words="two")
    frame = Rect(0, 0, 30, 30, tooltip="frame")
    line = ("%x", [(20.0, 0.0), (20.0, 20.0)])
    found = faults(Picture(80, 40, [one, two], [frame], [line]))
    assert found == [
        " 'two' is off the paper",
        "box 'one' is half in frame 'frame'",
        "boxes 'one' and 'two' overlap",
        "the line of '%x' runs through 'one'",
    ]
