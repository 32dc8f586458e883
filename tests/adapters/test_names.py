"""Every public name of torch.fx's modules that has a path here is here too, and is called in the same way."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

from torchgraft.fx_passes.paths import HOMES

PATHS = [
    *HOMES,
    *("_symbolic_trace", "graph", "graph_module", "immutable_collections", "interpreter", "node", "operator_schemas"),
    *("passes.fake_tensor_prop", "passes.shape_prop", "proxy", "subgraph_rewriter", "tensor_type", "traceback"),
]

# The rules of torch.fx's checker, one for each of ten operators (check_types tries any call), and what it solves with sympy.
_RULES = (
    *("Refine", "adaptiveavgpool2d_check", "all_eq", "calculate_out_dimension", "conv_rule", "element_wise_eq"),
    *("first_two_eq", "flatten_check", "get_greatest_upper_bound", "get_parameter", "linear_check", "maxpool2d_check"),
    *("adaptiveavgpool2d_inference_rule", "add_inference_rule", "bn2d_inference_rule", "conv2d_inference_rule"),
    *("conv_refinement_rule", "flatten_inference_rule", "flatten_refinement_rule", "get_attr_inference_rule"),
    *("linear_inference_rule", "linear_refinement_rule", "maxpool2d_inference_rule", "register_inference_rule"),
    *("register_algebraic_expressions_inference_rule", "register_refinement_rule", "relu_inference_rule"),
    *("reshape_inference_rule", "transpose_inference_rule"),
)
# How torch.fx's tracer gets along with operators and layers that did not run on meta tensors; they do now.
_OVERRIDES = (
    *("embedding_override", "functional_relu_override", "gen_constructor_wrapper", "manual_meta_overrides"),
    *("nn_layernorm_override", "torch_abs_override", "torch_nn_relu_override", "torch_relu_override"),
    "torch_where_override",
)

# What torch.compile needs of a graph: nodes that compute sizes, and numbers and views of backward nodes.
_OF_TORCH_COMPILE = (
    *(f"graph.Graph.create_{part}_node" for part in ("size", "stride", "storage_offset")),
    *("graph.Graph.materialize_symint", "graph.Graph.materialize_symints", "proxy.MetaProxy"),
    *(f"traceback.{verb}_current_replay_node" for verb in ("get", "set")),
    *(f"traceback.{verb}_grad_fn_seq_nr" for verb in ("reset", "set")),
)

# What is not here, or is called differently, and why nobody who uses torch.fx's interface meets it.
EXCEPTIONS = {
    **{f"experimental.graph_gradual_typechecker.{name}": "a rule for one operator" for name in _RULES},
    **{f"experimental.meta_tracer.{name}": "a way round what torch could not do" for name in _OVERRIDES},
    **dict.fromkeys(_OF_TORCH_COMPILE, "a part of torch.compile"),
    "_symbolic_trace.is_fx_tracing_warning": "torch.fx's own warning",
    "graph.Graph.placeholder": "the mark of no default is another one",
    "graph.PythonCode": "a table of lines may be left out",
    "graph_module.reduce_graph_module": "how torch.fx unpickles; programs here are pickled as they are",
    "graph_module.reduce_package_graph_module": "the same",
    "node.ArgumentT": "a type variable",
    "node.Node": "args and kwargs may be left out",
    "proxy.ParameterProxy.size": "takes a dimension too",
    "proxy.assert_fn": "the name of the parameter, which nobody sees",
    "traceback.NodeSource.NodeInfo": "a record of three fields",
    "experimental.normalize.NormalizeArgs.call_function": "types of arguments are found by the pass, not handed through it",
    "passes.split_module.Partition": "torch.fx's own record of a part while it splits",
    "passes.split_utils.Component": "the same",
    "passes.tools_common.FxNetAccFusionsFinder.FusionGroup": "a step of torch.fx's search",
    "passes.tools_common.FxNetAccFusionsFinder.recursive_add_node": "the same",
    "passes.utils.matcher_utils.InternalMatch": "made by the matcher; its attributes are the same",
}


def public_names(module: Any) -> list[str]:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return sorted({name for name in (*own, *getattr(module, "__all__", ())) if not name.startswith("_")})


def parameters(function: Any) -> list[tuple[str, Any, bool]] | None:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [(p.name, p.kind, p.default is not p.empty) for p in found]


def is_called_alike(theirs: Any, ours: Any) -> bool:
    """Whether every call of theirs is one of ours; ours may have more options, which some versions of torch have."""
    expected, found = parameters(theirs), parameters(ours)
    if expected is None or found is None:
        return expected == found
    return found[: len(expected)] == expected and all(has_default for _, _, has_default in found[len(expected) :])


def differences(path: str) -> list[str]:
    theirs, ours = importlib.import_module(f"torch.fx.{path}"), importlib.import_module(f"torchgraft.{path}")
    result = []
    for name in public_names(theirs):
        if not hasattr(ours, name):
            result.append(f"{path}.{name}")
            continue
        left, right = getattr(theirs, name), getattr(ours, name)
        if callable(left) and not is_called_alike(left, right):
            result.append(f"{path}.{name}")
        if inspect.isclass(left):
            members = {key: value for key, value in vars(left).items() if not key.startswith("_")}
            for key, value in members.items():
                other = getattr(right, key, None)
                is_method = inspect.isfunction(value)
                if not hasattr(right, key) or (is_method and not is_called_alike(value, other)):
                    result.append(f"{path}.{name}.{key}")
    return result


@pytest.mark.parametrize("path", PATHS)
def test_names_and_parameters_are_those_of_torch_fx(path: str) -> None:
    assert [difference for difference in differences(path) if difference not in EXCEPTIONS] == []


def test_no_exception_is_out_of_date() -> None:
    found = {difference for path in PATHS for difference in differences(path)}
    # Older versions of torch lack some of the names, and have others whose parameters are the same.
    if torch.__version__ >= "2.13":
        assert {name for name in EXCEPTIONS if is_in_torch_fx(name)} <= found


def is_in_torch_fx(name: str) -> bool:
    path = next(path for path in PATHS if name.startswith(f"{path}."))
    value: Any = importlib.import_module(f"torch.fx.{path}")
    for part in name.removeprefix(f"{path}.").split("."):
        value = getattr(value, part, None)
    return value is not None
