"""Which `--input` to add: what a model's forward takes, and a guess at its sizes from the first layer that has any.
What the texts of --input mean is in `models.py`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torchgraft.errors import GraftError

if TYPE_CHECKING:
    from torch import nn

_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def advice(model: nn.Module, given: int = 0, named: tuple[str, ...] = ()) -> str:
    """What to add to the command line, after `given` inputs by place and those `named`.

    >>> import torch
    >>> advice(torch.nn.Linear(16, 4))
    'add --input input:1x16 (its sizes are a guess)'
    >>> advice(torch.nn.Bilinear(2, 3, 4), given=1)
    'add --input input2:SIZES, such as input2:2x16 or input2:2x16:int64:1000'
    """
    missing = [name for name in _required(model)[given:] if name not in named]
    if not missing:
        return "give them with --input, such as --input 2x16 or --input NAME:2x16:int64:1000"
    guess = _guess(model) if not given and not named else ""
    if guess and len(missing) == 1:
        return f"add --input {missing[0]}:{guess} (its sizes are a guess)"
    options = " ".join(f"--input {name}:SIZES" for name in missing)
    return f"add {options}, such as {missing[0]}:2x16 or {missing[0]}:2x16:int64:1000"


def check_inputs_fit(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if forward cannot be called with so many inputs, or with these names."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(map(str, inspect.signature(model.forward).parameters.values()))
        what = f"the inputs do not fit: {error}"
        fix = f"\n{advice(model, len(args), tuple(kwargs))}" if "missing" in str(error) else ""
        raise GraftError(f"{what}\n{type(model).__name__}.forward takes ({takes}){fix}") from error
    except ValueError:  # forward is written in C, and says nothing
        return


def _required(model: nn.Module) -> list[str]:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [item.name for item in parameters if item.kind in _KINDS and item.default is item.empty]


def _guess(model: nn.Module) -> str:
    """Sizes that the first layer takes; nothing where it is not known."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Linear):
            return f"1x{module.in_features}"
        if isinstance(module, nn.Embedding):
            return f"1x16:int64:{module.num_embeddings}"
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            sides = {1: (256,), 2: (224, 224), 3: (16, 112, 112)}[len(module.kernel_size)]
            return "x".join(map(str, (1, module.in_channels, *sides)))
    return ""
