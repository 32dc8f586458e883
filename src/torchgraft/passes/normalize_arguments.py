"""Write every call in one form: each argument by the name of its parameter, with the defaults filled in.
Which parameter an argument belongs to is known to `analysis/signatures.py`.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any, get_origin

import torch

from torchgraft.analysis.aliases import is_fixed
from torchgraft.analysis.signatures import get_signature_for_torch_op, normalized_arguments
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraphError
from torchgraft.ir.modules import has_hooks
from torchgraft.ir.node import Node
from torchgraft.ir.value_classes import is_tensor
from torchgraft.ir.verify import find_attribute
from torchgraft.passes.definition import Pass


@dataclass(frozen=True)
class NormalizeArguments(Pass):
    """Name every argument of calls of functions and modules and fill in the defaults, so that equal calls look equal.

    With `keywords=False` arguments that were positional stay so. Calls that have no signature, take any number of
    arguments, fit several overloads, or reach a module with hooks stay as they are.

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: torch.nn.functional.relu(x))
    >>> NormalizeArguments()(program).changes, dict(program.graph.output_node().args[0].kwargs)
    (1, {'input': x, 'inplace': False})
    """

    keywords: bool = True

    def run(self, module: GraphModule) -> int:
        """Normalize, and return how many calls were written otherwise before."""
        changed = 0
        for node in module.graph.nodes:
            if node._op not in ("call_function", "call_module") or is_fixed(node):
                continue
            if node._op == "call_function" and getattr(node._target, "__module__", None) == "_operator":
                continue  # Python's own operators take no names
            try:
                found = normalized_arguments(node, module, normalize_to_only_use_kwargs=self.keywords)
            except GraphError:
                continue
            kwargs = None if found is None else _callable_form(node._target, found.kwargs)
            if found is None or kwargs is None:
                continue
            if node._op == "call_module" and has_hooks(find_attribute(module, node._target)[0]):
                continue  # hooks are given positional arguments apart from named ones, or not the named ones at all
            if tuple(found.args) != node._args or not _same(kwargs, node._kwargs):
                node._changing()
                node._set_arguments(found.args, kwargs)
                changed += 1
        return changed


def _same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return list(first) == list(second) and all(
        first[name] is second[name] or first[name] == second[name] for name in first
    )


def _callable_form(target: Any, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments as the target takes them, which is not in all points what the signature of an operator says."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        # Only the functions of `torch` call it `input`; operators themselves know it by the name in their schema.
        return {"self" if name == "input" and _has_self(target) else name: value for name, value in kwargs.items()}
    result = kwargs
    if isinstance(target, types.BuiltinFunctionType) and "size" in kwargs and _takes_sizes(target):
        size = kwargs["size"]
        if isinstance(size, Node):
            return None  # one number, which goes without a name only, or a whole size
        result = {**kwargs, "size": (size,)} if type(size) is int else kwargs
    if "input" in kwargs and not is_tensor(kwargs["input"]) and _takes_number_first(target):
        if isinstance(kwargs["input"], Node):
            return None  # a number, perhaps
        result = {"self" if name == "input" else name: value for name, value in result.items()}
    # Defaults that the schema writes in its own way (a dtype as a number, a layout as None); leaving them out says the same.
    return {name: value for name, value in result.items() if not _is_schemas_default(name, value)}


def _is_schemas_default(name: str, value: Any) -> bool:
    return (name == "dtype" and type(value) is int) or (name in ("layout", "pin_memory") and not value)


@functools.cache
def _takes_number_first(target: Any) -> bool:
    """Whether `self` may be a number for an operator: the functions of `torch` call it `input` only where it is a tensor."""
    if not isinstance(target, types.BuiltinFunctionType):
        return False
    _, schemas = get_signature_for_torch_op(target, return_schemas=True)
    arguments = [argument for schema in schemas or [] for argument in schema.arguments]
    return any(argument.name == "self" and str(argument.type) == "number" for argument in arguments)


def _has_self(target: Any) -> bool:
    is_one = isinstance(target, torch._ops.OpOverload)
    # Not by its __getattr__, which makes an overload anew: programs that call the old one would no longer be recognised.
    overloads = [target] if is_one else [getattr(target, name) for name in target.overloads()]
    return any(argument.name == "self" for overload in overloads for argument in overload._schema.arguments)


def _takes_sizes(target: Any) -> bool:
    """Whether `size` is a list for an operator: `torch.ones(3)` is right and `torch.ones(size=3)` is not."""
    signatures = get_signature_for_torch_op(target) or []
    sizes = [signature.parameters["size"] for signature in signatures if "size" in signature.parameters]
    return any(get_origin(size.annotation) is list for size in sizes)
