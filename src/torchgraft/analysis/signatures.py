"""Signatures: which parameter each argument of a call belongs to, with the defaults filled in.
Python functions and modules say it themselves, operators of torch in their schemas; no call is run or changed here.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch._jit_internal import boolean_dispatched  # where torch notes what F.max_pool2d and its kind choose between

from torchgraft.analysis.schemas import overloads_of
from torchgraft.errors import GraphAttributeError, GraphError
from torchgraft.ir.node import Node
from torchgraft.ir.printing import known_value, target_text

if TYPE_CHECKING:
    FunctionSchema = torch._C.FunctionSchema

_Kind = inspect._ParameterKind
_UNKNOWN: Any = object()

# The Python types of schema types; what is not here (a class, a type variable) may be anything.
_PYTHON_TYPES: dict[str, Any] = {
    "TensorType": torch.Tensor, "IntType": int, "SymIntType": int, "FloatType": float, "BoolType": bool, "SymBoolType": bool,
    "ComplexType": complex, "StringType": str, "NumberType": numbers.Number, "NoneType": type(None),
    "DeviceObjType": torch.device, "GeneratorType": torch.Generator, "StorageType": torch.UntypedStorage,
    "StreamObjType": torch.Stream,
}  # fmt: skip
# What torch takes in the place of something else, beyond what `type_matches` says.
_STANDS_FOR: dict[Any, tuple[Any, ...]] = {
    int: (float, torch.device),
    bool: (float,),
    str: (torch.device,),
    torch.layout: (int,),
    torch.memory_format: (int,),
    torch.nn.Parameter: (torch.Tensor,),
}


class ArgsKwargsPair(NamedTuple):
    """The positional and the keyword arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def normalized_arguments(
    node: Node,
    root: torch.nn.Module,
    arg_types: tuple[Any, ...] | None = None,
    kwarg_types: dict[str, Any] | None = None,
    normalize_to_only_use_kwargs: bool = False,
) -> ArgsKwargsPair | None:
    """The arguments of a call_function or call_module node bound to its target's signature; None for other nodes."""
    if node.op == "call_function":
        return normalize_function(
            node.target, node.args, node.kwargs, arg_types, kwarg_types, normalize_to_only_use_kwargs
        )
    if node.op == "call_module":
        return normalize_module(root, node.target, node.args, node.kwargs, normalize_to_only_use_kwargs)
    return None


def normalize_function(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    arg_types: tuple[Any, ...] | None = None,
    kwarg_types: Mapping[str, Any] | None = None,
    normalize_to_only_use_kwargs: bool = False,
) -> ArgsKwargsPair | None:
    """Arguments of a function bound to its signature, defaults filled in, or None where that is not possible.

    Impossible are parameters that take any number of arguments (`*args`) or no name, functions without a signature, and
    arguments that do not fit. Where an operator has several overloads that differ, the types of the arguments decide:
    those given, then those known (constants, and nodes whose value a pass has noted). Where they do not, GraphError.

    >>> normalize_function(torch.nn.functional.relu, ("x",))
    ArgsKwargsPair(args=('x',), kwargs={'inplace': False})
    >>> normalize_function(torch.relu, ("x",), normalize_to_only_use_kwargs=True).kwargs
    {'input': 'x'}
    """
    kwargs = kwargs or {}
    if "self" in kwargs and isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        kwargs = {"input" if name == "self" else name: value for name, value in kwargs.items()}
    calls = []
    for signature in _candidates(target):
        bound = _bind(signature, args, kwargs)
        if bound is not None:
            calls.append(bound)
    if len(calls) > 1:
        calls = _fitting(calls, _types(args, arg_types), _types_by_name(kwargs, kwarg_types))
        if arg_types is not None or kwarg_types is not None:
            calls = calls[:1]
    pairs = [_pair(call, 0 if normalize_to_only_use_kwargs else len(args)) for call in calls]
    if any(pair != pairs[0] for pair in pairs[1:]):
        overloads = "\n".join(f"  {call.signature}" for call in calls)
        raise GraphError(
            f"cannot normalize the arguments of {target_text(target)}: the schema match was ambiguous, they fit "
            f"{len(calls)} overloads and their types are not known:\n{overloads}\n"
            "give the types with arg_types and kwarg_types, or propagate shapes first"
        )
    return pairs[0] if pairs else None


def normalize_module(
    root: torch.nn.Module,
    target: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    normalize_to_only_use_kwargs: bool = False,
) -> ArgsKwargsPair | None:
    """Arguments of a submodule bound to the signature of its `forward`, or None where that is not possible.

    >>> normalize_module(torch.nn.Sequential(torch.nn.ReLU()), "0", ("x",), normalize_to_only_use_kwargs=True)
    ArgsKwargsPair(args=(), kwargs={'input': 'x'})
    """
    try:
        forward = root.get_submodule(target).forward
    except AttributeError as error:
        raise GraphAttributeError(
            f"cannot normalize a call of '{target}': {type(root).__name__} has no such submodule ({error}); "
            "give the module that the graph belongs to"
        ) from error
    return normalize_function(forward, args, kwargs, normalize_to_only_use_kwargs=normalize_to_only_use_kwargs)


# ---- binding ----


def _candidates(target: Callable[..., Any]) -> list[inspect.Signature]:
    if isinstance(target, types.BuiltinFunctionType | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        signatures = get_signature_for_torch_op(target)
        if signatures is not None:
            return signatures
    signature = python_signature(target)
    if signature is None or not all(
        parameter.kind in (_Kind.POSITIONAL_OR_KEYWORD, _Kind.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
    ):
        return []
    return [signature]


def python_signature(target: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a Python function, or None; where a flag chooses between two functions, the one they share."""
    choice = _boolean_choice(target)
    try:
        if choice is None:
            return inspect.signature(target)
        first, second = [inspect.signature(function) for function in choice]
    except (TypeError, ValueError):
        return None
    return first if first.parameters == second.parameters else None


def _boolean_choice(target: Callable[..., Any]) -> tuple[Any, Any] | None:
    """The two functions behind one that chooses by a flag; itself it takes `*args, **kwargs`."""
    try:
        entry = boolean_dispatched.get(target)
    except TypeError:  # not every callable can be looked up in a weak dictionary
        return None
    return None if entry is None else (entry["if_true"], entry["if_false"])


def _bind(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments | None:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        return None


def _pair(call: inspect.BoundArguments, positional: int) -> ArgsKwargsPair:
    call.apply_defaults()
    items = list(call.arguments.items())
    return ArgsKwargsPair(tuple([value for _, value in items[:positional]]), dict(items[positional:]))


# ---- choosing between overloads ----


def _fitting(
    calls: list[inspect.BoundArguments], arg_types: list[Any], kwarg_types: dict[str, Any]
) -> list[inspect.BoundArguments]:
    """The calls whose parameters accept these types; of those that accept the same types, the first."""
    result: dict[tuple[Any, ...], inspect.BoundArguments] = {}
    for call in calls:
        bound = _bind(call.signature, arg_types, kwarg_types)
        if bound is None:
            continue
        supplied = [(call.signature.parameters[name].annotation, kind) for name, kind in bound.arguments.items()]
        if all(_accepts(annotation, kind) for annotation, kind in supplied):
            result.setdefault(tuple([annotation for annotation, _ in supplied]), call)
    return list(result.values())


def _accepts(annotation: Any, kind: Any) -> bool:
    if kind is _UNKNOWN or type_matches(annotation, kind):
        return True
    if typing.get_origin(kind) is list:
        substitutes = [list[other] for other in _STANDS_FOR.get(typing.get_args(kind)[0], ())]  # type: ignore[valid-type]
    else:
        substitutes = list(_STANDS_FOR.get(kind, ()))
    return any(type_matches(annotation, other) for other in substitutes)


def _types(values: Sequence[Any], given: Sequence[Any] | None) -> list[Any]:
    given = given or ()
    return [*given, *[_known_type(value) for value in values[len(given) :]]]


def _types_by_name(values: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**{name: _known_type(value) for name, value in values.items()}, **(given or {})}


def _known_type(value: Any) -> Any:
    if isinstance(value, Node):
        known = known_value(value)
        if hasattr(known, "shape") and hasattr(known, "dtype"):
            return torch.Tensor
        return value.type if isinstance(value.type, type) else _UNKNOWN
    if isinstance(value, (list, tuple)):
        kinds = {_known_type(item) for item in value}
        if len(kinds) != 1 or _UNKNOWN in kinds:
            return _UNKNOWN
        return list[next(iter(kinds))]  # type: ignore[misc]
    return type(value)


def type_matches(signature_type: Any, argument_type: Any) -> bool:
    """Whether a parameter annotated with the first type takes an argument of the second.

    >>> type_matches(list[int], int), type_matches(torch.Tensor | None, torch.nn.Parameter), type_matches(int, str)
    (True, True, False)
    """
    if signature_type is argument_type or signature_type is Any:
        return True
    origin = typing.get_origin(signature_type)
    if origin in (typing.Union, types.UnionType):
        return any(type_matches(option, argument_type) for option in typing.get_args(signature_type))
    if origin is list:
        return _list_takes(typing.get_args(signature_type)[0], argument_type)
    if signature_type is int and argument_type is torch.dtype:
        return True  # schemas call a dtype an int
    if inspect.isclass(signature_type) and inspect.isclass(argument_type):
        return issubclass(argument_type, signature_type)
    return bool(signature_type == argument_type)


def _list_takes(element: Any, argument_type: Any) -> bool:
    if element is int and argument_type is int:
        return True  # one number is repeated as often as needed
    origin = typing.get_origin(argument_type)
    if origin not in (list, tuple):
        return False
    return all(type_matches(element, item) for item in typing.get_args(argument_type) if item is not Ellipsis)


def create_type_hint(x: Any) -> Any:
    """The annotation for a list or tuple of types, by the type that all others derive from; anything else as it is.

    >>> create_type_hint([int, bool]), create_type_hint((int, str))
    (list[int], tuple[typing.Any, ...])
    """
    if not isinstance(x, (list, tuple)):
        return x
    if not all(inspect.isclass(item) for item in x):
        warnings.warn(f"no type hint can be made of {x!r}: not every item is a class", stacklevel=2)
        return x
    element: Any = next((item for item in x if all(issubclass(other, item) for other in x)), Any)
    return list[element] if isinstance(x, list) else tuple[element, ...]


# ---- operators of torch ----


@typing.overload
def get_signature_for_torch_op(
    op: Callable[..., Any], return_schemas: Literal[True]
) -> tuple[list[inspect.Signature] | None, list[FunctionSchema] | None]: ...


@typing.overload
def get_signature_for_torch_op(
    op: Callable[..., Any], return_schemas: Literal[False] = False
) -> list[inspect.Signature] | None: ...


def get_signature_for_torch_op(op: Callable[..., Any], return_schemas: bool = False) -> Any:
    """One signature for each overload of an operator, and their schemas if wanted; None where there is none.

    >>> [str(signature) for signature in get_signature_for_torch_op(torch.relu)]
    ['(input: torch.Tensor) -> torch.Tensor', ...]
    """
    overloads = _overloads(op)
    signatures = [_schema_signature(overload) for overload in overloads] or None
    if not return_schemas:
        return signatures
    return signatures, [overload._schema for overload in overloads] or None


def check_for_mutable_operation(target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise GraphError if this call of an operator writes its arguments; one that fits several overloads may pass."""
    fitting = [
        overload._schema
        for overload in _overloads(target)
        if _bind(_schema_signature(overload), args, kwargs) is not None
    ]
    if len(fitting) == 1 and fitting[0].is_mutable:
        raise GraphError(
            f"Tried to trace mutable operation {fitting[0]}: it writes to its arguments; "
            "use the operator that returns a new tensor"
        )


def _overloads(op: Any) -> list[torch._ops.OpOverload]:
    if isinstance(op, torch._ops.OpOverload):
        return [op]
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    home = getattr(op, "__module__", None) or ""
    name = getattr(op, "__name__", "")
    if home.partition(".")[0] != "torch" or not hasattr(torch.ops.aten, name):
        return []
    return overloads_of(getattr(torch.ops.aten, name))


@functools.cache
def _schema_signature(overload: torch._ops.OpOverload) -> inspect.Signature:
    schema = overload._schema
    last_reserved = max([index for index, item in enumerate(schema.arguments) if item.name == "from"], default=-1)
    parameters = []
    for index, argument in enumerate(schema.arguments):
        if argument.kwarg_only:
            kind = _Kind.KEYWORD_ONLY
        else:
            # Python has no parameter called `from`, unless it and all before it go without names.
            kind = _Kind.POSITIONAL_ONLY if index <= last_reserved else _Kind.POSITIONAL_OR_KEYWORD
        name = "input" if argument.name == "self" else argument.name  # as the Python bindings call it
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=python_type(argument.type)))
    return inspect.Signature(parameters, return_annotation=_result_type(schema.returns))


def _result_type(returns: Iterable[Any]) -> Any:
    kinds = tuple([python_type(item.type) for item in returns])
    return kinds[0] if len(kinds) == 1 else kinds or None


def python_type(kind: Any) -> Any:
    """The Python type for a type in an operator's schema.

    >>> [python_type(argument.type) for argument in torch.ops.aten.sum.dim_IntList._schema.arguments][1]
    typing.Optional[typing.List[int]]
    """
    name = kind.kind()
    if name == "OptionalType":
        return typing.Optional[python_type(kind.getElementType())]  # noqa: UP045 (the type is made here, not written)
    if name == "ListType":
        return typing.List[python_type(kind.getElementType())]  # type: ignore[misc] # noqa: UP006 (as torch.fx has it)
    if name == "TupleType":
        return tuple[tuple([python_type(item) for item in kind.elements()])]  # type: ignore[misc]
    return _PYTHON_TYPES.get(name, Any)
