"""`convert`: from a prepared program to the reference form, in which integers are plain tensors, scales are buffers, and
ordinary operators stand between `dequantize_tensor` and `quantize_tensor`. Kernels that do this faster are put in by `native/`.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from typing import Any

import torch

from torchgraft.codegen.graph_module import GraphModule, with_own_graph
from torchgraft.errors import QuantizeError
from torchgraft.ir.guards import check_training
from torchgraft.ir.node import Node
from torchgraft.passes.attributes import References
from torchgraft.passes.layer_calls import Layer, bound, layer_arguments, read_layer
from torchgraft.passes.remove_no_ops import RemoveNoOps
from torchgraft.quantize.calibrating import check_observed
from torchgraft.quantize.corrections import LayerInputs, corrected_bias, learn_rounding
from torchgraft.quantize.observers import Observer
from torchgraft.quantize.operations import is_sum, operation
from torchgraft.quantize.operators import dequantize_tensor, quantize_tensor, scale_of_values
from torchgraft.quantize.plan import KEY, PlannedLayer, Stored, plan_of, weight_axis
from torchgraft.quantize.preparing import inherit
from torchgraft.quantize.schemes import Numbers
from torchgraft.quantize.training import TrainedLayer, settle
from torchgraft.quantize.weights import QuantizedWeight, quantize_weight


def convert(program: GraphModule) -> GraphModule:
    """The quantized program in its reference form; the prepared one stays as it is.

    >>> import torchgraft
    >>> prepared = torchgraft.quantize.prepare(torchgraft.symbolic_trace(torchgraft.zoo.create("mlp").eval()))
    >>> _ = torchgraft.quantize.calibrate(prepared, [torch.randn(4, 16)])
    >>> [node.name for node in convert(prepared).graph.nodes if node.op == "call_function"][:4]
    ['quantize_tensor', 'dequantize_tensor', 'dequantize_tensor_1', 'fc1']
    """
    plan = plan_of(program)
    plan.refuse_converted(program)
    if program.training and any(isinstance(module, TrainedLayer) for module in program.children()):
        raise QuantizeError("the program is being trained\ncall .eval() on it first")
    check_observed(program)
    result = with_own_graph(program)
    result.meta[KEY] = dataclasses.replace(plan, is_converted=True, inputs={}, stored={})
    with torch.no_grad():
        settle(result)
        RemoveNoOps(inference=True).run(result)
        rounded = learn_rounding(result, plan) if plan.config.learn_rounding else {}
        _Conversion(result, plan.inputs, rounded).run()
    result.graph.lint()
    return _with_tensors_of_its_own(result, program)


def _with_tensors_of_its_own(result: GraphModule, program: GraphModule) -> GraphModule:
    """A copy in which the floats that stay are copies, too: a model that is trained or loaded later would give its new biases to
    the program, whose integers are those of the old weights."""
    given = {id(tensor) for tensor in (*program.parameters(), *program.buffers())}
    found = (*result.parameters(), *result.buffers())
    new: dict[int, Any] = {id(tensor): tensor for tensor in found if id(tensor) not in given}
    return copy.deepcopy(result, new)


class _Conversion:
    """One run of `convert`; `inputs` went into the layers, and `rounded` are weights that were rounded already."""

    def __init__(
        self, program: GraphModule, inputs: dict[str, LayerInputs], rounded: dict[str, QuantizedWeight]
    ) -> None:
        self.program, self.graph, self.plan = program, program.graph, plan_of(program)
        self.inputs, self.rounded = inputs, rounded
        self.references = References(program)
        self.weights: dict[Any, tuple[QuantizedWeight, list[str | None]]] = {}
        self.dynamic: dict[tuple[Node, Numbers], Node] = {}
        self.bias: Node | None = None
        self.scales: dict[str, tuple[str, str]] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            watching = getattr(self.program, node.target, None) if node.op == "call_module" else None
            planned = self.plan.layers.get(node.name)
            if isinstance(watching, Observer):
                self._replace_observer(node, watching)
            elif planned is not None and planned.reason is None:
                self._replace_layer(node, planned)
        for group in dict.fromkeys(self.plan.groups.values()):
            if hasattr(self.program, group):
                del self.program._modules[group]
        for node in list(self.graph.nodes):
            self._drop_cast(node)
            self._drop_mode(node)

    def _drop_mode(self, node: Node) -> None:
        """A norm that was folded asks whether the program trains; with integers for weights, none does any more."""
        if node.target is not check_training or node.args[1] is not False:
            return
        mode = node.args[0]
        self.graph.erase_node(node)
        if isinstance(mode, Node) and mode.op == "get_attr" and not mode._users:
            self.graph.erase_node(mode)

    def _drop_cast(self, node: Node) -> None:
        """A sum is given the type of its first side; where both sides have the same, that is nothing."""
        if operation(node, self.program) != "type_as" or not isinstance(node.args[0], Node):
            return
        total = node.args[0]
        if not is_sum(total, self.program):
            return
        if all(self._is_float32(side) for side in total.args):
            node.replace_all_uses_with(total)
            self.graph.erase_node(node)

    def _is_float32(self, value: Any) -> bool:
        """Whether the conversion knows the type of a value: a result of a layer, or one that was quantized."""
        if value.target is dequantize_tensor:
            return not value.kwargs and len(value.args) == 3
        planned = self.plan.layers.get(value.name)
        return planned is not None and planned.reason is None and planned.dtype == "torch.float32"

    # ---- values ----

    def _replace_observer(self, node: Node, watching: Observer) -> None:
        value, dtype = node.args[0], watching.dtype
        if dtype is None and watching.has_seen:  # what it has seen came from a state dict
            dtype = next((item.dtype for item in self.program.parameters() if item.is_floating_point()), torch.float32)
        if dtype is not None and dtype.is_floating_point:
            group = node.target
            if group not in self.scales:
                scale, zero_point = watching.scale()
                stem = group.removeprefix("observer_")
                self.scales[group] = (
                    self._buffer(f"{stem}_scale", scale),
                    self._buffer(f"{stem}_zero_point", zero_point),
                )
            with self.graph.inserting_before(node):
                scale_node, zero_node = [self._fetch(path, node) for path in self.scales[group]]
                value = self._pair(node, value, scale_node, zero_node, watching.numbers, dtype)
        node.replace_all_uses_with(value)
        self.graph.erase_node(node)

    def _pair(
        self, place: Node, value: Node, scale: Node, zero: Node | None, numbers: Numbers, dtype: torch.dtype | None
    ) -> Node:
        """Quantize and dequantize a value, before `place`."""
        low, high = numbers.range
        steps = self.graph.call_function(quantize_tensor, (value, scale, zero, low, high, numbers.dtype))
        options = (dtype,) if dtype not in (None, torch.float32) else ()
        numbers_again = self.graph.call_function(dequantize_tensor, (steps, scale, zero, *options))
        inherit(steps, place, "conversion")
        inherit(numbers_again, place, "conversion")
        return numbers_again

    # ---- layers ----

    def _replace_layer(self, node: Node, planned: PlannedLayer) -> None:
        layer = read_layer(node, self.program)
        assert isinstance(layer, Layer)
        scheme = planned.scheme
        with self.graph.inserting_before(node):
            source = layer.source
            self.bias = self._corrected(node, layer, planned)
            if scheme.inputs is not None and scheme.dynamic:
                source = self._dynamic(node, source, scheme.inputs, layer.weight.dtype)
            weight = self._weight(node, layer, planned) if scheme.weights is not None else None
            self._rebuild(node, layer, source, weight, planned)

    def _dynamic(self, node: Node, source: Node, numbers: Numbers, dtype: torch.dtype) -> Node:
        key = (source, numbers)
        if key not in self.dynamic:
            low, high = numbers.range
            chosen = self.graph.call_function(
                scale_of_values,
                (source, low, high, numbers.symmetric),
                {"per_row": True} if numbers.per == "row" else {},
            )
            scale = self.graph.call_function(operator.getitem, (chosen, 0))
            zero = None
            if not (numbers.symmetric and numbers.signed):
                zero = self.graph.call_function(operator.getitem, (chosen, 1))
                inherit(zero, node)
            inherit(chosen, node)
            inherit(scale, node)
            self.dynamic[key] = self._pair(node, source, scale, zero, numbers, dtype)
        return self.dynamic[key]

    def _weight(self, node: Node, layer: Layer, planned: PlannedLayer) -> Node:
        numbers = planned.scheme.weights
        assert numbers is not None
        key = (id(layer.weight), numbers)
        if key not in self.weights:
            found = self._rounded(layer, planned, numbers)
            stem = planned.path.replace(".", "_") or node.name
            zero = None if found.zero_point is None else self._buffer(f"{stem}_weight_zero_point", found.zero_point)
            paths = [
                self._buffer(f"{stem}_weight", found.steps),
                self._buffer(f"{stem}_weight_scale", found.scale),
                zero,
            ]
            self.weights[key] = found, paths
            place = Stored(numbers, weight_axis(layer), paths[0] or "", paths[1] or "", zero)
            self.plan.stored[f"{planned.path}.weight"] = place
        found, names = self.weights[key]
        nodes = [None if path is None else self._fetch(path, node) for path in names]
        dtype = None if layer.weight.dtype == torch.float32 else layer.weight.dtype
        options = {"dtype": dtype, "axis": found.axis, "group": found.group}
        options = {name: value for name, value in options.items() if value is not None}
        result = self.graph.call_function(dequantize_tensor, tuple(nodes), options)
        inherit(result, node, "conversion")
        return result

    def _corrected(self, node: Node, layer: Layer, planned: PlannedLayer) -> Node | None:
        """A bias that makes up for what rounding does to the mean."""
        inputs = self.inputs.get(planned.name)
        if not self.plan.config.correct_bias or inputs is None or planned.scheme.weights is None:
            return None
        found = self._rounded(layer, planned, planned.scheme.weights)
        stem = planned.path.replace(".", "_") or node.name
        return self._fetch(self._buffer(f"{stem}_bias_corrected", corrected_bias(layer, found, inputs)), node)

    def _rounded(self, layer: Layer, planned: PlannedLayer, numbers: Numbers) -> QuantizedWeight:
        known = self.rounded.get(planned.name)
        return known or quantize_weight(layer.weight, numbers, weight_axis(layer), planned.path)

    def _rebuild(self, node: Node, layer: Layer, source: Node, weight: Node | None, planned: PlannedLayer) -> None:
        """The layer as a function of its input and the given weight, in another type where the scheme casts."""
        target, options = layer.as_function()
        parts = [
            source,
            self._as_it_is(node, layer, "weight") if weight is None else weight,
            self._as_it_is(node, layer, "bias") if self.bias is None else self.bias,
        ]
        if planned.scheme.cast is not None:
            dtype = getattr(torch, planned.scheme.cast)
            parts = [None if part is None else self._cast(node, part, dtype) for part in parts]
        path = node.target if node.op == "call_module" else None
        old = None if path is not None else bound(node, layer_arguments(node))["weight"]
        node.op, node.target = "call_function", target
        node._set_arguments(tuple(parts), options)
        node.meta["drawn_as"] = "integer"
        if planned.scheme.cast is not None:
            users = list(node._users)
            with self.graph.inserting_after(node):
                back = self._cast(node, node, layer.weight.dtype)
            for user in users:
                user.replace_input_with(node, back)
        self._drop(path, old)

    def _as_it_is(self, node: Node, layer: Layer, name: str) -> Node | None:
        """The weight or the bias of a layer, in floats."""
        if layer.module is None:
            return bound(node, layer_arguments(node)).get(name)
        value: Any = getattr(layer.module, name)
        if value is None:
            return None
        return self._fetch(self.references.put_new(f"{node.target.replace('.', '_')}_{name}", value), node)

    def _cast(self, node: Node, value: Node, dtype: torch.dtype) -> Node:
        result = self.graph.call_method("to", (value, dtype))
        inherit(result, node)
        return result

    # ---- attributes ----

    def _buffer(self, wish: str, value: torch.Tensor) -> str:
        return self.references.put_new(wish, value.detach(), persistent=True)

    def _fetch(self, path: str, like: Node) -> Node:
        node = self.graph.get_attr(path)
        inherit(node, like)
        self.references.change(path, 1)
        return node

    def _drop(self, path: str | None, weight: Any) -> None:
        """Take float weights that nothing needs any more out of the program."""
        if path is not None:
            self.references.change(path, -1)
            self.references.drop_unused(path)
        elif isinstance(weight, Node) and not weight._users:
            self.graph.erase_node(weight)
            self.references.change(weight.target, -1)
            self.references.drop_unused(weight.target)
