"""Programs for the smaller modules of torch.fx, and for methods of its classes that few override: run on both libraries, which
must give the same. A program gets the library, and a function for its modules: `of("passes.utils.common")`.
"""

from __future__ import annotations

import importlib
import operator
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchgraft.passes.utils.matcher_with_name_node_map_utils import SubgraphMatcherWithNameNodeMap

import torchgraft

PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {}


def program(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Register a program: what it makes of a library, and of a function that imports its modules, must be the same on both."""
    PROGRAMS[function.__name__] = function
    return function


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        return self.inner(self.layer(x) * self.weight) + 1


def rows(graph: Any) -> list[Any]:
    return [(node.op, node.name, str(node.target), str(node.args), str(node.kwargs)) for node in graph.nodes]


# ---- code generators ----


@program
def a_generator_that_hands_all_options_on(fx: Any, of: Any) -> Any:
    class Own(fx.CodeGen):
        def gen_fn_def(self, free_vars, maybe_return_annotation, *, expanded_def=False):
            head = super().gen_fn_def(free_vars, maybe_return_annotation, expanded_def=expanded_def)
            return head + "  # own"

        def generate_output(self, output_args, *, descs=None):
            return super().generate_output(output_args, descs=descs)

    traced = fx.symbolic_trace(Model())
    traced.graph.set_codegen(Own())
    traced.recompile()
    return traced.code, traced(torch.ones(1, 4))


@program
def a_generator_as_a_whole(fx: Any, of: Any) -> Any:
    class Own(fx.CodeGen):
        def _gen_python_code(self, nodes, root_module, namespace, **options):
            code = super()._gen_python_code(nodes, root_module, namespace, **options)
            code.src = code.src.replace("return add", "return add * 2")
            return code

    traced = fx.symbolic_trace(lambda x: x + 1)
    traced.graph.set_codegen(Own())
    traced.recompile()
    return traced.code, traced(1)


@program
def parameters_on_lines_of_their_own(fx: Any, of: Any) -> Any:
    graph = fx.symbolic_trace(lambda x, y=2: x + y).graph
    return graph.python_code("self", expanded_def=True).src, graph._codegen.gen_fn_def(["x"], "", expanded_def=True)


@program
def unknown_options_of_code(fx: Any, of: Any) -> Any:
    with pytest.raises(TypeError):
        fx.symbolic_trace(lambda x: x + 1).graph.python_code("self", no_such_option=True)
    with pytest.raises(TypeError):
        fx.symbolic_trace(lambda x: x + 1).print_readable(no_such_option=True)


# ---- interpreters ----


@program
def an_interpreter_that_finds_values_itself(fx: Any, of: Any) -> Any:
    seen: list[Any] = []

    class Scaled(fx.Interpreter):
        def fetch_args_kwargs_from_env(self, n):
            args, kwargs = super().fetch_args_kwargs_from_env(n)
            seen.append((n.name, len(args), dict(kwargs)))
            return tuple([arg * 2 if isinstance(arg, torch.Tensor) else arg for arg in args]), kwargs

    return Scaled(fx.symbolic_trace(Model())).run(torch.ones(1, 4)), seen


@program
def an_interpreter_that_maps_values_itself(fx: Any, of: Any) -> Any:
    seen: list[Any] = []

    class Mapped(fx.Interpreter):
        def map_nodes_to_values(self, args, n):
            seen.append((n.name, str(args)))
            return super().map_nodes_to_values(args, n)

    return Mapped(fx.symbolic_trace(lambda x: torch.add(x, 1, alpha=x))).run(3), seen


@program
def an_interpreter_that_brings_its_own_modules(fx: Any, of: Any) -> Any:
    fetched: list[str] = []

    class Other(fx.Interpreter):
        def fetch_attr(self, target):
            fetched.append(target)
            return nn.Identity() if target == "layer" else super().fetch_attr(target)

    return Other(fx.symbolic_trace(Model())).run(torch.ones(1, 4)), fetched


# ---- annotate, debug ----


@program
def annotated_values(fx: Any, of: Any) -> Any:
    annotate = of("annotate").annotate

    def forward(x):
        return annotate(annotate(x + 1, torch.Tensor) * 2, int), annotate(3, int)

    return fx.symbolic_trace(forward).code


@program
def annotated_twice(fx: Any, of: Any) -> Any:
    annotate = of("annotate").annotate

    def forward(x: torch.Tensor):
        return annotate(x, torch.Tensor)

    with pytest.raises(RuntimeError, match="already had a type"):
        fx.symbolic_trace(forward)


@program
def a_breakpoint(fx: Any, of: Any) -> Any:
    return of("experimental.debug").set_trace(fx.symbolic_trace(Model())).code


# ---- passes.utils ----


@program
def graphs_compared(fx: Any, of: Any) -> Any:
    def graph_of(function):
        return fx.symbolic_trace(function).graph

    compare = of("passes.utils.common").compare_graphs
    first = graph_of(lambda x, y: torch.relu(x + y))
    others = [lambda a, b: torch.relu(a + b), lambda a, b: torch.relu(a - b), lambda a, b: torch.relu(a + b) + 1]
    assert compare is of("passes.utils").compare_graphs
    return [compare(first, graph_of(function)) for function in others]


@program
def a_graph_lifted_out(fx: Any, of: Any) -> Any:
    traced, part = fx.symbolic_trace(Model()), fx.Graph()
    copies: dict[Any, Any] = {}
    for node in traced.graph.nodes:
        if node.name in ("x", "layer", "weight", "mul", "inner_0"):
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(copies[node.prev.prev.prev])
    lifted, names = of("passes.utils.common").lift_subgraph_as_module(traced, part, "part", "Part")
    return lifted.code, names, type(lifted).__name__, sorted(lifted.state_dict()), lifted(torch.ones(1, 4))


@program
def a_holder(fx: Any, of: Any) -> Any:
    return str(of("passes.utils").HolderModule({"a": nn.ReLU(), "b": None}))


@program
def matches_by_name(fx: Any, of: Any) -> Any:
    def pattern(x, weight):
        conv = F.conv2d(x, weight)
        relu = F.relu(conv)
        return relu, {"conv": conv, "relu": relu}

    # Flattened, as patterns are that torch.export made.
    flat = fx.symbolic_trace(lambda pair: pattern(*pair), concrete_args={"pair": (fx.PH, fx.PH)})
    target = fx.symbolic_trace(lambda x, w: F.relu(F.conv2d(F.relu(F.conv2d(x, w)), w)) * 2)
    matcher = of("passes.utils.matcher_with_name_node_map_utils").SubgraphMatcherWithNameNodeMap(flat)
    found = matcher.match(target.graph)
    return [{name: node.name for name, node in match.name_node_map.items()} for match in found], rows(flat.graph)


@program
def paths_in_parts_by_tags(fx: Any, of: Any) -> Any:
    traced = fx.symbolic_trace(Model())
    for node in traced.graph.nodes:
        node.tag = "front" if node.name in ("layer", "weight", "mul") else "back"
    parts, names = of("passes.split_utils").split_by_tags(traced, ["front", "back"], return_fqn_mapping=True)
    calls = [node.target for node in parts.back.graph.nodes if node.op == "call_module"]
    return sorted(names.items()), calls, sorted(parts.state_dict()), parts(torch.ones(1, 4))


# ---- graphs whose module is gone ----


@program
def dead_layers_of_a_bare_graph(fx: Any, of: Any) -> Any:
    class Dead(Model):
        def forward(self, x):
            self.layer(x)
            return self.inner(x)

    graph = fx.symbolic_trace(Dead()).graph
    impure = [node.name for node in graph.nodes if node.is_impure()]
    return graph.eliminate_dead_code(), impure, str(graph), type(graph.owning_module.layer).__name__


@program
def a_bare_graph_with_a_tensor_as_the_pattern(fx: Any, of: Any) -> Any:
    class Pattern(nn.Module):
        def __init__(self):
            super().__init__()
            self.any = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return x * self.any

    traced = fx.symbolic_trace(Model())
    matches = fx.replace_pattern(traced, fx.symbolic_trace(Pattern()).graph, lambda x: torch.neg(x))
    return len(matches), rows(traced.graph), traced(torch.ones(1, 4))


# ---- metadata ----


@program
def metadata_of_an_annotation(fx: Any, of: Any) -> Any:
    traceback = of("traceback")

    @traceback.annotate_fn({"function": "inner"})
    def inner(x):
        return x.relu()

    def forward(x):
        with traceback.annotate({"stage": 1}):
            x = inner(x + 1)
        return x * 2

    with traceback.preserve_node_meta():
        traced = fx.symbolic_trace(forward)
    plain = fx.symbolic_trace(forward)
    return [[(node.name, node.meta.get("custom")) for node in one.graph.nodes] for one in (traced, plain)]


@program
def metadata_of_the_node_that_is_interpreted(fx: Any, of: Any) -> Any:
    traceback, traced = of("traceback"), fx.symbolic_trace(Model())
    for node in traced.graph.nodes:
        node.meta["custom"], node.stack_trace = {"of": node.name}, f"line of {node.name}"
    graph = fx.Graph()
    inputs = fx.Proxy(graph.placeholder("x"))

    class Retrace(fx.Interpreter):
        def call_module(self, target, args, kwargs):
            return torch.relu(args[0]) + 2

        def get_attr(self, target, args, kwargs):
            return torch.neg(inputs)

    with traceback.preserve_node_meta():
        Retrace(traced).run(inputs)

    def described(node):
        sources = [(s.name, s.pass_name, s._get_action_string() if hasattr(s, "_get_action_string") else "create")
                   for s in node.meta.get("from_node", ())]  # fmt: skip
        return node.name, node.meta.get("custom"), node.stack_trace, sources

    return [described(node) for node in graph.nodes if node.op != "placeholder"]


@program
def a_stack_trace_for_new_nodes(fx: Any, of: Any) -> Any:
    traceback = of("traceback")
    with traceback.preserve_node_meta():
        traceback.set_stack_trace(["first\n", "second"])
        traced = fx.symbolic_trace(lambda x: x + 1)
        during = dict(traceback.get_current_meta()), traceback.format_stack(), traceback.has_preserved_node_meta()
        with traceback.preserve_node_meta(False):
            inner = traceback.has_preserved_node_meta()
    after = dict(traceback.get_current_meta()), traceback.has_preserved_node_meta()
    return [node.stack_trace for node in traced.graph.nodes], during, inner, after


@program
def the_metadata_of_one_node(fx: Any, of: Any) -> Any:
    traceback = of("traceback")
    node = next(iter(fx.symbolic_trace(lambda x: x + 1).graph.find_nodes(op="call_function", target=operator.add)))
    node.meta["source_fn_stack"] = [("add", operator.add)]
    with traceback.preserve_node_meta(), traceback.set_current_meta(node, "mine"):
        made = fx.symbolic_trace(lambda x: x * 2)
    found = next(iter(made.graph.find_nodes(op="call_function", target=operator.mul))).meta
    source = found["from_node"][0]
    again = traceback.NodeSource._from_dict(source.to_dict())
    text = re.sub(r"graph_id=\d+", "", str(again))
    return found["source_fn_stack"], source.name, source.pass_name, source.node_info.target, text


# ---- arguments and texts ----


@program
def places_with_keys(fx: Any, of: Any) -> Any:
    place = of("_symbolic_trace").PHWithMeta(ph_key="first")
    traced = fx.symbolic_trace(lambda a: a["q"] + 1, concrete_args={"a": {"q": place}})
    return [(node.name, getattr(node, "ph_key", None)) for node in traced.graph.nodes]


@program
def texts_of_arguments(fx: Any, of: Any) -> Any:
    class Own:
        def _custom_fx_repr_fn(self):
            return "own text"

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.add, (x, Own()))
    return str(graph), of("node")._format_arg([x, *range(9)], max_list_len=3)


@program
def metadata_of_tensors_without_their_order(fx: Any, of: Any) -> Any:
    return tuple(of("passes.shape_prop")._extract_tensor_metadata(torch.ones(2, 3), include_contiguity=False))


@program
def operators_and_types_at_once(fx: Any, of: Any) -> Any:
    normalize = of("experimental.normalize").NormalizeOperators
    result = normalize(fx.symbolic_trace(lambda x, y: F.relu(torch.add(x, torch.div(y, 2))))).transform()
    return [(node.name, str(node.type)) for node in result.graph.nodes], rows(result.graph), result.code


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_torch_fx(name: str) -> None:
    def outcome(library: str) -> str:
        def of(path: str) -> Any:
            return importlib.import_module(f"{library}.{path}")

        torch.manual_seed(0)
        return str(PROGRAMS[name](importlib.import_module(library), of)).replace("torchgraft", "torch.fx")

    assert outcome("torchgraft") == outcome("torch.fx")


@pytest.mark.parametrize("library", ["torch.fx", "torchgraft"])
def test_passes_are_attributes_without_importing_them(library: str) -> None:
    used = [
        *(
            "shape_prop.ShapeProp",
            "split_module.split_module",
            "graph_drawer.FxGraphDrawer",
            "param_fetch.extract_attrs_for_lowering",
        ),
        *("infra.pass_manager.PassManager", "operator_support.OperatorSupport", "split_utils.split_by_tags"),
        *("splitter_base._SplitterBase", "tools_common.legalize_graph", "utils.compare_graphs"),
        "utils.matcher_utils.SubgraphMatcher",
    ]
    code = f"import {library} as fx\n" + "".join([f"fx.passes.{name}\n" for name in used])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_marks_for_the_profiler_of_torch_fx_are_refused() -> None:
    graph = torchgraft.symbolic_trace(lambda x: x + 1).graph
    with pytest.raises(torchgraft.GraphError, match="record_func"):
        graph.python_code("self", record_func=True)


def test_further_metadata_is_shown_on_request() -> None:
    traced = torchgraft.symbolic_trace(lambda x: x + 1)
    for node in traced.graph.nodes:
        node.meta["stage"] = 7
    assert "# stage: 7 # " in traced.print_readable(print_output=False, additional_meta=["stage"])
    assert "stage" not in traced.print_readable(print_output=False)


def test_patterns_without_names_are_refused() -> None:
    with pytest.raises(torchgraft.GraphError, match="a dict of its values by name"):
        SubgraphMatcherWithNameNodeMap(torchgraft.symbolic_trace(lambda x: x + 1))
