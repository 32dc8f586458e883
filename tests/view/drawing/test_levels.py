"""What each group sees of the values that pass through it."""

from torchgraft.view.drawing.levels import make_levels
from torchgraft.view.drawing.scene import Box, Group, Scene


def scene() -> Scene:
    """x -> [a: b -> [c: d]], x -> d, d -> e."""
    boxes = [
        Box("x", "input", "x"),
        Box("b", "function", "b", inputs=[0], group=1),
        Box("d", "function", "d", inputs=[1, 0], group=2),
        Box("e", "function", "e", inputs=[2]),
    ]
    groups = [Group(-1, "", ""), Group(0, "a", "a"), Group(1, "c", "c")]
    return Scene("", boxes, groups)


def test_values_pass_each_frame_once():
    top, outer, inner = make_levels(scene())
    assert top.elements == [0, ~1, 3]
    assert top.targets == {0: {~1: None}, 2: {3: None}}
    assert top.source == {0: 0, 2: ~1}
    assert outer.elements == [1, ~2]
    assert outer.enters == [0]
    assert outer.targets[0] == {1: None, ~2: None}
    assert list(outer.leaves) == [2]
    assert inner.elements == [2]
    assert sorted(inner.enters) == [0, 1]
    assert list(inner.leaves) == [2]


def test_far_values_order_without_a_line():
    it = scene()
    it.boxes[2].inputs, it.boxes[2].far = [1], [0]
    top, outer, inner = make_levels(it)
    assert top.constraints == [(0, ~1)]
    assert inner.enters == [1]
    assert outer.enters == [0]


def test_a_group_of_parameters_alone():
    boxes = [Box("w", "parameter", "w", group=1), Box("y", "function", "y", inputs=[0])]
    top, inner = make_levels(Scene("", boxes, [Group(-1, "", ""), Group(0, "a", "a")]))
    assert top.elements == [~1, 1]
    assert inner.elements == [0]
