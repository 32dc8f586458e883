"""optimize_for_inference beside torch.fx's, the stretches it must not touch, and the parts that it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental import optimization as theirs
from torch.nn import functional

import torchgraft
from torchgraft import zoo
from torchgraft.fx_passes import optimization as ours

pytestmark = [
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def conversions(program: Any) -> list[str]:
    return [node.target for node in program.graph.nodes if node.op == "call_method" and node.target.startswith("to_")]


def assert_same(model: nn.Module, *args: torch.Tensor, **options: Any) -> Any:
    model = model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = ours.optimize_for_inference(model, **options)
    with torch.no_grad():
        torch.testing.assert_close(program(*args), model(*args), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return program


def test_resnet_is_one_stretch_as_in_torch_fx() -> None:
    model, x = zoo.create("resnet18").eval(), torch.randn(2, 3, 64, 64)
    program = assert_same(model, x)
    assert conversions(program) == conversions(theirs.optimize_for_inference(model)) == ["to_mkldnn", "to_dense"]


def test_the_steps_can_be_switched_off() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.ReLU())
    off = {"conv_bn_fuse": False, "remove_dropout": False, "mkldnn_layout_optimize": False}
    assert ours.optimize_for_inference(model, off) is model
    program = assert_same(model, torch.randn(1, 1, 5, 5), pass_config={"mkldnn_layout_optimize": False})
    assert [type(layer).__name__ for layer in program.children()] == ["Conv2d", "ReLU"]
    with pytest.raises(RuntimeError, match="Heuristic not found"):
        ours.optimize_for_inference(model.eval(), {"mkldnn_layout_optimize": {}})
    with pytest.raises(RuntimeError, match="is not a dict"):
        ours.optimize_for_inference(model.eval(), {"mkldnn_layout_optimize": True})


def test_a_heuristic_that_says_no_leaves_the_program_as_it_was() -> None:
    stretches: list[Any] = []

    def no(stretch: Any) -> bool:
        stretches.append((len(stretch.nodes), len(stretch.start_nodes), len(stretch.end_nodes)))
        return False

    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(18, 4))
    program = assert_same(model, torch.randn(1, 1, 5, 5), pass_config={"mkldnn_layout_optimize": {"heuristic": no}})
    assert stretches == [(3, 1, 1), (1, 1, 1)] and conversions(program) == []
    assert [type(layer).__name__ for layer in program.children()] == ["Conv2d", "ReLU", "Conv2d", "Flatten", "Linear"]


def test_the_autotuner_runs_both_ways() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
    x = torch.randn(1, 1, 8, 8)
    config = {"mkldnn_layout_optimize": {"heuristic": ours.gen_mkl_autotuner([x], iters=1)}}
    assert len(conversions(assert_same(model, x, pass_config=config))) in (0, 2)


def test_sums_of_different_shapes() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.first(x) + functional.relu(self.second(x)))

    assert_same(Scaled(), torch.randn(2, 1, 6, 6))


HOSTILE = {
    "another padding": nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.ReLU(), nn.ReLU()
    ),
    "padding by name": nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.ReLU()),
    "pools that oneDNN lacks": nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, dilation=2), nn.AvgPool2d(2, divisor_override=3), nn.AdaptiveAvgPool2d(1)
    ),
    "sizes that do not divide": nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.ReLU(), nn.AdaptiveAvgPool2d(3)),
    "writes": nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Conv2d(2, 2, 1), nn.ReLU(inplace=True)),
    "twice the same layer": nn.Sequential(*[nn.Conv2d(1, 1, 1)] * 3, nn.ReLU()),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_oneDNN_does_otherwise_stays(name: str) -> None:
    assert_same(HOSTILE[name], torch.randn(2, 1, 16, 16))


def test_a_value_that_is_written_later_keeps_its_layout() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.first(x)
            z = torch.relu(self.second(torch.relu(y)))
            y.add_(1)
            return y, z, y.view(-1)

    assert_same(Written(), torch.randn(1, 1, 4, 4))


def test_doubles_and_training_are_left_alone() -> None:
    layers = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.ReLU())
    assert conversions(ours.optimize_for_inference(layers.double().eval())) == []
    assert conversions(ours.optimize_for_inference(layers.float().train())) == []


def test_union_find_and_extract_subgraph_as_in_torch_fx() -> None:
    for library in (ours, theirs):
        sets = library.UnionFind(6)
        for number in range(6):
            sets.make_set(number)
        for pair in ((0, 1), (2, 3), (1, 3), (3, 0)):
            sets.join(*pair)
        assert len({sets.find(number) for number in range(6)}) == 3
    program = torchgraft.symbolic_trace(lambda x, y: (torch.sin(x) + y, x * y))
    x, y, sin, add, mul, _ = program.graph.nodes
    piece = ours.extract_subgraph(program, [add, mul], [sin, y, x], [mul, add])
    assert piece(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)) == [torch.tensor(6.0), torch.tensor(3.0)]
