"""The effects of torch operators, read off their schemas: written arguments, random draws, results that share memory.
No operator is named here; where a schema is silent, the rules go by the names of arguments and by torch's naming laws.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchgraft.analysis.effects.findings import Findings, Places
from torchgraft.analysis.schemas import Parameter, schema_parameters

# The namespaces in which torch binds operators. In them an operator writes only what its schema marks, or, where it has
# no schema (from_numpy, asarray), what a trailing underscore or `out=` announces.
_NAMESPACES = tuple(
    getattr(torch._C, name)
    for name in ("_VariableFunctions", "_nn", "_special", "_linalg", "_fft", "_sparse", "_nested")
    if hasattr(torch._C, name)
)
# With a tensor among their operands these compute a new one; two lists, which they also take, would hand on what they hold.
ARITHMETIC = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow}
    | {operator.matmul, operator.neg, operator.abs, operator.invert, operator.and_, operator.or_, operator.xor}
    | {operator.lshift, operator.rshift, operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge}
)
_TRAINING_FLAGS = frozenset({"train", "training", "use_input_stats"})


@dataclass(frozen=True, slots=True)
class _Signature:
    """One overload, reduced to what matters for effects."""

    parameters: tuple[Parameter, ...]
    random: bool
    called_for_effect: bool
    returns: str
    passes_through: bool
    updates_statistics: bool
    communicates: bool
    takes_over: bool

    @property
    def is_plain(self) -> bool:
        """Whether no call of this overload has an effect, except through `out=`."""
        positional_write = any(p.written and not p.keyword_only for p in self.parameters)
        return not (
            self.random or self.called_for_effect or self.updates_statistics or self.communicates or positional_write
        )

    def bind(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The argument of each parameter that is given one."""
        positional = [parameter.name for parameter in self.parameters if not parameter.keyword_only]
        bound = dict(zip(positional, args, strict=False))
        bound.update(kwargs)
        if "input" in bound:
            # The Python bindings call the first argument `input` where the schema says `self`.
            bound.setdefault("self", bound["input"])
        return bound

    def fits(self, bound: Mapping[str, Any]) -> bool:
        """Whether constants among the arguments can be meant for this overload."""
        return all(_fits(bound[p.name], p.type) for p in self.parameters if p.name in bound)


@dataclass(frozen=True, slots=True)
class Operator:
    """All overloads that one name can mean."""

    name: str
    signatures: tuple[_Signature, ...]

    @property
    def is_plain(self) -> bool:
        """Whether no call has an effect, except through `out=`."""
        return all(signature.is_plain for signature in self.signatures) and not announces_write(self.name)

    @property
    def makes_new_memory(self) -> bool:
        """Whether the result never shares memory with anything, except through `out=`."""
        return bool(self.signatures) and all(
            signature.returns == "number"
            or not (signature.passes_through or any(p.shared and not p.keyword_only for p in signature.parameters))
            for signature in self.signatures
        )

    @property
    def is_unmarked(self) -> bool:
        """Whether a schema leaves open if the result shares memory, and a run of any sizes would tell.

        What is given the size of its result may hand back an argument that has this size, so no run tells; what is private may
        be meant for other kinds of tensors.
        """
        if self.name.startswith("_"):
            return False
        open_ones = [signature for signature in self.signatures if signature.passes_through]
        return bool(open_ones) and not any(p.name == "size" for signature in open_ones for p in signature.parameters)

    @property
    def written_keywords(self) -> frozenset[str]:
        """Keyword arguments that are written if they are given."""
        parameters = [parameter for signature in self.signatures for parameter in signature.parameters]
        return frozenset({"out"} | {p.name for p in parameters if p.written and p.keyword_only})

    def find(
        self, findings: Findings, args: tuple[Any, ...], kwargs: Mapping[str, Any], memory: Callable[[Any], Places]
    ) -> None:
        """Find out what a call does; `memory` gives the places of everything in a tree of arguments."""
        out = kwargs.get("out")
        if out is not None:
            findings.write(memory(out), f"{self.name} writes its argument 'out'")
            findings.shares |= memory(out)
        calls = [(signature, signature.bind(args, kwargs)) for signature in self.signatures]
        calls = [call for call in calls if call[0].fits(call[1])] or calls
        for signature, bound in calls:
            self._find_effects(findings, signature, bound, memory)
            if signature.returns == "number":
                continue
            for parameter in signature.parameters:
                if parameter.name in bound and (parameter.shared or signature.passes_through):
                    findings.shares |= memory(bound[parameter.name])
        if not calls:
            if announces_write(self.name):
                findings.write(memory(args), f"{self.name} writes its arguments, as its name says")
            if not self.name.startswith("new"):
                findings.shares |= memory((args, dict(kwargs)))

    def _find_effects(
        self, findings: Findings, signature: _Signature, bound: dict[str, Any], memory: Callable[[Any], Places]
    ) -> None:
        draws = signature.random and not self._draws_nothing(signature, bound)
        if signature.random and not draws and "p" in bound:
            # A dropout that is switched off hands its input back untouched, also in place.
            return
        for parameter in signature.parameters:
            value = bound.get(parameter.name)
            if not parameter.written or (parameter.keyword_only and value is None):
                continue
            findings.write(
                memory(bound if parameter.name not in bound else value),
                f"{self.name} writes its argument '{parameter.name}'",
            )
        if signature.takes_over and memory(bound.get("source")):
            findings.give_up(f"{self.name} lets a tensor share the memory of another", memory(bound))
        if signature.called_for_effect:
            findings.write_outside(f"{self.name} returns nothing, or was declared to have an effect")
        if signature.communicates:
            findings.write_outside(f"{self.name} talks to other processes")
        flags = [parameter for parameter in signature.parameters if parameter.name in _TRAINING_FLAGS]
        if signature.updates_statistics and not (flags and all(_is_off(parameter, bound) for parameter in flags)):
            running = [value for name, value in bound.items() if name.startswith("running_")]
            findings.write(memory(running), f"{self.name} updates running statistics")
        if draws:
            findings.draw(f"{self.name} draws random numbers")

    @staticmethod
    def _draws_nothing(signature: _Signature, bound: Mapping[str, Any]) -> bool:
        flags = [parameter for parameter in signature.parameters if parameter.name in _TRAINING_FLAGS]
        if flags and all(_is_off(parameter, bound) for parameter in flags):
            return True
        # `p` alone is not enough: bernoulli(p=0) draws. Only a switchable dropout leaves the generator alone at zero.
        is_dropout = any(parameter.type == "bool" for parameter in flags)
        zero_means_none = ("dropout", "dropout_p", "p") if is_dropout else ("dropout", "dropout_p")
        return any(_is_off(parameter, bound) for parameter in signature.parameters if parameter.name in zero_means_none)


def _is_off(parameter: Parameter, bound: Mapping[str, Any]) -> bool:
    """Whether a flag is False, or a probability zero, in this call."""
    value = bound.get(parameter.name)
    if value is None:
        return parameter.has_default and parameter.default in (False, 0)
    return type(value) in (bool, int, float) and value == 0


def _fits(value: Any, kind: str) -> bool:
    """Whether a constant can be meant for a parameter of this type; tells overloads apart."""
    cls = type(value)
    if kind == "bool" and not hasattr(cls, "all_input_nodes"):
        return cls is bool
    if kind in ("float", "int") and cls is bool:
        return False
    return not (kind.endswith("Tensor") and cls in (bool, int, float, str))


def announces_write(name: str) -> bool:
    """Whether a name ends as those of torch's functions that write their first argument do."""
    return name.endswith("_") and not name.endswith("__")


def operator_of_function(function: Any) -> Operator | None:
    """The operator that a C function of torch is bound to, or None if it is no operator."""
    name = getattr(function, "__name__", "")
    for namespace in _NAMESPACES:
        if getattr(namespace, name, None) == function:
            return _operator_named(name)
    # A few more functions of torch._C are known to TorchScript by name (is_grad_enabled, set_grad_enabled, tensor, …).
    if getattr(function, "__module__", None) in ("torch", "torch._C") and _schemas(f"aten::{name}"):
        return _operator_named(name)
    return None


@functools.cache
def operator_of_method(name: str) -> Operator | None:
    """The operator behind a method that tensors have from C, or behind a method of TorchScript's containers."""
    method = getattr(torch._C.TensorBase, name, None)
    has_schema = bool(_schemas(f"aten::{name}"))
    if method is None:
        return _operator_named(name) if has_schema else None
    is_private = name.startswith("_") and not name.endswith("__")
    return None if not callable(method) or (is_private and not has_schema) else _operator_named(name)


@functools.cache
def operator_of_overload(overload: torch._ops.OpOverload) -> Operator:
    """The operator of one overload; random if any overload of the same name is (tags are missing here and there)."""
    packet = overload.overloadpacket
    siblings = [getattr(packet, name) for name in packet.overloads()]
    return Operator(str(overload), (_signature(overload, siblings),))


@functools.cache
def operator_of_packet(packet: torch._ops.OpOverloadPacket) -> Operator:
    """The operator of all overloads of a name."""
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return Operator(str(packet), tuple(_signature(overload, overloads) for overload in overloads))


def operator_of(op: str, target: Any) -> Operator | None:
    """The operator of torch that a node with this opcode and target calls, or None.

    >>> operator_of("call_method", "relu").is_plain, operator_of("call_function", len)
    (True, None)
    """
    if op == "call_method":
        return operator_of_method(target) if hasattr(torch._C.TensorBase, target) else None
    if isinstance(target, torch._ops.OpOverload):
        return operator_of_overload(target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return operator_of_packet(target)
    return operator_of_function(target) if isinstance(target, types.BuiltinFunctionType) else None


@functools.cache
def _operator_named(name: str) -> Operator:
    packet = getattr(torch.ops.aten, name, None)
    overloads = {
        schema.overload_name: getattr(packet, schema.overload_name or "default") for schema in _schemas(f"aten::{name}")
    }
    registered = [overload for overload in overloads.values() if torch._C._dispatch_has_kernel(overload.name())]
    # TorchScript gives Python's containers methods of the same names (list.sort); a tensor never reaches those.
    chosen = registered or list(overloads.values())
    return Operator(name, tuple(_signature(overload, registered) for overload in chosen))


def _schemas(qualified_name: str) -> list[Any]:
    return torch._C._jit_get_schemas_for_operator(qualified_name)


def _signature(overload: Any, siblings: list[Any]) -> _Signature:
    schema, parameters = overload._schema, schema_parameters(overload)
    return _Signature(
        parameters,
        random=any(_is_random(sibling) for sibling in (overload, *siblings)),
        # Nothing returned and nothing written: what is left is to print, to check, to seed.
        called_for_effect=_is_registered_effect(overload) or not (schema.returns or any(p.written for p in parameters)),
        returns=_kind_of_result(schema),
        passes_through=_may_pass_through(overload, schema),
        updates_statistics=_updates_statistics(schema, overload),
        takes_over=torch.Tag.inplace_view in overload.tags and any(p.name == "source" for p in parameters),
        communicates=any(p.name in ("group_name", "process_group") for p in parameters),
    )


_NUMBERS = frozenset({"int", "float", "bool", "number", "Scalar", "SymInt", "Device", "Layout", "ScalarType"})


def _kind_of_result(schema: Any) -> str:
    kinds = [str(result.type) for result in schema.returns]
    if kinds == ["Tensor"]:
        return "tensor"
    return "number" if set(kinds) <= _NUMBERS else "other"


def _is_random(overload: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in overload.tags or any(
        "Generator" in str(argument.type) for argument in overload._schema.arguments
    )


def _is_registered_effect(overload: Any) -> bool:
    """Whether the operator was declared effectful with `torch.library`; whoever did has loaded torch's list of these."""
    registry = sys.modules.get("torch._higher_order_ops.effects")
    return registry is not None and registry._get_effect(overload) is not None


def _may_pass_through(overload: Any, schema: Any) -> bool:
    """Whether the result may share memory with any input although none is marked: composites are bound by nothing."""
    if torch.Tag.core in overload.tags:
        return False
    tag = getattr(torch.Tag, "maybe_aliasing_or_mutating", None)
    if tag is not None and tag in overload.tags:
        return True
    marked = any(argument.alias_info is not None for argument in schema.arguments)
    name = overload.name()
    if "unsafe_" in name:
        # torch's word for a view that is declared to be none.
        return True
    if "Dimname" in name:
        # Looks the names up and calls the overload that takes numbers, whose own marks tell; gone in newer versions of torch.
        return False
    return not marked and (
        not torch._C._dispatch_has_kernel(name)
        or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    )


def _updates_statistics(schema: Any, overload: Any) -> bool:
    """Whether arguments called running_… are written without a mark, as in the batch norms that predate marks."""
    names = [argument.name for argument in schema.arguments]
    unmarked = any(a.name.startswith("running_") and a.alias_info is None for a in schema.arguments)
    returned = any(result.name.startswith("running_") for result in schema.returns)
    backward = any(name.startswith("grad_out") for name in names)
    return unmarked and not returned and not backward and torch.Tag.core not in overload.tags
