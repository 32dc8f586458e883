"""A joint program beside its model on the example: results, new values and gradients. What AOTAutograd shows a model is not quite
what it sees in eager, and may have led it elsewhere. The same for programs without gradients is in `self_check.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.bridge.model_call import ModelCall
from torchgraft.bridge.refusals import title
from torchgraft.bridge.self_check import can_be_tried, in_short, is_same, put_back
from torchgraft.capturing.example import copied_input
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BridgeError

Values = dict[tuple[str, str], torch.Tensor | None]


def check_joint(
    joint: GraphModule, call: ModelCall, modules: list[torch.nn.Module], inputs: Any, eager: Callable[..., Any]
) -> None:
    """Raise BridgeError if a joint program gives something else than the model on the example, which is left as it was."""
    if not all(can_be_tried(module, joint, inputs) for module in modules):
        return
    entries = [tuple(entry) for entry in joint.graph.output_node().meta["entries"]]
    with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        for module in modules:
            stack.enter_context(put_back(module))
        # Each for itself: a tensor that is given twice has two gradients.
        args, kwargs = pytree.tree_map(lambda leaf: copied_input(leaf, {}), inputs)
        before = [tensor.detach().clone() for tensor in call.row(args, kwargs)]
        try:
            expected = _expected(call, args, kwargs, eager)
        except Exception as error:
            raise BridgeError(
                f"cannot capture the backward of {title(modules[0])}: the model itself raises {type(error).__name__}: {error}; "
                "give inputs that it can be trained with"
            ) from error
    try:
        with torch.inference_mode(False), torch.enable_grad():
            found: dict[Any, Any] = {("update", name): value for name, value in zip(call.names, before, strict=True)}
            values = joint(*[value.clone() for value in before], *_tangents(joint))
            found.update(zip(entries, values, strict=True))
        problem = _difference(expected, found)
    except Exception as error:
        problem = f"it raises {type(error).__name__}: {error}"
    if problem is not None:
        raise BridgeError(
            f"cannot capture the backward of {title(modules[0])}: on the example the program does not do what the model does: "
            f"{problem}; the model looks at something that is different while torch traces it (the class of a tensor, an error "
            "that it recovers from, torch.compiler.is_compiling()), or keeps something that is no tensor of its own; capture it "
            "at level 'function', which runs the model as it is"
        )


def _expected(call: ModelCall, args: tuple[Any, ...], kwargs: dict[str, Any], eager: Callable[..., Any]) -> Values:
    row = call.row(args, kwargs)
    wanted = [(name, tensor) for name, tensor in zip(call.names, row, strict=True) if tensor.requires_grad]
    leaves = pytree.tree_leaves(eager(*args, **kwargs))
    results = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    expected: Values = {("result", str(index)): value.detach().clone() for index, value in enumerate(results)}
    differentiable = [value for value in results if value.requires_grad]
    ones = [torch.ones_like(value) for value in differentiable]
    gradients = torch.autograd.grad(differentiable, [tensor for _, tensor in wanted], ones, allow_unused=True)
    expected.update({("gradient", name): value for (name, _), value in zip(wanted, gradients, strict=True)})
    for name, tensor, now in zip(call.names, row, call.row(args, kwargs), strict=True):
        expected["update", name] = tensor.detach().clone()
        if now is not tensor:
            expected["assignment", name] = now.detach().clone()
    return expected


def _tangents(joint: GraphModule) -> list[torch.Tensor]:
    """Ones for the results, and nothing for the new values of inputs that the model writes."""
    values = []
    for node in joint.graph.find_nodes(op="placeholder"):
        if node.meta["origin_kind"] == "tangent":
            example = node.meta["val"]
            value = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
            values.append(value.fill_(0 if str(node.meta["origin_name"]).startswith("new ") else 1))
    return values


def _difference(expected: Values, found: dict[Any, torch.Tensor | None]) -> str | None:
    """The first thing in which the two differ, in words."""
    numbers = iter(range(len(found)))  # results come in their order
    for (kind, name), other in found.items():
        one = expected.get((kind, str(next(numbers)) if kind == "result" else name))
        if (one is None) != (other is None) and not _is_zero(one, other):
            return f"there is {'a' if one is None else 'no'} {kind} {name!r}"
        if one is not None and other is not None and not is_same(one.detach(), other.detach()):
            return f"the {kind} {name!r} is {in_short(other)} instead of {in_short(one)}"
    missing = [entry for entry, one in expected.items() if entry not in found and one is not None]
    names = [name for kind, name in missing if kind == "gradient"]
    return f"there is no gradient {names[0]!r}" if names else None


def _is_zero(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether what only one side has is a gradient of nothing but zeros, which is as good as none."""
    value = one if one is not None else other
    return value is not None and not bool(value.detach().count_nonzero())
