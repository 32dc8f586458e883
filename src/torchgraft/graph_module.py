"""Alias: the names that code written for torch.fx imports from `torch.fx.graph_module`; they live in `torchgraft.codegen`."""

import functools
from typing import Any

import torch

from torchgraft.codegen.attributes import Adoption, assign_attribute
from torchgraft.codegen.graph_module import GraphModule as GraphModule
from torchgraft.fx_passes.semi_private import WrappedCall as _WrappedCall  # noqa: F401
from torchgraft.fx_passes.semi_private import exec_with_source as _exec_with_source  # noqa: F401
from torchgraft.fx_passes.semi_private import format_import_statement as _format_import_statement  # noqa: F401
from torchgraft.fx_passes.semi_private import forward_from_src as _forward_from_src  # noqa: F401
from torchgraft.ir.graph import Graph as Graph
from torchgraft.ir.verify import find_attribute

_USER_PRESERVED_ATTRIBUTES_KEY = "_user_preserved_attributes"


class _CodeOnlyModule(torch.nn.Module):
    """A module that is made of its attributes alone, as copies of graph modules begin."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__()
        self.__dict__ = body


def _copy_attr(from_module: torch.nn.Module, to_module: torch.nn.Module, target: str) -> None:
    Adoption(from_module, to_module).adopt(target)


def _assign_attr(from_obj: Any, to_module: torch.nn.Module, target: str) -> None:
    assign_attribute(to_module, target, from_obj)


def _has_attr(model: torch.nn.Module, attr_name: str) -> bool:
    return find_attribute(model, attr_name)[1] is None


def _get_attr(model: torch.nn.Module, attr_name: str) -> Any:
    return functools.reduce(getattr, attr_name.split("."), model)


def _del_attr(model: torch.nn.Module, attr_name: str) -> None:
    prefix, _, name = attr_name.rpartition(".")
    delattr(_get_attr(model, prefix) if prefix else model, name)
