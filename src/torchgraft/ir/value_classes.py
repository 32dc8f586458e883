"""Of what class the value of a node is, as far as its call, its annotations and its metadata tell: a tensor, a number, a tuple.
Shapes and element types are facts of `analysis/`.
"""

from __future__ import annotations

import functools
import operator
import typing
from types import BuiltinFunctionType
from typing import Any

import torch

from torchgraft.ir.node import Node

_INTEGERS = frozenset({"dim", "ndimension", "numel", "nelement", "element_size", "ndim", "itemsize", "nbytes"})
_TUPLES = frozenset({"split", "chunk", "unbind", "tensor_split"})
_FLAGS = frozenset({"requires_grad", "is_leaf", "is_cuda", "is_contiguous", "is_floating_point", "is_complex"})
_BY_NAME: dict[str, type] = {
    "shape": torch.Size,
    "dtype": torch.dtype,
    "device": torch.device,
    "tolist": list,
    **dict.fromkeys((*_INTEGERS, "get_device", "storage_offset"), int),
    **dict.fromkeys(_FLAGS, bool),
    **dict.fromkeys(_TUPLES, tuple),
}
_MAY_BE_TENSORS = (torch.Tensor, "tensor", "any")
# What may be more than one thing, and is no tensor.
_OTHER_METHODS = frozenset({"size", "item", "stride", "data_ptr", "type", "__len__", "numpy", "get"})
_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "grad", "real", "imag", "values", "indices"})
_INTEGER_ARITHMETIC = frozenset(
    {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.pow}
)
_ANNOTATIONS = {
    kind.__name__.lower(): kind for kind in (torch.Tensor, int, float, bool, str, complex, list, tuple, dict, set)
}


def likely_class(node: Node) -> type:
    """What the value of a node most likely is: a tensor, where nothing else is known.

    >>> from torchgraft.ir.graph import Graph
    >>> graph = Graph()
    >>> x = graph.placeholder("x")
    >>> likely_class(x), likely_class(graph.call_method("size", (x, 0)))
    (<class 'torch.Tensor'>, <class 'int'>)
    """
    if node._op == "placeholder":
        return _class_of_input(node)
    if node._op == "call_method":
        if node._target == "size":
            return int if len(node._args) > 1 or node._kwargs else torch.Size
        return _BY_NAME.get(str(node._target), torch.Tensor)
    if node._op != "call_function" or not node._args:
        return torch.Tensor
    if node._target is getattr:
        return _BY_NAME.get(str(node._args[1]), torch.Tensor)
    if node._target is len:
        return int
    source = node._args[0]
    if node._target is operator.getitem and isinstance(source, Node) and likely_class(source) is torch.Size:
        return torch.Size if isinstance(node._args[1], slice) else int
    if node._target in _INTEGER_ARITHMETIC and all(_is_integer(item) for item in node._args):
        return int
    return torch.Tensor


def _class_of_input(node: Node) -> type:
    """By its annotation, else by its default."""
    known = _plain_class(node.type)
    if known is None and node._args and type(node._args[0]) in _ANNOTATIONS.values():
        known = type(node._args[0])
    return known or torch.Tensor


def _plain_class(annotation: Any) -> type | None:
    """The one class that an annotation names, or None where it names none or several."""
    if isinstance(annotation, str):
        name = annotation.partition("[")[0].rpartition(".")[2]
        return None if "|" in annotation else _ANNOTATIONS.get(name.lower())
    kind = typing.get_origin(annotation) or annotation
    return kind if kind in _ANNOTATIONS.values() else None


def is_plainly_typed(annotation: Any) -> bool:
    """Whether an annotation leaves no doubt about the class of an argument: `torch.Tensor` does, `Optional[torch.Tensor]` not.

    >>> is_plainly_typed(torch.Tensor), is_plainly_typed("list[int]"), is_plainly_typed("torch.Tensor | None")
    (True, True, False)
    """
    return _plain_class(annotation) is not None


def _is_integer(value: Any) -> bool:
    return likely_class(value) is int if isinstance(value, Node) else type(value) is int


def is_surely_of_class(node: Node, root: torch.nn.Module | None = None) -> bool:
    """Whether the value of a node cannot be anything else than it most likely is, so that nobody needs to check it.
    `root` is the model, where modules may be looked up.
    """
    if node._op == "placeholder":
        return is_plainly_typed(node.type) and node._args != (None,)
    if node._op == "get_attr":
        return root is not None and isinstance(_attribute(root, str(node._target)), torch.Tensor)
    if node._op == "call_module":
        return root is not None and _layer_returns_tensor(root, str(node._target))
    if node._op == "call_method":
        if node._target in _BY_NAME or node._target == "size":
            return True
        return _is_surely_tensor(node._args[0], root) and _operators_return_tensor(str(node._target))
    if node._op != "call_function":
        return False
    if node._target is operator.getitem or getattr(node._target, "__module__", "") == "_operator":
        return any(_is_surely_tensor(item, root) for item in node._args[: 1 if node._target is operator.getitem else 2])
    return node._target in (getattr, len) or _returns_one_tensor(node._target)


def _is_surely_tensor(value: Any, root: torch.nn.Module | None) -> bool:
    return isinstance(value, Node) and likely_class(value) is torch.Tensor and is_surely_of_class(value, root)


def _attribute(root: torch.nn.Module, path: str) -> Any:
    """What a module has at a path, without asking it: while a model is traced the answer would be a proxy."""
    owner: Any = root
    for name in path.split(".") if path else ():
        tables = (
            [vars(owner).get(table, {}) for table in ("_modules", "_parameters", "_buffers")]
            if owner is not None
            else []
        )
        owner = next((table[name] for table in [*tables, getattr(owner, "__dict__", {})] if name in table), None)
    return owner


def _layer_returns_tensor(root: torch.nn.Module, path: str) -> bool:
    """Whether a layer of torch.nn always returns one tensor: it is annotated so, except for pooling."""
    layer = _attribute(root, path)
    if not type(layer).__module__.startswith("torch.nn.modules."):
        return False
    is_pooling = type(layer).__module__.endswith(".pooling") and getattr(layer, "return_indices", True) is False
    return is_pooling or type(layer).forward.__annotations__.get("return") is torch.Tensor


@functools.cache
def _returns_one_tensor(target: Any) -> bool:
    """Whether a function of torch's always returns one tensor, by its annotation or the schemas of the operators of its name."""
    name = getattr(target, "__name__", "")
    if isinstance(target, torch._ops.OpOverload):
        return _return_tensor([target._schema])
    if getattr(target, "__module__", None) == "torch.nn.functional":
        return getattr(target, "__annotations__", {}).get("return") is torch.Tensor
    is_operator = isinstance(target, BuiltinFunctionType) and getattr(torch, name, None) is target
    return is_operator and _operators_return_tensor(name)


@functools.cache
def _operators_return_tensor(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and _return_tensor([getattr(packet, each)._schema for each in packet.overloads()])


def _return_tensor(schemas: list[Any]) -> bool:
    return bool(schemas) and all([str(item.type) for item in schema.returns] == ["Tensor"] for schema in schemas)


# ---- tensors and numbers ----


def is_tensor(value: Any, depth: int = 50) -> bool:
    """Whether an argument is a tensor; False where it may be a number, so that `+` on it may not be `torch.add`. An input is
    taken for a tensor unless its annotation, its default, its metadata or a check of the program says otherwise."""
    if not isinstance(value, Node):
        return False
    known = value.meta.get("val", value.meta.get("example_value")) if value._meta is not None else None
    if known is not None:
        return isinstance(known, torch.Tensor)
    if value._op == "placeholder":
        return likely_class(value) is torch.Tensor and not _is_checked_to_be_plain(value)
    if value._op == "call_method":
        return value._target not in _OTHER_METHODS and value._target not in _BY_NAME
    if value._op != "call_function":
        return value._target != "training" and not str(value._target).endswith(".training")
    return depth == 0 or _returns_tensor(value, depth - 1)  # nobody computes numbers in so many steps


def _returns_tensor(node: Node, depth: int) -> bool:
    target = node._target
    if target is getattr:
        return node._args[1] in _TENSOR_ATTRIBUTES
    if target is operator.getitem:
        source = node._args[0]
        # An item of a tuple of tensors is one.
        is_tuple = isinstance(source, Node) and likely_class(source) is tuple and source._op != "placeholder"
        return is_tuple or is_tensor(source, depth)
    home = getattr(target, "__module__", None) or ""
    if home == "_operator":
        return any(is_tensor(item, depth) for item in node._args)
    if isinstance(target, torch._ops.OpOverload):
        return _returns_one_tensor(target)
    name = getattr(target, "__name__", "")
    is_other = name in _BY_NAME or name in _OTHER_METHODS or name.startswith(("sym_", "is_", "get_"))
    return home.partition(".")[0] == "torch" and not is_other


def _is_checked_to_be_plain(node: Node) -> bool:
    """Whether a program that was captured on example inputs checks that an input is a number, or another plain value."""
    for user in node._users:
        described = user._args if getattr(user._target, "__torchgraft_guard__", False) else ()
        kinds = [part.get(str(node._target)) for part in described if isinstance(part, dict)]
        # The guard has the inputs themselves by their names, and what each of them has to be.
        if any(kind is not None and not isinstance(kind, Node) and kind not in _MAY_BE_TENSORS for kind in kinds):
            return True
    return False
