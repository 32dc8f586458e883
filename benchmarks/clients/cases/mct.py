"""model_compression_toolkit reads a traced and shape-propagated graph into a graph of its own and substitutes in it."""

import numpy
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.clients.case import each, nodes
from benchmarks.coverage.torchvision_models import import_torchvision

torchvision = import_torchvision()
from model_compression_toolkit.core.pytorch.reader.reader import (  # noqa: E402
    _trace_model,
    fx_graph_module_generation,
    model_reader,
)


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.register_buffer("scale", torch.ones(4, 1, 1))

    def forward(self, x):
        x = F.relu(self.layer(x)) * self.scale
        x = F.adaptive_avg_pool2d(F.max_pool2d(x, 2), 1)
        return x.view(x.shape[0], -1).softmax(-1)


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.layer(self.layer(x) + 1)


class Outputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

    def forward(self, x):
        a, b = self.one(x), self.two(x)
        return a, [b, torch.cat([a, b], 1)]


class Constants(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 1, 1))
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = F.conv2d(x, self.weight)
        return self.layer(x) + torch.ones(4, 1, 1) * 2 - self.weight.sum()


class Asserting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        y = self.layer(x)
        torch._assert(y.shape[1] == 4, "four channels")
        a, b = torch.split(y, 2, dim=1)
        return torch.stack([a, b], 1).reshape(y.shape[0], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = x.flatten(1)[:, :64].reshape(-1, 8, 8)
        return self.norm(self.attention(x, x, x)[0] + x)


class Slices(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        y = self.layer(x)[:, 1:3]
        return y.permute(0, 2, 3, 1).contiguous().transpose(1, 2) ** 2


class Switches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Conv2d(3, 4, 1), nn.Dropout(0.5)

    def forward(self, x, scale=None):
        x = self.drop(self.layer(x))
        if isinstance(x, torch.Tensor) and self.training:
            x = x * 2
        return F.dropout(x, 0.1, self.training)


SMALL = {kind.__name__: kind for kind in (Functional, Reused, Outputs, Constants, Asserting, Attention, Slices)}
NETWORKS = (
    *("resnet18", "mobilenet_v2", "mobilenet_v3_small", "squeezenet1_1", "vgg11_bn", "shufflenet_v2_x0_5", "alexnet"),
    *("efficientnet_b0", "regnet_y_400mf", "mnasnet0_5", "convnext_tiny", "densenet121"),
)


def data():
    while True:
        yield [torch.rand(1, 3, 64, 64)]


def made(name):
    if name in SMALL:
        return SMALL[name]().eval()
    return torchvision.models.get_model(name, weights=None).eval()


def read(model):
    to_numpy = lambda tensor: tensor.detach().cpu().numpy() if torch.is_tensor(tensor) else numpy.array(tensor)  # noqa: E731
    return model_reader(model, data, to_numpy, torch.as_tensor)


@each(*SMALL, *NETWORKS)
def case_traced(name):
    module = fx_graph_module_generation(made(name), data, torch.as_tensor)
    shapes = [str(getattr(node.meta.get("tensor_meta"), "shape", None)) for node in module.graph.nodes]
    return [nodes(module.graph), shapes, [[node.name, len(node.users)] for node in module.graph.nodes]]


@each(*SMALL, *NETWORKS)
def case_read(name):
    graph = read(made(name))
    found = [
        [node.name, str(node.input_shape), str(node.output_shape), sorted(map(str, node.weights))]
        for node in graph.nodes
    ]
    edges = sorted(f"{edge.source_node.name} -> {edge.sink_node.name}" for edge in graph.get_edges_info_list()) if hasattr(
        graph, "get_edges_info_list"
    ) else sorted(f"{a.name} -> {b.name}" for a, b in graph.edges())  # fmt: skip
    return [found, edges, [item.node.name for item in graph.get_outputs()]]


@each("eval", "train")
def case_modes(mode):
    model = Switches()
    getattr(model, mode)()
    return nodes(_trace_model(model.eval()).graph) if mode == "eval" else type(_trace_model(model)).__name__


def case_custom_layers_are_leaves():
    from mct_quantizers.pytorch.metadata import add_metadata  # noqa: F401

    return nodes(_trace_model(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())).graph)


def case_branch_on_a_value():
    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    try:
        read(Branch())
    except Exception as error:
        return "symbolically traced variables cannot be used as inputs to control flow" in str(error)
