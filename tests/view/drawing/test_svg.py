"""The text of a drawing."""

import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ET
import zlib

import pytest
import torch

import torchgraft
from tests.view.drawing.geometry import read
from tests.view.drawing.programs import Tower, random_program
from torchgraft.view.drawing.svg import escape, number


def test_text_is_escaped_and_no_control_characters_get_through():
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    nasty = "</title><script>alert(1)</script>&\"'\x00\x1b\ud800]]>"
    node = graph.call_function(torch.add, (x, nasty), {"alpha": nasty})
    node.meta["nn_module_stack"] = {nasty: (nasty, nasty)}
    node.meta["stack_trace"] = f'File "{nasty}", line 3, in f\n  {nasty}'
    second = graph.call_function(torch.relu, (node,))
    second.meta["nn_module_stack"] = {nasty: (nasty, nasty)}
    graph.output(second)
    drawing = torchgraft.draw(graph, title=nasty)
    root = ET.fromstring(drawing.svg)
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    drawing.svg.encode("utf-8")


@pytest.mark.parametrize("fold", [False, True])
def test_the_same_program_gives_the_same_bytes(fold):
    first = torchgraft.draw(torchgraft.symbolic_trace(Tower(3)), fold=fold).svg
    assert torchgraft.draw(torchgraft.symbolic_trace(Tower(3)), fold=fold).svg == first
    again = random_program(80, 5, 4)
    assert torchgraft.draw(again).svg == torchgraft.draw(random_program(80, 5, 4)).svg


def test_another_process_gives_the_same_bytes():
    code = (
        "import sys, zlib, torchgraft; from tests.view.drawing.programs import random_program;"
        "sys.stdout.write(str(zlib.crc32(torchgraft.draw(random_program(60, 7, 4)).svg.encode())))"
    )
    here = pathlib.Path(__file__).parents[3]
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": f"{here / 'src'}:{here}"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert other.stdout == str(zlib.crc32(torchgraft.draw(random_program(60, 7, 4)).svg.encode())), other.stderr


def test_the_legend_shows_the_kinds_that_are_there():
    program = torchgraft.symbolic_trace(lambda x: torch.relu(x))
    words = read(torchgraft.draw(program).svg).words
    assert {"input", "function", "output"} <= set(words)
    assert "parameter" not in words
    assert "3 nodes" in words
    assert "3 nodes" not in read(torchgraft.draw(program, legend=False).svg).words


def test_shapes_are_optional():
    inputs = (torch.ones(2, 4),)
    program = torchgraft.capture(Tower(1), inputs)
    assert "2×4" in read(torchgraft.draw(program, args=inputs).svg).words
    assert "2×4" not in read(torchgraft.draw(program, args=inputs, shapes=False).svg).words
    assert "2×4" not in read(torchgraft.draw(program).svg).words


def test_tooltips_are_in_the_drawing():
    tooltips = [box.tooltip for box in read(torchgraft.draw(torchgraft.symbolic_trace(Tower(1))).svg).boxes]
    linear = next(tooltip for tooltip in tooltips if tooltip.startswith("%blocks_0_first"))
    assert "call_module blocks.0.first" in linear
    assert "Linear(in_features=4, out_features=4, bias=True)" in linear
    assert "drawing/programs.py:" in linear


def test_numbers_of_the_file_are_short():
    assert (number(3.0), number(3.25), number(-0.04), number(12345.678)) == ("3", "3.2", "-0", "12345.7")
    assert escape('<a b="c">&') == "&lt;a b=&quot;c&quot;&gt;&amp;"
