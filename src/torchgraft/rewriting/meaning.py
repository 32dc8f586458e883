"""The meaning of a call: which operator it is and what each parameter of that operator is given, however the call is spelled.
`torch.softmax(x, 1)`, `x.softmax(dim=1)`, `F.softmax(x, dim=1)` and `torch.ops.aten.softmax.int(x, 1)` mean the same. Modules
are in `modules.py`; comparing meanings is in `meaning_matching.py`.

Parameters and defaults come from operator schemas. A Python function of torch (F.softmax, Tensor.split) means the operator of its
name if each of its parameters is one of the operator's or has its default; where that is not so, it only means itself.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchgraft.analysis.schemas import Parameter, overloads_of, schema_parameters
from torchgraft.analysis.signatures import python_signature
from torchgraft.ir.node import Node
from torchgraft.ir.value_classes import is_tensor


class Meaning(NamedTuple):
    """An operator (the name of one of torch's, or a function, method or module type) and its arguments by parameter."""

    key: Any
    arguments: Mapping[Any, Any]

    @property
    def commutes(self) -> bool:
        """Whether the first two arguments may change places."""
        return self.key in COMMUTES and self.arguments.get("alpha", 1) == 1


COMMUTES = frozenset(
    {"add", "mul", "eq", "ne", "maximum", "minimum", "fmax", "fmin", "logical_and", "logical_or", "logical_xor"}
    | {"bitwise_and", "bitwise_or", "bitwise_xor"}
)

# Python's operators on tensors, and names that torch has twice.
_PYTHON_OPERATORS = {
    operator.truediv: "div", operator.floordiv: "floor_divide", operator.mod: "remainder", operator.invert: "bitwise_not",
    operator.and_: "bitwise_and", operator.or_: "bitwise_or", operator.xor: "bitwise_xor", operator.lshift: "bitwise_left_shift",
    operator.rshift: "bitwise_right_shift", operator.iadd: "add_", operator.isub: "sub_", operator.imul: "mul_",
    operator.itruediv: "div_", operator.iand: "bitwise_and_", operator.ior: "bitwise_or_", operator.ixor: "bitwise_xor_",
    operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.matmul: "matmul", operator.pow: "pow",
    operator.neg: "neg", operator.abs: "abs", operator.eq: "eq", operator.ne: "ne", operator.lt: "lt", operator.le: "le",
    operator.gt: "gt", operator.ge: "ge",
}  # fmt: skip
_ALIASES = {
    "multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div", "absolute": "abs", "negative": "neg",
    "concat": "cat", "concatenate": "cat", "clip": "clamp", "greater": "gt", "greater_equal": "ge", "less": "lt",
    "less_equal": "le", "not_equal": "ne", "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim",
    "arccos": "acos", "arcsin": "asin", "arctan": "atan", "arccosh": "acosh", "arcsinh": "asinh", "arctanh": "atanh",
    "special_expit": "sigmoid", "special_softmax": "softmax", "special_log_softmax": "log_softmax", "special_erf": "erf",
    "special_expm1": "expm1", "special_log1p": "log1p", "special_exp2": "exp2", "fix": "trunc", "ger": "outer",
    "__add__": "add", "__mul__": "mul", "__sub__": "sub", "__truediv__": "div", "__matmul__": "matmul", "__neg__": "neg",
}  # fmt: skip
# What `max` of two tensors is also called, and which operators must be looked at as one for that.
_OF_TWO = {"max": "maximum", "min": "minimum"}
_LOOKED_AT_AS = {"maximum": "max", "minimum": "min", "rsub": "sub"}
# What Python wrappers call the parameters of operators.
_PARAMETER_ALIASES = {"training": "train", "split_size_or_sections": "split_size", "axis": "dim", "keepdims": "keepdim"}
_NO_DEFAULT: Any = object()
_FIRST_PARAMETERS = ("self", "input", "tensor")


def coarse_key(node: Node) -> Any:
    """What a call may mean, without looking at its arguments; equal for all calls that mean the same. Not for modules."""
    if node.op == "call_function":
        try:
            return _function_name(node.target) or node.target
        except TypeError:  # a callable that cannot be looked up
            return id(node.target)
    return _plain_name(node.target) if node.op == "call_method" else None


def meaning_of_call(node: Node) -> Meaning:
    """The meaning of a function or method call.

    >>> from torchgraft.ir.graph import Graph
    >>> graph = Graph()
    >>> x = graph.placeholder("x")
    >>> meaning_of_call(graph.call_method("softmax", (x,), {"dim": 1}))
    Meaning(key='softmax', arguments={'self': x, 'dim': 1, 'dtype': None})
    >>> meaning_of_call(graph.call_function(operator.add, (x, 2)))
    Meaning(key='add', arguments={'self': x, 'other': 2, 'alpha': 1})
    """
    target, args, kwargs = node.target, node.args, node.kwargs
    found: Meaning | None = None
    if node.op == "call_method":
        wrapper = getattr(torch.Tensor, target, None)
        if isinstance(wrapper, types.FunctionType):
            found = _of_wrapper(wrapper, target, args, kwargs)
        else:
            found = _of_operator(target, args, kwargs)
        return found or Meaning(("method", target), _raw(args, kwargs))
    if isinstance(target, torch._ops.OpOverload):
        return _of_overload(target, args, kwargs)
    if type(target).__hash__ is None:
        return Meaning(("function", id(target)), _raw(args, kwargs))
    if target in _PYTHON_OPERATORS:
        if any(is_tensor(value) for value in args):  # else they may be numbers, and their sum is none of torch's
            found = _of_operator(_PYTHON_OPERATORS[target], args, kwargs)
    else:
        name = _function_name(target)
        if isinstance(target, types.FunctionType):
            found = _of_wrapper(target, target.__name__, args, kwargs)
        elif name is not None:
            found = _of_operator(target.__name__, args, kwargs)
    return found or Meaning(("function", target), _raw(args, kwargs))


def _of_wrapper(function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Meaning | None:
    """A Python function of torch: the operator of the same name, or the function itself with its parameters by name."""
    bound = _signature_arguments(function, args, kwargs)
    if bound is None:
        return None
    if not (getattr(function, "__module__", None) or "").startswith("torch."):
        return Meaning(("function", function), bound)
    arguments = {key: value for key, value in bound.items() if not key.startswith("_")}
    if arguments.pop("inplace", False) is True:
        name += "_"
    for parameters in _overloads(_canonical(name)):
        known = {parameter.name for parameter in parameters}
        given = {}
        for position, (key, value) in enumerate(arguments.items()):
            parameter = _parameter_name(key, known, is_first=position == 0)
            if parameter in known:
                given[parameter] = value
            elif isinstance(value, Node) or value != _defaults(function).get(key, _NO_DEFAULT):
                break
        else:
            result = _bind(parameters, (), given, lenient=True)
            if result is not None:
                return _settled(_canonical(name), result)
    return Meaning(("function", function), bound)


@functools.lru_cache(10_000)
def _defaults(function: Any) -> dict[str, Any]:
    signature = _signature(function)
    parameters = () if signature is None else signature.parameters.values()
    return {item.name: item.default for item in parameters if item.default is not item.empty}


def _signature_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    signature = _signature(function)
    if signature is None:
        return None
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return bound.arguments


@functools.lru_cache(10_000)
def _signature(function: Any) -> inspect.Signature | None:
    """The signature of a function whose every parameter has a name of its own."""
    signature = python_signature(function)
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if signature is None or any(parameter.kind in stars for parameter in signature.parameters.values()):
        return None
    return signature


def _parameter_name(name: str, known: set[str], is_first: bool) -> str:
    if name in known:
        return name
    if is_first and name in _FIRST_PARAMETERS:
        return next((first for first in _FIRST_PARAMETERS if first in known), name)
    return _PARAMETER_ALIASES.get(name, name)


def _of_operator(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Meaning | None:
    name = _canonical(name)
    for lenient in (False, True):
        for parameters in _overloads(name):
            found = _bind(parameters, args, kwargs, lenient)
            if found is not None:
                return _settled(name, found)
    return None


def _of_overload(overload: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Meaning:
    found = _bind(schema_parameters(overload), args, kwargs, lenient=True)
    if found is None:
        return Meaning(("function", overload), _raw(args, kwargs))
    namespace, _, name = overload._schema.name.partition("::")
    return (
        _settled(_canonical(name), found)
        if namespace == "aten"
        else Meaning(("function", overload.overloadpacket), found)
    )


def _settled(name: str, arguments: dict[str, Any]) -> Meaning:
    """One meaning where torch has two operators for it, told apart by the arguments."""
    if name in _OF_TWO and arguments.keys() == {"self", "other"}:
        return Meaning(_OF_TWO[name], arguments)
    if name == "rsub":
        return Meaning("sub", {**arguments, "self": arguments["other"], "other": arguments["self"]})
    if arguments.get("rounding_mode", "") is None:
        arguments = {key: value for key, value in arguments.items() if key != "rounding_mode"}
    return Meaning(name, arguments)


def _raw(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
    return {**dict(enumerate(args)), **kwargs}


# ---- names ----


def _canonical(name: str) -> str:
    ending = "_" if name.endswith("_") and not name.endswith("__") else ""
    base = name[: len(name) - len(ending)]
    return _ALIASES.get(base, base) + ending


def _plain_name(name: str) -> str:
    """The name without the mark of an in-place operator, which a keyword can stand for as well."""
    plain = _canonical(name).removesuffix("_") if not name.endswith("__") else _canonical(name)
    return _LOOKED_AT_AS.get(plain, plain)


@functools.lru_cache(10_000)
def _function_name(target: Any) -> str | None:
    """The operator that a function is by its name, or None."""
    if target in _PYTHON_OPERATORS:
        return _plain_name(_PYTHON_OPERATORS[target])
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        schema_name = target._schema.name if isinstance(target, torch._ops.OpOverload) else target._qualified_op_name
        namespace, _, name = schema_name.partition("::")
        return _plain_name(name) if namespace == "aten" else None
    home, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    if home.partition(".")[0] != "torch" or not _overloads(_canonical(name)):
        return None
    if isinstance(target, types.BuiltinFunctionType | types.FunctionType):
        return _plain_name(name)
    return None


# ---- parameters ----


@functools.cache
def _overloads(name: str) -> tuple[tuple[Parameter, ...], ...]:
    """The parameters of every overload of an operator that returns its result and takes no names of dimensions."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return ()
    found = [schema_parameters(overload) for overload in overloads_of(packet)]
    return tuple(
        [
            parameters
            for parameters in found
            if not any(parameter.name == "out" or "Dimname" in parameter.kind for parameter in parameters)
        ]
    )


def _bind(
    parameters: tuple[Parameter, ...], args: Sequence[Any], kwargs: Mapping[str, Any], lenient: bool
) -> dict[str, Any] | None:
    """Arguments by parameter, with defaults, each in one form; None where they do not fit."""
    positional = [parameter for parameter in parameters if not parameter.keyword_only]
    args = _gathered(positional, args)
    if len(args) > len(positional):
        return None
    given = {parameter.name: value for parameter, value in zip(positional, args, strict=False)}
    names = {parameter.name for parameter in parameters}
    for position, (key, value) in enumerate(kwargs.items()):
        name = _parameter_name(key, names, is_first=position == 0 and not args)
        if name not in names or name in given:
            return None
        given[name] = value
    result: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.name not in given:
            if not parameter.has_default:
                return None
            result[parameter.name] = parameter.default
            continue
        value = given[parameter.name]
        if value is None and not parameter.is_optional and parameter.has_default:
            value = parameter.default
        if not _fits(value, parameter, lenient):
            return None
        result[parameter.name] = _in_one_form(value, parameter)
    if result.get("stride") == [] and "kernel_size" in result:
        result["stride"] = result["kernel_size"]  # what an empty stride means to every pooling operator
    return result


def _gathered(positional: list[Parameter], args: Sequence[Any]) -> Sequence[Any]:
    """`x.view(2, 3)` as `x.view([2, 3])`: the last positional parameter may be a list that is given as several arguments."""
    last = len(positional) - 1
    if last < 1 or len(args) <= last or positional[last].kind != "List[int]" or positional[last].repeats is not None:
        return args
    if isinstance(args[last], list | tuple):
        return args
    return (*args[:last], list(args[last:]))


_LITERALS: dict[type, frozenset[str]] = {
    bool: frozenset({"bool", "number"}),
    int: frozenset({"int", "float", "number", "complex"}),
    float: frozenset({"float", "number", "complex"}),
    complex: frozenset({"number", "complex"}),
    str: frozenset({"str", "Device"}),
    torch.dtype: frozenset({"int"}),
    torch.layout: frozenset({"int"}),
    torch.memory_format: frozenset({"int"}),
    torch.device: frozenset({"Device"}),
}


def _fits(value: Any, parameter: Parameter, lenient: bool) -> bool:
    """Whether an argument can be meant for a parameter; a number may stand for a tensor only if nothing else fits."""
    if isinstance(value, Node):
        return parameter.kind != "str"
    if value is None:
        return parameter.is_optional
    is_list = parameter.kind.startswith("List[")
    if isinstance(value, list | tuple):
        return is_list
    kinds = _LITERALS.get(type(value))
    if kinds is None:
        return True
    if is_list:
        return parameter.repeats is not None and parameter.kind[5:-1] in kinds
    return parameter.kind in kinds or (lenient and parameter.kind == "Tensor" and "number" in kinds)


def _in_one_form(value: Any, parameter: Parameter) -> Any:
    if parameter.kind == "float" and type(value) is int:
        return float(value)
    if parameter.repeats is not None and parameter.kind.startswith("List[") and isinstance(value, int | float):
        return [value] * parameter.repeats
    return value
