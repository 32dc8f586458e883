"""How an ATen program is called: like the model, in the call and the situation that it was captured for, and in no other.
The conditions on inputs that torch.export knows of are found in `input_guards.py`, checking them is in `checked_calls.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from torchgraft.bridge.calling import keyword_names
from torchgraft.bridge.checked_calls import CheckedCallCodeGen, InputCheck
from torchgraft.bridge.input_guards import facts_of_inputs, input_conditions, kinds_of_inputs
from torchgraft.bridge.model_watch import reads_training
from torchgraft.bridge.run_watch import Asked
from torchgraft.capturing.identities import compares_variables
from torchgraft.capturing.mentions import reached
from torchgraft.capturing.mode_switches import has_own_train
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.codegen.source import PyTreeCodeGen
from torchgraft.ir.node import Node


def check_calls(result: GraphModule, exported: ExportedProgram, module: torch.nn.Module, asked: Asked) -> None:
    """Have a program check how it is called, before its first operation."""
    graph = result.graph
    inputs = graph.find_nodes(op="placeholder")
    conditions = [*kinds_of_inputs(inputs), *_types(inputs, graph), *_apart(inputs, exported)]
    conditions += [*input_conditions(exported, inputs), *facts_of_inputs(exported, inputs, asked.facts)]
    leaves = pytree.tree_leaves(exported.example_inputs)
    conditions += identities(module, zip([node.name for node in inputs], leaves, strict=False))
    values = [node.meta.get("val") for node in graph.nodes]
    conditions += [*asked.situation, *situation(value for value in values if isinstance(value, torch.Tensor))]
    check = InputCheck([node.name for node in inputs], list(dict.fromkeys(conditions)), _modes(result, module))
    check.reasons = asked.situation
    check.gradients = torch.is_grad_enabled()
    check.layouts = {node.name: layout_of(node.meta.get("val")) for node in inputs}
    check.recovers = asked.recovers
    codegen = graph._codegen
    assert isinstance(codegen, PyTreeCodeGen)
    call = CheckedCallCodeGen(codegen.parameters, codegen.in_spec, codegen.out_spec, check)
    call.keyword_only, call.loose, call.rest = _keywords(signature_of(module.forward), codegen)
    graph.set_codegen(call)


def _modes(result: GraphModule, module: torch.nn.Module) -> dict[str, bool]:
    paths = dict(result.named_modules())
    modes: dict[str, bool] = {}
    for path, child in module.named_modules():
        if depends_on_mode(child):
            modes[path if path in paths else ""] = child.training if path in paths else module.training
    return modes


def depends_on_mode(module: torch.nn.Module) -> bool:
    """Whether a module may do something else in the other mode: it asks for it, or is switched in a way of its own."""
    return reads_training(module) or has_own_train([module])


def situation(tensors: Iterable[torch.Tensor]) -> list[str]:
    """What an exported program takes for granted about torch: in which types operators compute, and make new tensors."""
    conditions = [f"torch.get_default_dtype() == {torch.get_default_dtype()}"]
    for device in sorted({tensor.device.type for tensor in tensors} - {"meta"}):
        is_on = torch.is_autocast_enabled(device)
        conditions.append(f"torch.is_autocast_enabled({device!r}) == {is_on}")
        if is_on:
            conditions.append(f"torch.get_autocast_dtype({device!r}) == {torch.get_autocast_dtype(device)}")
    return conditions


def _types(inputs: list[Node], graph: Any) -> list[str]:
    """The dtypes of the inputs, and their devices where the program names one: a branch on either leaves no trace."""
    values = [(node.name, node.meta.get("val")) for node in inputs]
    tensors = [(name, value) for name, value in values if isinstance(value, torch.Tensor)]
    leaves = [leaf for node in graph.nodes for leaf in pytree.tree_leaves((node.args, dict(node.kwargs)))]
    named = any(isinstance(leaf, torch.device) for leaf in leaves)
    result = [f"{name}.dtype == {value.dtype}" for name, value in tensors]
    return [*result, *[f"{name}.device.type == {value.device.type!r}" for name, value in tensors if named]]


def _apart(inputs: list[Node], exported: ExportedProgram) -> list[str]:
    """That inputs written at the end of a program share no memory with others, which the model would have seen change."""
    written = set(exported.graph_signature.user_inputs_to_mutate.values())
    tensors = [node for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)]
    return [
        f"not torch._C._is_alias_of({one.name}, {other.name})"
        for one in tensors
        for other in tensors
        if one.target in written and other is not one and not (other.target in written and other < one)
    ]


def identities(module: torch.nn.Module, pairs: Iterable[tuple[str, Any]]) -> list[str]:
    """Which inputs, given as names and values of the example, are one tensor; where the model may ask for that. `x is y` is no
    operation, so its code is looked at."""
    functions = [function for part in module.modules() for function in reached(type(part)).functions]
    own = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    codes = [function.__code__ for function in [*functions, own] if isinstance(function, FunctionType)]
    if not any(map(compares_variables, codes)):
        return []
    tensors = [pair for pair in pairs if isinstance(pair[1], torch.Tensor)]
    return [
        f"({one} is {other}) == {first is second}"
        for place, (one, first) in enumerate(tensors)
        for other, second in tensors[place + 1 :]
    ]


def layout_of(value: Any) -> tuple[int, ...] | None:
    """How a tensor lies in memory, where all its sizes are known."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return tuple(value.stride()) if all(type(step) is int for step in (*value.shape, *value.stride())) else None


# ---- the arguments ----


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function; functions written in C have none that Python knows.

    >>> str(signature_of(torch.relu))
    '(*args, **kwargs)'
    """
    try:
        return inspect.signature(function)
    except ValueError:
        return inspect.signature(lambda *args, **kwargs: None)


def _keywords(signature: inspect.Signature, codegen: PyTreeCodeGen) -> tuple[bool, list[str], str]:
    """How the keywords of the captured call are given to the program: whether by their names only, because they do not follow
    its other arguments in the order of the signature; which went into the model's `**rest`, where their order tells; and `rest`.
    """
    keywords = keyword_names(codegen.in_spec) or []
    names = list(signature.parameters)
    rest = [name for name, item in signature.parameters.items() if item.kind is inspect.Parameter.VAR_KEYWORD]
    loose = [name for name in keywords if name not in names] if rest else []
    named = [name for name in keywords if name not in loose]
    count = len(codegen.parameters) - len(keywords)
    return named != names[count : count + len(named)], loose, rest[0] if rest else ""
