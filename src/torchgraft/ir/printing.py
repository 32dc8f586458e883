"""A program as text for people: one line a node, tables, and the names of functions and types.
Text that Python runs is made in `codegen/`.
"""

from __future__ import annotations

import builtins
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.errors import GraphError
from torchgraft.ir.node import Node
from torchgraft.ir.origin import user_source_line
from torchgraft.results.tables import aligned

if TYPE_CHECKING:
    from torchgraft.ir.graph import Graph

DTYPE_LETTERS = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex32: "c32",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def qualified_name(function: Callable[..., Any]) -> str:
    """The dotted name a function is reached by: `torch.relu`, `torch.ops.aten.add.Tensor`, `operator.add`'s `_operator.add`.

    >>> qualified_name(torch.relu), qualified_name(len)
    ('torch.relu', 'len')
    """
    name = getattr(function, "__name__", None)
    if name is None:
        name = type(function).__name__
    if getattr(builtins, name, None) is function:
        return name
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return "torch.ops." + str(function)
    if isinstance(function, (types.MethodDescriptorType, types.WrapperDescriptorType)) or (
        getattr(function, "__qualname__", "") == f"Tensor.{name}"
    ):
        if function is getattr(torch.Tensor, name, None):
            return f"torch.Tensor.{name}"
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and (
        isinstance(function, types.MethodType) or issubclass(owner, torch.autograd.Function)
    ):
        return f"{owner.__module__}.{owner.__qualname__}.{name}"
    if name == "<lambda>":
        name = _lambda_name(function)
    if isinstance(function, torch.jit.ScriptFunction):
        # All have the same name; the function it was made of has its own.
        original: Any = getattr(function, "_torchdynamo_inline", function)
        return f"{original.__module__}.{original.__qualname__}"
    return f"{_module_of(function)}.{name}"


def _lambda_name(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function).split("=")[0].strip()
    except (OSError, TypeError) as error:
        raise GraphError(
            f"cannot name the lambda {function!r}: its source is not at hand; define it with def"
        ) from error


def _module_of(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", None)
    if module is not None:
        # torch.ops reports the module that implements it, which is not how users write it.
        return module.replace("torch._ops", "torch.ops")
    name = getattr(function, "__name__", "")
    for place in (torch, torch.nn.functional):
        if getattr(place, name, None) is function:
            return place.__name__
    owner = getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType):
        return owner.__name__
    home = sys.modules.get(type(owner).__module__)  # methods of a hidden instance, as random.random is one
    found = getattr(home, name, None)
    if home is not None and getattr(found, "__torchgraft_original__", found) == function:
        return home.__name__
    objclass = getattr(function, "__objclass__", None)
    if objclass is not None:
        return f"{objclass.__module__}.{objclass.__qualname__}"
    raise GraphError(f"cannot find the module of {function!r}; wrap it in a function defined with def")


def type_text(annotation: Any) -> str:
    """An annotation as people write it."""
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        if annotation.__module__ == "builtins":
            return annotation.__qualname__
        return f"{annotation.__module__}.{annotation.__qualname__}"
    if annotation is ...:
        return "..."
    if isinstance(annotation, types.FunctionType):
        return annotation.__name__
    return repr(annotation)


def target_text(target: Any) -> str:
    """A target as `torch.relu`, `operator.add` or `layer1.0`."""
    if isinstance(target, str):
        return target
    home = getattr(target, "__module__", None)
    if home in ("_operator", "builtins") and hasattr(target, "__name__"):
        return f"{home.lstrip('_')}.{target.__name__}"
    try:
        return qualified_name(target)
    except GraphError:
        return repr(target)


def argument_text(value: Any, max_list_len: float = float("inf")) -> str:
    """An argument tree with nodes written `%name`, an object as its `_custom_fx_repr_fn` says, and lists up to a length."""
    if isinstance(value, Node):
        return f"%{value._name}"
    if isinstance(value, list):
        left = len(value) - max_list_len
        texts = [argument_text(item) for item in (value if left <= 0 else value[: int(max_list_len)])]
        return f"[{', '.join(texts)}{f', ...[total_len={len(value)}]' if left > 0 else ''}]"
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(map(argument_text, value))}{comma})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {argument_text(item)}' for key, item in value.items())}}}"
    own_text = getattr(value, "_custom_fx_repr_fn", None)
    return str(value) if own_text is None else own_text()


def tensor_text(value: Any, stride: bool = False, device: bool = False) -> str | None:
    """`f32[2, 3]` for a tensor or for what shape propagation noted of one; None for anything else."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or not isinstance(dtype, torch.dtype):
        return None
    text = f"{DTYPE_LETTERS.get(dtype, str(dtype).removeprefix('torch.'))}[{', '.join(map(str, shape))}]"
    if stride and getattr(value, "layout", torch.strided) is torch.strided:
        strides = value.stride() if callable(value.stride) else value.stride
        text += f"[{', '.join(map(str, strides))}]"
    if device and hasattr(value, "device"):
        text += str(value.device)
    return text


def value_text(value: Any, stride: bool = False, device: bool = False) -> str | None:
    """`tensor_text`, also for a tuple or list of tensors: `(f32[2, 3], i64[2])`; None where there is no tensor in it.

    >>> value_text((torch.ones(2, 3), [torch.arange(2)], 7))
    '(f32[2, 3], [i64[2]], 7)'
    """
    if isinstance(value, (tuple, list)) and not hasattr(value, "dtype"):
        parts = [value_text(item, stride, device) for item in value]
        if all(part is None for part in parts):
            return None
        texts = [str(item) if part is None else part for part, item in zip(parts, value, strict=True)]
        opening, closing = ("[", "]") if isinstance(value, list) else ("(", ")")
        comma = "," if len(texts) == 1 and closing == ")" else ""
        return f"{opening}{', '.join(texts)}{comma}{closing}"
    return tensor_text(value, stride, device)


def known_value(node: Node) -> Any:
    """What a pass noted about the value of a node: a tensor, its metadata, or None."""
    meta = node.meta
    for key in ("val", "tensor_meta", "example_value"):
        if key in meta:
            return meta[key]
    return None


def format_node(
    node: Node,
    placeholder_names: list[str] | None = None,
    maybe_return_typename: list[str] | None = None,
    include_tensor_metadata: bool = False,
) -> str | None:
    """The node as one line; the lists are filled for the heading of a graph, as in torch.fx."""
    annotation = "" if node._type is None else f"{type_text(node._type)} "
    head = f"%{node._name} : {annotation}[num_users={len(node.users)}] = {node._op}[target={target_text(node._target)}]"
    if node._op == "placeholder":
        if placeholder_names:
            placeholder_names.append(node._target if node._type is None else f"{node._target}: {type_text(node._type)}")
            return None
        return head + (f"(default={node._args[0]})" if node._args else "")
    if node._op == "get_attr":
        return head
    if node._op == "output":
        if node._type is not None and maybe_return_typename:
            maybe_return_typename[0] = f" -> {type_text(node._type)}"
        return f"return {node._args[0]}" if node._args else "return"
    if include_tensor_metadata:
        shape = tensor_text(known_value(node), stride=True, device=True)
        if shape is not None:
            head = head.replace(f" : {annotation}[num", f' : Tensor "{shape}"[num', 1)
    return f"{head}(args = {argument_text(node._args)}, kwargs = {argument_text(node._kwargs)})"


def graph_text(graph: Graph) -> str:
    """A whole graph, one line a node."""
    return "\n    ".join(["graph():", *[str(format_node(node)) for node in graph.nodes]])


def tabular_text(graph: Graph, source: bool = False) -> str:
    """The nodes as a table: opcode, name, target, args and kwargs; the result where it is known; the source line if wanted."""
    rows = [["opcode", "name", "target", "args", "kwargs"]]
    rows += [[n._op, n._name, target_text(n._target), str(n._args), str(dict(n._kwargs))] for n in graph.nodes]
    results = [value_text(known_value(node)) or "" for node in graph.nodes]
    if any(results):
        rows = [[*row, text] for row, text in zip(rows, ["result", *results], strict=True)]
    if source:
        lines = [user_source_line(node.stack_trace) for node in graph.nodes]
        texts = [f"{line.file}:{line.line}  {line.text}" if line else "" for line in lines]
        rows = [[*row, text] for row, text in zip(rows, ["source", *texts], strict=True)]
    rule = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(aligned([rows[0], rule, *rows[1:]]))
