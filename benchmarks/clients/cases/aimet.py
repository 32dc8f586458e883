"""AIMET's model preparer traces a model with a tracer of its own, and puts a module in the place of each function and reuse."""

import logging

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.clients.case import each, same
from benchmarks.coverage.torchvision_models import import_torchvision

torchvision = import_torchvision()
from aimet_torch.model_preparer import prepare_model  # noqa: E402

logging.disable(logging.INFO)


class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()

    def forward(self, x):
        y = self.act(self.conv(x))
        y = F.relu(self.act(y) + 1)
        return torch.cat([y, y * 2], dim=1).mean(dim=(2, 3))


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act, self.pool = nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)

    def forward(self, x):
        return self.pool(self.act(self.conv(self.pool(self.act(x)))))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x):
        return F.relu(self.norm(self.one(x)) + x)


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = x.flatten(1)[:, :64].reshape(-1, 8, 8)
        scores = torch.matmul(self.query(x), self.key(x).transpose(1, 2)) / 8**0.5
        return F.softmax(scores, dim=-1).sum(1)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Functions()
        self.end = nn.Linear(8, 2)

    def forward(self, x):
        return self.end(self.block(x)).exp() - 1


class Divided(nn.Module):
    def forward(self, x):
        a, b, c = torch.split(x, 1, dim=1)
        return torch.stack([a - b, b * c]).permute(1, 0, 2, 3, 4).squeeze(2)


SMALL = {kind.__name__: kind for kind in (Functions, Reused, Residual, Matrices, Inner, Divided)}
NETWORKS = (
    *("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small", "squeezenet1_1", "vgg11_bn", "alexnet"),
    *("mnasnet0_5", "densenet121", "regnet_y_400mf", "regnet_x_400mf", "shufflenet_v2_x0_5"),
)


def made(name):
    torch.manual_seed(0)
    return SMALL[name]().eval() if name in SMALL else torchvision.models.get_model(name, weights=None).eval()


@each(*SMALL, *NETWORKS)
def case_prepared(name):
    model, x = made(name), torch.randn(1, 3, 64, 64)
    prepared = prepare_model(model)
    same(prepared(x), model(x))
    # In the order of the model, as here, or of the calls, as in torch.fx.
    return [sorted(prepared.state_dict()), sorted(name for name, _ in prepared.named_modules())]


@each(*SMALL)
def case_code(name):
    return prepare_model(made(name)).code.splitlines()


@each("act", "conv")
def case_kept_as_they_are(name):
    model = made("Inner")
    prepared = prepare_model(model, modules_to_exclude=[getattr(model.block, name)])
    return [node.name for node in prepared.graph.nodes]


@each("Functions", "Residual")
def case_trained(name):
    model, x = made(name), torch.randn(1, 3, 64, 64)
    prepare_model(model)(x).sum().backward()
    return [parameter.grad is not None for parameter in model.parameters()]
