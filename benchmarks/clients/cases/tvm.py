"""TVM's Relax importer reads a traced graph node by node: `from_fx`, and what it makes of layers, functions and methods."""

import operator

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from tvm.relax.frontend.torch.fx_translator import from_fx

from benchmarks.clients.case import each

IMAGE = [((1, 3, 10, 10), "float32")]
MATRIX = [((4, 6), "float32")]

LAYERS = {
    "conv1d": (nn.Conv1d(3, 4, 3), [((1, 3, 10), "float32")]),
    "conv2d": (nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), IMAGE),
    "conv_transpose2d": (nn.ConvTranspose2d(3, 4, 3), IMAGE),
    "linear": (nn.Linear(6, 3), MATRIX),
    "batch_norm": (nn.BatchNorm2d(3).eval(), IMAGE),
    "layer_norm": (nn.LayerNorm(6), MATRIX),
    "group_norm": (nn.GroupNorm(3, 3), IMAGE),
    "max_pool": (nn.MaxPool2d(2), IMAGE),
    "average_pool": (nn.AvgPool2d(2), IMAGE),
    "adaptive_pool": (nn.AdaptiveAvgPool2d(1), IMAGE),
    "dropout": (nn.Dropout(0.5).eval(), MATRIX),
    "embedding": (nn.Embedding(10, 4), [((2, 3), "int64")]),
    "softmax": (nn.Softmax(-1), MATRIX),
    "activations": (nn.Sequential(nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Sigmoid(), nn.Tanh(), nn.LeakyReLU()), MATRIX),
    "flatten": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)), IMAGE),
}
FUNCTIONS = {
    "arithmetic": lambda x: (x + 1) * 2 - x / 3,
    "matmul": lambda x: torch.matmul(x, x.transpose(0, 1)),
    "operators": lambda x: operator.neg(x) + abs(x) ** 2,
    "functional": lambda x: F.relu(F.layer_norm(x, (6,))),
    "softmax": lambda x: F.softmax(x, dim=-1).log(),
    "reductions": lambda x: x.sum(dim=1) + x.mean(1),
    "shapes": lambda x: x.view(-1, 3).unsqueeze(0).permute(0, 2, 1).squeeze(0),
    "sizes": lambda x: x.reshape(x.shape[0], 2, 3),
    "slices": lambda x: x[1:3, 0:2] + x[1:3, 2:4],
    "cat": lambda x: torch.cat([x, x], dim=1),
    "split": lambda x: torch.split(x, 3, dim=1)[0],
    "chunk": lambda x: torch.chunk(x, 2, dim=1)[1],
    "where": lambda x: torch.where(x > 0, x, -x),
    "comparison": lambda x: (x > 0) & (x < 1),
    "clamp": lambda x: x.clamp(0, 1).sqrt().exp(),
    "types": lambda x: x.to(torch.float16).float(),
    "triangle": lambda x: torch.tril(x) + torch.triu(x),
    "expand": lambda x: x.unsqueeze(0).expand(2, 4, 6).repeat(1, 1, 2),
    "several results": lambda x: (x.sin(), [x.cos(), torch.rsqrt(x)]),
}


class Parameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(6, 2))
        self.register_buffer("shift", torch.ones(2))

    def forward(self, x):
        return torch.addmm(self.shift, x, self.weight)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = (
            nn.Conv2d(3, 3, 3, padding=1),
            nn.Conv2d(3, 3, 3, padding=1),
            nn.BatchNorm2d(3),
        )

    def forward(self, x):
        return F.relu(self.norm(self.second(F.relu(self.first(x))))) + x


def imported(model, inputs, **options):
    torch.manual_seed(0)
    return from_fx(torch.fx.symbolic_trace(model), inputs, **options).script().splitlines()


@each(*LAYERS)
def case_layer(name):
    layer, inputs = LAYERS[name]
    return imported(nn.Sequential(layer), inputs)


@each(*FUNCTIONS)
def case_function(name):
    return imported(FUNCTIONS[name], MATRIX)


@each("attributes", "residual")
def case_model(name):
    model, inputs = {"attributes": (Parameters(), MATRIX), "residual": (Residual().eval(), IMAGE)}[name]
    return imported(model, inputs)


@each("keep_params_as_input", "unwrap_unit_return_tuple", "no_bind_return_tuple")
def case_option(name):
    return imported(LAYERS["flatten"][0], IMAGE, **{name: True})
