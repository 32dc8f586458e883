"""Modules and their attributes as source: the call that makes a module like another, except for the values of its tensors.
What is made of such calls, and what happens to modules without one, is the business of `folder.py`.
"""

from __future__ import annotations

import math
import warnings
from keyword import iskeyword
from typing import Any

import torch

from torchgraft.errors import GraphError

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_TENSORS_AND_CHILDREN = frozenset({"_parameters", "_buffers", "_modules", "training"})
# What `repr` of a module may mention. Nothing else can be called from there.
_SCOPE = {"__builtins__": {}, "torch": torch, "inf": math.inf, "nan": math.nan}


def constructor_text(module: torch.nn.Module) -> str | None:
    """The call that makes such a module, tried out; None where the module does not print itself as one.

    >>> constructor_text(torch.nn.Linear(2, 3)), constructor_text(torch.nn.LSTM(2, 3))
    ('torch.nn.Linear(in_features=2, out_features=3, bias=True)', None)
    """
    cls = type(module)
    if getattr(torch.nn, cls.__name__, None) is not cls:
        return None
    text = f"torch.nn.{module!r}"
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = eval(text, dict(_SCOPE))
    except Exception:  # a repr need not be Python
        return None
    return text if _is_like(module, made) else None


def is_container(module: torch.nn.Module) -> bool:
    """Whether a module is nothing but the submodules and tensors in it."""
    if type(module) is torch.nn.Module:
        return True
    return (
        type(module) in _CONTAINERS and is_bare(module) and module.__dict__.keys() == torch.nn.Module().__dict__.keys()
    )


def is_bare(module: torch.nn.Module) -> bool:
    """Whether no hooks are registered on a module."""
    tables = [name for name, value in torch.nn.Module().__dict__.items() if isinstance(value, dict)]
    return not any(module.__dict__.get(name) for name in tables if name not in _TENSORS_AND_CHILDREN)


def _is_like(module: torch.nn.Module, other: torch.nn.Module) -> bool:
    if type(module) is not type(other) or module.__dict__.keys() != other.__dict__.keys():
        return False
    if module._modules or other._modules:
        return False
    for key, value in module.__dict__.items():
        if key not in _TENSORS_AND_CHILDREN and not _is_same(value, other.__dict__[key]):
            return False
    for mine, its in ((module._parameters, other._parameters), (module._buffers, other._buffers)):
        if mine.keys() != its.keys() or not all(_is_same_kind(value, its[key]) for key, value in mine.items()):
            return False
    return True


def _is_same_kind(value: Any, other: Any) -> bool:
    if value is None or other is None:
        return value is other
    return type(value) is type(other) and not torch.nn.parameter.is_lazy(value) and value.shape == other.shape


def _is_same(value: Any, other: Any) -> bool:
    try:
        return value is other or (type(value) is type(other) and bool(value == other))
    except Exception:  # not everything can be compared
        return False


def _is_word(name: str) -> bool:
    return name.isidentifier() and not iskeyword(name) and not name.startswith("__")


def expression(path: str) -> str:
    """What stands at a dotted path below `self`.

    >>> expression("layers.0.weight")
    "getattr(self.layers, '0').weight"
    """
    text = "self"
    for name in path.split(".") if path else []:
        text = f"{text}.{name}" if _is_word(name) else f"getattr({text}, {name!r})"
    return text


def assignment(path: str, value: str) -> str:
    """The statement that puts a value at a dotted path below `self`."""
    holder, _, name = path.rpartition(".")
    if _is_word(name):
        return f"{expression(holder)}.{name} = {value}"
    return f"setattr({expression(holder)}, {name!r}, {value})"


def empty_tensor(tensor: torch.Tensor, path: str) -> str:
    """The call that makes a tensor of the same shape."""
    if torch.nn.parameter.is_lazy(tensor):
        raise GraphError(f"cannot write '{path}': it has no shape yet; run the model once on an example first")
    dtype = torch.float32 if tensor.is_quantized else tensor.dtype  # only the shape has to be right
    return f"torch.empty({tuple(tensor.shape)}, dtype={dtype})"
