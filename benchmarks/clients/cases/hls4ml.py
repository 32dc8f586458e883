"""hls4ml reads traced models, with layers of its own as leaves, into the layers that it writes for hardware."""

import tempfile

import hls4ml
import torch
import torch.nn.functional as F
from hls4ml.utils.torch import CustomFXTracer
from torch import nn

from benchmarks.clients.case import each, nodes

ACTIVATIONS = {kind.__name__: kind for kind in (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Sigmoid, nn.Tanh, nn.Softmax)}


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return F.softmax(self.second(F.relu(self.first(x))), dim=-1)


class Residual(Functional):
    def forward(self, x):
        return self.second(x + self.first(x))


class Concatenated(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.cat([self.one(x), self.two(x)], dim=1))


class Flattened(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.last = nn.Conv1d(2, 4, 3), nn.MaxPool1d(2), nn.Linear(12, 2)

    def forward(self, x):
        return self.last(torch.flatten(self.pool(torch.relu(self.conv(x))), 1))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = Functional(), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.inner(x))


MODELS = {
    "Linear": (lambda: nn.Sequential(nn.Linear(8, 4)), (8,)),
    "layers": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2), nn.Sigmoid()), (8,)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()), (8,)),
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU()), (2, 8)),
    "Conv2d": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2)), (3, 8, 8)),
    "Functional": (Functional, (8,)),
    "Residual": (Residual, (8,)),
    "Concatenated": (Concatenated, (8,)),
    "Flattened": (Flattened, (2, 8)),
    "Nested": (Nested, (8,)),
    **{name: (lambda kind=kind: nn.Sequential(nn.Linear(8, 8), kind()), (8,)) for name, kind in ACTIVATIONS.items()},
}


@each(**MODELS)
def case_trace(model):
    make, _ = model
    return nodes(CustomFXTracer().trace(make().eval()))


@each(**MODELS)
def case_convert(model):
    make, shape = model
    module = make().eval()
    config = hls4ml.utils.config_from_pytorch_model(module, shape, granularity="name")
    with tempfile.TemporaryDirectory() as folder:
        written = hls4ml.converters.convert_from_pytorch_model(module, hls_config=config, output_dir=folder)
    layers = [[layer.class_name, layer.name, str(layer.get_output_variable().shape)] for layer in written.get_layers()]
    return [layers, sorted(config["LayerName"])]
