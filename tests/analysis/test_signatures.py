"""Arguments bound to signatures: the answers of torch.fx where it has one, and right ones where it has not.
Every bound call must still be the same call: it is made both ways and the results are compared.
"""

# ruff: noqa: UP006, UP007, UP045 (both spellings of a type are under test)

import inspect
import math
import numbers
import operator
import typing
from collections.abc import Callable
from types import ModuleType
from typing import Any, Optional

import pytest
import torch
import torch.fx.operator_schemas
from torch import nn
from torch.nn import functional

import torchgraft as fx
from tests.torch_versions import TORCH
from torchgraft import operator_schemas
from torchgraft.analysis.signatures import (
    ArgsKwargsPair,
    check_for_mutable_operation,
    create_type_hint,
    get_signature_for_torch_op,
    normalize_function,
    normalize_module,
    type_matches,
)

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def user(a, b=2, *, c=3):
    return a + b + c


def takes_any_number(a, *rest):
    return a


def takes_any_name(a, **rest):
    return a


def without_names(a, /, b):
    return a + b


class Sum:
    def __init__(self, x, y=1):
        self.value = x + y

    def __eq__(self, other):
        return torch.equal(self.value, other.value)

    __hash__ = None


torch.manual_seed(0)
X = torch.rand(2, 3, 8, 8)
Y = torch.rand(2, 3, 8, 8)
M = torch.rand(3, 4)
W = torch.rand(4, 3, 3, 3)
V = torch.rand(3)

# Calls for which torch.fx has an answer, which must be ours.
SAME: list[Call] = [
    (torch.relu, (X,), {}),
    (torch.sum, (X, 1), {}),
    (torch.sum, (X,), {"dim": (1, 2), "keepdim": True}),
    (torch.max, (X,), {}),
    (torch.cat, ([X, Y], 1), {}),
    (torch.cat, ((X, Y),), {}),
    (torch.matmul, (M, M.t()), {}),
    (torch.transpose, (X, 0, 1), {}),
    (torch.softmax, (M,), {"dim": 1}),
    (torch.flatten, (X, 1), {}),
    (torch.stack, ([X, Y],), {}),
    (torch.arange, (5,), {}),
    (torch.zeros, ((2, 3),), {}),
    (torch.zeros, (2, 3), {}),
    (torch.mean, (X, 1), {}),
    (torch.topk, (M, 2), {}),
    (torch.argmax, (M,), {}),
    (torch.linalg.norm, (M,), {}),
    (torch.fft.fft, (M,), {}),
    (torch.special.erf, (M,), {}),
    (torch.addmm, (torch.rand(3, 3), M, M.t()), {"beta": 2}),
    (torch.split, (M, 1), {}),
    (torch.einsum, ("ij,jk", M, M.t()), {}),
    (torch.norm, (M,), {}),
    (torch.roll, (M, 1), {}),
    (torch.bmm, (X,), {}),
    (functional.relu, (X,), {}),
    (functional.linear, (M.t(), M.t()), {}),
    (functional.gelu, (X,), {}),
    (functional.max_pool2d, (X, 2), {}),
    (functional.max_pool2d, (X, 2), {"return_indices": True}),
    (functional.adaptive_max_pool2d, (X, 1), {}),
    (functional.avg_pool2d, (X, 2), {}),
    (functional.adaptive_avg_pool2d, (X, 1), {}),
    (functional.batch_norm, (X, V, V), {}),
    (functional.dropout, (X, 0.0), {}),
    (functional.softmax, (M, 1), {}),
    (functional.interpolate, (X,), {"scale_factor": 2}),
    (functional.embedding, (torch.tensor([0, 1]), M), {}),
    (functional.layer_norm, (X, (8,)), {}),
    (functional.pad, (X, (1, 1)), {}),
    (functional.scaled_dot_product_attention, (X, X, X), {}),
    (operator.add, (X, Y), {}),
    (operator.getitem, (X, 0), {}),
    (len, (X,), {}),
    (getattr, (X, "shape"), {}),
    (user, (X,), {}),
    (user, (X, 5), {"c": 4}),
    (user, (), {"a": X}),
    (takes_any_number, (X, 2), {}),
    (takes_any_name, (X,), {"z": 3}),
    (without_names, (X, 2), {}),
    (Sum, (X,), {}),
    (torch.ops.aten.add.Tensor, (X, Y), {}),
    (torch.ops.aten.convolution.default, (X, W, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {}),
]

# Calls that torch.fx finds ambiguous, or about which it is silent or wrong: keyword arguments that the call stands for.
BETTER: list[tuple[Call, dict[str, Any]]] = [
    ((torch.add, (X, Y), {}), {"input": X, "other": Y, "alpha": 1}),
    ((torch.add, (X, 2), {"alpha": 3}), {"input": X, "other": 2, "alpha": 3}),
    ((torch.sum, (X,), {}), {"input": X, "dtype": None}),
    ((torch.max, (X, 1), {}), {"input": X, "dim": 1, "keepdim": False}),
    ((torch.max, (X, Y), {}), {"input": X, "other": Y}),
    ((torch.clamp, (X,), {"min": 0}), {"input": X, "min": 0, "max": None}),
    ((torch.pow, (X, 2), {}), {"input": X, "exponent": 2}),
    ((torch.where, (X > 0, X, Y), {}), {"condition": X > 0, "input": X, "other": Y}),
    ((torch.std, (X, True), {}), {"input": X, "unbiased": True}),
    ((torch.std, (X, 1), {}), {"input": X, "dim": 1, "unbiased": True, "keepdim": False}),
    ((torch.nonzero, (X,), {}), {"input": X}),
    (
        (functional.conv2d, (X, W), {}),
        {"input": X, "weight": W, "bias": None, "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1},
    ),
    (
        (functional.conv2d, (X, W), {"padding": "same"}),
        {"input": X, "weight": W, "bias": None, "stride": [1, 1], "padding": "same", "dilation": [1, 1], "groups": 1},
    ),
    (
        (torch.arange, (1, 5), {"device": "cpu"}),
        {"start": 1, "end": 5, "dtype": None, "layout": None, "device": "cpu", "pin_memory": None},
    ),
]


def identical(found: Any, expected: Any) -> bool:
    """Equal, tensors included, without asking a tensor for the truth of a comparison."""
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(identical(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return type(found) is type(expected) and len(found) == len(expected) and all(map(identical, found, expected))
    return type(found) is type(expected) and found == expected


def same_call(call: Call, pair: ArgsKwargsPair) -> bool:
    function, args, kwargs = call
    return identical(function(*pair.args, **pair.kwargs), function(*args, **kwargs))


def title(call: Any) -> str:
    return getattr(call[0], "__name__", str(call[0])) if isinstance(call, tuple) and callable(call[0]) else ""


@pytest.mark.parametrize("only_keywords", [False, True])
@pytest.mark.parametrize("call", SAME, ids=title)
def test_same_answer_as_torch_fx(call: Call, only_keywords: bool) -> None:
    options = {"normalize_to_only_use_kwargs": only_keywords}
    found = normalize_function(*call, **options)
    try:
        expected = torch.fx.operator_schemas.normalize_function(*call, **options)
    except RuntimeError as error:
        # It could not tell the overloads for dimensions with names from the others while torch had them.
        assert TORCH < (2, 13) and "the schema match was ambiguous" in str(error)
        expected = found
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert identical(tuple(found), tuple(expected))
    if not (
        only_keywords and isinstance(call[0], torch._ops.OpOverload)
    ):  # overloads say `self` where `input` is meant
        assert same_call(call, found)


@pytest.mark.parametrize(("call", "expected"), BETTER, ids=title)
def test_an_answer_where_torch_fx_has_none(call: Call, expected: dict[str, Any]) -> None:
    try:
        assert torch.fx.operator_schemas.normalize_function(*call) is None
    except RuntimeError as error:
        assert "the schema match was ambiguous" in str(error)
    found = normalize_function(*call, normalize_to_only_use_kwargs=True)
    assert found is not None
    assert found.args == ()
    assert identical(found.kwargs, expected)
    assert same_call(call, found)
    mixed = normalize_function(*call)
    assert mixed is not None
    assert len(mixed.args) == len(call[1])
    assert same_call(call, mixed)


@pytest.mark.parametrize(
    ("call", "arg_types", "kwarg_types"),
    [
        ((torch.add, (X, Y), {}), (torch.Tensor, torch.Tensor), {}),
        ((torch.add, (X, 2), {}), (torch.Tensor, int), {}),
        ((torch.max, (X, Y), {}), (torch.Tensor, torch.Tensor), None),
        ((torch.max, (X, 1), {}), (torch.Tensor, int), None),
        ((torch.sum, (X, 1), {"keepdim": True}), (torch.Tensor, int), {"keepdim": bool}),
        ((torch.where, (X > 0, X, Y), {}), (torch.Tensor, torch.Tensor, torch.Tensor), {}),
        ((torch.conv2d, (X, W), {"padding": "same"}), (torch.Tensor, torch.Tensor), {"padding": str}),
        ((torch.max, (X, "name"), {}), (torch.Tensor, dict), {}),
    ],
)
def test_types_given_by_the_caller(call: Call, arg_types: Any, kwarg_types: Any) -> None:
    expected = torch.fx.operator_schemas.normalize_function(*call, arg_types, kwarg_types)
    found = normalize_function(*call, arg_types, kwarg_types)
    assert (found is None) == (expected is None)
    assert found is None or identical(tuple(found), tuple(expected))


@pytest.mark.parametrize(
    "call",
    [(user, (), {}), (user, (1, 2, 3), {}), (math.sqrt, (2.0,), {}), (torch.Tensor.add, (X, Y), {}), (print, (1,), {})],
    ids=title,
)
def test_none_where_nothing_can_be_said(call: Call) -> None:
    assert normalize_function(*call) is None


def test_unknown_types_of_nodes_are_ambiguous_only_where_it_matters() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert graph.call_function(torch.add, (x, y)).normalized_arguments(nn.Module()) == ((x, y), {"alpha": 1})
    node = graph.call_function(torch.max, (x, y))
    with pytest.raises(RuntimeError) as caught:
        node.normalized_arguments(nn.Module())
    assert isinstance(caught.value, fx.GraphError)
    message = str(caught.value)
    count = 2 if TORCH >= (2, 13) else 3  # torch had one for dimensions with names
    assert message.startswith(
        f"cannot normalize the arguments of torch.max: the schema match was ambiguous, they fit {count} overloads"
    )
    assert "other: torch.Tensor" in message and "dim: int" in message
    assert message.endswith("give the types with arg_types and kwarg_types, or propagate shapes first")
    assert node.normalized_arguments(nn.Module(), (torch.Tensor, torch.Tensor)).kwargs == {}
    y.meta["val"] = X
    assert node.normalized_arguments(nn.Module(), normalize_to_only_use_kwargs=True).kwargs == {"input": x, "other": y}
    del y.meta["val"]
    y.type = int
    assert node.normalized_arguments(nn.Module()).kwargs == {"keepdim": False}


def test_normalized_arguments_replace_those_of_a_node() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.MaxPool2d(2)

        def forward(self, x):
            return torch.add(functional.max_pool2d(self.pool(x), 2), 1)

    traced = fx.symbolic_trace(Model())
    expected = traced(X)
    for node in traced.graph.nodes:
        pair = node.normalized_arguments(traced, normalize_to_only_use_kwargs=True)
        if pair is not None:
            node.args, node.kwargs = pair
    assert "torch.add(input = max_pool2d, other = 1, alpha = 1)" in traced.code
    assert "self.pool(input = x)" in traced.code
    assert torch.equal(traced(X), expected)


class Scale(nn.Module):
    def forward(self, x, factor=2.0):
        return x * factor


def test_modules() -> None:
    root = nn.ModuleDict({"linear": nn.Linear(4, 2), "scale": Scale(), "list": nn.ModuleList([nn.ReLU()])})
    expected = torch.fx.operator_schemas.normalize_module(root, "linear", (M,), {}, True)
    assert identical(tuple(normalize_module(root, "linear", (M,), {}, True)), tuple(expected))
    assert identical(normalize_module(root, "list.0", (M,)).args, (M,))
    assert identical(normalize_module(root, "scale", (M,), None, True).kwargs, {"x": M, "factor": 2.0})
    assert normalize_module(root, "scale", (), {"y": M}) is None
    with pytest.raises(RuntimeError, match="cannot normalize a call of 'missing': ModuleDict has no such submodule"):
        normalize_module(root, "missing", (M,))


@pytest.mark.parametrize("library", [torch.fx.operator_schemas, operator_schemas], ids=["torch.fx", "torchgraft"])
def test_type_matches(library: ModuleType) -> None:
    matches = library.type_matches
    tensor = torch.Tensor
    for signature, argument in [
        (int, int),
        (tensor, tensor),
        (tensor, nn.Parameter),
        (Optional[tensor], tensor),
        (Optional[tensor], type(None)),
        (typing.Union[int, str], str),
        (list[int], int),
        (list[int], list[int]),
        (list[int], tuple[int, ...]),
        (list[int], tuple[int, int]),
        (list[tensor], list[nn.Parameter]),
        (typing.List[int], list[int]),
        (numbers.Number, int),
        (numbers.Number, float),
        (int, torch.dtype),
        (int, bool),
    ]:
        assert matches(signature, argument), (signature, argument)
    for signature, argument in [
        (int, str),
        (int, float),
        (tensor, int),
        (Optional[tensor], int),
        (list[int], str),
        (list[int], list[str]),
        (list[int], tuple[int, str]),
        (numbers.Number, str),
        (torch.dtype, int),
    ]:
        assert not matches(signature, argument), (signature, argument)


def test_type_matches_inside_containers() -> None:
    assert type_matches(list[Optional[torch.Tensor]], list[torch.Tensor])
    assert not type_matches(list[Optional[torch.Tensor]], list[int])
    assert type_matches(torch.Tensor | None, type(None))


@pytest.mark.parametrize("x", [[int, int], (int,), [int, bool], [bool, int], [int, str], [], (), int, "text"])
def test_create_type_hint(x: Any) -> None:
    assert create_type_hint(x) == torch.fx.operator_schemas.create_type_hint(x)


def test_create_type_hint_of_no_types() -> None:
    with pytest.warns(UserWarning, match="not every item is a class"):
        assert create_type_hint([1, 2]) == [1, 2]


@pytest.mark.parametrize("function", [torch.relu, functional.conv2d, torch.add, torch.ops.aten.add.Tensor])
def test_signatures_of_operators_are_among_those_of_torch_fx(function: Callable[..., Any]) -> None:
    expected = torch.fx.operator_schemas.get_signature_for_torch_op(function)
    found, schemas = get_signature_for_torch_op(function, return_schemas=True)
    assert found and len(schemas) == len(found)
    assert get_signature_for_torch_op(function) == found
    for signature in found:
        assert isinstance(signature, inspect.Signature)
        assert str(signature) in [str(item) for item in expected]


@pytest.mark.parametrize("function", [user, len, operator.add, math.sqrt, torch.nn.Linear])
def test_no_signatures_for_what_is_no_operator(function: Callable[..., Any]) -> None:
    assert get_signature_for_torch_op(function) is None
    assert get_signature_for_torch_op(function, return_schemas=True) == (None, None)


def test_a_parameter_called_from() -> None:
    pair = normalize_function(torch.ops.aten.uniform.default, (X, 0.0), normalize_to_only_use_kwargs=True)
    assert identical(pair.kwargs, {"input": X, "from": 0.0, "to": 1.0, "generator": None})


def test_mutable_operations_are_refused() -> None:
    check_for_mutable_operation(torch.relu, (X,), {})
    check_for_mutable_operation(user, (X,), {})
    with pytest.raises(RuntimeError, match="Tried to trace mutable operation aten::relu_"):
        check_for_mutable_operation(torch.relu_, (X,), {})
    with pytest.raises(RuntimeError, match="Tried to trace mutable operation aten::sigmoid.out"):
        check_for_mutable_operation(torch.sigmoid, (X,), {"out": Y})


def test_every_name_of_the_module_path() -> None:
    for name in torch.fx.operator_schemas.__all__:
        assert getattr(operator_schemas, name).__doc__
