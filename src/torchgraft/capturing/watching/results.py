"""The end of a watched run: what it returns and what it changed in objects that it was given, as nodes.
What happens on the way is written down in `watcher.py`.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import torch

from torchgraft.capturing.flowing.dtypes import FlowingDtype
from torchgraft.capturing.flowing.sizes import unwrapped
from torchgraft.capturing.watching.arguments import is_of_run
from torchgraft.capturing.watching.reruns import KeepWhole
from torchgraft.capturing.watching.watcher import Watcher
from torchgraft.ir.guards import check_distinct
from torchgraft.ir.structures import (
    Template,
    has_attributes,
    put_into,
    put_together,
    put_together_record,
    record_of,
    take_apart,
)


def result_argument(watcher: Watcher, value: Any) -> Any:
    """A part of the result; objects of their own kind are put together anew by every run."""
    if isinstance(value, torch.Tensor) and id(value) in watcher.writes.with_attributes:
        raise KeepWhole(None, "it writes an attribute onto a tensor that it returns")
    if type(value) is FlowingDtype:
        return value.node
    if type(value) in (tuple, list):
        return type(value)([result_argument(watcher, item) for item in value])
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {key: result_argument(watcher, item) for key, item in value.items()}
    is_object = isinstance(value, (tuple, list, dict)) or has_attributes(value)
    if is_object and not isinstance(value, (torch.Tensor, torch.nn.Module)) and unwrapped(value) is None:
        known = watcher.values.outside_node(value)
        if known is not None:
            return known
        record = record_of(value)
        if record is not None:
            fields = [
                result_argument(watcher, value[name] if isinstance(value, dict) else getattr(value, name))
                for name in record.names
            ]
            arguments = (watcher.values.constant("_template", record), *fields)
            return watcher.create_node("call_function", put_together_record, arguments, {})
        template, parts = take_apart(value, functools.partial(_is_part, watcher))
        lowered = [watcher.values.outside_node(part) or watcher.create_arg(part) for part in parts]
        return watcher.create_node(
            "call_function", put_together, (watcher.values.constant("_template", Template(template)), *lowered), {}
        )
    return watcher.create_arg(value)


def _is_part(watcher: Watcher, value: Any) -> bool:
    """Whether a value in the result is computed by every run; one that has such values with it cannot be told apart."""
    if callable(value) and not isinstance(value, (torch.nn.Module, type)) and watcher.arguments.closes_over(value):
        raise KeepWhole(None, f"it returns a {type(value).__name__} that it makes")
    return is_of_run(value) or value in watcher.values.objects


def changed_objects(watcher: Watcher) -> list[tuple[Any, list[Any], Any]]:
    """The objects that the program was given and the run has changed (a cache, say), each with the keys and the contents that it
    has now. The program checks that it is not given one of them twice."""
    changes = []
    for value, before, now in watcher.values.objects.changed():
        keys = list(now)
        if not isinstance(value, (list, dict)):
            keys = [key for key in now if key not in before or now[key] is not before[key]]
        is_odd = isinstance(value, dict) and type(value) not in (dict, OrderedDict)
        if is_odd or (not isinstance(value, (list, dict)) and len(now) < len(before)):
            raise KeepWhole(None, f"it changes a {type(value).__name__} that it is given")
        changes.append((watcher.values.outside_node(value), keys, now))
    if changes:
        changed = [node for node, _, _ in changes]
        nodes = [watcher.values.outside_node(value) for value in watcher.values.objects.writable()]
        others = [node for node in nodes if node not in changed]
        distinct = ((*changed, *others), len(changed), "the end of the model, where it changes its inputs")
        watcher.create_node("call_function", check_distinct, distinct, {})
    return changes


def write_objects(watcher: Watcher, changes: list[tuple[Any, list[Any], Any]]) -> None:
    """Have the program leave in these objects what the run left in them."""
    written = [
        (node, watcher.create_arg(tuple(keys)), *[result_argument(watcher, now[key]) for key in keys])
        for node, keys, now in changes
    ]
    for arguments in written:  # after everything that is read
        watcher.create_call("call_function", put_into, arguments, {})
