"""The plan of a quantization: which layers become what, which values are turned into integers, which of them share a scale, and
why the rest stays as it is. Plans are made here from a program and a configuration; nothing is edited.

A value is turned into integers where a layer that computes with integers takes it. From there the plan goes back: through calls
that move or select elements, which share the scale of what they are given, as joins do with their parts; and to the other side
of a sum that a layer can do on the fly.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.errors import QuantizeError
from torchgraft.ir.modules import paths_around
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.ir.verify import find_attribute
from torchgraft.passes.layer_calls import Layer, bound, is_layer, layer_arguments, read_layer
from torchgraft.quantize.config import Config, text_of
from torchgraft.quantize.operations import (
    ACTIVATIONS,
    AVERAGES,
    MOVES,
    SELECTS,
    first_input,
    is_sum,
    operation,
    parts_of_join,
    product,
    real_users,
)
from torchgraft.quantize.schemes import Numbers, Scheme

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule
    from torchgraft.quantize.corrections import LayerInputs

KEY = "quantize"


@dataclass
class PlannedLayer:
    """A layer and what becomes of it; `reason` says why it stays as it is."""

    name: str
    path: str
    kind: str
    scheme_name: str
    scheme: Scheme
    source: str = ""
    reason: str | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()


class Stored(NamedTuple):
    """Where a program keeps a rounded weight: in buffers, or in a layer with a kernel of its own."""

    numbers: Numbers
    axis: int | None
    steps: str
    scale: str
    zero_point: str | None
    layer: str | None = None


@dataclass
class Plan:
    """What is done with a program: layers by the names of their nodes, values by theirs, and the group of each value."""

    config: Config
    backend: str
    layers: dict[str, PlannedLayer] = field(default_factory=dict)
    # The observer of each value; values with the same one share their scale.
    groups: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, Numbers] = field(default_factory=dict)
    observers: dict[str, str] = field(default_factory=dict)
    consumers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_converted: bool = False
    # What went into each layer when the program was calibrated, where a correction wants that.
    inputs: dict[str, LayerInputs] = field(default_factory=dict)
    # Where the weights are that were rounded, and where other tensors of the model went, by the paths that they had.
    stored: dict[str, Stored] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)

    def refuse_converted(self, program: GraphModule) -> None:
        """Raise where observers are gone, because integers stand in their places."""
        if self.is_converted:
            raise QuantizeError(
                f"{type(program).__name__} has been converted, and has no observers any more\n"
                "give the prepared program that it was made from, or prepare the model again"
            )

    @property
    def needs_data(self) -> bool:
        """Whether a scale has to be found by watching data."""
        return bool(self.groups)


def plan_of(program: GraphModule) -> Plan:
    """The plan that a prepared or quantized program carries."""
    plan = getattr(program, "meta", {}).get(KEY)
    if not isinstance(plan, Plan):
        raise QuantizeError(
            f"{type(program).__name__} has not been prepared for quantization\n"
            "call torchgraft.quantize.prepare() first, or quantize(), which does everything"
        )
    return plan


def make_plan(program: GraphModule, config: Config, backend: str) -> Plan:
    """The plan for a program."""
    return _Planner(program, Plan(config, backend)).run()


def weight_axis(layer: Layer) -> int | None:
    """The dimension of the weights that counts the channels that come out; None where no single one does."""
    if not layer.transposed:
        return 0
    return 1 if layer.groups == 1 else None


class _Planner:
    def __init__(self, program: GraphModule, plan: Plan) -> None:
        self.program, self.plan = program, plan
        self.static: dict[Node, PlannedLayer] = {}
        self.layers: dict[Node, Layer] = {}
        self.values: dict[Node, PlannedLayer] = {}  # a value and the first layer that wants it
        self.leader: dict[Node, Node] = {}
        self.takers: dict[Node, set[Node]] = {}
        self.memory: Aliases | None = None
        self.types: set[str] = set()
        self.functions: set[str] = set()

    def run(self) -> Plan:
        nodes = list(self.program.graph.nodes)
        for node in nodes:
            self._look_at(node)
        for node, planned in self.static.items():
            self._need(self.layers[node].source, node, planned)
        self._name_groups(nodes)
        self._check_config()
        return self.plan

    def _look_at(self, node: Node) -> None:
        if not is_layer(node, self.program):
            name = product(node, self.program)
            if name:
                self.plan.others[node.name] = f"no integer form of {name} is chosen"
            elif node.op == "call_module" and _has_layers(find_attribute(self.program, node.target)[0]):
                self.plan.others[node.name] = (
                    "it is one call in this program; capture with level='function' to see inside"
                )
            return
        path, kind = place_of(node, self.program)
        function = node.target if node.op == "call_function" else None
        self.types.update(map(text_of, kind.__mro__ if kind is not None else ()))
        self.functions.update([text_of(function)] if function is not None else [])
        name = self.plan.config.name_of(path, kind, function)
        scheme = self.plan.config.scheme_of(path, kind, function)
        kind_name = kind.__name__ if kind is not None else getattr(node.target, "__name__", str(node.target))
        planned = PlannedLayer(node.name, path, kind_name, name, scheme, str(source_of(node) or ""))
        self.plan.layers[node.name] = planned
        layer = read_layer(node, self.program)
        if isinstance(layer, str):
            planned.reason = layer
        elif scheme.is_float:
            planned.reason = "the configuration keeps it in floats"
        else:
            planned.reason = _unsuited(layer, scheme) or self._written(layer, node)
        if planned.reason is None and isinstance(layer, Layer):
            self.layers[node] = layer
            planned.dtype, planned.shape = str(layer.weight.dtype), tuple(layer.weight.shape)
            if scheme.is_static:
                self.static[node] = planned

    def _written(self, layer: Layer, node: Node) -> str | None:
        """Why the weights of a layer cannot be rounded once and for all, or its input and result not be other tensors."""
        if self.memory is None:
            self.memory = Aliases(self.program.graph)
        tensors = [tensor for tensor in (layer.weight, layer.bias) if tensor is not None]
        if any(self.memory.is_known_to_be_written(tensor) for tensor in tensors):
            return "the program writes its weights"
        changes = self.memory.is_known_to_change_between(layer.source, node)
        return "its input is written in place by the program" if changes else None

    def _changes(self, value: Node, user: Node) -> bool:
        """Whether a value is written between its making and a user, so that what is rounded at once is not what the user sees."""
        return self.memory is not None and self.memory.is_known_to_change_between(value, user)

    # ---- values ----

    def _need(self, value: Node, user: Node, planned: PlannedLayer) -> None:
        """Note that `user` takes this value as integers."""
        if value.op == "get_attr":
            return
        self.takers.setdefault(value, set()).add(user)
        if value in self.values:
            return
        self.values[value] = planned
        self.leader[value] = value
        name = operation(value, self.program)
        source = first_input(value)
        if any(self._changes(part, value) for part in value.all_input_nodes):
            return
        if (name in MOVES or name in SELECTS) and source is not None and source.op != "get_attr":
            self._need(source, value, planned)
            self._join(value, source)
        elif name in AVERAGES and source is not None and self._is_of_integers(source):
            self._need(source, value, planned)
        elif name == "cat":
            for part in parts_of_join(value):
                self._need(part, value, planned)
                self._join(value, part)
        else:
            self._need_other_side(value, planned)

    def _need_other_side(self, value: Node, planned: PlannedLayer) -> None:
        """Where a value is a sum with the result of a layer, that layer can add the other side while it computes."""
        total = value
        while not is_sum(total, self.program):
            source = first_input(total)
            if operation(total, self.program) not in ACTIVATIONS | {"type_as"} or source is None:
                return
            total = source
        mine = [item for item in total.args if item in self.static and len(real_users(item)) == 1]
        if not mine:
            return
        fused = max(mine, key=lambda item: item._order)
        for other in total.args:
            if other is not fused and isinstance(other, Node) and not self._changes(other, total):
                self._need(other, total, planned)

    def _join(self, first: Node, second: Node) -> None:
        if second in self.leader:
            old, new = self._leader(second), self._leader(first)
            self.leader[old] = new

    def _leader(self, value: Node) -> Node:
        while self.leader[value] is not value:
            value = self.leader[value]
        return value

    def _is_of_integers(self, value: Node) -> bool:
        """Whether the layer behind a value can write it as integers at once."""
        while value not in self.static:
            source = first_input(value)
            if source is None or operation(value, self.program) not in ACTIVATIONS | MOVES | SELECTS | {"add"}:
                return False
            if is_sum(value, self.program):
                return any(item in self.static for item in value.args)
            value = source
        return True

    def _name_groups(self, nodes: list[Node]) -> None:
        plan = self.plan
        for node in nodes:
            if node not in self.values:
                continue
            leader = self._leader(node)
            group = f"observer_{leader.name}"
            scheme = self.values[leader].scheme
            assert scheme.inputs is not None
            plan.groups[node.name] = group
            plan.numbers.setdefault(group, scheme.inputs)
            plan.observers.setdefault(group, scheme.observer)
            wanted = self.takers[node]
            if self._is_of_integers(node):
                wanted = wanted | set(real_users(node))
            plan.consumers[node.name] = tuple([user.name for user in node._users if user in wanted])

    def _check_config(self) -> None:
        """Refuse a name, type or function that no layer goes by: most likely it is misspelled."""
        config, layers = self.plan.config, self.plan.layers.values()
        around = {part for layer in layers for part in paths_around(layer.path)}
        for what, given, known, said in (
            ("", config.modules, around, [layer.path for layer in layers]),
            ("type ", config.types, self.types, [name for name in self.types if not name.startswith(_BASES)]),
            ("function ", config.functions, self.functions, self.functions),
        ):
            for name in given:
                if name not in known and not (not what and any(fnmatch.fnmatchcase(path, name) for path in known)):
                    found = sorted(dict.fromkeys(said))
                    raise QuantizeError(
                        f"the configuration names {what}{name!r}, and no layer goes by that\n"
                        f"layers are: {', '.join(found[:8]) or 'none'}{', …' if len(found) > 8 else ''}"
                    )


# Classes that every layer is of.
_BASES = ("builtins.", "torch.nn.Module", "torch.nn._")


def place_of(node: Node, program: Any) -> tuple[str, type | None]:
    """The path and the class of the module that a layer belongs to."""
    if node.op == "call_module":
        return node.target, type(find_attribute(program, node.target)[0])
    weight = bound(node, layer_arguments(node)).get("weight")
    path = weight.target.rpartition(".")[0] if isinstance(weight, Node) and weight.op == "get_attr" else ""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    kind = stack[-1][1] if stack and isinstance(stack[-1][1], type) else None
    return path or (stack[-1][0] if stack else node.name), kind


def _has_layers(module: Any) -> bool:
    if not isinstance(module, torch.nn.Module):
        return False
    return any(isinstance(inner, (torch.nn.Linear, torch.nn.modules.conv._ConvNd)) for inner in module.modules())


def _unsuited(layer: Layer, scheme: Scheme) -> str | None:
    """Why a layer cannot have a scheme."""
    if getattr(layer.module, "padding_mode", "zeros") != "zeros":
        return "it pads with other values than zero; capture with level='function', where that is a call of its own"
    weights = scheme.weights
    if weights is None:
        return None
    if weights.per == "group":
        if layer.dimensions:
            return "groups of weights are for linear layers"
        if layer.weight.shape[1] % weights.group:
            return f"its {layer.weight.shape[1]} inputs are no multiple of the group of {weights.group}"
    if weights.per == "channel" and weight_axis(layer) is None:
        return "a transposed convolution in groups has no one dimension of channels"
    return None
