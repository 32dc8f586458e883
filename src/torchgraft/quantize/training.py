"""`prepare_qat`: a program that trains with its weights and values rounded as they will be, so that it learns to live with it.
Gradients pass straight through the rounding (`fake_quantize` in `operators.py`); `convert` makes integers of the result.

A batch norm after a layer is folded into its weights before they are rounded, and taken out again before it normalises by the
batch: so what is rounded in training is exactly what will be rounded in the end.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from torchgraft.capturing.program import capture
from torchgraft.codegen.calling import example_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import QuantizeError
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute
from torchgraft.passes.functionalize import Functionalize
from torchgraft.passes.fuse_conv_norm import scaled_weight, with_weights
from torchgraft.passes.layer_calls import Layer, function_of, is_norm, read_layer
from torchgraft.quantize.config import as_config
from torchgraft.quantize.observers import MovingAverage
from torchgraft.quantize.operations import real_users
from torchgraft.quantize.operators import fake_quantize, scale_of_values
from torchgraft.quantize.plan import KEY, Plan, make_plan, weight_axis
from torchgraft.quantize.preparing import ConfigLike, Model, check_anything, clean, observe
from torchgraft.quantize.schemes import Numbers, Scheme
from torchgraft.quantize.weights import spread, weight_scale

_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
_SMALLEST_FACTOR = 1e-5


def prepare_qat(
    model: Model,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    config: ConfigLike = None,
    backend: str = "native",
    freeze_after: int | None = None,
) -> GraphModule:
    """A program with parameters of its own that trains as if it computed with integers; `convert` it when it has learned.

    After `freeze_after` steps of training, the statistics of batch norms and the ranges of values stay as they are then.
    `.train()` and `.eval()` do what they always do.

    >>> import torchgraft
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> program = prepare_qat(model, torch.randn(2, 4))
    >>> program(torch.randn(16, 4)).sum().backward()
    >>> integers = torchgraft.quantize.convert(program.eval())
    """
    settings = as_config(config, backend)
    if isinstance(model, GraphModule):
        program = copy.deepcopy(model)
    else:
        values, keywords = example_inputs(args, kwargs)
        program = copy.deepcopy(capture(model, values, keywords, level="module"))
    Functionalize().run(program)
    plan = _plan_in_evaluation(program, settings, backend)
    _join_norms(program, plan, freeze_after)
    _insert(program, plan, freeze_after)
    program.meta[KEY] = plan
    program.graph.lint()
    return program.train()


def _plan_in_evaluation(program: GraphModule, settings: Any, backend: str) -> Plan:
    """What would become of the program if it were not trained any more: norms are folded there, and dropouts are gone."""
    twin = copy.deepcopy(program).eval()
    clean(twin)
    plan = make_plan(twin, settings, backend)
    check_anything(plan, twin)
    left = [node for node in program.graph.nodes if node.op == "call_function" and is_norm(node, program)]
    if left:
        raise QuantizeError(
            f"cannot train '{left[0].name}': batch norms are folded while training where they are modules\n"
            'capture the model with level="module" or symbolic_trace(), or give the model itself'
        )
    return plan


class TrainedLayer(torch.nn.Module):
    """A layer, and the batch norm after it where there is one, with weights rounded as they will be."""

    def __init__(
        self, layer: Any, norm: Any, scheme: Scheme, axis: int | None, freeze_after: int | None, name: str = ""
    ) -> None:
        super().__init__()
        self.name = name
        self.layer, self.norm, self.numbers, self.axis = layer, norm, scheme.weights, axis
        # Inputs with a scale known from data have observers of their own.
        self.inputs = scheme.inputs if scheme.dynamic else None
        self.freeze_after = freeze_after
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.steps: torch.Tensor

    @property
    def is_frozen(self) -> bool:
        """Whether statistics stay as they are."""
        return self.freeze_after is not None and int(self.steps) >= self.freeze_after

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The layer with rounded weights."""
        if self.inputs is not None and self.inputs.kind == "int":
            limits = self.inputs.range
            scales = scale_of_values(values.detach(), *limits, self.inputs.symmetric, self.inputs.per == "row")
            values = fake_quantize(values, *scales, *limits)
        if self.norm is not None and values.dim() != self.layer.weight.dim():
            raise QuantizeError(
                f"cannot fold the batch norm after '{self.name}' into it: it is given {values.dim()} dimensions, and the norm "
                f"would normalise another one than that of its outputs\n"
                f"keep the layer in floats, config=Config(modules={{{self.name!r}: 'float'}})"
            )
        normalises_batch = self.norm is not None and self.training and not self.is_frozen
        if self.training:
            self.steps += 1
        if not normalises_batch:
            weight, bias = self.folded()
            return self._call(values, self._rounded(weight), bias)
        factor = self._factor()
        result = self._call(values, self._rounded(self._times(factor)), None)
        result = result / self._over_channels(factor, result)
        if self.layer.bias is not None:
            result = result + self._over_channels(self.layer.bias, result)
        return self.norm(result)

    def folded(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias with the norm's running statistics in them."""
        if self.norm is None:
            return self.layer.weight, self.layer.bias
        factor = self._factor()
        bias = 0.0 if self.layer.bias is None else self.layer.bias
        shift = (bias - self.norm.running_mean) * factor
        return self._times(factor), shift if self.norm.bias is None else shift + self.norm.bias

    def settled(self) -> torch.nn.Module:
        """The plain layer that this one has become."""
        weight, bias = [
            None if item is None else torch.nn.Parameter(item.detach().clone(), requires_grad=False)
            for item in self.folded()
        ]
        return with_weights(self.layer, weight, bias).eval()

    def _factor(self) -> torch.Tensor:
        factor = torch.rsqrt(self.norm.running_var + self.norm.eps)
        if self.norm.weight is not None:
            factor = factor * self.norm.weight
        # A channel that is all but switched off must not be divided by nothing.
        tiny = factor.abs() < _SMALLEST_FACTOR
        return torch.where(tiny, torch.where(factor < 0, -_SMALLEST_FACTOR, _SMALLEST_FACTOR).to(factor.dtype), factor)

    def _times(self, factor: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        transposed = isinstance(layer, torch.nn.modules.conv._ConvTransposeNd)
        return scaled_weight(layer.weight, factor, transposed, getattr(layer, "groups", 1))

    def _over_channels(self, values: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        if isinstance(self.layer, torch.nn.Linear) and result.dim() == 2:
            return values
        return values.reshape(-1, *[1] * (result.dim() - 2))

    def _rounded(self, weight: torch.Tensor) -> torch.Tensor:
        if self.numbers is None:
            return weight
        scale, zero_point = weight_scale(weight, self.numbers, self.axis)
        return fake_quantize(weight, scale, zero_point, *self.numbers.range, *spread(self.numbers, self.axis))

    def _call(self, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        function, options = function_of(self.layer)
        return function(values, weight, bias, **options)


class TrainingObserver(MovingAverage):
    """Follows the range of a value while it trains, and rounds it."""

    def __init__(self, numbers: Numbers, where: str = "a value", freeze_after: int | None = None) -> None:
        super().__init__(numbers, where)
        self.freeze_after = freeze_after
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.steps: torch.Tensor

    def forward(self, values: Any) -> Any:
        """Watch, and round."""
        if not isinstance(values, torch.Tensor) or not values.is_floating_point():
            return super().forward(values)
        if self.training and (self.freeze_after is None or int(self.steps) < self.freeze_after):
            super().forward(values)
            self.steps += 1
        self.dtype = values.dtype
        if not self.has_seen:
            return values
        return fake_quantize(values, *self.scale(), *self.numbers.range)


def _join_norms(program: GraphModule, plan: Plan, freeze_after: int | None) -> None:
    """Put a trained layer in the place of each layer of the plan and of the norm after it."""
    nodes = {node.name: node for node in program.graph.nodes}
    for name, planned in plan.layers.items():
        if planned.reason is not None:
            continue
        node = nodes[name]
        layer = read_layer(node, program)
        if not isinstance(layer, Layer) or layer.module is None:
            raise QuantizeError(
                f"cannot train '{name}': only layers that are modules are trained\n"
                'capture the model with level="module" or symbolic_trace(), or give the model itself'
            )
        norm_node = _norm_after(node, program)
        norm = None if norm_node is None else find_attribute(program, norm_node.target)[0]
        trained = TrainedLayer(layer.module, norm, planned.scheme, weight_axis(layer), freeze_after, planned.path)
        path = f"trained_{name}"
        program.add_module(path, trained)
        node.target = path
        if norm_node is not None:
            norm_node.replace_all_uses_with(node)
            program.graph.erase_node(norm_node)
    program.delete_all_unused_submodules()


def _norm_after(node: Node, program: GraphModule) -> Node | None:
    users = real_users(node)
    if len(users) != 1 or users[0].op != "call_module" or users[0].args != (node,):
        return None
    norm = find_attribute(program, users[0].target)[0]
    layer, dimensions = read_layer(node, program), users[0].meta.get("dimensions")
    if dimensions is not None and isinstance(layer, Layer) and dimensions != layer.dimensions + 2:
        return None  # it does not go by the layer's channels
    return users[0] if type(norm) in _NORMS and norm.running_mean is not None else None


def _insert(program: GraphModule, plan: Plan, freeze_after: int | None) -> None:
    nodes = {node.name: node for node in program.graph.nodes}
    for name, group in plan.groups.items():
        value = nodes[name]
        if not hasattr(program, group):
            program.add_module(group, TrainingObserver(plan.numbers[group], f"'{name}'", freeze_after))
        wanted = set(plan.consumers[name])
        if name in plan.layers and plan.layers[name].reason is not None:
            # Where the layer is trained in floats, its norm is not a part of it.
            value = _norm_after(value, program) or value
        users = [user for user in value._users if user.name in wanted or _is_dropout(user, program)]
        if users:
            observe(program, group, value, users)


def _is_dropout(node: Node, program: GraphModule) -> bool:
    if node.op != "call_module":
        return getattr(node.target, "__name__", "") == "dropout"
    return isinstance(find_attribute(program, node.target)[0], torch.nn.modules.dropout._DropoutNd)


def settle(program: GraphModule) -> None:
    """Make plain layers of trained ones, in a program that may be edited."""
    for name, module in list(program.named_children()):
        if isinstance(module, TrainedLayer):
            program.add_module(name, module.settled())
