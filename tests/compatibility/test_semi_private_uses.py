"""Every semi-private name and public part that clients of torch.fx import, imported and used, on both libraries.
That the names are there under their paths is in `test_module_paths.py`.
"""

from __future__ import annotations

import importlib
import operator
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from .small_models import asserting

USES: dict[str, Callable[[Any], Any]] = {}


def use(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Register a use: given a function that imports a module of the library, what it returns must be the same on both."""
    USES[function.__name__] = function
    return function


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)
        self.inner = nn.Sequential(nn.ReLU(), nn.Linear(2, 3))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.layer(x)) * self.scale


def names(graph: Any) -> list[str]:
    return [node.name for node in graph.nodes]


# ---- graph ----


@use
def magic_methods(of: Any) -> Any:
    graph = of("graph")
    return [dict(graph.magic_methods), sorted(graph.inplace_methods), sorted(graph.reflectable_magic_methods)]


@use
def namespace(of: Any) -> Any:
    found = of("graph")._Namespace()
    return [found.create_name(wish, None) for wish in ("a", "a", "a-b", "1", "import", "a_1", "Tensor")]


@use
def pytree_code_generator(of: Any) -> Any:
    graph = of("graph")
    structure = _pytree.tree_structure((((1, {"a": 2}),), {}))
    generator = graph._PyTreeCodeGen(graph._PyTreeInfo(["x"], structure, None))
    traced = of("").symbolic_trace(lambda a, b: a + b)
    traced.graph.set_codegen(generator)
    traced.recompile()
    return [traced((torch.ones(1), {"a": torch.ones(1)})).tolist(), generator.pytree_info.orig_args]


# ---- node ----


@use
def texts_of_nodes(of: Any) -> Any:
    node = of("node")
    x = next(iter(of("").symbolic_trace(lambda x: x).graph.nodes))
    return [
        node._type_repr(int),
        node._type_repr(torch.Tensor),
        node._format_arg([x, {"a": 1}, slice(0, 2)]),
        node._get_qualified_name(torch.relu),
        node._get_qualified_name(operator.add),
        node._find_module_of_method(torch.relu),
    ]


@use
def side_effects(of: Any) -> Any:
    def log(x: Any) -> None: ...

    node, graph = of("node"), of("").Graph()
    node._side_effectful_functions.add(log)
    graph.call_function(log, (graph.placeholder("x"),))
    graph.output(None)
    graph.eliminate_dead_code()
    node._side_effectful_functions.remove(log)
    return names(graph)


@use
def base_types(of: Any) -> Any:
    return [kind in of("proxy").base_types for kind in (int, str, torch.dtype, torch.device, torch.Tensor, list)]


# ---- graph_module ----


@use
def attributes_of_modules(of: Any) -> Any:
    module, source, target = of("graph_module"), Small(), nn.Module()
    module._copy_attr(source, target, "inner.1.weight")
    module._copy_attr(source, target, "scale")
    found = [target.inner.get_submodule("1").weight is source.inner[1].weight, module._has_attr(target, "scale")]
    module._del_attr(target, "inner.1.weight")
    module._del_attr(target, "scale")
    gone = [hasattr(target.inner.get_submodule("1"), "weight"), module._has_attr(target, "scale")]
    return [*found, *gone, isinstance(module._USER_PRESERVED_ATTRIBUTES_KEY, str)]


@use
def code_only_module(of: Any) -> Any:
    made = of("graph_module")._CodeOnlyModule({"a": 5, "training": False})
    return [isinstance(made, nn.Module), made.a]


@use
def running_source(of: Any) -> Any:
    module, scope = of("graph_module"), {"torch": torch}
    module._exec_with_source("def twice(x):\n    return x * 2\n", scope)
    forward = module._forward_from_src("def forward(self, x):\n    return torch.relu(x)\n", {"torch": torch})
    return [scope["twice"](3), forward(None, -torch.ones(1)).tolist()]  # type: ignore[operator]


@use
def wrapped_call(of: Any) -> Any:
    class Doubling(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    class Child(Doubling):
        pass

    wrapped = of("graph_module")._WrappedCall(Child, None)
    return wrapped(Child(), torch.ones(1)).tolist()


@use
def import_statements(of: Any) -> Any:
    importer = getattr(importlib.import_module("torch.package"), "sys_importer", None)
    return of("graph_module")._format_import_statement("relu", torch.nn.functional.relu, importer)


@use
def hooks_of_edits(of: Any) -> Any:
    traced, told = of("").symbolic_trace(Small()), []
    create, erase, replace = (
        lambda *given, _kind=kind, **named: told.append(_kind) for kind in ("create", "erase", "replace")
    )
    traced._register_create_node_hook(create)
    traced._register_erase_node_hook(erase)
    traced._register_replace_node_hook(replace)
    lists = [traced._create_node_hooks, traced._erase_node_hooks, traced._replace_hooks]
    found = [len(hooks) for hooks in lists]
    [layer] = [node for node in traced.graph.nodes if node.name == "layer"]
    with traced.graph.inserting_after(layer):
        new = traced.graph.call_function(torch.relu, (layer.args[0],))
    layer.replace_all_uses_with(new)
    traced.graph.erase_node(layer)
    return [found, told]


@use
def line_numbers(of: Any) -> Any:
    traced = of("").symbolic_trace(Small())
    traced(torch.ones(1, 2))
    return isinstance(traced._lineno_map, dict) or traced._lineno_map is None


# ---- _symbolic_trace ----


@use
def patching_tools(of: Any) -> Any:
    tools = of("_symbolic_trace")
    scope = {"double": lambda x: 2 * x}
    with tools._Patcher() as patcher:
        patcher.patch(scope, "double", lambda x: x + 1)
        inside = scope["double"](5)
    proxy = of("").Proxy(of("").Graph().placeholder("x"))
    return [
        inside,
        scope["double"](5),
        tools._find_proxy([1, {"a": proxy}]) is proxy,
        tools._find_proxy([1]) is None,
        tools._orig_module_call is nn.Module.__call__,
        tools._orig_module_getattr is nn.Module.__getattr__,
        tools.HAS_VARSTUFF,
        getattr(tools, "_is_fx_tracing_flag", False),  # gone since torch 2.15
        callable(tools._autowrap_check),
        callable(tools._patch_wrapped_functions),
        isinstance(tools._wrapped_methods_to_patch, list),
        len(tools._wrapped_fns_to_patch) >= 0,
        isinstance(tools._proxyable_classes, dict),
    ]


@use
def asserting_none(of: Any) -> Any:
    check = of("_symbolic_trace")._assert_is_none
    check(None, "fine")
    with pytest.raises(AssertionError, match="not none"):
        check(1, "not none")
    return check.__name__


@use
def patched_function(of: Any) -> Any:
    def taking(a: Any, *rest: Any, **named: Any) -> Any:
        return [a, rest, named]

    return of("_symbolic_trace")._patch_function(taking, 3)(1, (2,), {"b": 3})


@use
def marks(of: Any) -> Any:
    @of("_compatibility").compatibility(is_backward_compatible=False)
    def function() -> int:
        return 1

    return function()


# ---- trees, tracebacks, operators ----


class Pair:
    def __init__(self, one: Any, two: Any) -> None:
        self.one, self.two = one, two


_pytree.register_pytree_node(Pair, lambda pair: ([pair.one, pair.two], None), lambda parts, _: Pair(*parts))


@use
def trees(of: Any) -> Any:
    tree = of("_pytree")
    tree.register_pytree_flatten_spec(Pair, lambda pair, spec: [pair.one, pair.two])
    return tree.tree_flatten_spec([Pair(1, [2]), {"a": 3}], _pytree.tree_structure([Pair(0, [0]), {"a": 0}]))


@use
def metadata_of_transforms(of: Any) -> Any:
    with of("traceback").preserve_node_meta():
        return names(of("").Transformer(of("").symbolic_trace(Small())).transform().graph)


@use
def types_of_operators(of: Any) -> Any:
    convert = of("operator_schemas")._torchscript_type_to_python_type
    arguments = torch.ops.aten.sum.dim_IntList._schema.arguments
    return [str(convert(argument.type)) for argument in arguments]


# ---- public parts ----


@use
def rewriting_tracer(of: Any) -> Any:
    graph = of("experimental.rewriter").RewritingTracer().trace(asserting())
    return [f"{node.name} {node.target} {node.args}" for node in graph.nodes]


@use
def lazy_graph_modules(of: Any) -> Any:
    lazy = of("_lazy_graph_module")
    with lazy._use_lazy_graph_module(True):
        made = lazy._make_graph_module(Small(), of("").Tracer().trace(Small()))
    with lazy._force_skip_lazy_graph_module():
        return made(torch.ones(1, 2)).shape


@use
def graph_manipulation(of: Any) -> Any:
    module, traced = of("passes.graph_manipulation"), of("").symbolic_trace(Small())
    of("passes.shape_prop").ShapeProp(traced).propagate(torch.ones(1, 2))
    module.get_size_of_all_nodes(traced, [torch.ones(1, 2)])
    sizes = [tuple(node.size_bytes) for node in traced.graph.nodes if node.op.startswith("call")]
    module.replace_target_nodes_with(traced, "call_module", "inner.0", "call_function", torch.relu)
    return [sizes, names(traced.graph)]


@use
def items_with_types(of: Any) -> Any:
    graph = of("").Graph()
    x = graph.placeholder("x", type_expr=tuple[torch.Tensor, int])
    item = graph.call_function(operator.getitem, (x, 1))
    graph.output(item)
    of("passes.annotate_getitem_nodes").annotate_getitem_nodes(graph)
    return item.type is int


@use
def fetching_parameters(of: Any) -> Any:
    module, traced = of("passes.param_fetch"), of("").symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    module.lift_lowering_attrs_to_nodes(traced)
    return [sorted(getattr(node, "attrs_for_lowering", {})) for node in traced.graph.nodes]


@use
def schema_types(of: Any) -> Any:
    module, traced = of("experimental.schema_type_annotation"), of("").symbolic_trace(nn.Sequential(nn.ReLU()))
    return [str(node.type) for node in module.AnnotateTypesWithSchema(traced).transform().graph.nodes]


@use
def folding_keeps_metadata(of: Any) -> Any:
    class Folds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight + 1).t()

    traced = of("").symbolic_trace(Folds())
    for number, node in enumerate(traced.graph.nodes):
        node.meta["number"] = number
    folded = of("experimental.const_fold").split_const_subgraphs(traced)
    folded(torch.ones(1, 2))
    inner = folded.const_subgraph_module.graph
    kept = [node.meta.get("number") for node in folded.graph.nodes if node.op not in ("get_attr", "output")]
    return [kept, [node.meta.get("number") for node in inner.nodes if node.op.startswith("call")]]


@use
def events_of_splitters(of: Any) -> Any:
    base, support = of("passes.splitter_base"), of("passes.operator_support")

    class Supports(support.OperatorSupportBase):  # type: ignore[misc, name-defined]
        def is_node_supported(self, submodules: Any, node: Any) -> bool:
            return node.target is not operator.add

    traced = of("").symbolic_trace(lambda x: torch.relu(x).size(0) + x.relu())
    of("passes.shape_prop").ShapeProp(traced).propagate(torch.ones(2))
    finder = base.FxNetAccNodesFinder(traced, Supports(), False)
    finder()
    lines: list[str] = []
    finder.tracker.print_all(lines.append)
    finder.tracker.print_node("size", recursive=True, writer=lines.append)
    return [finder.tracker.to_dict(), lines, sorted(node.name for node in finder.acc_nodes)]


def minimizer(of: Any, **settings: Any) -> Any:
    base = of("passes.net_min_base")

    class Minimizer(base._MinimizerBase):  # type: ignore[misc, name-defined]
        def run_a(self, mod: Any, inputs: Any, report_idx: int = -1) -> Any:
            return mod(*inputs)

        def run_b(self, mod: Any, inputs: Any, report_idx: int = -1) -> Any:
            result = mod(*inputs)
            return result + 1 if any(node.target is torch.cos for node in mod.graph.nodes) else result

        def print_report(self, report: list[str]) -> None: ...

    def function(x: Any) -> Any:
        return torch.abs(torch.relu(torch.cos(torch.sin(x))))

    def compare(a: Any, b: Any, names: Any) -> tuple[float, bool]:
        return (a - b).abs().max().item(), torch.equal(a, b)

    traced = of("").symbolic_trace(function)
    return Minimizer(traced, (torch.ones(2),), compare, base._MinimizerSettingBase(**settings))


@use
def minimizing(of: Any) -> Any:
    methods = ("sequential", "binary", "accumulate", "block")
    return [[node.name for node in minimizer(of, traverse_method=method).minimize()] for method in methods]


@use
def running_and_comparing(of: Any) -> Any:
    found = minimizer(of)
    good = {node for node in found.module.graph.nodes if node.name in ("relu", "abs_1")}
    split, name = found._build_submodule(good)
    found._run_and_compare(split, name, ["relu"])
    outputs = sorted(set(found.a_outputs) - {"x"})
    bad = {node for node in found.module.graph.nodes if node.name in ("sin", "cos")}
    split, name = found._build_submodule(bad)
    with pytest.raises(of("passes.net_min_base").FxNetMinimizerResultMismatchError, match="Result mismatch for"):
        found._run_and_compare(split, name, ["cos"])
    return outputs


@pytest.mark.parametrize("name", USES)
def test_use(graft: ModuleType, name: str, capsys: Any) -> None:
    results = []
    for library in ("torch.fx", graft.__name__):

        def of(path: str, library: str = library) -> Any:
            return importlib.import_module(f"{library}.{path}" if path else library)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(USES[name](of))
    assert results[1] == results[0]
