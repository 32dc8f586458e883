"""What a model chooses by its mode, such as `0.0 if not self.training else self.dropout`, and stays a choice in the program.
Python itself would take one branch and forget the other, so the methods that choose run, for the time of a capture, with other
code (`mode_statements.py`), which calls the functions here. Other branches on the mode become guards
(`Watcher._training_decides`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from torchgraft.capturing.flowing.sizes import unwrapped
from torchgraft.capturing.patching.module_patches import TrainingFlag, plain_mode
from torchgraft.capturing.tracer_base import UNCHANGED_TYPES
from torchgraft.ir.choices import add_if


def is_open(flag: Any) -> bool:
    """Whether a value is the mode of a model that is being captured, and so may be either in the program."""
    return type(flag) is TrainingFlag and flag._tracer._runs_for_real


def choose(flag: Any, chosen: Any, otherwise: Any) -> Any:
    """`chosen if flag else otherwise`; for an open mode a value that stays a choice, if it is a number or a bool."""
    if not is_open(flag):
        return chosen if flag else otherwise
    chosen, otherwise = _settled(chosen, flag, True), _settled(otherwise, flag, False)
    kind = type(chosen)
    is_plain = kind is type(otherwise) and kind in UNCHANGED_TYPES
    if chosen is otherwise or (is_plain and repr(chosen) == repr(otherwise)):
        return chosen
    if is_plain and kind is bool:
        return flag if chosen else negated(flag)
    if not is_plain or kind not in (int, float):
        return chosen if flag else otherwise
    module, tracer = flag._module, flag._tracer
    values = (chosen, otherwise) if flag._is_negated else (otherwise, chosen)

    def make() -> Any:
        return tracer.create_node("call_function", operator.getitem, (values, tracer._training_node(module)), {})

    return tracer.flow.symbol(values[bool(module.__dict__["training"])], make, "a choice by the mode")


def _settled(value: Any, flag: TrainingFlag, is_set: bool) -> Any:
    """A value where the flag is set, or not: what the same mode says there is known."""
    if is_open(value) and value._module is flag._module:
        return is_set is (value._is_negated is flag._is_negated)
    return value


def negated(flag: Any) -> Any:
    """`not flag`."""
    return TrainingFlag(flag._module, flag._tracer, not flag._is_negated) if is_open(flag) else not flag


def both(first: Any, second: Any) -> Any:
    """`first and second`."""
    return choose(first, second, False) if is_open(first) else first and second


def either(first: Any, second: Any) -> Any:
    """`first or second`."""
    return choose(first, True, second) if is_open(first) else first or second


def truth(value: Any) -> Any:
    """A value of which only the truth matters: as a bool, if asking decides nothing."""
    return bool(value) if type(value) in UNCHANGED_TYPES else value


def asked(flag: Any, value: Any) -> Any:
    """`value`, where it is asked only if the flag is set: if asking it decides something, the flag decides first."""
    is_plain = not isinstance(value, torch.Tensor) and unwrapped(value) is None and not is_open(value)
    return value if is_plain else flag and value


def is_added(flag: Any, tensor: Any, amount: Any) -> bool:
    """Have the program add to a buffer of the model where the flag is set; whether that is what is to be added to. (`self.a += 1`
    where `a` is computed is no addition in place.)"""
    is_buffer = type(tensor) is torch.Tensor and id(tensor) in flag._tracer.values.names
    if not is_buffer or type(amount) not in (int, float):
        return False
    flag._tracer.unwatched(_add, flag._tracer, flag, tensor, amount)
    return True


def _add(tracer: Any, flag: TrainingFlag, tensor: torch.Tensor, amount: float) -> None:
    arguments = (flag.__fx_create_arg__(tracer), tracer.values.node_of(tensor), amount)
    node = tracer.create_call("call_function", add_if, arguments, {})
    if plain_mode(flag):
        tracer.writes.before_call("add_", (tensor,))
        tracer.values.register(tensor.add_(amount), node, {})
