"""The names and module paths that programs written for torch.fx import.

Only that they resolve, and that the same thing is the same thing under each path.
"""

import importlib
from types import ModuleType

import pytest

TOP_LEVEL = [
    "symbolic_trace",
    "Tracer",
    "wrap",
    "Graph",
    "GraphModule",
    "Interpreter",
    "Transformer",
    "Node",
    "Proxy",
    "replace_pattern",
    "has_side_effect",
    "map_arg",
    "PH",
    "ProxyableClassMeta",
    "CodeGen",
    "subgraph_rewriter",
    "immutable_collections",
]

BY_MODULE = {
    "node": [
        *("Node", "map_arg", "map_aggregate", "has_side_effect", "Argument", "Target", "base_types"),
        *("_format_arg", "_get_qualified_name", "_side_effectful_functions", "_type_repr"),
    ],
    "graph": [
        *("Graph", "CodeGen", "PythonCode", "map_arg", "Node"),
        *("_Namespace", "_snake_case", "inplace_methods", "magic_methods", "reflectable_magic_methods"),
    ],
    "proxy": [
        "Proxy",
        "TracerBase",
        "GraphAppendingTracer",
        "TraceError",
        "Attribute",
        "ParameterProxy",
        "Scope",
        "ScopeContextManager",
        "base_types",
    ],
    "graph_module": [
        *("GraphModule", "Graph", "_CodeOnlyModule", "_USER_PRESERVED_ATTRIBUTES_KEY"),
        *("_assign_attr", "_copy_attr", "_del_attr", "_get_attr", "_has_attr"),
    ],
    "interpreter": ["Interpreter", "Transformer"],
    "subgraph_rewriter": ["Match", "ReplacedPatterns", "replace_pattern", "replace_pattern_with_filters"],
    "immutable_collections": ["immutable_list", "immutable_dict"],
    "_symbolic_trace": [
        *(
            "symbolic_trace",
            "Tracer",
            "wrap",
            "PH",
            "ProxyableClassMeta",
            "HAS_VARSTUFF",
            "_Patcher",
            "_assert_is_none",
        ),
        *("_autowrap_check", "_find_proxy", "_is_fx_tracing_flag", "_orig_module_call", "_orig_module_getattr"),
        *("_patch_function", "_patch_wrapped_functions", "_proxyable_classes", "_wrapped_fns_to_patch"),
        *("_wrapped_methods_to_patch", "is_fx_symbolic_tracing", "is_fx_tracing"),
    ],
    "_compatibility": ["compatibility"],
    "_pytree": ["register_pytree_flatten_spec", "tree_flatten_spec", "_dict_flatten_spec"],
    "config": ["do_not_emit_stack_traces"],
    "operator_schemas": ["normalize_function"],
    "traceback": ["preserve_node_meta"],
}
SEMI_PRIVATE = {
    "graph": ["_PyTreeCodeGen", "_PyTreeInfo", "_Namespace", "inplace_methods", "Target", "Argument"],
    "graph_module": ["_exec_with_source", "_forward_from_src", "_WrappedCall", "_format_import_statement"],
    "node": ["_find_module_of_method", "_type_repr", "_format_arg"],
    "_symbolic_trace": [
        "compatibility",
        "functools",
        "FunctionType",
        "ScriptObject",
        "Proxy",
        "_Patcher",
        "map_aggregate",
    ],
}


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_top_level_name(fx: ModuleType, name: str) -> None:
    assert getattr(fx, name) is not None


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in BY_MODULE.items() for name in names])
def test_name_in_module(fx: ModuleType, path: str, name: str) -> None:
    module = importlib.import_module(f"{fx.__name__}.{path}")
    if fx.__name__ == "torch.fx" and not hasattr(module, name):
        pytest.skip("newer than this torch")
    assert hasattr(module, name)
    if hasattr(fx, name) and name != "map_arg":
        assert getattr(module, name) is getattr(fx, name)


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in SEMI_PRIVATE.items() for name in names])
def test_name_that_clients_use_although_it_is_private(fx: ModuleType, path: str, name: str) -> None:
    assert hasattr(importlib.import_module(f"{fx.__name__}.{path}"), name)


@pytest.mark.parametrize("path", BY_MODULE)
def test_submodule_is_an_attribute_without_importing_it(fx: ModuleType, path: str) -> None:
    assert getattr(fx, path) is importlib.import_module(f"{fx.__name__}.{path}")


def test_star_import(port) -> None:
    program = port("""
        from torch.fx import *

        traced = symbolic_trace(lambda x: x + 1)
    """)
    for name in ("Tracer", "wrap", "Graph", "GraphModule", "Interpreter", "Transformer", "Node", "Proxy"):
        assert hasattr(program, name)
    assert program.traced(1) == 2


def test_imports_seen_in_the_wild(port) -> None:
    port("""
        import torch.fx
        import torch.fx.proxy
        import torch.fx.graph_module
        from torch.fx import Graph, GraphModule, Interpreter, Node, Proxy, Tracer, symbolic_trace
        from torch.fx import subgraph_rewriter, replace_pattern, wrap
        from torch.fx._symbolic_trace import Tracer, symbolic_trace
        from torch.fx.graph import Graph, Node, map_arg
        from torch.fx.graph_module import GraphModule
        from torch.fx.immutable_collections import immutable_dict, immutable_list
        from torch.fx.interpreter import Interpreter, Transformer
        from torch.fx.node import Argument, Target, Node, map_aggregate, map_arg
        from torch.fx.proxy import Attribute, ParameterProxy, Proxy, TraceError, TracerBase
        from torch.fx.subgraph_rewriter import Match, replace_pattern
    """)
