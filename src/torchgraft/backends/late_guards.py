"""Checks that come after something which cannot be undone: a program with one cannot be tried and left when it does not fit.
Torch's random numbers can be put back. Which programs are tried, and in which order, is the business of `variants.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.analysis.effects import Effects
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GuardError, RunError
from torchgraft.ir.guards import check_result, guard, is_guard
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of


def late_guard(program: GraphModule) -> str | None:
    """Why a program cannot be tried: a guard that comes after something which cannot be undone. None where there is none.

    What is checked of the result of a module that is kept whole cannot be checked before it; there the program insists.
    """
    memory: Aliases | None = None
    done: Node | None = None
    for node in program.graph.nodes:
        if node._op in ("placeholder", "get_attr", "output"):
            continue
        if node._op == "call_function" and is_guard(node._target):
            if done is not None and node._target is check_result:
                node.target = insist_on_result
            elif done is not None and node._target is not insist_on_result:
                line = source_of(node)
                where = f" at {line.place}" if line else ""
                return f"the check '{node._name}'{where} comes after '{done._name}', whose effect cannot be undone"
        elif done is None and node._target is not torch._assert and node.is_impure():
            memory = memory or Aliases(program.graph)
            effects = memory.effects.get(node)
            if effects is None or (_only_draws(node, effects) and not written_outside(effects, memory)):
                continue
            if effects.unknown or effects.random or written_outside(effects, memory):
                done = node
    return None


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
