"""torch_tensorrt.fx's acc_tracer: a model traced, its calls normalized to `acc_ops`.

The library of TensorRT is not needed for that, but `import torch_tensorrt` is not possible without it; so the packages above the
tracer are entered without being run.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.clients.case import each, nodes, same
from benchmarks.coverage.torchvision_models import import_torchvision

torchvision = import_torchvision()


def enter_packages(name):
    folder = Path(importlib.util.find_spec(name.partition(".")[0]).origin).parent.parent
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:length]))
        package.__path__ = [str(folder.joinpath(*parts[:length]))]
        sys.modules[package.__name__] = package


enter_packages("torch_tensorrt.fx.tracer")
from torch_tensorrt.fx.tracer.acc_tracer import acc_tracer  # noqa: E402


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        y = F.relu(self.norm(self.layer(x)))
        y = F.adaptive_avg_pool2d(F.max_pool2d(y, 2), 1)
        return F.linear(torch.flatten(y, 1), self.weight).softmax(-1)


class Arithmetic(nn.Module):
    def forward(self, x):
        y = (x + 1) * 2 - x / 3
        return torch.cat([y.sum(1, keepdim=True), y.mean(1, keepdim=True), -y.abs().sqrt()], dim=1).clamp(0, 1)


class Shapes(nn.Module):
    def forward(self, x):
        y = x.reshape(x.size(0), -1)[:, 2:8].unsqueeze(1).permute(0, 2, 1)
        a, b = torch.split(y, 3, dim=1)
        return torch.stack([a, b], dim=0).squeeze(-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        x = x.flatten(1)[:, :64].reshape(-1, 8, 8)
        scores = torch.matmul(self.query(x), self.key(x).transpose(1, 2))
        return self.norm(torch.bmm(scores.softmax(-1), x) + x)


class Chosen(nn.Module):
    def forward(self, x):
        return torch.where(x > 0, x, torch.sigmoid(x)) + F.gelu(x) + F.silu(x) + F.leaky_relu(x)


SMALL = {kind.__name__: kind for kind in (Functional, Arithmetic, Shapes, Attention, Chosen)}
NETWORKS = (
    *("resnet18", "mobilenet_v2", "mobilenet_v3_small", "squeezenet1_1", "vgg11_bn", "mnasnet0_5"),
    *("regnet_y_400mf", "shufflenet_v2_x0_5"),
)


def made(name):
    torch.manual_seed(0)
    return SMALL[name]().eval() if name in SMALL else torchvision.models.get_model(name, weights=None).eval()


@each(*SMALL, *NETWORKS)
def case_traced(name):
    model, x = made(name), torch.randn(1, 3, 64, 64)
    traced = acc_tracer.trace(model, [x])
    same(traced(x), model(x), rtol=1e-3, atol=1e-4)
    return nodes(traced.graph)


@each(*SMALL)
def case_users_and_shapes(name):
    traced = acc_tracer.trace(made(name), [torch.randn(1, 3, 64, 64)])
    found = {node.name: [len(node.users), str(node.meta.get("tensor_meta"))[:200]] for node in traced.graph.nodes}
    return {name: about for name, about in found.items() if "training" not in name and "guard" not in name}


@each("Functional", "Attention")
def case_rewritten(name):
    tracer = acc_tracer.AccRewritingTracer()
    graph, _ = tracer.trace(made(name))
    return nodes(graph)
