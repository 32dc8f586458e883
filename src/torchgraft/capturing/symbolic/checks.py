"""What is refused before a symbolic trace begins, and what is looked at when it is over.
The refusals on the way are raised where they are noticed; how they are told from the model's own errors is in `refusals.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType

import torch

from torchgraft.capturing.refusals import LEAF, in_lines, is_raised_by_user
from torchgraft.capturing.user_code.comparisons import compared_types, compares_variables
from torchgraft.errors import TraceError
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import are_different, check_value
from torchgraft.ir.modules import has_hooks
from torchgraft.ir.node import Node
from torchgraft.ir.origin import line_of_error, source_line

# What is called to read a number.
NUMBERS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "item", getattr, len})


def refuse_root_hooks(root: torch.nn.Module) -> None:
    """Raise if the call of a model does more than its forward, with which a trace begins."""
    name = type(root).__name__
    if not type(root).__call__.__module__.startswith(("torch.", "torchgraft.")):
        raise TraceError(
            f"cannot trace {name}: its class has a __call__ of its own\n"
            "  trace a module that contains it, or give it no __call__"
        )
    if has_hooks(root):
        raise TraceError(
            f"cannot trace {name}: hooks are registered on it\n"
            "  remove them and register them on the traced program, or trace a module that contains this one"
        )


def refuse_missing_hooks(error: Exception, paths: dict[torch.nn.Module, str]) -> None:
    """Raise if a model most likely failed for want of what its hooks leave behind: they run with the program only."""
    hooked = next((path for module, path in paths.items() if has_hooks(module)), None)
    is_missing = isinstance(error, (LookupError, AttributeError)) and not is_raised_by_user(error)
    if hooked is not None and is_missing:
        text = in_lines(
            f"cannot trace a forward that needs what hooks leave behind: {type(error).__name__}: {error}",
            line_of_error(error),
            f"the hooks of '{hooked}' run with the program, and not while tracing",
            "return what they collect, or use torchgraft.capture(model, args)",
        )
        raise TraceError(text) from error


def drop_constants(graph: Graph, constants: list[Node]) -> None:
    """Drop constants that only Python looked at."""
    for node in reversed(constants):
        if not node._erased and not node._users:
            fetched = [source for source in node._inputs if source._op == "get_attr"]
            graph.erase_node(node)
            for source in fetched:
                if not source._users:
                    graph.erase_node(source)


def guard_identities(nodes: list[Node], last_of_inputs: Node, codes: Iterable[CodeType]) -> None:
    """Have a program of these nodes check that no two inputs are one tensor where a function that ran asks for that: proxies
    never are."""
    inputs = [node for node in nodes if node._op == "placeholder" and not str(node._target).startswith("*")]
    if len(inputs) < 2 or not any(map(compares_variables, [*codes, *_codes_of(nodes, last_of_inputs)])):
        return
    graph = inputs[0].graph
    with graph.inserting_after(inputs[-1]):
        answer = graph.create_node("call_function", are_different, tuple(inputs))
    with graph.inserting_after(answer):
        details = (answer, True, "no two inputs being one tensor", "a line that compares them by `is`")
        graph.create_node("call_function", check_value, details)


def _codes_of(nodes: list[Node], last_of_inputs: Node) -> list[CodeType]:
    """The functions in which nodes were made."""
    # The output, and the checks of the inputs, are made by whoever asked for the trace. By identity, because the hash of a code
    # object is computed from everything in it.
    codes: dict[int, CodeType] = {}
    is_made = last_of_inputs._erased
    for node in nodes:
        origin = node._origin
        if is_made and origin is not None and origin[0] is not None and not node._erased and node._op != "output":
            codes[id(origin[0])] = origin[0]
        is_made = is_made or node is last_of_inputs
    return list(codes.values())


def refuse_compared_types(graph: Graph) -> None:
    """`type(x.size(0)) is int` is false for the proxy of a size, and nothing is called that could notice."""
    for node in graph.nodes:
        if node._target in NUMBERS and node._op in ("call_method", "call_function") and node._origin is not None:
            code, instruction, _ = node._origin
            if code is not None and compared_types(code) and _is_number(node):
                raise TraceError(
                    in_lines(
                        f"cannot trace a function that compares types and reads the number '{node._name}'",
                        source_line(code, instruction),
                        "the proxy of a number has a type of its own",
                        f"use isinstance, {LEAF}, or use torchgraft.capture(model, args)",
                    )
                )


def _is_number(node: Node) -> bool:
    return node._target is not getattr or node._args[1] in ("shape", "ndim")
