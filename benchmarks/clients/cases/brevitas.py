"""brevitas traces with patches of its own, rewrites graphs and prepares them for quantization. Its tracing by values and its
`quantize` do not run on the newest torch.fx either: they want `_wrapped_fns_to_patch` and `Node` as they were once.
"""

import brevitas.fx
import torch
import torch.nn.functional as F
from brevitas.fx import GraphModule, brevitas_symbolic_trace, symbolic_trace
from brevitas.graph import (
    AdaptiveAvgPoolToAvgPool,
    CollapseConsecutiveConcats,
    DuplicateSharedStatelessModule,
    FnToModule,
    MergeBatchNorm,
    MethodToModule,
    ModuleToModuleByClass,
    ModuleToModuleByInstance,
    TorchFunctionalToModule,
)
from brevitas.graph.channel_splitting import GraphChannelSplitting
from brevitas.graph.equalize import EqualizeGraph
from brevitas.graph.quantize import preprocess_for_quantize
from torch import nn

from benchmarks.clients.case import each, nodes, same
from benchmarks.clients.models import Convolutional
from benchmarks.coverage.torchvision_models import import_torchvision

TRACERS = {
    "symbolic": symbolic_trace,
    "brevitas symbolic": brevitas_symbolic_trace,
}


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.second(self.act(self.first(x))))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.register_buffer("scale", torch.ones(4, 1, 1))

    def forward(self, x):
        x = F.relu(self.layer(x)) * self.scale
        x = F.adaptive_avg_pool2d(torch.max_pool2d(x, 2), 1)
        return x.view(x.shape[0], -1).softmax(-1)


class Concatenated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(torch.cat([self.first(x), self.second(x)], dim=1))


class MeanMethod(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.layer(x).mean([2, 3])


def image_model(name):
    kinds = {kind.__name__: kind for kind in (Convolutional, Shared, Functional, Concatenated, MeanMethod)}
    if name in kinds:
        return kinds[name]().eval()
    return import_torchvision().models.get_model(name, weights=None).eval()


def images():
    return torch.randn(2, 3, 64, 64)


SMALL = ("Convolutional", "Shared", "Functional", "Concatenated", "MeanMethod")
LARGE = ("resnet18", "mobilenet_v2", "squeezenet1_1", "regnet_x_400mf", "efficientnet_b0")


@each(**{f"{model}, {tracer}": (model, tracer) for tracer in TRACERS for model in SMALL})
def case_trace(pair):
    model, x = image_model(pair[0]), images()
    graph_module = TRACERS[pair[1]](model)
    same(graph_module(x), model(x))
    return nodes(graph_module.graph)


@each(*TRACERS)
def case_concrete_arguments(name):
    def body(x, double=False):
        return x * 2 if double else x

    x = torch.randn(3)
    graph_module = TRACERS[name](body, concrete_args={"double": True})
    same(graph_module(x, True), body(x, True))
    return nodes(graph_module.graph)


@each(*LARGE)
def case_trace_torchvision(name):
    model, x = image_model(name), images()
    graph_module = brevitas_symbolic_trace(model)
    with torch.no_grad():
        same(graph_module(x), model(x))
    return nodes(graph_module.graph)


@each("Convolutional", "Shared", "Functional", *LARGE)
def case_preprocess(name):
    model, x = image_model(name), images()
    ready = preprocess_for_quantize(model, trace_model=True)
    with torch.no_grad():
        same(ready(x), model(x), rtol=1e-2, atol=1e-3)
    return nodes(ready.graph)


@each("resnet18", "mobilenet_v2")
def case_equalize(name):
    model, x = image_model(name), images()
    graph_module, regions = EqualizeGraph(iterations=2, return_regions=True).apply(
        MergeBatchNorm().apply(symbolic_trace(model))
    )
    with torch.no_grad():
        same(graph_module(x), image_model_like(name, model)(x), rtol=1e-2, atol=1e-3)
    return [nodes(graph_module.graph), len(regions)]


def image_model_like(name, model):
    torch.manual_seed(0)
    return image_model(name)


@each("resnet18")
def case_channel_splitting(name):
    model, x = image_model(name), images()
    graph_module = MergeBatchNorm().apply(symbolic_trace(model))
    with torch.no_grad():
        expected = graph_module(x)
        split = GraphChannelSplitting(split_ratio=0.1).apply(graph_module)
        same(split(x), expected, rtol=1e-2, atol=1e-3)
    return nodes(split.graph)


def case_functions_become_modules():
    model, x = image_model("Functional"), images()
    done = TorchFunctionalToModule().apply(symbolic_trace(model))
    same(done(x), model(x))
    return nodes(done.graph)


@each("function", "method", "class", "instance")
def case_replacements(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x):
            return torch.relu(self.act(x)).abs()

    model, x = Model(), torch.randn(3)
    graph_module = symbolic_trace(model)
    change = {
        "function": lambda: FnToModule(torch.relu, nn.ReLU),
        "method": lambda: MethodToModule("abs", Absolute),
        "class": lambda: ModuleToModuleByClass(nn.ReLU, nn.ReLU6),
        "instance": lambda: ModuleToModuleByInstance(graph_module.act, nn.ReLU6),
    }[kind]()
    done = change.apply(graph_module)
    same(done(x), model(x))
    return [nodes(done.graph), sorted(name for name, _ in done.named_modules())]


class Absolute(nn.Module):
    def forward(self, x):
        return x.abs()


@each("duplicate", "merge", "pool", "concats")
def case_transformations(name):
    model = image_model({"duplicate": "Shared", "concats": "Concatenated"}.get(name, "Convolutional"))
    x = images()
    graph_module = symbolic_trace(model)
    with torch.no_grad():
        expected = model(x)
        done = {
            "duplicate": lambda: DuplicateSharedStatelessModule().apply(graph_module),
            "merge": lambda: MergeBatchNorm().apply(graph_module),
            "pool": lambda: AdaptiveAvgPoolToAvgPool().apply(graph_module, x),
            "concats": lambda: CollapseConsecutiveConcats().apply(graph_module),
        }[name]()
        same(done(x).flatten(), expected.flatten(), rtol=1e-3, atol=1e-4)
    return nodes(done.graph)


def case_classes():
    graph_module = symbolic_trace(image_model("Shared"))
    return [isinstance(graph_module, GraphModule), brevitas.fx.Tracer.__name__, type(graph_module).__name__]
