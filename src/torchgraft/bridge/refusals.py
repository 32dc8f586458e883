"""The errors of captures that go through torch's own tracers: what would be lost, and torch's reasons in short.
What leads to them is found in `model_watch.py`, `levels.py` and `joint_capture.py`.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.errors import BridgeError
from torchgraft.ir.origin import SourceLine, line_of_error


def title(module: torch.nn.Module) -> str:
    """What messages call a model: its class, or the function that was made into a module.

    >>> title(torch.nn.ReLU())
    'ReLU'
    """
    function = vars(module).get("forward")
    return getattr(function, "__qualname__", None) or type(module).__name__


def refuse_attributes(module: torch.nn.Module, changed: list[str]) -> None:
    """Raise because a forward writes attributes."""
    raise BridgeError(
        f"cannot capture {title(module)}: its forward writes {', '.join(changed[:3])}"
        f"{f' and {len(changed) - 3} more' if len(changed) > 3 else ''}, and the program would not do that when it runs; "
        "keep the value in a registered buffer, or return it as an output. The model is left as it was"
    )


def refuse_inputs(module: torch.nn.Module, inputs: Any) -> None:
    """Raise if there are inputs that no ATen program takes."""
    for leaf in pytree.tree_leaves(inputs):
        is_array = hasattr(leaf, "__array__") and not isinstance(leaf, (torch.Tensor, int, float))
        if is_array or isinstance(leaf, (torch.nn.Module, torch.Generator)):
            raise BridgeError(
                f"cannot capture {title(module)} with a {type(leaf).__name__} as an input: an ATen program takes tensors, "
                "numbers and texts; make it an attribute of the model, or capture at level 'function'"
            )


def refuse_call(module: torch.nn.Module, what: str) -> None:
    """Raise because a model does something that is no operator."""
    raise BridgeError(
        f"cannot capture {title(module)}: it {what}, which an ATen program does not do; do it outside of the model, or capture "
        "at level 'function'"
    )


def refuse_random(module: torch.nn.Module, what: str) -> None:
    """Raise because a model does something to random numbers that operators do not say."""
    raise BridgeError(
        f"cannot capture {title(module)}: it {what}, which an ATen program does not do; draw with the state that is there, seed "
        "outside of the model, or capture at level 'function'"
    )


def refuse_hidden_parameter(module: torch.nn.Module) -> None:
    """Raise because a tensor that wants a gradient is no parameter of the model."""
    raise BridgeError(
        f"cannot capture {title(module)}: it uses a tensor that requires a gradient and is neither an input nor a parameter of a "
        "module that it mentions, and the program would take it for a constant; make it a parameter of the model, give it as an "
        "input, or capture under torch.no_grad()"
    )


def refuse_dropout(module: torch.nn.Module, name: str) -> None:
    """Raise because torch would decompose a recurrent layer into operators without its dropout."""
    raise BridgeError(
        f"cannot capture {title(module)} in training mode: torch decomposes '{name}' with dropout between its layers "
        "into operators that drop nothing; make it of layers with nn.Dropout between them, capture it in evaluation mode, "
        "or take level 'aten', where it stays one operator"
    )


def refuse_custom_gradient(module: torch.nn.Module, name: str) -> None:
    """Raise because gradients go through a torch.autograd.Function."""
    if name == "BackwardHookFunction":
        refuse_gradient(module, "has a backward hook on a module", None)
    refuse_gradient(module, f"uses the torch.autograd.Function {name}, which has a backward of its own", None)


def refuse_gradient(module: torch.nn.Module, what: str, line: SourceLine | None) -> None:
    """Raise because a model computes gradients in another way than from its operators."""
    raise BridgeError(
        f"cannot export {title(module)} with its gradients: it {what}{f' at {line}' if line else ''}, and an ATen "
        "program computes gradients from its operators alone; capture it under torch.no_grad() if you need none, or take "
        "capture_training() or level 'function', which keep it"
    )


_NOISE = re.compile(
    r"For more (information|debugging help),.*|Caused by:.*|The following call raised this error.*|Suggested fixes:[\s\S]*|"
    r"The error above occurred[\s\S]*"
)


def export_error(module: torch.nn.Module, error: Exception) -> BridgeError:
    """The error to raise instead of torch's: the reason in short, and the user's line."""
    line, needs_value = line_of_error(error), _needs_a_value(error)
    remedy = "" if needs_value else "give inputs that it takes, "
    return BridgeError(
        f"cannot capture {title(module)}: {_NEEDS_VALUE if needs_value else _reason(error)}{f'; at {line}' if line else ''}; "
        f"{remedy}rewrite it with tensor operations (torch.where, torch.cond), or capture at level 'function', which runs the "
        "model as it is"
    )


_NEEDS_VALUE = (
    "Python needs the value of a tensor to go on (bool(), .item(), a branch), which is not known while exporting"
)


def _needs_a_value(error: Exception) -> bool:
    return "_local_scalar_dense" in str(error) or "data-dependent" in str(error)


def _reason(error: Exception) -> str:
    text = " ".join((_NOISE.sub("", str(error)).strip(" .\n") or type(error).__name__).split())
    return text if len(text) <= 300 else f"{text[:300].rsplit(' ', 1)[0]} ..."
