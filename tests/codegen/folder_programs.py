"""Programs that are hard to write down, and the classes and functions they call, for the tests of `to_folder`.
They live in a module of their own, so that another process can import what they call.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

import torchgraft as fx
from torchgraft.codegen.source import PyTreeCodeGen

# ---- what the programs call ----


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Box:
    low: Any
    high: Any


class Pair:
    """A container that pytree learns about when this file is imported."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


pytree.register_pytree_node(
    Pair,
    lambda pair: ([pair.first, pair.second], None),
    lambda values, context: Pair(*values),
    serialized_type_name="test_folder.Pair",
)


def height(box: Box) -> Any:
    return box.high - box.low


def paint(x: Any, color: Color) -> Any:
    return x + 1 if color is Color.RED else x - 1


fx.wrap("height")
fx.wrap("paint")


class Outer:
    class Inner:
        @staticmethod
        def twice(x: Any) -> Any:
            return x * 2

        @classmethod
        def thrice(cls, x: Any) -> Any:
            return x * 3


class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 100


@torch.library.custom_op("test_folder::shifted", mutates_args=())
def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + 5


class Leaf(nn.Module):
    """Knows a parameter under a second name and has state that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("shift", torch.rand(3), persistent=False)
        self.weights = [self.inner.weight]
        self.note = torch.rand(3)

    def forward(self, x: Any) -> Any:
        return self.inner(x) + self.shift + self.weights[0].sum() + self.note


class LeafTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        leaves = (Leaf, torch.jit.ScriptModule, fx.GraphModule, nn.Sequential)
        return isinstance(m, leaves) or super().is_leaf_module(m, module_qualified_name)


def with_leaves(model: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(model, LeafTracer().trace(model), type(model).__name__)


def call_of(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(function, (x, *arguments), keywords))
    return fx.GraphModule(nn.Module(), graph)


# ---- the programs: each returns a module and arguments for it ----


class NestedAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Module()
        self.a.b = nn.Module()
        self.a.b.weight = nn.Parameter(torch.rand(3), requires_grad=False)
        self.a.b.register_buffer("table", torch.rand(3), persistent=False)
        self.outside = torch.rand(3)
        self.register_buffer("counts", torch.ones(3, dtype=torch.int8))

    def forward(self, x):
        return x * self.a.b.weight + self.a.b.table + self.outside + self.counts


class OddNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
        setattr(self, "class", nn.Linear(3, 3))
        self.by_name = nn.ModuleDict({"x y": nn.Linear(3, 3), "half-1": nn.Tanh()})
        self.lstm = nn.LSTM(3, 3)
        self.state_dict_ = nn.Identity()

    def forward(self, x, keyword=2.0, *, flag: bool = True):
        x = getattr(self, "class")(self.layers(x))
        for layer in self.by_name.values():
            x = layer(x)
        return self.state_dict_(self.lstm(x)[0]) * keyword


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.middle = self.again = nn.Linear(3, 3)
        self.decoder = nn.Linear(3, 5, bias=False)
        self.decoder.weight = self.embedding.weight
        self.first = nn.Module()
        self.first.register_buffer("table", torch.rand(5))
        self.second = nn.Module()
        self.second.register_buffer("table", self.first.table, persistent=False)

    def forward(self, index):
        return self.decoder(self.again(self.middle(self.embedding(index)))) + self.first.table * self.second.table


class TiedToLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.leaf = Leaf()
        self.linear.weight = self.leaf.inner.weight

    def forward(self, x):
        return self.leaf(self.linear(x))


def with_a_second_name(module: fx.GraphModule) -> fx.GraphModule:
    module.add_submodule("again.leaf", module.leaf)
    with module.graph.inserting_before(output := module.graph.output_node()):
        output.args = (module.graph.call_module("again.leaf", output.args),)
    return module


class SharedWithLeaf(nn.Module):
    """One layer stands before a leaf and in it, another in the leaf and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3)
        self.leaf = Leaf()
        self.leaf.extra = self.before

    def forward(self, x):
        return self.leaf(self.before(x))


def with_a_layer_behind(module: fx.GraphModule) -> fx.GraphModule:
    module.behind = module.leaf.inner
    return module


class ManyKinds(nn.Module):
    """Layers with and without a text that makes them, and of several dtypes and modes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.linear.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(3).eval()
        self.clamp = nn.Hardtanh(-math.inf, 0.5)
        self.reflect = nn.Conv1d(2, 2, 3, padding=1, padding_mode="reflect")
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
        self.leaf = Leaf()
        self.spectral = nn.utils.spectral_norm(nn.Linear(3, 3))
        self.sequence = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.GELU(approximate="tanh"))

    def forward(self, x):
        x = self.clamp(self.norm(self.linear(x.double()).float()))
        x = self.reflect(x)
        x = self.spectral(self.leaf(self.attention(x, x, x)[0]))
        return self.sequence(x)


def structured(tree: Any, items: Any) -> Any:
    return {"sum": (tree["a"] + items[0], [items[1] * 2]), "b": tree["b"]}


class Whole(nn.Module):
    """A program that calls programs, one of which has a container as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = fx.symbolic_trace(NestedAttributes())
        self.outer = nn.Module()
        self.outer.structured = fx.symbolic_trace(structured, concrete_args=STRUCTURE)

    def forward(self, x):
        return self.inner(x), self.outer.structured({"a": x, "b": x}, [x, x])


STRUCTURE = {"tree": {"a": fx.PH, "b": fx.PH}, "items": [fx.PH, fx.PH]}


def user_code(x, dtype=torch.float64, color=Color.BLUE, limit=math.inf):
    return (
        height(Box(x, x + 1)),
        paint(x, Color.RED),
        paint(x, color),
        Point(x, x),
        x.clamp(max=limit),
        torch.full((2, 3), math.nan).to(dtype),
        math.sqrt(x.shape[0]),
    )


def regions(x):
    with torch.no_grad():
        y = x * 2
    return x + y


def program_with_plain_attributes() -> fx.GraphModule:
    root = nn.Module()
    root.scale, root.label, root.nothing = 2.5, "text", None
    root.infinite = math.inf
    root.box = Box(1, 2)
    root.part = nn.Module()
    root.part.size = torch.Size([2])
    graph = fx.Graph()
    x = graph.placeholder("x")
    names = ("scale", "label", "nothing", "infinite", "box", "part.size")
    graph.output((x, *[graph.get_attr(name) for name in names]))
    return fx.GraphModule(root, graph)


def program_with_a_generator() -> fx.GraphModule:
    root = nn.Module()
    root.generator = torch.Generator().manual_seed(5)
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.rand_like, (x,), {"generator": graph.get_attr("generator")}))
    return fx.GraphModule(root, graph)


def program_with_private_names() -> fx.GraphModule:
    root = nn.Module()
    setattr(root, "__weight", nn.Parameter(torch.rand(3)))
    setattr(root, "__layer", nn.Linear(3, 3))
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_module("__layer", (x,))
    graph.output(graph.call_function(torch.add, (y, graph.get_attr("__weight"))))
    return fx.GraphModule(root, graph)


def program_over_pairs() -> fx.GraphModule:
    spec = pytree.tree_structure([Pair(0, 0)])
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    graph.output([graph.call_function(torch.sub, (first, second))])
    graph.set_codegen(PyTreeCodeGen(["pair"], spec, pytree.tree_structure([0])))
    return fx.GraphModule(nn.Module(), graph)


def chained_calls() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for function in (paint_red, Outer.Inner.twice, Outer.Inner.thrice, torch.Tensor.neg, operation):
        x = graph.call_function(function, (x,))
    graph.output(x)
    return fx.GraphModule(nn.Module(), graph)


def paint_red(x):
    return x * 7


operation = functools.partial(torch.add, other=3)

X = torch.linspace(-1, 1, 6).reshape(2, 3)

PROGRAMS: dict[str, Callable[[], tuple[fx.GraphModule, tuple[Any, ...]]]] = {
    "nested_attributes": lambda: (fx.symbolic_trace(NestedAttributes()), (X,)),
    "odd_names": lambda: (fx.symbolic_trace(OddNames()), (X,)),
    "tied": lambda: (fx.symbolic_trace(Tied()), (torch.tensor([1, 4]),)),
    "tied_to_leaf": lambda: (with_a_second_name(with_leaves(TiedToLeaf())), (X,)),
    "shared_with_leaf": lambda: (with_a_layer_behind(with_leaves(SharedWithLeaf())), (X,)),
    "many_kinds": lambda: (with_leaves(ManyKinds()), (X,)),
    "structured": lambda: (fx.symbolic_trace(structured, concrete_args=STRUCTURE), ({"a": X, "b": X}, [X, X])),
    "named_tuple": lambda: (
        fx.symbolic_trace(lambda p: Point(p.y, p.x), concrete_args={"p": Point(fx.PH, fx.PH)}),
        (Point(X, X + 1),),
    ),
    "pairs": lambda: (program_over_pairs(), (Pair(X, X + 1),)),
    "whole": lambda: (with_leaves(Whole()), (X,)),
    "user_code": lambda: (fx.symbolic_trace(user_code), (X,)),
    "regions": lambda: (fx.symbolic_trace(regions), (X,)),
    "plain_attributes": lambda: (program_with_plain_attributes(), (X,)),
    "private_names": lambda: (program_with_private_names(), (X,)),
    "chained_calls": lambda: (chained_calls(), (X,)),
    "autograd_function": lambda: (call_of(Steep.apply), (X,)),
    "custom_operator": lambda: (call_of(torch.ops.test_folder.shifted.default), (X,)),
    "bfloat16_eval": lambda: (
        fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Dropout())).bfloat16().eval(),
        (X.bfloat16(),),
    ),
    "generator": lambda: (program_with_a_generator(), (X,)),
}
