"""torch_geometric's transformations of graph networks, which trace with a tracer of their own and rewrite node by node."""

import copy

import torch
from torch import nn
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    to_fixed_size,
    to_hetero,
    to_hetero_with_bases,
)
from torch_geometric.nn.fx import Transformer, symbolic_trace

from benchmarks.clients.case import each, nodes, same

KINDS = (["paper", "author"], [("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "by", "author")])


class TwoLayers(nn.Module):
    def __init__(self, convolution):
        super().__init__()
        self.first, self.second = convolution(), convolution()
        self.activation = nn.ReLU()

    def forward(self, x, edge_index):
        return self.second(self.activation(self.first(x, edge_index)), edge_index)


class Functional(TwoLayers):
    def forward(self, x, edge_index):
        x = self.first(x, edge_index).relu()
        return torch.cat([x, self.second(x, edge_index).tanh()], dim=-1)


class Residual(TwoLayers):
    def __init__(self, convolution):
        super().__init__(convolution)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x, edge_index):
        x = self.norm(self.first(x, edge_index)) + self.linear(x)
        return self.second(x, edge_index), x


class Several(nn.Module):
    def __init__(self, convolution):
        super().__init__()
        self.layers = nn.ModuleList([convolution() for _ in range(3)])
        self.norms = nn.ModuleDict({"a": nn.BatchNorm1d(8)})

    def forward(self, x, edge_index):
        seen = []
        for layer in self.layers:
            x = layer(x, edge_index)
            seen.append(x)
        return self.norms["a"](sum(seen[1:], seen[0]))


class Edges(nn.Module):
    def __init__(self, convolution):
        super().__init__()
        self.convolution = convolution()
        self.edge = nn.Linear(8, 8)

    def forward(self, x, edge_index, edge_attr):
        return self.convolution(x, edge_index), self.edge(edge_attr).relu()


CONVOLUTIONS = {
    "SAGE": lambda: SAGEConv((-1, -1), 8),
    "GraphConv": lambda: GraphConv((-1, -1), 8),
    "GAT": lambda: GATConv((-1, -1), 8, add_self_loops=False),
    "GIN": lambda: GINConv(nn.Linear(8, 8)),
}
MODELS = (TwoLayers, Functional, Residual, Several)
PAIRS = {f"{model.__name__} of {name}": (model, make) for model in MODELS for name, make in CONVOLUTIONS.items()}


def hetero_inputs():
    x = {"paper": torch.randn(6, 8), "author": torch.randn(4, 8)}
    sizes = {"paper": 6, "author": 4}
    edges = {
        kind: torch.stack([torch.randint(0, sizes[kind[0]], (9,)), torch.randint(0, sizes[kind[2]], (9,))])
        for kind in KINDS[1]
    }
    return x, edges


@each(**PAIRS)
def case_trace(pair):
    model, make = pair
    return nodes(symbolic_trace(model(make)).graph)


@each(**PAIRS)
def case_to_hetero(pair):
    model, make = pair
    hetero = to_hetero(model(make), KINDS)
    x, edges = hetero_inputs()
    outputs = hetero(x, edges)
    flat = outputs if isinstance(outputs, tuple) else (outputs,)
    shapes = [[kind, list(value.shape)] for output in flat for kind, value in output.items() if value is not None]
    return [shapes, nodes(hetero.graph), sorted(name for name, _ in hetero.named_modules())]


@each("sum", "mean", "min", "max", "mul")
def case_aggregations(aggr):
    hetero = to_hetero(TwoLayers(CONVOLUTIONS["SAGE"]), KINDS, aggr=aggr)
    x, edges = hetero_inputs()
    return [{kind: list(value.shape) for kind, value in hetero(x, edges).items()}, nodes(hetero.graph)]


def case_hetero_equals_the_sum_of_parts():
    model = GraphConv(8, 8)

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = model

        def forward(self, x, edge_index):
            return self.convolution(x, edge_index)

    hetero = to_hetero(One(), KINDS)
    x, edges = hetero_inputs()
    parts = hetero.convolution
    key = {kind: "__".join(kind) for kind in KINDS[1]}
    paper = [parts[key[kind]]((x[kind[0]], x["paper"]), edges[kind]) for kind in KINDS[1] if kind[2] == "paper"]
    same(hetero(x, edges)["paper"], paper[0] + paper[1])


@each(False, True)
def case_edge_level_values(debug):
    hetero = to_hetero(
        Edges(CONVOLUTIONS["SAGE"]), KINDS, input_map={"x": "node", "edge_index": "edge", "edge_attr": "edge"}
    )
    x, edges = hetero_inputs()
    features = {kind: torch.randn(9, 8) for kind in KINDS[1]}
    out, edge_out = hetero(x, edges, features)
    return [sorted(out), sorted(map(str, edge_out)), nodes(hetero.graph), debug]


@each(2, 4)
def case_bases(count):
    model = Several(lambda: SAGEConv(8, 8))
    hetero = to_hetero_with_bases(model, KINDS, num_bases=count, in_channels={"x": 8})
    x, edges = hetero_inputs()
    return [{kind: list(value.shape) for kind, value in hetero(x, edges).items()}, nodes(hetero.graph)]


@each("TwoLayers", "Functional", "Residual")
def case_fixed_size(name):
    model = {kind.__name__: kind for kind in MODELS}[name](lambda: SAGEConv(8, 8))
    fixed = to_fixed_size(copy.deepcopy(model), batch_size=10)
    x = torch.randn(10, 8)
    edge_index = torch.randint(0, 10, (2, 30))
    same(fixed(x, edge_index), model(x, edge_index))
    return nodes(fixed.graph)


@each("add", "mean")
def case_global_pooling(aggr):
    from torch_geometric.nn.aggr import MeanAggregation, SumAggregation

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.pool = SumAggregation() if aggr == "add" else MeanAggregation()

        def forward(self, x, batch):
            return self.pool(self.layer(x), batch)

    fixed = to_fixed_size(Pooled(), batch_size=2)
    return [nodes(fixed.graph), list(fixed(torch.randn(6, 8), torch.tensor([0, 0, 0, 1, 1, 1])).shape)]


def case_transformer_visits_every_node():
    seen = []

    class Watch(Transformer):
        def placeholder(self, node, target, name):
            seen.append(("placeholder", name))

        def call_module(self, node, target, name):
            seen.append(("module", target))

        def call_message_passing_module(self, node, target, name):
            seen.append(("message passing", target))

        def call_method(self, node, target, name):
            seen.append(("method", target))

        def call_function(self, node, target, name):
            seen.append(("function", target.__name__))

        def output(self, node, target, name):
            seen.append(("output", name))

    done = Watch(Functional(lambda: GCNConv(8, 8))).transform()
    return [seen, nodes(done.graph)]


def case_message_passing_is_a_leaf():
    class Own(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return x_j * 2

    traced = symbolic_trace(TwoLayers(Own))
    x, edge_index = torch.randn(5, 8), torch.randint(0, 5, (2, 12))
    same(traced(x, edge_index), TwoLayers(Own)(x, edge_index))
    return nodes(traced.graph)


def case_dropout_with_a_flag_of_training():
    class Dropped(TwoLayers):
        def forward(self, x, edge_index):
            x = nn.functional.dropout(self.first(x, edge_index), p=0.5, training=self.training)
            return self.second(x, edge_index)

    hetero = to_hetero(Dropped(CONVOLUTIONS["SAGE"]).eval(), KINDS)
    x, edges = hetero_inputs()
    hetero(x, edges)
    hetero.eval()
    same(hetero(x, edges), hetero(x, edges))
