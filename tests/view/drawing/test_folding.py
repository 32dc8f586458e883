"""Modules as one box, and repeated modules drawn once."""

import pytest
import torch

import torchgraft
from tests.view.drawing.geometry import faults, read
from tests.view.drawing.programs import Block, Tower
from torchgraft import zoo
from torchgraft.ir.guards import check_value


def test_repeated_blocks_are_drawn_once_with_a_count():
    program = torchgraft.symbolic_trace(Tower(12))
    whole, folded = torchgraft.draw(program), torchgraft.draw(program, fold=True)
    picture = read(folded.svg)
    assert whole.boxes == 4 + 12 * 4
    assert folded.boxes == 4 + 4
    assert any(words.startswith("blocks.0 … blocks.11") for words in picture.words)
    assert "×12" in picture.words
    assert len(picture.frames) == 1
    assert faults(picture) == []


def test_a_fold_is_left_by_what_its_last_block_gives():
    picture = read(torchgraft.draw(torchgraft.symbolic_trace(Tower(3)), fold=True).svg)
    boxes = {box.tooltip.split("\n")[0]: box for box in picture.boxes}
    ends = [way[-1] for tooltip, way in picture.lines if tooltip == "%add"]
    assert boxes["%end"].left < ends[-1][0] < boxes["%end"].right


def test_blocks_that_differ_are_not_folded():
    class Growing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.Sequential(Block(4), Block(4), torch.nn.Sequential(torch.nn.Linear(4, 8)), Block(8))

        def forward(self, x):
            return self.blocks(x)

    program = torchgraft.capture(Growing(), (torch.ones(1, 4),))
    picture = read(torchgraft.draw(program, fold=True, args=(torch.ones(1, 4),)).svg)
    assert "×2" in picture.words
    assert not any(words.startswith(("×3", "×4")) for words in picture.words)


def test_blocks_with_other_shapes_are_not_folded():
    class Halving(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                [torch.nn.Sequential(torch.nn.MaxPool1d(2), torch.nn.ReLU()) for _ in range(3)]
            )

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    inputs = (torch.ones(1, 2, 16),)
    program = torchgraft.capture(Halving(), inputs)
    assert torchgraft.draw(program, fold=True, args=inputs).boxes == torchgraft.draw(program, args=inputs).boxes
    assert torchgraft.draw(program, fold=True, shapes=False).boxes < torchgraft.draw(program).boxes


def test_one_module_called_again_and_again():
    class Again(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            for _ in range(5):
                x = self.block(x)
            return x

    picture = read(torchgraft.draw(torchgraft.symbolic_trace(Again()), fold=True).svg)
    assert "×5" in picture.words
    assert "blockBlock" in picture.words  # the name and, lighter, the class


def test_what_stands_between_blocks_keeps_them_apart():
    class Between(Tower):
        def forward(self, x):
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

    program = torchgraft.symbolic_trace(Between(3))
    assert torchgraft.draw(program, fold=True).boxes == torchgraft.draw(program).boxes


def test_modules_that_are_alike_by_chance_are_not_folded():
    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = Block(), Block()

        def forward(self, x):
            return self.left(x) * self.right(x)

    program = torchgraft.symbolic_trace(Pair())
    assert torchgraft.draw(program, fold=True).boxes == torchgraft.draw(program).boxes


def test_experts_side_by_side_are_folded():
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList([Block() for _ in range(6)])

        def forward(self, x):
            return sum(expert(x) for expert in self.experts)

    class Concatenated(Experts):
        def forward(self, x):
            return torch.cat([expert(x) for expert in self.experts])

    picture = read(torchgraft.draw(torchgraft.symbolic_trace(Concatenated()), fold=True).svg)
    assert "×6" in picture.words
    assert faults(picture) == []


def test_a_guard_that_only_the_first_block_has_is_no_difference():
    graph = torchgraft.Graph()
    value = graph.placeholder("x")
    for number in range(3):
        path = f"blocks.{number}"
        nodes = [value := graph.call_function(torch.relu, (value,)), value := graph.call_function(torch.tanh, (value,))]
        if number == 0:
            nodes.append(graph.call_function(check_value, (value, 1, "a value", "model.py:3")))
        for node in nodes:
            node.meta["nn_module_stack"] = {path: (path, Block)}
    graph.output(value)
    picture = read(torchgraft.draw(graph, fold=True).svg)
    assert "×3" in picture.words
    assert sorted(box.kind for box in picture.boxes) == ["function", "function", "guard", "input", "output"]


@pytest.mark.parametrize("level", ["module", "function", "aten", "joint"])
def test_a_transformer_folds_to_one_layer(level):
    model, inputs = zoo.create("transformer", layers=4).eval(), zoo.example_inputs("transformer")
    program = torchgraft.capture(model, inputs, level=level)
    picture = read(torchgraft.draw(program, fold=True).svg)
    assert picture.words.count("×4") == (2 if level == "joint" else 1)


def test_a_size_of_a_value_that_layers_share_is_no_difference():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).view(x.shape[0], 2, 2).view(x.shape[0], 4).relu()

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), *[Layer() for _ in range(3)])
    program = torchgraft.capture(model, (torch.ones(5, 4),), level="aten")
    assert sum(node.target in ("size", torch.ops.aten.sym_size.int) for node in program.graph.nodes) < 3, (
        "they share it"
    )
    picture = read(torchgraft.draw(program, fold=True).svg)
    assert picture.words.count("×3") == 1
    assert faults(picture) == []


def test_depth():
    program = torchgraft.symbolic_trace(Tower(3))
    picture = read(torchgraft.draw(program, depth=1).svg)
    assert [box.words.split("\n")[0] for box in picture.boxes].count("Block") == 3
    assert picture.frames == []
    assert "blocks.1 · 4 nodes" in picture.titled("Block")[1].words
    everything = read(torchgraft.draw(program, depth=0).svg)
    assert sorted(box.words.split("\n")[0] for box in everything.boxes) == ["Tower", "output", "x"]
    assert torchgraft.draw(program, depth=9).boxes == torchgraft.draw(program).boxes


def test_depth_of_a_joint_program_keeps_the_halves():
    program = torchgraft.capture(Tower(2), (torch.ones(1, 4),), level="joint")
    picture = read(torchgraft.draw(program, depth=0).svg)
    assert {"Forward", "Backward"} <= {box.words.split("\n")[0] for box in picture.boxes}
    assert faults(picture) == []


def test_depth_and_fold_together():
    drawing = torchgraft.draw(
        torchgraft.capture(zoo.create("resnet18").eval(), zoo.example_inputs("resnet18", size=32)), depth=2, fold=True
    )
    assert faults(read(drawing.svg)) == []


@pytest.mark.parametrize("depth", [-1, 1.5, "two"])
def test_a_depth_that_is_none(depth):
    with pytest.raises(torchgraft.GraftError, match="cannot draw to the depth .*\nuse 0, 1, 2, … or None"):
        torchgraft.draw(torchgraft.symbolic_trace(Tower(1)), depth=depth)


class Norm(torch.nn.Module):
    """As in language models: the dtype is asked for once where layers share the tensor, and anew where they do not."""

    def forward(self, x):
        return (x.to(torch.float32) * 2).to(x.dtype)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = Norm(), torch.nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Language(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x):
        x = x * torch.ones(4, dtype=x.dtype, device=x.device)
        x = x * torch.ones(4, dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_that_ask_for_a_dtype_are_folded():
    program = torchgraft.capture(Language(), torch.ones(2, 4))
    assert "getattr" in program.code and "getattr" not in torchgraft.draw(program, fold=True).svg.replace(
        "%getattr", ""
    )
    assert "layers.0 … layers.2" in torchgraft.draw(program, fold=True).svg
