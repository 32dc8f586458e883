"""Corrections that look at data: biases that make up for what rounding the weights did to the mean, and rounding that is learned
layer by layer. Both are switched on by the configuration; `calibrate` collects what they need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.codegen.calling import placeholder_values
from torchgraft.interpreter import Interpreter
from torchgraft.ir.node import Node
from torchgraft.passes.layer_calls import Layer, read_layer
from torchgraft.quantize.operators import dequantize_tensor
from torchgraft.quantize.plan import Plan, weight_axis
from torchgraft.quantize.weights import QuantizedWeight, spread, weight_scale

if TYPE_CHECKING:
    from torchgraft.codegen.graph_module import GraphModule

_MOST_VALUES = 1 << 20
_STEPS, _RATE = 400, 5e-2


@dataclass
class LayerInputs:
    """What went into a layer: the mean of each channel, and some of the values."""

    sums: torch.Tensor
    count: int
    samples: list[torch.Tensor]

    @property
    def mean(self) -> torch.Tensor:
        """The mean of each channel."""
        return self.sums / max(self.count, 1)

    def add(self, other: LayerInputs) -> None:
        """Take in another batch."""
        self.sums, self.count = self.sums + other.sums, self.count + other.count
        if sum(item.numel() for item in self.samples) < _MOST_VALUES:
            self.samples += other.samples


class Collector(Interpreter):
    """Runs a prepared program and keeps what goes into its layers."""

    def __init__(self, program: GraphModule, plan: Plan) -> None:
        super().__init__(program)
        self.program, self.plan = program, plan

    def collect(self, *args: Any, **kwargs: Any) -> None:
        """Run the program on a batch."""
        self.run(initial_env=dict(placeholder_values(self.program, args, kwargs)))

    def run_node(self, n: Node) -> Any:
        """Run a node, and note its input if it is a layer of the plan."""
        planned = self.plan.layers.get(n.name)
        if planned is not None and planned.reason is None:
            layer = read_layer(n, self.module)
            if isinstance(layer, Layer):
                self._note(n.name, layer, self.env[layer.source])
        return super().run_node(n)

    def _note(self, name: str, layer: Layer, values: torch.Tensor) -> None:
        floats = values.detach().float()
        channels = floats.movedim(1, -1) if layer.dimensions and floats.dim() > 2 else floats
        rows = channels.reshape(-1, channels.shape[-1])
        noted = LayerInputs(rows.sum(0), rows.shape[0], [values.detach()])
        if name in self.plan.inputs:
            self.plan.inputs[name].add(noted)
        else:
            self.plan.inputs[name] = noted


def corrected_bias(layer: Layer, weight: QuantizedWeight, inputs: LayerInputs) -> torch.Tensor:
    """The bias with which a layer of rounded weights gives the mean that it gave before."""
    lost = layer.weight.detach().float() - weight.values()
    mean = inputs.mean.to(lost.device)
    if layer.dimensions:
        lost = lost.flatten(2).sum(2)
    if layer.transposed:
        lost = lost.transpose(0, 1)
    if layer.groups > 1:
        parts = lost.reshape(layer.groups, -1, lost.shape[1])
        moved = torch.einsum("goi,gi->go", parts, mean.reshape(layer.groups, -1)).reshape(-1)
    else:
        moved = lost @ mean
    bias = torch.zeros_like(moved) if layer.bias is None else layer.bias.detach().float()
    return (bias + moved).to(layer.weight.dtype)


def learn_rounding(program: GraphModule, plan: Plan) -> dict[str, QuantizedWeight]:
    """Learn for each weight whether to round it up or down, so that the results of its layer on what `calibrate` collected stay
    as they are."""
    rounded: dict[str, QuantizedWeight] = {}
    nodes = {node.name: node for node in program.graph.nodes}
    for name, inputs in plan.inputs.items():
        layer = read_layer(nodes[name], program)
        numbers = plan.layers[name].scheme.weights
        if isinstance(layer, Layer) and numbers is not None and numbers.kind == "int":
            rounded[name] = _learned(layer, inputs, numbers)
    return rounded


def _learned(layer: Layer, inputs: LayerInputs, numbers: Any) -> QuantizedWeight:
    axis, (low, high) = weight_axis(layer), numbers.range
    weight = layer.weight.detach().float()
    scale, zero_point = weight_scale(weight, numbers, axis)
    axis, group = spread(numbers, axis)
    unit = dequantize_tensor(torch.ones_like(weight), scale, None, axis=axis, group=group)
    zero: Any = 0.0
    if zero_point is not None:
        zero = -dequantize_tensor(torch.zeros_like(weight), scale, zero_point, axis=axis, group=group) / unit
    down = torch.floor(weight / unit)
    rest = weight / unit - down
    # A rectified sigmoid that starts where rounding would change nothing.
    free = torch.logit(((rest + 0.1) / 1.2).clamp(1e-4, 1 - 1e-4)).requires_grad_(True)
    optimizer = torch.optim.Adam([free], _RATE)
    samples = inputs.samples
    with torch.no_grad():
        wanted = [_result(layer, sample.float(), weight) for sample in samples]
        size = sum(float(item.square().mean()) for item in wanted) / len(wanted)
    with torch.enable_grad():
        for step in range(_STEPS):
            up = (torch.sigmoid(free) * 1.2 - 0.1).clamp(0, 1)
            candidate = (torch.clamp(down + up + zero, low, high) - zero) * unit
            place = step % len(samples)
            error = (_result(layer, samples[place].float(), candidate) - wanted[place]).square().mean() / max(
                size, 1e-12
            )
            # Towards the end each weight has to decide.
            sharpness = 20 - 18 * step / _STEPS
            decided = 1 - (2 * up - 1).abs().pow(sharpness)
            loss = error + (0.1 * decided.mean() if step > _STEPS // 5 else 0.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    up = ((torch.sigmoid(free.detach()) * 1.2 - 0.1) >= 0.5).float()
    learned = torch.clamp(down + up + zero, low, high).round().to(numbers.dtype)
    nearest = torch.clamp(torch.round(weight / unit) + zero, low, high).round().to(numbers.dtype)
    chosen = min((learned, nearest), key=lambda item: _error(layer, samples, wanted, (item.float() - zero) * unit))
    return QuantizedWeight(chosen, scale, zero_point, axis, group)


def _error(layer: Layer, samples: Any, wanted: Any, weight: torch.Tensor) -> float:
    with torch.no_grad():
        pairs = zip(samples, wanted, strict=True)
        return sum([float((_result(layer, sample.float(), weight) - old).square().mean()) for sample, old in pairs])


def _result(layer: Layer, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A layer, without its bias, on other weights."""
    function, options = layer.as_function()
    return function(values, weight, None, **options)
