"""Making a program ready for one model as it is: its plain attributes become constants, its checks of them are made once, batch
norms are folded, and inputs are checked for what the code is made for. Kernels are chosen in `prepacking.py`.

What is fixed here has to be watched (`watch.py`): a frozen program does not see changes of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.choices import add_if
from torchgraft.ir.guards import check_inputs, check_result, check_value, guard, is_guard, refuse
from torchgraft.ir.input_kinds import class_name, misfit_of_tensor
from torchgraft.ir.modules import has_hooks, is_from_torch
from torchgraft.ir.node import Node, map_arg
from torchgraft.ir.verify import find_attribute
from torchgraft.passes.fold_constants import FoldConstants
from torchgraft.passes.functionalize import Functionalize
from torchgraft.passes.fuse_conv_norm import FuseConvNorm
from torchgraft.passes.remove_dead_code import RemoveDeadCode
from torchgraft.passes.remove_no_ops import RemoveNoOps

_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
# Modules of other libraries that hand on their very input in evaluation mode, which capture has to keep whole.
_HAND_ON = frozenset({"torchvision.ops.stochastic_depth.StochasticDepth", "timm.layers.drop.DropPath"})
# Largest constant that is computed once and kept.
_MOST_BYTES = 1 << 26


def frozen(program: GraphModule, inputs: dict[Node, Any]) -> GraphModule:
    """A copy of a program for a model as it is now; `inputs` are the example values of its placeholders."""
    body = GraphModule(program, copy.deepcopy(program.graph), type(program).__name__)
    _freeze_attributes(body)
    _drop_switched_off(body)
    _check_inputs(body, {node.name: value for node, value in inputs.items()})
    Functionalize().run(body)
    with torch.no_grad():
        FuseConvNorm().run(body)
    _drop_settled_guards(body)
    Functionalize().run(body)  # what was a norm's result, which may share anything, is now a layer's
    with torch.no_grad():
        FoldConstants(max_bytes=_MOST_BYTES, freeze=True).run(body)
    RemoveNoOps(inference=True).run(body)
    RemoveDeadCode().run(body)
    return body


def _freeze_attributes(body: GraphModule) -> None:
    """Plain attributes (a mode, a number) become constants in the calls that take them."""
    for node in list(body.graph.nodes):
        if node._op != "get_attr":
            continue
        value = find_attribute(body, node._target)[0]
        if type(value) in _PLAIN:
            _put_constant(node, value)
    for node in list(body.graph.nodes):
        if node._op != "call_function" or node._inputs:
            continue
        if is_guard(node._target) and not node._users:
            node._target(*node._args, **node._kwargs)
            body.graph.erase_node(node)
        elif getattr(node._target, "__module__", None) == "_operator" and not node._kwargs:
            value = node._target(*node._args)  # a choice by the mode, say
            if type(value) in _PLAIN:
                _put_constant(node, value)
    for node in body.graph.find_nodes(op="call_function", target=add_if):
        if node._args[0] is False and not node._users:
            body.graph.erase_node(node)


def _put_constant(node: Node, value: Any) -> None:
    for user in list(node._users):
        user.args, user.kwargs = (map_arg(part, _putting(node, value)) for part in (user.args, user.kwargs))
    node.graph.erase_node(node)


def _drop_switched_off(body: GraphModule) -> None:
    """Modules that do something in training mode alone, with the checks of what they return."""
    for node in list(body.graph.nodes):
        module = find_attribute(body, node._target)[0] if node._op == "call_module" else None
        if module is None or class_name(type(module)) not in _HAND_ON or module.training or has_hooks(module):
            continue
        if len(node._args) != 1 or node._kwargs or not isinstance(node._args[0], Node):
            continue
        for user in list(node._users):
            if user._target is check_result:
                body.graph.erase_node(user)
        node.replace_all_uses_with(node._args[0])
        body.graph.erase_node(node)


def _putting(old: Node, new: Any) -> Callable[[Node], Any]:
    return lambda item: new if item is old else item


# ---- what the inputs of lowered code have to look like ----


def _described(found: Any, expected: Any, where: str) -> Any:
    return [
        (f"the input '{name}'", f"{dtype} of {rank} dimensions on {device}") for name, dtype, rank, device in expected
    ]


@guard(_described)
def check_lowered(found: tuple[Any, ...], expected: tuple[Any, ...], where: str) -> None:
    """Raise unless inputs are tensors of the dtype, the number of dimensions and the device that code was made for."""
    for value, (name, dtype, rank, device) in zip(found, expected):  # noqa: B905  (asking for it takes as long as the loop)
        if type(value) is not torch.Tensor or value.__dict__:
            problem = misfit_of_tensor(value, name)
            if problem is not None:
                refuse(f"expected {problem[1]} for '{name}', got {problem[2]}", where, _AGAIN)
        if value.layout is not _STRIDED:
            refuse(f"the module was lowered for a dense tensor '{name}', and got {value.layout}", where, _AGAIN)
        # Asking for the type of a device makes a text, which takes as long as all the rest.
        elsewhere = not value.is_cpu if device == "cpu" else value.device.type != device
        if value.dtype is not dtype or value.ndim != rank or elsewhere:
            refuse(
                f"the module was lowered for '{name}' of {dtype} with {rank} dimensions on {device}, and got {value.dtype} "
                f"with {value.ndim} on {value.device}",
                where,
                _AGAIN,
            )


_STRIDED = torch.strided
_AGAIN = "give inputs like those it was lowered with, or lower the model again with inputs like these"


def _check_inputs(body: GraphModule, values: dict[str, Any]) -> None:
    placeholders = [node for node in body.graph.nodes if node._op == "placeholder"]
    tensors = [node for node in placeholders if isinstance(values.get(node._name), torch.Tensor)]
    if not tensors:
        return
    known = [(node, values[node._name]) for node in tensors]
    expected = tuple([(str(node._target), value.dtype, value.ndim, value.device.type) for node, value in known])
    # After the program's own checks, which say more: a number where a tensor should be.
    last = placeholders[-1]
    for node in list(body.graph.nodes)[len(placeholders) :]:
        if not is_guard(node._target) or not set(node._inputs) <= set(placeholders):
            break
        last = node
    with body.graph.inserting_after(last):
        body.graph.call_function(check_lowered, (tuple(tensors), expected, f"the inputs of {type(body).__name__}"))
    for node in body.graph.find_nodes(op="call_function", target=check_inputs):
        if set(node._args[1].values()) == {"tensor"} and set(node._inputs) <= set(tensors):
            body.graph.erase_node(node)  # which is checked now


def ranks_follow(body: GraphModule) -> bool:
    """Whether the ranks of all values follow from those of the inputs, which are checked: there is no container whose tensors
    are not looked at, no squeeze that makes ranks depend on sizes, and nothing that runs the model's Python."""
    nodes = list(body.graph.nodes)
    checked = {item for node in nodes if node._target is check_lowered for item in node._inputs}
    return not any(
        (node._op == "placeholder" and node not in checked and not all(is_guard(user._target) for user in node._users))
        or (node._op == "call_module" and not is_from_torch(find_attribute(body, node._target)[0]))
        or _may_drop_dimensions(node)
        for node in nodes
    )


def _may_drop_dimensions(node: Node) -> bool:
    name = getattr(node._target, "__name__", str(node._target))
    return "squeeze" in name and "unsqueeze" not in name


def _drop_settled_guards(body: GraphModule) -> None:
    """Checks of ranks that follow from those of the inputs."""
    if not ranks_follow(body):
        return
    for node in list(body.graph.nodes):
        if node._target is not check_value or not isinstance(node._args[0], Node):
            continue
        read = node._args[0]
        is_rank = (read._op == "call_method" and read._target in ("dim", "ndimension")) or (
            read._op == "call_function" and read._target is getattr and read._args[1] == "ndim"
        )
        if is_rank and not node._users:
            body.graph.erase_node(node)
            if not read._users:
                body.graph.erase_node(read)


# ---- the quickest spelling of a call ----


def _plain_calls() -> dict[Any, Any]:
    """Functions of torch.nn.functional that are Python around one call of torch: that call, with the same arguments."""

    def relu(x: Any, inplace: bool = False) -> Any:
        return (torch.relu_ if inplace else torch.relu), (x,)

    def silu(x: Any, inplace: bool = False) -> Any:
        return (torch._C._nn.silu_ if inplace else torch._C._nn.silu), (x,)

    def max_pool2d(
        x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:  # fmt: skip
        stride = [] if stride is None else stride
        return (
            (torch.max_pool2d, (x, kernel_size, stride, padding, dilation, ceil_mode)) if not return_indices else None
        )

    def layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        return torch.layer_norm, (x, shape, weight, bias, eps, False)

    def softmax(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        return (torch.softmax, (x, dim)) if dtype is None and dim is not None else None

    def embedding(
        x: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Any:  # fmt: skip
        return (torch.embedding, (weight, x, -1, False, False)) if max_norm is None else None

    def batch_norm(
        x: Any, mean: Any, variance: Any, weight: Any = None, bias: Any = None, training: Any = False,
        momentum: float = 0.1, eps: float = 1e-5,
    ) -> Any:  # fmt: skip
        return (
            (torch.batch_norm, (x, weight, bias, mean, variance, False, momentum, eps, False))
            if training is False
            else None
        )

    names = {
        "relu": relu, "silu": silu, "max_pool2d": max_pool2d, "layer_norm": layer_norm, "softmax": softmax,
        "embedding": embedding, "batch_norm": batch_norm,
    }  # fmt: skip
    return {getattr(functional, name): function for name, function in names.items()}


_CALLS = _plain_calls()
_NAMES = {"input": "x", "running_mean": "mean", "running_var": "variance", "normalized_shape": "shape"}


def spell_directly(body: GraphModule) -> None:
    """Call torch's own functions in the place of Python functions around them."""
    for node in body.graph.nodes:
        if node._op == "call_function" and getattr(node._target, "__module__", "").startswith("torch"):
            try:
                spelled = _CALLS.get(node._target)
                found = spelled and spelled(
                    *node._args, **{_NAMES.get(key, key): value for key, value in node._kwargs.items()}
                )
            except TypeError:  # given in another way than there is
                continue
            if found:
                node.target, (node.args, node.kwargs) = found[0], (found[1], {})


def keep_outputs_contiguous(body: GraphModule, shapes: Any) -> None:
    """Results that were contiguous stay so, although images are computed with their channels last."""
    output = next(node for node in reversed(body.graph.nodes) if node._op == "output")
    for node in output._inputs:
        known = shapes.get(node._name)
        if len(getattr(known, "shape", ())) > 1 and known.memory_format is torch.contiguous_format:
            with body.graph.inserting_before(output):
                same = body.graph.call_method("contiguous", (node,))
            output.args = map_arg(output.args, _putting(node, same))
