"""Programs torch.fx cannot trace, or refuses without saying where, asked of torchgraft alone.

Silent mistakes while tracing are in test_traps.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from .conftest import import_source

REMEDIES = ("capture", "torch.where", "leaf", "concrete_args", "wrap")


def branch(x):
    y = x.sum()
    if y > 0:
        return x
    return -x


def loop(x):
    total = 0
    for item in x:
        total = total + item
    return total


def length(x):
    return x * len(x)


def integer(x):
    return x * int(x.shape[0])


@pytest.mark.parametrize(
    ("function", "line", "origin"),
    [
        (branch, "if y > 0:", "gt"),
        (loop, "for item in x:", "x"),
        (length, "return x * len(x)", "x"),
        (integer, "return x * int(x.shape[0])", "getitem"),
    ],
    ids=["branch", "loop", "len", "int"],
)
def test_what_cannot_be_traced_is_explained(graft: ModuleType, function: Callable, line: str, origin: str) -> None:
    source, first = inspect.getsourcelines(function)
    number = first + next(i for i, text in enumerate(source) if text.strip() == line)
    with pytest.raises(graft.TraceError) as caught:
        graft.symbolic_trace(function)
    message = str(caught.value)
    assert Path(__file__).name in message
    assert str(number) in message
    assert line in message
    assert f"'{origin}'" in message or f" {origin} " in message
    assert any(remedy in message for remedy in REMEDIES)


def test_decorated_forward_with_keyword_varargs(graft: ModuleType) -> None:
    def checked(function):
        @functools.wraps(function)
        def wrapper(self, *args, **kwargs):
            return function(self, *args, **kwargs)

        return wrapper

    class Decorated(nn.Module):
        @checked
        def forward(self, x, scale=2, *, offset=0, **kwargs):
            return x * scale + offset

    traced = graft.symbolic_trace(Decorated())
    assert traced(3) == 6
    assert traced(3, scale=3, offset=1) == 10


def test_keyword_only_after_varargs(graft: ModuleType) -> None:
    def forward(x, y=2, *rest, scale=3, **options):
        return x + y + rest[0] + scale + options["offset"]

    traced = graft.symbolic_trace(forward)
    assert traced(1, 2, 10, scale=100, offset=1000) == 1113


def test_keyword_only_stays_keyword_only(graft: ModuleType) -> None:
    def forward(x, *, scale=3):
        return x * scale

    traced = graft.symbolic_trace(forward)
    assert traced(2, scale=5) == 10


def test_bound_methods_can_be_traced(graft: ModuleType) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return x

        def predict(self, x):
            return self.linear(x).relu()

    model = Model()
    traced = graft.symbolic_trace(model.predict)
    x = torch.rand(1, 2)
    assert torch.equal(traced(x), model.predict(x))


def test_method_of_a_plain_object_can_be_traced(graft: ModuleType) -> None:
    class Scaler:
        factor = 3

        def apply(self, x):
            return x * self.factor

    assert graft.symbolic_trace(Scaler().apply)(2) == 6


def test_leaves_marked_for_torch_fx_are_honoured(graft: ModuleType, tmp_path: Path) -> None:
    library = import_source(
        """
        import torch
        import torch.fx

        def branchy(x):
            return x if x.sum() > 0 else -x

        torch.fx.wrap("branchy")

        class Model(torch.nn.Module):
            def forward(self, x):
                return branchy(x) + 1
        """,
        tmp_path,
        "torch.fx",
    )
    traced = graft.symbolic_trace(library.Model())
    assert library.branchy in [node.target for node in traced.graph.nodes]
    assert traced(torch.tensor([-1.0])).item() == 2.0


def test_assertions_are_recorded_on_request(graft: ModuleType, tmp_path: Path) -> None:
    class Asserting(graft.Tracer):
        trace_asserts = True

    # In a file of its own, because pytest rewrites the assertions of test files.
    library = import_source("def forward(x):\n    assert x.sum() > 0\n    return x * 2\n", tmp_path, "torchgraft")
    tracer = Asserting()
    graph = tracer.trace(library.forward)
    traced = graft.GraphModule(tracer.root, graph)
    traced.graph.eliminate_dead_code()
    assert traced(torch.tensor(1.0)).item() == 2.0
    with pytest.raises(AssertionError):
        traced(torch.tensor(-1.0))


def test_submodule_named_like_a_keyword_runs(graft: ModuleType) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("class", nn.ReLU())

        def forward(self, x):
            return getattr(self, "class")(x)

    assert graft.symbolic_trace(Odd())(torch.tensor([-1.0])).item() == 0.0


def test_names_of_the_surface_at_the_top(graft: ModuleType) -> None:
    for name in (
        "symbolic_trace, Tracer, TracerBase, Proxy, ParameterProxy, Attribute, Graph, Node, GraphModule, CodeGen, "
        "Interpreter, Transformer, replace_pattern, replace_pattern_with_filters, subgraph_rewriter, Match, "
        "ReplacedPatterns, wrap, PH, ProxyableClassMeta, map_arg, map_aggregate, has_side_effect, immutable_list, "
        "immutable_dict, TraceError"
    ).split(", "):
        assert hasattr(graft, name), name
