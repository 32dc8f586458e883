"""Reading captured programs: what a node does, and what a program does that another one calls.
How a call is followed further is said in `calls.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from torchgraft.analysis.effects.calls import Calls
from torchgraft.analysis.effects.machine import Arguments
from torchgraft.analysis.effects.values import OUTSIDE, Value, lift, reachable


class Programs(Calls):
    """The part of the machine that reads nodes."""

    def call_program(self, site: Any, callee: Value, graph: Any, arguments: Arguments) -> Value:
        """Read a captured program node by node."""
        self.cacheable = False
        values: dict[Any, Value] = {}
        inputs = list(arguments.positional)
        result = Value()
        for node in graph.nodes:
            here = (site, node)
            if node.op == "placeholder":
                given = arguments.keyword.get(node.target)
                values[node] = given or (inputs.pop(0) if inputs else Value(places=reachable(arguments.all())))
            elif node.op == "output":
                result = self.argument_value(here, node.args[0], values)
            else:
                values[node] = self.run_node(here, node, callee, values)
        return result

    def run_node(self, site: Any, node: Any, root: Value, values: dict[Any, Value]) -> Value:
        """Do what one node of a program does; `root` is the module that holds its attributes."""
        if node.op == "get_attr":
            return self._fetch(site, root, node.target)
        positional = [self.argument_value((site, i), value, values) for i, value in enumerate(node.args)]
        keyword = {name: self.argument_value((site, name), value, values) for name, value in node.kwargs.items()}
        if node.op == "call_function":
            return self.call(site, Value(node.target), Arguments(positional, keyword))
        if node.op == "call_method":
            return self.call_method(site, positional[0], node.target, Arguments(positional[1:], keyword))
        module = self._fetch(site, root, node.target)
        if not isinstance(module.known, torch.nn.Module):
            self.give_up(f"calls the module '{node.target}', which is not there")
        return self.call(site, module, Arguments(positional, keyword))

    def _fetch(self, site: Any, root: Value, path: str) -> Value:
        value = root
        for name in path.split("."):
            value = self.read_attribute(site, value, name)
        return value

    def argument_value(self, site: Any, argument: Any, values: dict[Any, Value]) -> Value:
        """The value of an argument tree of a node."""
        if hasattr(type(argument), "all_input_nodes"):
            return values[argument]
        if isinstance(argument, list | tuple):
            items = [self.argument_value((site, i), item, values) for i, item in enumerate(argument)]
            if type(argument) is tuple and all(item.is_known and not item.places for item in items):
                return Value(argument)
            return self.make_sequence(site, items, tuple if isinstance(argument, tuple) else list)
        if isinstance(argument, dict):
            entries = {name: self.argument_value((site, name), item, values) for name, item in argument.items()}
            return self.make(site, entries.values(), dict)
        if isinstance(argument, slice):
            parts = [self.argument_value((site, i), part, values) for i, part in enumerate(_slice_parts(argument))]
            return Value(argument) if all(part.is_known for part in parts) else Value()
        return lift(argument, OUTSIDE)


def _slice_parts(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step
