"""Calling values: which code a call reaches (operator, builtin, function, class, module, program) and what it does.
How the body of a Python function is read is said in `statements.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import sys
import types
import weakref
from typing import Any

import torch

from torchgraft.analysis.effects.attributes import Attributes, is_python_class
from torchgraft.analysis.effects.builtin_functions import (
    DIAGNOSTICS,
    call_builtin,
    call_container_method,
    is_in_place_name,
    is_pure_method_name,
)
from torchgraft.analysis.effects.machine import Arguments, ModuleRead
from torchgraft.analysis.effects.operators import (
    operator_of_function,
    operator_of_method,
    operator_of_overload,
    operator_of_packet,
)
from torchgraft.analysis.effects.values import (
    MISSING,
    OUTSIDE,
    Bound,
    Closure,
    OneOf,
    Partial,
    Value,
    contents,
    element_of,
    join,
    lift,
    reachable,
)
from torchgraft.ir.node import _side_effectful_functions

_BUILTIN_TYPES = (list, dict, set, tuple, frozenset, str, bytes, int, float, bool, complex, range, slice, torch.Size)
_CONTAINERS_IN_C = (collections.OrderedDict, collections.defaultdict, collections.deque, types.SimpleNamespace)
_CALLABLE_IN_C = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.MethodWrapperType,
)

# Checks raise or do nothing, diagnostics tell people. Inside a function that is no effect, as an assertion is none; a node
# that calls one stays because it returns nothing.
_SILENT = DIAGNOSTICS | {getattr(torch, name) for name in dir(torch) if name.startswith("_check")}
# A Python function up to torch 2.14, compiled code after.
_APPLY = getattr(inspect.getattr_static(torch.autograd.Function, "apply"), "__func__", None)


def is_declared_effect(target: Any) -> bool:
    """Whether someone said that calls of `target` must stay: by `has_side_effect` (torch.fx's too) or by attribute."""
    try:
        if target in _side_effectful_functions or target in _declared_to_torch():
            return True
    except TypeError:
        pass
    return getattr(target, "__torchgraft_effect__", False) is True


def declared_effects() -> int:
    """How many functions were declared so far; grows with every declaration."""
    return len(_side_effectful_functions) + len(_declared_to_torch())


def _declared_to_torch() -> Any:
    # Libraries declare effects to torch.fx (the collectives of torch.distributed do); read where it is loaded anyway.
    module = sys.modules.get("torch.fx.node")
    return () if module is None else module._side_effectful_functions


class Calls(Attributes):
    """The part of the machine that calls values."""

    def call(self, site: Any, callee: Value, arguments: Arguments) -> Value:
        known = callee.known
        if isinstance(known, OneOf):
            return functools.reduce(join, [self.call(site, choice, arguments) for choice in known.choices])
        if isinstance(known, Bound):
            return self.call(site, Value(known.function), arguments.with_receiver(known.receiver))
        if isinstance(known, Closure):
            return self.call_closure(site, known, arguments)
        if isinstance(known, Partial):
            return self.call(site, known.function, _complete(known, arguments))
        if known is MISSING:
            return self._call_unknown(site, callee, arguments)
        if not is_declared_effect(known):
            return self._call_known(site, callee, arguments)
        if isinstance(known, types.FunctionType):
            self.write_outside(f"{_name(known)} was declared to have an effect")
            return self.unknown_result(arguments.all())
        found = len(self.writes)
        result = self._call_known(site, callee, arguments)
        if len(self.writes) == found:
            self.write_outside(f"{_name(known)} was declared to have an effect")
        return result

    def _call_known(self, site: Any, callee: Value, arguments: Arguments) -> Value:
        known = callee.known
        if isinstance(known, types.FunctionType | types.BuiltinFunctionType) and known in _SILENT:
            return Value(None)
        if isinstance(known, types.FunctionType):
            if known is _APPLY and arguments.positional:
                others = Arguments(arguments.positional[1:], arguments.keyword, arguments.rest)
                return self._apply_autograd_function(site, arguments.positional[0], others)
            return self.call_python(site, known, arguments)
        if isinstance(known, torch._ops.OperatorBase | torch._ops.OpOverloadPacket):
            return self._call_operator(site, known, arguments)
        if isinstance(known, torch.nn.Module):
            return self.call_module(site, callee, arguments)
        if isinstance(known, type):
            return self._construct(site, known, arguments)
        if isinstance(known, types.MethodType):
            receiver = lift(known.__self__, OUTSIDE)
            return self.call(site, Value(known.__func__), arguments.with_receiver(receiver))
        if isinstance(known, _CALLABLE_IN_C):
            return self._call_in_c(site, known, arguments)
        return self._call_object(site, callee, arguments)

    def _call_unknown(self, site: Any, callee: Value, arguments: Arguments) -> Value:
        if callee.cls is not None and is_python_class(callee.cls):
            method = self._find_in_class(callee.cls, "__call__")
            if isinstance(method, types.FunctionType):
                return self.call(site, Value(method), arguments.with_receiver(callee))
        self.give_up("calls something that is only known when it runs")

    def _call_object(self, site: Any, callee: Value, arguments: Arguments) -> Value:
        known = callee.known
        if isinstance(known, functools.partial):
            fixed = tuple(lift(value, OUTSIDE) for value in known.args)
            named = {name: lift(value, OUTSIDE) for name, value in known.keywords.items()}
            function = lift(known.func, OUTSIDE)
            return self.call(site, function, _complete(Partial(function, fixed, named), arguments))
        if isinstance(known, functools._lru_cache_wrapper):
            return self.call(site, lift(known.__wrapped__, OUTSIDE), arguments)
        if isinstance(known, weakref.ReferenceType):
            return lift(known(), OUTSIDE)
        method = self._find_in_class(type(known), "__call__")
        if isinstance(method, types.FunctionType):
            return self.call(site, Value(method), arguments.with_receiver(callee))
        if type(known).__module__ == "operator" and type(known).__name__ in ("itemgetter", "attrgetter"):
            return element_of(Value(places=reachable(arguments.all())))
        self.give_up(f"calls an object of {type(known).__name__}")

    # ---- torch ----

    def _call_operator(self, site: Any, target: Any, arguments: Arguments) -> Value:
        if isinstance(target, torch._ops.OpOverload):
            operator = operator_of_overload(target)
        elif isinstance(target, torch._ops.OpOverloadPacket):
            operator = operator_of_packet(target)
        else:
            return self._call_higher_order(site, target, arguments)
        return operator.call(self, site, arguments.positional, arguments.keyword, arguments.rest)

    def _call_higher_order(self, site: Any, target: Any, arguments: Arguments) -> Value:
        """An operator on programs (cond, map, …) has the effects of the programs it is given."""
        programs = [value for value in arguments.all() if isinstance(value.known, torch.nn.Module)]
        if not programs:
            self.give_up(f"{_name(target)} has no schema")
        others = Value(places=reachable(arguments.all()))
        results = [self.call((site, i), program, Arguments(rest=others)) for i, program in enumerate(programs)]
        return functools.reduce(join, results)

    def _call_in_c(self, site: Any, function: Any, arguments: Arguments) -> Value:
        name = getattr(function, "__name__", "")
        owner = getattr(function, "__objclass__", None)
        if owner is not None:
            return self._call_descriptor(site, owner, name, arguments)
        if name == "__new__" and arguments.positional and isinstance(arguments.positional[0].known, type):
            made = self.make_mapping(site, {}, arguments.positional[0].known)
            return Value(MISSING, made.places | reachable(arguments.all()), made.cls)
        operator = operator_of_function(function)
        if operator is not None:
            return operator.call(self, site, arguments.positional, arguments.keyword, arguments.rest)
        result = call_builtin(self, site, function, arguments)
        if result is not None:
            return result
        receiver = getattr(function, "__self__", None)
        if name == "apply" and isinstance(receiver, type) and issubclass(receiver, torch.autograd.Function):
            return self._apply_autograd_function(site, Value(receiver), arguments)
        if type(receiver) in _BUILTIN_TYPES:
            return self.call_method(site, lift(receiver, OUTSIDE), name, arguments)
        self.give_up(f"calls {_name(function)}, of which only compiled code is there")

    def _call_descriptor(self, site: Any, owner: type, name: str, arguments: Arguments) -> Value:
        """A method taken from its class: `torch.Tensor.add(x, y)`, `object.__init__(self)`, `list.append(l, x)`."""
        if owner is object and name in ("__init__", "__init_subclass__"):
            return Value(None)
        if not arguments.positional:
            self.give_up(f"calls {owner.__name__}.{name}")
        first, others = arguments.positional[0], Arguments(arguments.positional[1:], arguments.keyword, arguments.rest)
        if owner in _BUILTIN_TYPES:
            return call_container_method(self, site, first, owner, name, others)
        if owner is object and is_in_place_name(name):
            self.write(first, f"{name} writes its object")
            return Value(None)
        if issubclass(torch.Tensor, owner):
            return self._method_by_name(site, first, name, others, look_in_python=False)
        if issubclass(torch.autograd.Function, owner) and name == "apply":
            return self._apply_autograd_function(site, first, others)
        self.give_up(f"calls {owner.__name__}.{name}, of which only compiled code is there")

    def _apply_autograd_function(self, site: Any, cls: Value, arguments: Arguments) -> Value:
        """A custom autograd function does in a forward pass what its `forward` does, on a context of its own."""
        if not isinstance(cls.known, type) or not issubclass(cls.known, torch.autograd.Function):
            self.give_up("applies an autograd function that is only known when it runs")
        function: Any = cls.known
        forward = self.read_attribute(site, cls, "forward")
        context = self.make((site, "context"), (), torch.autograd.function.FunctionCtx)
        if function.setup_context is torch.autograd.Function.setup_context:
            return self.call(site, forward, arguments.with_receiver(context))
        result = self.call(site, forward, arguments)
        setup = self.read_attribute(site, cls, "setup_context")
        inputs = self.make((site, "inputs"), arguments.all(), tuple)
        self.call((site, "setup"), setup, Arguments([context, inputs, result]))
        return result

    # ---- methods ----

    def call_method(self, site: Any, owner: Value, name: str, arguments: Arguments) -> Value:
        cls = type(owner.known) if owner.is_known else owner.cls
        if cls in _BUILTIN_TYPES:
            return call_container_method(self, site, owner, cls, name, arguments)
        if isinstance(owner.known, torch.Tensor) or (not owner.is_known and (cls is None or cls is torch.Tensor)):
            local = contents(owner)
            if local is not None and local.entries is not None and name in local.entries:
                return self.call(site, local.entries[name], arguments)
            return self._method_by_name(site, owner, name, arguments)
        found = self.read_attribute(site, owner, name)
        if found.is_known:
            return self.call(site, found, arguments)
        if not owner.is_known:
            return self._method_by_name(site, owner, name, arguments)
        self.give_up(f"calls {type(owner.known).__name__}.{name}")

    def _method_by_name(
        self, site: Any, owner: Value, name: str, arguments: Arguments, look_in_python: bool = True
    ) -> Value:
        """A method of a value of unknown class, taken for a tensor where tensors have such a method."""
        if is_in_place_name(name):
            for value in arguments.all() or [Value()]:
                self.store(owner, value, f"{name} writes its object")
            return owner
        method = getattr(torch.Tensor, name, None)
        if look_in_python and isinstance(method, types.FunctionType):
            return self.call(site, Value(method), arguments.with_receiver(owner))
        operator = operator_of_method(name)
        if method is not None and operator is not None:
            return operator.call(self, site, [owner, *arguments.positional], arguments.keyword, arguments.rest)
        if method is None and is_pure_method_name(name):
            return self.make(site, [owner, *arguments.all()])
        if method is None and operator is not None:
            return call_container_method(self, site, owner, list, name, arguments)
        for cls in torch.Tensor.__subclasses__() if method is None else ():
            found = vars(cls).get(name)
            if isinstance(found, types.FunctionType) and cls.__module__.startswith("torch."):
                return self.call(site, Value(found), arguments.with_receiver(owner))
        self.give_up(f"calls the method {name} of a value of unknown class")

    # ---- classes ----

    def _construct(self, site: Any, cls: type, arguments: Arguments) -> Value:
        if cls is functools.partial and arguments.positional and arguments.rest is None:
            function, *fixed = arguments.positional
            return Value(Partial(function, tuple(fixed), arguments.keyword), reachable(arguments.all()))
        if not is_python_class(cls):
            return self._construct_in_c(site, cls, arguments)
        if issubclass(cls, BaseException):
            return self.make(site, arguments.all(), cls)
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            return self.make_sequence(site, arguments.all(), cls)
        if issubclass(cls, torch.Tensor) and _has_plain_new(cls):
            # A tensor made of a tensor shares its memory.
            made = self.make(site, arguments.all())
            return Value(MISSING, made.places | reachable(arguments.all()), torch.Tensor)
        if type(cls).__call__ is not type.__call__:
            self.give_up(f"makes a {cls.__name__}, whose class decides how")
        if not _is_made_plainly(cls):
            return self._construct_in_c(site, cls, arguments)
        if _has_plain_new(cls):
            instance = self.make_mapping(site, {}, cls)
        else:
            instance = self.call((site, "new"), Value(cls.__new__), arguments.with_receiver(Value(cls)))
            if instance.cls is not cls:
                return instance
        local = contents(instance)
        initialize = self._find_in_class(cls, "__init__")
        if dataclasses.is_dataclass(cls) and _is_generated(initialize):
            return self._construct_dataclass(site, cls, instance, arguments)
        if isinstance(initialize, types.FunctionType):
            self.call((site, "init"), Value(initialize), arguments.with_receiver(instance))
        elif local is not None:
            for value in arguments.all():
                self.extend(local, value)
        return instance

    def _construct_in_c(self, site: Any, cls: type, arguments: Arguments) -> Value:
        if issubclass(cls, BaseException):
            return self.make(site, arguments.all(), cls)
        if cls.__module__ in ("torch", "collections", "functools", "types", "torch._C"):
            made = self.make(site, arguments.all(), cls if cls in _BUILTIN_TYPES else None)
            return Value(MISSING, made.places | reachable(arguments.all()), made.cls)
        result = call_builtin(self, site, cls, arguments)
        if result is None:
            self.give_up(f"makes a {cls.__name__}")
        return result

    def _construct_dataclass(self, site: Any, cls: Any, instance: Value, arguments: Arguments) -> Value:
        local = contents(instance)
        assert local is not None
        names = [field.name for field in dataclasses.fields(cls) if field.init]
        given = {**dict(zip(names, arguments.positional, strict=False)), **arguments.keyword}
        if arguments.rest is not None:
            self.forget_contents(local)
            self.extend(local, arguments.rest)
        for name, value in given.items():
            self.extend(local, value)
            if local.entries is not None:
                self.set_entry(local, name, value)
        if hasattr(cls, "__post_init__"):
            self.call_method((site, "init"), instance, "__post_init__", Arguments())
        return instance

    # ---- modules ----

    def call_module(self, site: Any, callee: Value, arguments: Arguments) -> Value:
        module = callee.known
        if isinstance(module, torch.jit.ScriptModule):
            self.give_up("calls a compiled module")
        if self.read_attribute(site, callee, "_is_impure").known is True:
            self.write_outside("the module is marked _is_impure")
        self.module_reads.append((module, ModuleRead.CLASS, type(module)))
        # Only a captured program has both; asking any module for `graph` might run a property of the user's.
        graph = module.graph if hasattr(type(module), "recompile") and hasattr(type(module), "graph") else None
        if type(module).__call__ is not torch.nn.Module.__call__ and graph is None:
            return self._call_object(site, callee, arguments)
        inner = torch.nn.modules.module
        before = [*inner._global_forward_pre_hooks.values(), *module._forward_pre_hooks.values()]
        after = [*inner._global_forward_hooks.values(), *module._forward_hooks.values()]
        self.module_reads.append((module, ModuleRead.HOOKS, bool(before or after)))
        self.cacheable = self.cacheable and not before and not after
        for hook in before:
            arguments = self._run_hook(site, hook, callee, arguments)
        if graph is not None and hasattr(graph, "owning_module"):
            result = self.call_program(site, callee, graph, arguments)
        else:
            result = self.call(site, self.read_attribute(site, callee, "forward"), arguments)
        for hook in after:
            result = join(result, self._run_hook(site, hook, callee, arguments, result).rest or result)
        return result

    def _run_hook(self, site: Any, hook: Any, module: Value, arguments: Arguments, *result: Value) -> Arguments:
        """The arguments after a hook, which may replace them (or the result)."""
        inputs = self.make_sequence((site, hook), arguments.all(), tuple)
        answer = self.call((site, hook), lift(hook, OUTSIDE), Arguments([module, inputs, *result]))
        if answer.known is None:
            return arguments
        return Arguments(rest=Value(places=reachable([answer, *arguments.all(), *result])))


def _complete(partial: Partial, arguments: Arguments) -> Arguments:
    return Arguments(
        [*partial.positional, *arguments.positional], {**partial.keyword, **arguments.keyword}, arguments.rest
    )


def _has_plain_new(cls: type) -> bool:
    return not isinstance(cls.__new__, types.FunctionType)


def _is_made_plainly(cls: type) -> bool:
    """Whether what makes an object is Python code, or C code of types that only hold their contents."""
    initialize = inspect.getattr_static(cls, "__init__")
    makers = (getattr(cls.__new__, "__self__", object), getattr(initialize, "__objclass__", object))
    return all(maker is object or maker in _BUILTIN_TYPES or maker in _CONTAINERS_IN_C for maker in makers)


def _is_generated(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and function.__code__.co_filename == "<string>"


def _name(known: Any) -> str:
    return getattr(known, "__qualname__", None) or getattr(known, "__name__", None) or type(known).__name__
