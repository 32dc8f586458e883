"""`summary`: numbers against those counted by hand and by torch, the choice of depth and columns, forms, and awkward models."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torchgraft
from tests.view.programs import MLP, Net
from torchgraft import summary
from torchgraft.errors import GraftError

X = torch.ones(2, 16)
IMAGE = torch.ones(2, 3, 4, 4)

TEXT = """\
module          output      parameters   share   FLOPs
------------------------------------------------------
MLP             f32[2, 16]       1,072  100.0%  4.16 k
├─ fc1: Linear  f32[2, 32]         544   50.7%  2.05 k
├─ fc2: Linear  f32[2, 16]         528   49.3%  2.05 k
└─ relu: ReLU   f32[2, 32]           0    0.0%      64
------------------------------------------------------
1,072 parameters (1,072 trainable, 0 not), 4,288 bytes; 4,160 FLOPs forward for f32[2, 16] (a multiply-add is two)"""


def test_the_text() -> None:
    assert str(summary(MLP(), (X,))) == TEXT
    assert str(summary(MLP(), X)) == TEXT  # one input needs no tuple
    assert str(summary(MLP(), kwargs={"x": X})) == TEXT


def test_matrix_work_is_what_torch_counts() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 5))
    with FlopCounterMode(display=False) as counter:
        model(IMAGE)
    assert summary(model, IMAGE)[""].flops == counter.get_total_flops()


def test_a_tree_of_modules() -> None:
    result = summary(
        Net(), IMAGE, columns=["input", "output", "trainable", "bytes", "flops_share", "calls"], fold=False
    )
    lines = str(result).splitlines()
    assert [line.split(":")[0] for line in lines[3:6]] == ["├─ blocks", "│  ├─ 0", "│  │  ├─ conv"]
    assert lines[0].split() == ["module", "input", "output", "trainable", "bytes", "of", "FLOPs", "calls"]
    assert result["blocks.1.conv"].output.shape == (2, 3, 4, 4)
    assert result[""].output[0] == result["head"].output and result[""].output[1][0].shape == (2, 2)
    assert result["blocks"].parameters == 180 and result["blocks"].calls == 1
    with pytest.raises(KeyError, match="Net has no module 'blocks.2'"):
        result["blocks.2"]


@pytest.mark.parametrize(("depth", "count"), [(0, 1), (1, 3), (2, 5), (3, 9), (None, 9), (99, 9)])
def test_depth(depth, count: int) -> None:
    assert len(summary(Net(), IMAGE, depth=depth).rows()) == count


def test_without_inputs() -> None:
    result = summary(Net())
    assert result["head"].parameters == 20 and result["head"].output is None and result["head"].flops is None
    assert "FLOPs forward" not in str(result)


@pytest.mark.parametrize("level", ["module", "function", "aten", "core_aten"])
def test_programs_at_every_level(level: str) -> None:
    model = Net().eval()
    program = torchgraft.capture(model, (IMAGE,), level=level)
    result, eager = summary(program, IMAGE), summary(model, IMAGE)
    assert [(row.path, row.parameters) for row in result.modules] == [
        (row.path, row.parameters) for row in eager.modules
    ]
    assert {row.type for row in result.modules} >= {"Block", "Conv2d", "BatchNorm2d", "Linear"}
    assert result["blocks.0.conv"].output.shape == (2, 3, 4, 4)
    assert result["head"].flops == eager["head"].flops == 2 * 2 * 3 * 5
    assert result[""].flops is not None and result["blocks"].flops < result[""].flops


def test_shared_frozen_and_unused_modules() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first
            self.tied = nn.Linear(4, 4, bias=False)
            self.tied.weight = self.first.weight
            self.unused = nn.Linear(4, 4).requires_grad_(False)
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.tied(self.second(self.first(x)))

    result = summary(Shares(), torch.ones(1, 4), columns="parameters,calls,flops")
    assert result[""].parameters == 60 == sum(p.numel() for p in Shares().parameters())
    assert result[""].trainable == 40
    assert result["second"].shared and not result["first"].shared
    assert result["first"].calls == result["second"].calls == 2
    assert result["unused"].calls == 0 and result["unused"].flops is None
    assert result["layers"].calls == 0 and result["layers"].flops == 32
    assert "second: Linear (shared)" in str(result)


def test_the_model_stays_as_it_is() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.drop = nn.Dropout()
            self.seen = []
            self.last = None

        def forward(self, x):
            self.last = self.drop(self.norm(x.add_(1)))
            self.seen.append(self.last)
            return self.last

    model, x = Remembers(), torch.zeros(3, 4)
    random = torch.get_rng_state()
    assert summary(model, x)["norm"].output.shape == (3, 4)
    assert model.last is None and model.seen == [] and model.norm.num_batches_tracked == 0
    assert not x.any() and torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks for module in model.modules()) and model.training


def test_a_model_that_reads_values_is_run_for_real() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.a(x) if x.sum().item() > 0 else self.b(x)

    model = Reads()
    result = summary(model, torch.ones(3, 4))
    assert result["a"].calls == 1 and result["b"].calls == 0 and result[""].output.shape == (3, 4)
    assert model.calls == 0 and not model._forward_hooks


def test_a_failing_model_raises_its_own_error_and_loses_its_hooks() -> None:
    model = MLP()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|mat1"):
        summary(model, torch.ones(2, 5))
    assert not any(module._forward_hooks for module in model.modules())


def test_meta_models_lazy_modules_and_empty_ones() -> None:
    with torch.device("meta"):
        model = MLP()
    assert summary(model, torch.ones(2, 16, device="meta"))["fc1"].output.shape == (2, 32)
    assert summary(nn.LazyLinear(3)).rows()[0]["parameters"] == 0
    empty = summary(nn.Identity(), X)
    assert empty.rows()[0]["share"] is None and "Identity" in str(empty)


def test_forms() -> None:
    result = summary(Net(), IMAGE, depth=1)
    data = json.loads(result.to_json())
    assert data["name"] == "Net" and [row["path"] for row in data["modules"]] == ["", "blocks", "head"]
    assert data["modules"][2]["output"] == "f32[2, 5]" and data["modules"][2]["share"] == 0.1
    html = result._repr_html_()
    assert html.count("<tr") == html.count("</tr>") == 4 and "blocks: Sequential" in html


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"columns": ["size"]}, "summary has no column 'size'\nchoose some of input, output, parameters"),
        ({"depth": -1}, "depth must be a whole number"),
        ({"depth": "2"}, "depth must be a whole number"),
    ],
)
def test_wrong_options(options, text: str) -> None:
    with pytest.raises(GraftError, match=text):
        summary(MLP(), X, **options)


def test_what_is_no_model() -> None:
    with pytest.raises(GraftError, match="cannot summarise a function"):
        summary(lambda x: x, X)


# ---- equal layers ----


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.back = nn.Linear(width, 4)

    def forward(self, x):
        return x + self.back(self.linear(x))


def labels(model: nn.Module, **options) -> list[str]:
    lines = str(summary(model, torch.ones(2, 4), columns=["parameters"], **options)).splitlines()[2:-2]
    return [line.rsplit(None, 1)[0].rstrip() for line in lines]


def test_equal_layers_are_shown_once() -> None:
    model = nn.Sequential(Block(8), Block(8), Block(8), Block(5), Block(8), nn.ReLU())
    assert labels(model) == [
        "Sequential",
        "├─ 0 to 2: 3 × Block, each",
        "│  ├─ linear: Linear",
        "│  └─ back: Linear",
        "├─ 3: Block",
        "│  ├─ linear: Linear",
        "│  └─ back: Linear",
        "├─ 4: Block",
        "│  ├─ linear: Linear",
        "│  └─ back: Linear",
        "└─ 5: ReLU",
    ]
    assert len(labels(model, fold=False)) == 17
    assert labels(model, depth=1)[1:3] == ["├─ 0 to 2: 3 × Block, each", "├─ 3: Block"]
    everything = summary(model, torch.ones(2, 4))
    assert len(everything.modules) == len(everything.rows()) == 17, "only what is shown is folded"
    assert "0 to 2: 3 × Block, each" in everything._repr_html_()


def test_layers_are_not_equal_if_one_is_frozen_or_called_more_often() -> None:
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    frozen[1].requires_grad_(False)
    assert len(labels(frozen)) == 3

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            return self.layers[1](self.layers[1](self.layers[0](x)))

    assert [label.strip() for label in labels(Twice())][-2:] == ["├─ 0: Linear", "└─ 1: Linear"]


def test_layers_inside_equal_layers_are_folded_as_well() -> None:
    layers = [nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]) for _ in range(2)]
    assert labels(nn.Sequential(*layers)) == [
        "Sequential",
        "└─ 0 to 1: 2 × Sequential, each",
        "   └─ 0 to 2: 3 × Linear, each",
    ]


def test_programs_are_folded_too() -> None:
    model = nn.Sequential(*[Block(8) for _ in range(4)])
    assert "0 to 3: 4 × Block, each" in str(summary(torchgraft.capture(model, torch.ones(2, 4)), torch.ones(2, 4)))


def test_inputs_of_the_wrong_size_raise_the_error_of_the_model_and_log_nothing(caplog, capfd) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        summary(nn.Linear(16, 4), torch.ones(2, 3))
    assert caplog.records == [] and capfd.readouterr() == ("", "")
