"""Optimum's transformations of graphs: merged layers, folded norms, divisions as products, and the way back from each."""

import torch
import torch.fx
from torch import nn

from benchmarks.clients.case import each, nodes, same
from benchmarks.coverage.torchvision_models import import_torchvision

import_torchvision()
from optimum.fx.optimization import (  # noqa: E402
    ChangeTrueDivToMulByInverse,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    MergeLinears,
    compose,
)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        scores = torch.matmul(self.query(x), self.key(x).transpose(-1, -2)) / 2.5
        return self.out(torch.matmul(scores.softmax(-1), self.value(x)))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Attention() for _ in range(2)])
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        for block in self.blocks:
            x = self.norm(block(x) + x) / 4
        return x


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.first, self.before = nn.BatchNorm1d(4), nn.Linear(4, 6)
        self.after = nn.BatchNorm1d(6)

    def forward(self, x):
        x = self.norm(self.conv(x)).mean(dim=(2, 3))
        return self.after(self.before(self.first(x)))


MODELS = {"attention": (Attention, (2, 5, 8)), "layers": (Layers, (2, 5, 8)), "norms": (Norms, (2, 3, 8, 8))}
TRANSFORMATIONS = {
    kind.__name__: kind
    for kind in (
        *(ChangeTrueDivToMulByInverse, FuseBatchNorm1dInLinear, FuseBatchNorm2dInConv2d, FuseBiasInLinear),
        MergeLinears,
    )
}
PAIRS = [f"{transformation} {model}" for transformation in TRANSFORMATIONS for model in MODELS]
PAIRS.remove("MergeLinears attention")  # which only finds layers inside a module


def made(name):
    kind, shape = MODELS[name]
    torch.manual_seed(0)
    model = kind().eval()
    return torch.fx.symbolic_trace(model), torch.randn(shape)


def described(program):
    return [nodes(program.graph), sorted(program.state_dict())]


@each(*PAIRS)
def case_transformed(pair):
    name, model = pair.split()
    program, x = made(model)
    expected = program(x)
    changed = TRANSFORMATIONS[name]()(program)
    same(changed(x), expected)
    return described(changed)


@each(*PAIRS)
def case_reversed(pair):
    name, model = pair.split()
    transformation = TRANSFORMATIONS[name]()
    program, x = made(model)
    expected = program(x)
    changed = transformation(program)
    if not hasattr(transformation, "reverse"):
        return described(changed)
    back = transformation(changed, reverse=True)
    same(back(x), expected)
    return described(back)


@each("layers", "norms")
def case_composed(model):
    program, x = made(model)
    expected = program(x)
    changed = compose(MergeLinears(), ChangeTrueDivToMulByInverse(), FuseBiasInLinear())(program)
    same(changed(x), expected)
    return described(changed)
