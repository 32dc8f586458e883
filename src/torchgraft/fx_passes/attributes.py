"""torch.fx's tools for attributes of modules by dotted path, for graph modules that are put together by hand.
They are names over `codegen/attributes.py`, reached as `torchgraft.graph_module._copy_attr` and the like.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchgraft.codegen.attributes import Adoption, assign_attribute
from torchgraft.ir.verify import find_attribute

USER_PRESERVED_ATTRIBUTES_KEY = "_user_preserved_attributes"


class CodeOnlyModule(torch.nn.Module):
    """A module that is made of its attributes alone, as copies of graph modules begin."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__()
        self.__dict__ = body


def copy_attr(from_module: torch.nn.Module, to_module: torch.nn.Module, target: str) -> None:
    """Let one module have what another has at a path, with empty modules where the way is not there yet."""
    Adoption(from_module, to_module).adopt(target)


def assign_attr(from_obj: Any, to_module: torch.nn.Module, target: str) -> None:
    """Let a module have an object at a path."""
    assign_attribute(to_module, target, from_obj)


def has_attr(model: torch.nn.Module, attr_name: str) -> bool:
    """Whether there is something at a path."""
    return find_attribute(model, attr_name)[1] is None


def get_attr(model: torch.nn.Module, attr_name: str) -> Any:
    """What is at a path."""
    return functools.reduce(getattr, attr_name.split("."), model)


def del_attr(model: torch.nn.Module, attr_name: str) -> None:
    """Remove what is at a path."""
    prefix, _, name = attr_name.rpartition(".")
    holder = get_attr(model, prefix) if prefix else model
    delattr(holder, name)
