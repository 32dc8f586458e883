"""nvidia-modelopt traces what it can, keeps what it cannot as leaves, and reasons about the graphs to prune networks."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.clients.case import each, nodes, same
from benchmarks.coverage.torchvision_models import import_torchvision

torchvision = import_torchvision()
import modelopt.torch.nas as nas  # noqa: E402
import modelopt.torch.prune as prune  # noqa: E402
from modelopt.torch.trace import RobustTracer, analyze_symbols, recursive_trace  # noqa: E402,F401
from modelopt.torch.utils.graph import match  # noqa: E402


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        y = self.one(x)
        return self.two(y) if y.sum() > 0 else self.two(-y)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.inner, self.after = nn.Conv2d(3, 3, 1), Branch(), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.after(self.inner(self.before(x)))


class Loops(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, x, scale: float = 2.0, flag=None):
        for layer in self.layers:
            x = layer(x) * scale
        return x if flag is None else -x


class Concatenated(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(16, 8, 1)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x):
        return self.three(F.relu(self.norm(torch.cat([self.one(x), self.two(x)], dim=1))))


class Iterates(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return sum(row for row in self.layer(x))


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, *rest, **options):
        return self.layer(x)


SMALL = {kind.__name__: kind for kind in (Branch, Around, Loops, Concatenated, Iterates, Keywords)}
NETWORKS = (
    "resnet18",
    "mobilenet_v2",
    "squeezenet1_1",
    "vgg11_bn",
    "densenet121",
    "mobilenet_v3_small",
    "alexnet",
    "googlenet",
)


def made(name):
    if name in SMALL:
        return SMALL[name]().eval()
    options = {"init_weights": False} if name == "googlenet" else {}
    return torchvision.models.get_model(name, weights=None, **options).eval()


@each(*SMALL, *NETWORKS)
def case_recursive_trace(name):
    model = made(name)
    graphs = recursive_trace(model)
    names = {module: path for path, module in model.named_modules()}
    failed = sorted(names[module] for module in model.modules() if graphs.is_failed(module))
    unvisited = sorted(names[module] for module in model.modules() if graphs.is_unvisited(module))
    return [failed, unvisited, [[names[module], nodes(graphs[module])] for module in graphs]]


@each("ModuleList", "Linear", "Sequential", "Identity", "MultiheadAttention")
def case_leaf_as_root(name):
    layer = {
        "ModuleList": lambda: nn.ModuleList([nn.Linear(2, 2)]),
        "Linear": lambda: nn.Linear(2, 2),
        "Sequential": lambda: nn.Sequential(nn.Linear(2, 2)),
        "Identity": lambda: nn.Identity(),
        "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2),
    }[name]()
    graphs = recursive_trace(layer)
    return [graphs.is_failed(layer), nodes(graphs[layer])]


@each("same", "other layer", "other order", "functional")
def case_match(kind):
    pattern = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    model = {
        "same": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()),
        "other layer": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Tanh()),
        "other order": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.ReLU()),
        "functional": Concatenated,
    }[kind]()
    return match(model, [pattern])


@each("resnet18", "mobilenet_v2", "squeezenet1_1", "vgg11_bn", "alexnet", "mobilenet_v3_small")
def case_search_space(name):
    model = made(name)
    space = nas.convert(copy.deepcopy(model), "autonas")
    return {name: str(choices) for name, choices in nas.get_subnet_config(space).items()}


@each("resnet18", "mobilenet_v2", "vgg11_bn")
def case_smallest_network(name):
    model = made(name)
    space = nas.convert(copy.deepcopy(model), "autonas")
    nas.sample(space, min)
    small = nas.export(space)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        out = small.eval()(x)
    return [list(out.shape), sum(parameter.numel() for parameter in small.parameters())]


def case_largest_network_is_the_model():
    model, x = made("resnet18"), torch.randn(1, 3, 64, 64)
    space = nas.convert(copy.deepcopy(model), "autonas")
    nas.sample(space, max)
    with torch.no_grad():
        same(nas.export(space).eval()(x), model(x))


@each("resnet18", "squeezenet1_1")
def case_prune(name):
    model = made(name)
    pruned = (
        prune.convert(copy.deepcopy(model), "fastnas") if hasattr(prune, "convert") else nas.convert(model, "fastnas")
    )
    return sorted(nas.get_subnet_config(pruned))
