"""`graph_manipulation`, `annotate_getitem_nodes`, `param_fetch`, `schema_type_annotation` and the like, beside torch.fx.

The names alone are in tests/compatibility/test_module_paths.
"""

import importlib
import sys
from typing import NamedTuple

import pytest
import torch
from torch import nn


@pytest.fixture(params=["torch.fx", "torchgraft"])
def fx(request):
    return importlib.import_module(request.param)


def part(fx, path: str):
    return importlib.import_module(f"{fx.__name__}.{path}")


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)).eval()


def test_targets_are_replaced(fx):
    program = fx.symbolic_trace(lambda x: torch.relu(x) + torch.relu(x).neg())
    part(fx, "passes.graph_manipulation").replace_target_nodes_with(
        program, "call_function", torch.relu, "call_method", "exp"
    )
    program.recompile()
    assert [node.target for node in program.graph.nodes if node.op == "call_method"] == ["exp", "exp", "neg"]
    assert program(torch.ones(1)).tolist() == [0]


def test_sizes_in_bytes(fx):
    program = fx.symbolic_trace(model())
    manipulation = part(fx, "passes.graph_manipulation")
    with pytest.raises(RuntimeError, match="no tensor metadata"):
        manipulation.get_size_of_node(program, next(iter(program.graph.nodes)))
    manipulation.get_size_of_all_nodes(program, [torch.ones(2, 3, 4, 4)])
    sizes = [tuple(node.size_bytes) for node in program.graph.nodes if node.op != "output"]
    assert sizes == [(384, 384), (512, 576), (512, 544), (512, 512), (128, 128)]


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


@pytest.mark.parametrize(
    ("annotation", "index", "expected"),
    [
        (tuple[int, torch.Tensor], 1, torch.Tensor),
        (tuple[int, ...], 1, int),
        (list[torch.Tensor], 0, torch.Tensor),
        (Pair, 1, int),
        (torch.Tensor, 0, None),
        (None, 0, None),
    ],
)
def test_items_get_their_types(fx, annotation, index, expected):
    graph = fx.Graph()
    item = graph.output(fx.Proxy(graph.placeholder("x", type_expr=annotation))[index].node).all_input_nodes[0]
    part(fx, "passes.annotate_getitem_nodes").annotate_getitem_nodes(graph)
    assert item.type is expected


def test_attributes_for_lowering(fx):
    program = fx.symbolic_trace(model())
    fetch = part(fx, "passes.param_fetch")
    fetch.lift_lowering_attrs_to_nodes(program)
    found = {node.name: list(node.attrs_for_lowering) for node in program.graph.nodes if node.op == "call_module"}
    assert list(found.values())[2:] == [
        ["name", "inplace"],
        ["name", "kernel_size", "stride", "padding", "dilation", "return_indices", "ceil_mode"],
    ]
    assert [names[:3] for names in found.values()][:2] == [["name", "weight", "bias"]] * 2
    with pytest.raises(RuntimeError, match="not in the module_fetch_book yet"):
        fetch.extract_attrs_for_lowering(nn.Tanh())


def test_types_by_schemas(fx):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.weight = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

        def forward(self, x):
            return torch.relu(nn.functional.linear(self.layer(x), self.weight))

    annotate = part(fx, "experimental.schema_type_annotation").AnnotateTypesWithSchema
    program = annotate(fx.symbolic_trace(Model())).transform()
    types = {node.name: node.type for node in program.graph.nodes}
    assert types["layer"] is torch.Tensor
    assert types["weight"] is torch.Tensor


def test_assertions_are_recorded(fx, tmp_path, monkeypatch):
    # In a file of its own: pytest rewrites the assertions in this one.
    text = "import torch\nfrom torch import nn\n\nclass Model(nn.Module):\n    def forward(self, x, y):\n"
    (tmp_path / "asserting.py").write_text(text + "        assert y == 3, 'expected 3'\n        return x + y\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "asserting", raising=False)
    model = importlib.import_module("asserting").Model()
    tracer = part(fx, "experimental.rewriter").RewritingTracer()
    graph = tracer.trace(model)
    program = fx.GraphModule(tracer.root, graph)
    assert program(1, 3) == 4
    with pytest.raises(AssertionError):
        program(1, 4)


def test_graph_modules_that_are_lazy_when_asked(fx):
    lazy = part(fx, "_lazy_graph_module")
    with lazy._use_lazy_graph_module(True):
        program = lazy._make_graph_module({}, fx.symbolic_trace(lambda x: x + 1).graph)
    assert isinstance(program, lazy._get_graph_module_cls()) and program(1) == 2
    lazy._LazyGraphModule.force_recompile(program)
    with lazy._force_skip_lazy_graph_module():
        assert program(1) == 2
