"""Checks that come after something which cannot be undone: a program with one cannot be tried and left when it does not fit.
Torch's random numbers can be put back. Which programs are tried, and in which order, is the business of `variants.py`.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.analysis.effects import Effects
from torchgraft.backends.sizes import for_one_size
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GuardError, RunError
from torchgraft.ir.guards import check_length, check_result, guard, is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.passes.layer_calls import is_metadata_read


def late_guard(program: GraphModule) -> str | None:
    """Why a program cannot be tried: a guard that comes after something which cannot be undone. None where there is none.

    What is checked of the result of a module that is kept whole cannot be checked before it; there the program insists.
    """
    done, late = _late_guards(program)
    if done is None or not late:
        return None
    line = source_of(late[0])
    where = f" at {line.place}" if line else ""
    return f"the check '{late[0]._name}'{where} comes after '{done._name}', whose effect cannot be undone"


def _late_guards(program: GraphModule) -> tuple[Node | None, list[Node]]:
    """The first call that cannot be undone, and the checks that come after it."""
    memory: Aliases | None = None
    done: Node | None = None
    late: list[Node] = []
    for node in program.graph.nodes:
        if node._op in ("placeholder", "get_attr", "output"):
            continue
        if node._op == "call_function" and is_guard(node._target):
            if done is not None and node._target is check_result:
                node.target = insist_on_result
            elif done is not None and node._target is not insist_on_result:
                late.append(node)
        elif done is None and node._target is not torch._assert and node.is_impure():
            memory = memory or Aliases(program.graph)
            effects = memory.effects.get(node)
            if effects is None or (_only_draws(node, effects) and not written_outside(effects, memory)):
                continue
            if effects.unknown or effects.random or written_outside(effects, memory):
                done = node
    return done, late


def lift_guards(program: GraphModule) -> None:
    """Checks of which objects are among the inputs come before all that has an effect, with what they read to get there."""
    done, late = _late_guards(program)
    for guard_node in late:
        moved = _reads_of_objects(guard_node)
        if moved is None or done is None:
            continue
        objects = {*moved, *(source for node in moved for source in node._inputs)}
        between = program.graph.nodes  # a call that is given one of them may change what is in it
        if any(done <= node < guard_node and node.is_impure() and objects & {*node._inputs} for node in between):
            continue
        for node in sorted(moved):
            if done < node:
                done.prepend(node)


def _reads_of_objects(guard_node: Node) -> set[Node] | None:
    """A check and the attributes and items it asks for, back to the inputs; None where it asks for something that is computed."""
    found, open_nodes = {guard_node}, list(guard_node._inputs)
    while open_nodes:
        node = open_nodes.pop()
        if node._op == "placeholder":
            continue
        if node._op != "call_function" or node._target not in (getattr, operator.getitem):
            return None
        if node not in found:
            found.add(node)
            open_nodes += node._inputs
    return found


def without_checks_of_sizes(
    program: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[GraphModule | None, str]:
    """A copy of a program, for calls of these sizes alone, without the late checks that follow from sizes; None where another one
    is left, and why."""
    sized = for_one_size(program, args, kwargs)
    if (reason := late_guard(sized)) is not None:
        return None, reason
    left = {node._name for node in sized.graph.nodes}
    result = GraphModule(program, copy.deepcopy(program.graph), type(program).__name__)
    for node in _late_guards(result)[1]:
        if node._name not in left and _asks_for_sizes(node):
            result.graph.erase_node(node)
    return result, late_guard(result) or ""


def _asks_for_sizes(node: Node) -> bool:
    """Whether a check looks at nothing but sizes: dtypes and devices may be others in a call of the same sizes."""
    return node._target is check_length or all(map(_follows_from_sizes, node._inputs))


def _follows_from_sizes(node: Node) -> bool:
    if is_metadata_read(node):
        return node._op == "call_method" or node._args[1] in ("shape", "ndim")
    is_arithmetic = getattr(node._target, "__module__", None) == "_operator"
    return node._op == "call_function" and is_arithmetic and all(map(_follows_from_sizes, node._inputs))


def draws_before_check(program: GraphModule) -> bool:
    """Whether a guard comes after a draw of random numbers, which have to be put back when the guard fails."""
    drawn = False
    memory: Aliases | None = None
    for node in program.graph.nodes:
        if node._op in ("placeholder", "get_attr", "output"):
            continue
        if node._op == "call_function" and is_guard(node._target):
            if drawn:
                return True
        elif not drawn and node._target is not torch._assert and node.is_impure():
            memory = memory or Aliases(program.graph)
            effects = memory.effects.get(node)
            drawn = effects is not None and effects.random
    return False


def _only_draws(node: Node, effects: Effects) -> bool:
    """Whether a call draws from torch's own generators and may do nothing worse. A generator that is given is not put back."""
    home = getattr(node._target, "__module__", None) or ""
    is_foreign = node._op == "call_function" and home.partition(".")[0] in ("random", "numpy")
    given = [*node._args, *node._kwargs.values()]
    has_generator = node._kwargs.get("generator") is not None or any(
        isinstance(item, torch.Generator) for item in given
    )
    return effects.random and not effects.unknown and not is_foreign and not has_generator


def written_outside(effects: Effects, memory: Aliases) -> list[Any]:
    """What a call writes that is no value of the program's own making."""
    return [item for item in effects.writes if not (isinstance(item, Node) and not memory.is_input_or_state(item))]


@guard(check_result.__torchgraft_describe__)  # type: ignore[attr-defined]
def insist_on_result(found: Any, kind: str, length: int | None, name: str, where: str) -> None:
    """Raise an error that no other variant is tried after, because what has run cannot be undone."""
    try:
        check_result(found, kind, length, name, where)
    except GuardError as error:
        raise RunError(str(error)) from None
