"""From nodes to boxes."""

import torch

import torchgraft
from tests.view.drawing.geometry import read


def test_every_node_has_a_box_and_its_inputs():
    program = torchgraft.symbolic_trace(lambda x, y: (x + y) * x)
    picture = read(torchgraft.draw(program).svg)
    assert sorted(box.tooltip.split("\n")[0] for box in picture.boxes) == ["%add", "%mul", "%output", "%x", "%y"]
    assert sorted(tooltip for tooltip, _ in picture.lines) == ["%add", "%mul", "%x", "%y"]


def test_what_is_only_checked_is_part_of_the_guard():
    def forward(x):
        if x.ndim == 2:
            return x * 2
        return x

    program = torchgraft.capture(forward, (torch.ones(2, 2),))
    picture = read(torchgraft.draw(program).svg)
    assert "getattr" in {node.target.__name__ for node in program.graph.nodes if node.op == "call_function"}
    assert not picture.titled("getattr")
    assert any("ndim" in box.words for box in picture.boxes if box.kind == "guard")


def test_new_values_of_buffers_stand_in_the_module_that_writes_them():
    layers = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)) for _ in range(6)]
    program = torchgraft.capture(torch.nn.Sequential(*layers), (torch.ones(4, 2),), level="joint")
    picture = read(torchgraft.draw(program).svg)
    updates = [box for box in picture.boxes if box.kind == "update"]
    assert sorted({box.words for box in updates}) == ["num_batches_tracked", "running_mean", "running_var"]
    frames = [frame for frame in picture.frames if "BatchNorm1d" in frame.tooltip]
    assert len(updates) == 18 and all(any(frame.contains(box) for frame in frames) for box in updates)
    assert "written to a buffer or input" in picture.words


def test_gradients_stand_with_what_makes_them():
    program = torchgraft.capture(torch.nn.Linear(2, 3), (torch.ones(4, 2),), level="joint")
    picture = read(torchgraft.draw(program).svg)
    gradients = [box for box in picture.boxes if box.kind == "gradient"]
    assert sorted(box.words for box in gradients) == ["∂ bias", "∂ weight"]
    assert [box.words for box in picture.boxes if box.kind == "output"] == ["result"]
    backward = next(frame for frame in picture.frames if frame.tooltip == "Backward")
    assert all(backward.contains(box) for box in gradients)


def test_unused_buffers_are_one_box():
    graph = torchgraft.Graph()
    for number in range(20):
        graph.get_attr(f"buffer{number}")
    graph.output(graph.placeholder("x"))
    picture = read(torchgraft.draw(graph).svg)
    assert [box.words for box in picture.boxes if box.kind == "constant"] == ["20 unused buffers"]


def test_parameters_stand_in_the_frame_of_their_first_user():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    program = torchgraft.capture(model, (torch.ones(1, 2),), level="aten")
    picture = read(torchgraft.draw(program).svg)
    for path in ("0", "1"):
        frame = next(frame for frame in picture.frames if frame.tooltip.startswith(f"{path}\n"))
        inside = sorted(box.words.split("\n")[0] for box in picture.boxes if frame.contains(box))
        assert inside == ["bias", "linear", "weight"]


def test_programs_of_torch_fx_and_torch_export_are_drawn_as_they_are():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    fx = read(torchgraft.draw(torch.fx.symbolic_trace(model)).svg)
    assert sorted(box.kind for box in fx.boxes) == ["input", "module", "module", "output"]
    exported = read(torchgraft.draw(torch.export.export(model.eval(), (torch.ones(1, 2),))).svg)
    kinds = [box.kind for box in exported.boxes]
    assert kinds.count("parameter") == 2 and kinds.count("input") == 1
    assert "1×3" in exported.words


def test_inputs_outputs_and_nodes_alone():
    graph = torchgraft.Graph()
    graph.placeholder("unused")
    graph.call_function(torch.manual_seed, (0,))
    picture = read(torchgraft.draw(graph).svg)
    assert [box.words.split("\n")[0] for box in picture.boxes] == ["unused", "manual_seed"]
