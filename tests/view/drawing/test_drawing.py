"""`draw` as a whole."""

import pytest
import torch

import torchgraft
from tests.view.drawing.geometry import read
from tests.view.drawing.programs import Tower, chain
from torchgraft import zoo


def test_a_drawing_shows_itself_in_notebooks():
    drawing = torchgraft.draw(torchgraft.symbolic_trace(Tower(1)))
    assert isinstance(drawing, torchgraft.Drawing)
    assert drawing._repr_svg_() == drawing.svg
    assert repr(drawing) == f"Drawing(width={drawing.width}, height={drawing.height}, boxes={drawing.boxes})"
    picture = read(drawing.svg)
    assert (picture.width, picture.height) == (drawing.width, drawing.height)


def test_graphs_modules_functions_and_programs():
    model = Tower(1)
    program = torchgraft.symbolic_trace(model)
    assert torchgraft.draw(program.graph).boxes == torchgraft.draw(program).boxes == torchgraft.draw(model).boxes
    assert torchgraft.draw(lambda x: x * 2).boxes == 3
    assert "1×4" in read(torchgraft.draw(model, args=(torch.ones(1, 4),)).svg).words


def test_an_empty_graph():
    drawing = torchgraft.draw(torchgraft.Graph())
    assert drawing.boxes == 0
    assert "0 nodes" in read(drawing.svg).words


def test_drawing_changes_nothing():
    program = torchgraft.symbolic_trace(Tower(2))
    before = str(program.graph), program.code, [dict(node.meta) for node in program.graph.nodes]
    torchgraft.draw(program, fold=True, depth=1)
    torchgraft.draw(program, args=(torch.ones(1, 4),))
    assert (str(program.graph), program.code, [dict(node.meta) for node in program.graph.nodes]) == before


def test_an_unknown_direction_is_refused():
    with pytest.raises(
        torchgraft.GraftError, match='cannot draw in the direction \'up\': it is not known\nuse "down" or "right"'
    ):
        torchgraft.draw(chain(2), direction="up")


def test_the_title():
    assert "Tower" in read(torchgraft.draw(torchgraft.symbolic_trace(Tower(1))).svg).words
    assert "mine" in read(torchgraft.draw(chain(1), title="mine").svg).words


def test_resnet50_is_a_handful_of_boxes_when_collapsed():
    program = torchgraft.symbolic_trace(zoo.create("resnet50"))
    picture = read(torchgraft.draw(program, depth=1).svg)
    assert [box.words.split("\n")[0] for box in picture.boxes] == [
        "x", "Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "Sequential", "Sequential", "Sequential", "Sequential",
        "AdaptiveAvgPool2d", "flatten", "Linear", "output",
    ]  # fmt: skip


def test_time_grows_with_size_and_no_faster():
    """Counted in calls of Python functions, which do not depend on the clock."""
    import cProfile

    counts = []
    for length in (200, 1600):
        graph = chain(length)
        profile = cProfile.Profile()
        profile.runcall(torchgraft.draw, graph)
        counts.append(sum(entry.callcount for entry in profile.getstats()))
    assert counts[1] / counts[0] < 8 * 1.3
