"""Values that are named instead of drawn."""

import torch

import torchgraft
from tests.view.drawing.geometry import faults, read
from torchgraft import zoo


def dense(length):
    """Every node takes the values of all before it."""
    graph = torchgraft.Graph()
    values = [graph.placeholder("x")]
    for _ in range(length):
        values.append(graph.call_function(torch.cat, (list(values),)))
    graph.output(values[-1])
    return graph


def test_small_programs_keep_all_their_lines():
    picture = read(torchgraft.draw(dense(6)).svg)
    assert not [box for box in picture.boxes if box.kind == "reference"]


def test_long_lines_become_names_that_lead_back():
    picture = read(torchgraft.draw(dense(23)).svg)
    named = [box for box in picture.boxes if box.kind == "reference"]
    assert named
    assert len(picture.links) == len(named)
    identities = {box.identity for box in picture.boxes}
    assert {link.removeprefix("#") for link in picture.links} <= identities
    assert faults(picture) == []


def test_a_box_with_very_many_inputs_says_how_many():
    picture = read(torchgraft.draw(dense(30)).svg)
    many = picture.titled("30 values from above")
    assert len(many) == 1
    assert "cat_28" in many[0].tooltip


def test_what_backward_takes_from_forward_is_named_where_it_is_much():
    small = torchgraft.capture(zoo.create("mlp"), zoo.example_inputs("mlp"), level="joint")
    assert "reference" not in {box.kind for box in read(torchgraft.draw(small).svg).boxes}
    model, inputs = zoo.create("transformer", layers=1), zoo.example_inputs("transformer")
    large = read(torchgraft.draw(torchgraft.capture(model, inputs, level="joint")).svg)
    assert len([box for box in large.boxes if box.kind == "reference"]) > 10
    assert faults(large) == []
