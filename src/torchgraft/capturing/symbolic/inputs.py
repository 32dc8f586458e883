"""Inputs of a traced function: one placeholder for each parameter, concrete arguments, and the call that starts the trace.
What happens during the call is the business of `tracer.py`.
"""

from __future__ import annotations

import enum
import functools
import inspect
import operator
import types
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import _pytree as pytree

from torchgraft.capturing.refusals import in_lines
from torchgraft.capturing.symbolic.proxy import Proxy
from torchgraft.capturing.user_code.comparisons import Operand, compared_types, identity_comparisons
from torchgraft.codegen.source import PyTreeCodeGen
from torchgraft.errors import TraceError
from torchgraft.ir.guards import check_given, check_value
from torchgraft.ir.origin import source_line
from torchgraft.ir.value_classes import is_plainly_typed

if TYPE_CHECKING:
    from torchgraft.capturing.symbolic.tracer import Tracer

_VARIABLE = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


class PHBase:
    """A place in `concrete_args` that stays an input; attributes set on it are copied onto its placeholder node.

    >>> import torch, torchgraft
    >>> def scaled(x, pair):
    ...     return x * pair[0] if pair[1] == 2 else x
    >>> program = torchgraft.symbolic_trace(scaled, concrete_args={"pair": (torchgraft.PH, 2)})
    >>> program(torch.ones(2), (torch.tensor(3.0), 2))
    tensor([3., 3.])
    """

    def __repr__(self) -> str:
        return "PH"


class PHWithMeta(PHBase):
    """A place that stays an input, with a key that its placeholder has as `node.ph_key`."""

    def __init__(self, ph_key: str | None = None) -> None:
        self.ph_key = ph_key


PH = PHBase()
"""The place in `concrete_args` that stays an input: `concrete_args={"pair": (PH, 2)}` fixes the second of a pair."""


def _assert_is_none(value: Any, msg: str) -> None:
    """What remains in the program of an argument fixed to None; tracing the program again records it."""
    if has_torch_function((value,)):
        return handle_torch_function(_assert_is_none, (value,), value, msg)
    assert value is None, msg


_assert_is_none.__torchgraft_effect__ = True  # type: ignore[attr-defined]


def create_inputs(
    tracer: Tracer, function: Callable[..., Any], is_module: bool, concrete_args: Any = None
) -> tuple[Callable[..., Any], list[Any]]:
    """Make placeholders for the parameters of `function`; return a function of exactly these values, and the values."""
    parameters = _parameters(function)
    if is_module:
        if not parameters or parameters[0].kind in (parameters[0].VAR_POSITIONAL, parameters[0].VAR_KEYWORD):
            raise TraceError("``self`` argument cannot be part of *args expansion! Name self in the signature")
        parameters = parameters[1:]
    first = [tracer.root] if is_module else []
    if _is_flat_call(concrete_args, parameters):
        leaves = [_flat_input(tracer, index, value) for index, value in enumerate(concrete_args)]
        return function, [*first, *leaves]
    concrete = _concrete_by_name(concrete_args, parameters)
    empty = [
        p for p in parameters if _must_stay_empty(function, p) or (_is_variable(p) and not concrete.get(p.name, True))
    ]
    parameters = [p for p in parameters if p not in empty]
    # As in torch.fx, other values for *args and **kwargs fix nothing: these stay inputs, and take what they are given.
    concrete = {p.name: concrete[p.name] for p in parameters if p.name in concrete and not _is_variable(p)}
    values = [_input_value(tracer, parameter, concrete) for parameter in parameters]
    for parameter, value in zip(parameters, values, strict=True):
        if isinstance(value, Proxy):
            if parameter.default is None:
                tracer._optional_inputs[value.node] = parameter.name
            _guard_comparisons(tracer, function, parameter, value)
    call: Any = functools.partial(_call, function, parameters)
    call.__annotations__ = dict(
        getattr(function, "__annotations__", {})
    )  # which a tracer of somebody's own may ask for
    _, spec = pytree.tree_flatten(tuple(values))
    children = spec.children() if callable(spec.children) else spec.children
    if all(child.is_leaf() for child in children):
        return call, [*first, *values]
    return _over_leaves(tracer, call, first, parameters, values)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise TraceError(
            f"cannot trace {function!r}: it is implemented in C or has no signature; wrap it in a Python function"
        ) from error


def _is_variable(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def _must_stay_empty(function: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    # A decorated function is entered through its wrapper's own *args, where a traced tuple could not be told apart. Extra
    # arguments are then no inputs of the program, and passing some to it raises.
    return _is_variable(parameter) and not _is_plain_function(function)


def _is_plain_function(function: Callable[..., Any]) -> bool:
    return isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__")


def _is_flat_call(concrete_args: Any, parameters: list[inspect.Parameter]) -> bool:
    variable = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return isinstance(concrete_args, tuple) and len(concrete_args) > 0 and bool(variable) and variable == parameters


def _concrete_by_name(concrete_args: Any, parameters: list[inspect.Parameter]) -> dict[str, Any]:
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if concrete_args is None:
        return {}
    if isinstance(concrete_args, tuple):
        if len(named) != len(concrete_args):
            raise TraceError(
                f"Tracing expected {len(named)} arguments but got {len(concrete_args)} concrete arguments; "
                "give one for each parameter, PH for those that stay inputs, or a dict by name"
            )
        return dict(zip(named, concrete_args, strict=True))
    if not isinstance(concrete_args, Mapping):
        raise TraceError(
            f"concrete_args is a {type(concrete_args).__name__}; give a dict of values by name, or a tuple of one for each "
            "parameter; example inputs are for torchgraft.capture(model, args)"
        )
    unknown = [name for name in concrete_args if name.lstrip("*") not in {p.name for p in parameters}]
    if unknown:
        warnings.warn(
            f"concrete_args names {', '.join(map(repr, unknown))}, which is ignored: the parameters are "
            f"{', '.join(map(repr, named))}; use these names",
            stacklevel=2,
        )
    # Who takes all defaults for concrete arguments takes this one too, for `**kwargs`, which has none.
    given = {name: value for name, value in concrete_args.items() if value is not inspect.Parameter.empty}
    return {name.lstrip("*"): value for name, value in given.items()}


def _flat_input(tracer: Tracer, index: int, value: Any) -> Any:
    proxy = tracer.create_proxy("placeholder", f"input_{index}", (), {})
    _copy_marks(value, proxy.node)
    return proxy


def _copy_marks(place: Any, node: Any) -> None:
    if isinstance(place, PHBase) and place is not PH:
        for name, value in vars(place).items():
            setattr(node, name, value)


def _input_value(tracer: Tracer, parameter: inspect.Parameter, concrete: dict[str, Any]) -> Any:
    name = parameter.name
    default = () if parameter.default is inspect.Parameter.empty else (parameter.default,)
    if name in concrete:
        counter = iter(range(1, 1_000_000))
        return pytree.tree_map(lambda leaf: _concrete_leaf(tracer, name, next(counter), default, leaf), concrete[name])
    stars = (
        "*" if parameter.kind is parameter.VAR_POSITIONAL else "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    )
    target = _input_name(parameter)
    annotation = None if stars or parameter.annotation is inspect.Parameter.empty else parameter.annotation
    if default and not isinstance(default[0], (int, float, complex, str, tuple, list, dict, type(None))):
        # A default may be anything; it is no argument that is computed.
        return tracer.proxy(tracer.create_node("placeholder", stars + target, default, {}, type_expr=annotation))
    return tracer.create_proxy("placeholder", stars + target, default, {}, type_expr=annotation)


def _input_name(parameter: inspect.Parameter) -> str:
    """What the program calls a parameter: its own `self` is the module, whatever the function means by it."""
    return "self_" if parameter.name == "self" else parameter.name


def _guard_comparisons(
    tracer: Tracer, function: Callable[..., Any], parameter: inspect.Parameter, value: Proxy
) -> None:
    """`if mask is None` finds a proxy, which is neither None nor any other object; nor may it be one when the program runs."""
    target = inspect.unwrap(function)
    code = getattr(target, "__code__", None)
    if code is None:
        return
    guarded: list[Any] = []
    for item in identity_comparisons(code):
        if item.left.kind != "variable" or item.left.names != (parameter.name,):
            continue
        other = _other_side(item.right, getattr(target, "__globals__", {}))
        if not any(other is known for known in guarded):
            guarded.append(other)
            guard_comparison(tracer, value, parameter, other, str(source_line(code, item.offset)))
    if parameter.name in compared_types(code):
        raise TraceError(
            in_lines(
                f"cannot trace a comparison of the type of the argument '{parameter.name}'",
                source_line(code, compared_types(code)[parameter.name]),
                "its proxy has a type of its own",
                f'use isinstance, fix the argument with concrete_args={{"{parameter.name}": ...}}, or use '
                "torchgraft.capture(model, args)",
            )
        )


def _other_side(operand: Operand, scope: dict[str, Any]) -> Any:
    """The object that an argument is compared with, or the argument's own place where it cannot be told."""
    if operand.kind == "constant":
        return operand.value
    if operand.kind == "global" and operand.names[0] in scope:
        return functools.reduce(
            lambda found, name: getattr(found, name, _UNKNOWN), operand.names[1:], scope[operand.names[0]]
        )
    return _UNKNOWN


def guard_comparison(tracer: Tracer, value: Proxy, parameter: inspect.Parameter, other: Any, where: str) -> None:
    """Have the program check that an argument is not the object that the model compares it with."""
    name = parameter.name
    if other is None:
        if parameter.default is None or not is_plainly_typed(parameter.annotation):
            tracer._optional_inputs.pop(value.node, None)
            tracer.create_proxy("call_function", check_given, (value, name, where), {})
    elif isinstance(other, _COMPARABLE):
        found = tracer.create_proxy("call_function", operator.is_, (value, other), {})
        shown = getattr(other, "__name__", other)
        tracer.create_proxy("call_function", check_value, (found, False, f"'{name}' is {shown}", where), {})
    elif other is not _UNKNOWN and other is parameter.default:
        raise TraceError(
            f"cannot trace a comparison of the argument '{name}' with its default\n  at {where}\n"
            f'  fix the argument with concrete_args={{"{name}": ...}}, or use torchgraft.capture(model, args)'
        )


_UNKNOWN = object()
_COMPARABLE = (bool, enum.Enum, type, torch.dtype, torch.layout, torch.memory_format)


def _concrete_leaf(tracer: Tracer, name: str, number: int, default: tuple[Any, ...], leaf: Any) -> Any:
    proxy = tracer.create_proxy("placeholder", f"{name}_{number}", default, {})
    if isinstance(leaf, PHBase):
        _copy_marks(leaf, proxy.node)
        return proxy
    message = f"{name} has been specialized to have value {leaf} but got another value"
    if leaf is None:
        tracer.create_proxy("call_function", _assert_is_none, (proxy, message), {})
    elif isinstance(
        leaf, (bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format, torch.layout)
    ):
        torch._assert(proxy == leaf, message)
    else:
        warnings.warn(
            f"Was not able to add assertion to guarantee correct input {name} to specialized function: values of type "
            f"{type(leaf).__name__} are not compared. Make sure that your inputs match the ones given in concrete_args",
            stacklevel=2,
        )
    return leaf


def _call(function: Callable[..., Any], parameters: list[inspect.Parameter], *values: Any) -> Any:
    """Call `function` with one value for each parameter; `*args` and `**kwargs` arrive as one traced value each."""
    own = values[: len(values) - len(parameters)]
    by_parameter = list(zip(parameters, values[len(own) :], strict=True))
    variable = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if variable and _is_plain_function(function):
        return _with_plain_parameters(function)(*own, *_in_code_order(by_parameter))
    has_wrapper = hasattr(function, "__wrapped__")
    positional, keywords = [], {}
    for parameter, value in by_parameter:
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += list(value)
        elif parameter.kind is parameter.VAR_KEYWORD:
            keywords.update(value)
        elif parameter.kind is parameter.KEYWORD_ONLY or (has_wrapper and parameter.default is not parameter.empty):
            # A decorator may put in keywords of its own; what is optional must not stand in their way as a position.
            keywords[parameter.name] = value
        else:
            positional.append(value)
    return function(*own, *positional, **keywords)


def _in_code_order(by_parameter: list[tuple[inspect.Parameter, Any]]) -> list[Any]:
    """A code object keeps its parameters as positional, keyword-only, *args, **kwargs."""
    order = {
        inspect.Parameter.POSITIONAL_ONLY: 0,
        inspect.Parameter.POSITIONAL_OR_KEYWORD: 0,
        inspect.Parameter.KEYWORD_ONLY: 1,
        inspect.Parameter.VAR_POSITIONAL: 2,
        inspect.Parameter.VAR_KEYWORD: 3,
    }
    return [value for _, value in sorted(by_parameter, key=lambda pair: order[pair[0].kind])]


def _with_plain_parameters(function: Any) -> types.FunctionType:
    """The same function with `args` of `*args` (and `kwargs`) as ordinary parameters, so that they can be one proxy."""
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    plain = code.replace(
        co_argcount=count, co_posonlyargcount=0, co_kwonlyargcount=0, co_flags=code.co_flags & ~_VARIABLE
    )
    return types.FunctionType(plain, function.__globals__, function.__name__, None, function.__closure__)


def _over_leaves(
    tracer: Tracer, call: Callable[..., Any], first: list[Any], parameters: list[inspect.Parameter], values: list[Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """Inputs that are containers: the program takes their leaves, the generated code takes them apart."""
    leaves, spec = pytree.tree_flatten(list(values))
    codegen = PyTreeCodeGen([_input_name(parameter) for parameter in parameters], spec)
    tracer.graph._codegen = codegen

    def over_leaves(*arguments: Any) -> Any:
        own, rest = arguments[: len(first)], list(arguments[len(first) :])
        result = call(*own, *pytree.tree_unflatten(rest, spec))
        out_leaves, codegen.out_spec = pytree.tree_flatten(result)
        return out_leaves

    return over_leaves, [*first, *leaves]
