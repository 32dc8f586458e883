"""nirtorch reads traced models into graphs of neurons, and writes such graphs as graph modules with their state."""

import nir
import nirtorch
import numpy
import torch
import torch.fx
from torch import nn

from benchmarks.clients.case import each, nodes, same


class Leaky(nn.Module):
    """A neuron that keeps its state outside, as these libraries do."""

    def __init__(self, decay=0.5):
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(decay))

    def forward(self, x, state=None):
        state = (torch.zeros_like(x) if state is None else state) * self.decay + x
        return (state > 1).to(x.dtype), state


def linear(before, after):
    return nn.Linear(before, after, bias=False)


class Simple(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(4, 4), linear(4, 2)

    def forward(self, x):
        return self.second(self.first(x))


class Residual(Simple):
    def forward(self, x):
        x = self.first(x)
        return self.second(x + self.first(x))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = Simple(), linear(2, 2)

    def forward(self, x):
        return self.outer(self.inner(x))


class Parallel(Simple):
    def __init__(self):
        super().__init__()
        self.third = linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x) + self.third(x))


class Optional(Simple):
    def forward(self, x, state=None):
        assert state is None
        return self.second(self.first(x))


def to_nir(model, extra=None, **options):
    map_linear = {nn.Linear: lambda layer: nir.Linear(layer.weight.detach().numpy())}
    return nirtorch.torch_to_nir(model, {**map_linear, **(extra or {})}, {}, type_check=False, **options)


def described(graph):
    return [sorted((name, type(node).__name__) for name, node in graph.nodes.items()), sorted(map(list, graph.edges))]


@each(**{kind.__name__: kind for kind in (Simple, Residual, Nested, Parallel)})
def case_to_nir(kind):
    return described(to_nir(kind()))


@each(**{kind.__name__: kind for kind in (Simple, Nested)})
def case_there_and_back(kind):
    model = kind()
    back = nirtorch.nir_to_torch(to_nir(model), {})
    x = torch.randn(3, 4)
    same(back(x)[0], model(x))
    return nodes(back.graph)


@each(True, False)
def case_concrete_arguments(given):
    options = {"concrete_args": {"state": None}} if given else {}
    try:
        return described(to_nir(Optional(), **options))
    except Exception as error:
        return isinstance(error, ValueError | AssertionError | KeyError | TypeError)


def stateful_graph():
    weight = numpy.ones((2, 2), dtype=numpy.float32)
    neuron = nir.LIF(*(numpy.ones(2, dtype=numpy.float32) for _ in range(4)))
    return nir.NIRGraph(
        nodes={
            "in": nir.Input({"input": numpy.array([2])}),
            "layer": nir.Linear(weight),
            "neuron": neuron,
            "out": nir.Output({"output": numpy.array([2])}),
        },
        edges=[("in", "layer"), ("layer", "neuron"), ("neuron", "out")],
    )


def recurrent_graph():
    graph = stateful_graph()
    graph.edges.append(("neuron", "layer"))
    return graph


@each(stateful=stateful_graph, recurrent=recurrent_graph)
def case_state(make):
    module = nirtorch.nir_to_torch(make(), {nir.LIF: lambda node: Leaky()})
    x = torch.ones(1, 2)
    first, state = module(x)
    second, state = module(x, state)
    return [nodes(module.graph), first.tolist(), second.tolist(), sorted(state)]


@each("Affine", "Linear", "Conv1d", "Conv2d", "Flatten", "AvgPool2d")
def case_from_nir(kind):
    ones = lambda *size: numpy.ones(size, dtype=numpy.float32)  # noqa: E731
    node, shape = {
        "Affine": lambda: (nir.Affine(ones(2, 4), ones(2)), (3, 4)),
        "Linear": lambda: (nir.Linear(ones(2, 4)), (3, 4)),
        "Conv1d": lambda: (nir.Conv1d(8, ones(2, 3, 3), 1, 0, 1, 1, ones(2)), (1, 3, 8)),
        "Conv2d": lambda: (nir.Conv2d((8, 8), ones(2, 3, 3, 3), 1, 0, 1, 1, ones(2)), (1, 3, 8, 8)),
        "Flatten": lambda: (nir.Flatten({"input": numpy.array([2, 3])}, 0, -1), (1, 2, 3)),
        "AvgPool2d": lambda: (
            nir.AvgPool2d(numpy.array([2, 2]), numpy.array([2, 2]), numpy.array([0, 0])),
            (1, 1, 4, 4),
        ),
    }[kind]()
    layer = nirtorch.nir_to_torch(node, {})
    return [type(layer).__name__, list(layer(torch.ones(*shape)).shape)]


def case_names_that_are_keywords():
    graph = stateful_graph()
    graph.nodes["0.lambda"] = graph.nodes.pop("layer")
    graph.edges = [("in", "0.lambda"), ("0.lambda", "neuron"), ("neuron", "out")]
    return nodes(nirtorch.nir_to_torch(graph, {nir.LIF: lambda node: Leaky()}).graph)


def case_missing_output():
    graph = stateful_graph()
    del graph.nodes["out"]
    graph.edges = [edge for edge in graph.edges if "out" not in edge]
    try:
        nirtorch.nir_to_torch(graph, {nir.LIF: lambda node: Leaky()})
    except ValueError as error:
        return str(error)


def case_stateful_leaf():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.neuron = nn.Linear(4, 4), Leaky()

        def forward(self, x):
            out, _ = self.neuron(self.layer(x))
            return out

    neuron = {Leaky: lambda _: nir.LIF(*(numpy.ones(4, dtype=numpy.float32) for _ in range(4)))}
    try:
        return described(to_nir(Model(), neuron, stateful_modules={Leaky}))
    except torch.fx.proxy.TraceError as error:
        return "iterated" in str(error)


def case_leaf_that_is_not_mapped():
    class Bare(nn.Module):
        def forward(self, x):
            return x

    try:
        to_nir(Bare())
    except ValueError as error:
        return str(error)


@each("deepcopy", "compile", "script")
def case_after_conversion(what):
    import copy

    model = Simple()
    module = nirtorch.nir_to_torch(to_nir(model), {})
    x = torch.randn(3, 4)
    if what == "deepcopy":
        same(copy.deepcopy(module)(x)[0], model(x))
    elif what == "compile":
        same(torch.compile(module, backend="eager")(x)[0], model(x))
    else:
        return sorted(module.state_dict())
