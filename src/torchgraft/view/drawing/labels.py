"""What is written in and behind a box: the kind that gives its colour, title, second line, shape and tooltip of a node.
Where boxes stand is decided elsewhere; nothing here changes a node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchgraft.analysis.effects.calls import is_node
from torchgraft.errors import GraftError
from torchgraft.ir import guards
from torchgraft.ir.arguments import leaves
from torchgraft.ir.origin import source_of
from torchgraft.ir.printing import target_text
from torchgraft.ir.verify import find_attribute
from torchgraft.results.tables import shortened
from torchgraft.view.node_facts import class_name
from torchgraft.view.plain import argument_text

# The kinds of boxes, in the order of the legend, with what the legend says of them.
KINDS = {
    "input": "input",
    "tangent": "tangent (gradient coming in)",
    "parameter": "parameter",
    "constant": "buffer or constant",
    "module": "module call",
    "function": "function",
    "method": "method",
    "compiled": "runs compiled",
    "python": "stays in Python",
    "integer": "computed with integers",
    "conversion": "between floats and integers",
    "error-none": "SQNR above 40 dB",
    "error-little": "SQNR of 30 to 40 dB",
    "error-some": "SQNR of 20 to 30 dB",
    "error-much": "SQNR below 20 dB",
    "backward": "backward step",
    "guard": "guard",
    "reference": "value from far above",
    "output": "output",
    "update": "written to a buffer or input",
    "gradient": "gradient going out",
}
# Results that stand beside the step that makes them, because there may be hundreds.
LEAVING = frozenset({"update", "gradient"})
SOURCES = frozenset({"parameter", "constant"})

_ORIGIN_KINDS = {"parameter": "parameter", "buffer": "constant", "constant": "constant", "tangent": "tangent"}
_CALLS = {"call_module": "module", "call_function": "function", "call_method": "method"}
_LONGEST = 400  # of arguments in a tooltip
_PATH = re.compile(r"(?:[A-Za-z]:)?[\w./\\~@+-]*[/\\]([\w.@+-]+[/\\][\w.@+-]+\.py)")


def is_guard(node: Any, root: Any) -> bool:
    """Whether a node checks something instead of computing it."""
    if node.op == "call_module":
        return type(find_attribute(root, node.target)[0]).__module__ == "torchgraft.bridge.input_guards"
    return guards.is_guard(node.target)


def is_backward(node: Any) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def kind_of(node: Any, root: Any, parameters: Mapping[str, str]) -> str:
    """One of `KINDS`; `parameters` says which placeholders are a parameter or buffer of the model."""
    if node.op == "placeholder":
        if node.target in parameters:
            return parameters[node.target]
        return _ORIGIN_KINDS.get(node.meta.get("origin_kind", ""), "input")
    if node.op == "get_attr":
        return "parameter" if isinstance(find_attribute(root, node.target)[0], torch.nn.Parameter) else "constant"
    if node.op == "output":
        return "output"
    if is_guard(node, root):
        return "guard"
    if is_backward(node):
        return "backward"
    said = node.meta.get("drawn_as")  # by who made the node: quantization and backends mark what they changed
    return said if said in KINDS else _CALLS[node.op]


def title_of(node: Any, kind: str, root: Any) -> str:
    """The first line: the class of a module, the name of a function without its home, the path of a parameter."""
    if kind == "guard":
        return "guard"
    if node.op == "call_module":
        return type_name(node, find_attribute(root, node.target)[0])
    if node.op == "output":
        return "output"
    if isinstance(node.target, str):
        if node.op != "placeholder":
            return node.target
        name = str(node.meta.get("origin_name") or node.target)
        return f"∂ {name}" if kind == "tangent" else name
    return function_name(node.target)


def function_name(target: Any) -> str:
    """`linear`, `add`, `addmm`; which overload of an operator it is stands in the tooltip.

    >>> function_name(torch.relu), function_name(torch.ops.aten.sum.dim_IntList)
    ('relu', 'sum')
    """
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name.split("::")[-1])
    return str(getattr(target, "__name__", None) or type(target).__name__)


def type_name(node: Any, module: Any) -> str:
    """The class of the module that a `call_module` node calls, also where only the note of it is left."""
    if isinstance(module, torch.nn.Module):
        return type(module).__name__
    stack = node.meta.get("nn_module_stack") or {}
    for path, kind in stack.values():
        if path == node.target:
            return class_name(kind)
    return str(node.target)


def detail_of(node: Any, kind: str, root: Any) -> str:
    """The second line: the options of a module, or the arguments that are no values of other nodes."""
    if node.op in ("placeholder", "get_attr", "output"):
        return ""
    if kind == "guard":
        return _guard_condition(node, root)[0]
    if node.op == "call_module":
        module = find_attribute(root, node.target)[0]
        return shortened(short_options(_extra(module)), 120) if isinstance(module, torch.nn.Module) else ""
    plain = [argument_text(value, 60) for value in node.args if not _holds_node(value)]
    plain += [f"{key}={argument_text(value, 60)}" for key, value in node.kwargs.items() if not _holds_node(value)]
    return shortened(", ".join(plain), 120)


def _extra(module: torch.nn.Module) -> str:
    try:
        return " ".join(module.extra_repr().split())
    except Exception:  # the user's own code, and what it says is an ornament
        return ""


# What modules say of themselves, in fewer words; the tooltip has them all.
_SHORTER = (
    (r"in_features=(\d+), out_features=(\d+)", r"\1→\2"),
    (r"^(\d+), (\d+), kernel_size", r"\1→\2, kernel_size"),
    (r"kernel_size=\((\d+), (\d+)\)", r"\1×\2"),
    (r"kernel_size=(\d+)", r"\1×\1"),
    (r"stride=\((\d+), \1\)", r"/\1"),
    (r"stride=(\d+)", r"/\1"),
    (r"padding=\((\d+)(?:, \1)+\)", r"padding=\1"),
    (r"output_size=\((\d+), (\d+)\)", r"to \1×\2"),
    (r"normalized_shape=|num_features=|num_embeddings=", ""),
    (r"(?:, )?(?:bias|affine|track_running_stats|elementwise_affine|count_include_pad)=True", ""),
    (r"(?:, )?(?:eps|momentum|padding_mode|approximate)=[^,]+", ""),
    (r"(?:, )?(?:ceil_mode|inplace)=(?:True|False)", ""),
    (r"(?:, )?dilation=(?:1|\(1(?:, 1)*\))(?=,|$)", ""),
    (r"(?:, )?/1(?=,|$)", ""),
    (r"^\((\d+),\)$", r"\1"),
)
_SHORTER_FORMS = [(re.compile(long), short) for long, short in _SHORTER]


def short_options(text: str) -> str:
    """The options of a module in short.

    >>> short_options("3, 64, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False")
    '3→64, 7×7, /2, padding=3, bias=False'
    >>> short_options("in_features=256, out_features=1024, bias=True"), short_options("(256,), eps=1e-05")
    ('256→1024', '256')
    """
    for form, short in _SHORTER_FORMS:
        text = form.sub(short, text)
    return text.removeprefix(", ")


def _holds_node(value: Any) -> bool:
    return any(map(is_node, leaves(value)))


# ---- shapes ----


_SIZES = frozenset({"size", "dim", "numel", "item", "ndimension", "stride", "nelement"})
_SIZE_OPERATORS = frozenset(
    {torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel.default}
)
_SIZE_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "is_cuda", "requires_grad"})


def is_kind(node: Any) -> bool:
    """Whether a node only asks for the dtype or the device of a tensor."""
    asked = node.args[1] if node.op == "call_function" and node.target is getattr and len(node.args) > 1 else None
    return asked in ("dtype", "device")


def is_number(node: Any, value: Any, is_scalar: Callable[[Any], bool]) -> bool:
    """Whether the value of a node is a number or sizes, as far as one can tell; `is_scalar` answers for its inputs."""
    if value is not None:
        return isinstance(value, (bool, int, float, complex, torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool))
    if node.op == "call_method" and node.target in _SIZES:
        return True
    if node.op == "call_function" and node.target is getattr:
        return len(node.args) > 1 and node.args[1] in _SIZE_ATTRIBUTES
    if node.target in _SIZE_OPERATORS:
        return True
    inputs = node.all_input_nodes
    home = getattr(node.target, "__module__", None)
    plain = home in ("_operator", "builtins", "math") and node.op == "call_function"
    return plain and bool(inputs) and all(map(is_scalar, inputs))


# ---- tooltips ----


def tooltip_of(node: Any, kind: str, root: Any, shape: str) -> str:
    """Everything there is to know of a node, a line each."""
    lines = [f"%{node.name}"]
    if kind == "guard":
        condition, where = _guard_condition(node, root)
        lines += [f"guard: {condition}", where]
    elif node.op == "placeholder":
        lines.append(f"{kind} {node.target}" + (f" = {argument_text(node.args[0], _LONGEST)}" if node.args else ""))
    elif node.op == "output":
        lines.append(f"return {argument_text(node.args[0], _LONGEST) if node.args else ''}")
    else:
        lines.append(f"{node.op} {shortened(target_text(node.target), 200)}")
        module = find_attribute(root, node.target)[0] if node.op == "call_module" else None
        if isinstance(module, torch.nn.Module):
            lines.append(shortened(f"{type(module).__name__}({_extra(module)})", _LONGEST))
        if node.op != "get_attr":
            lines.append(f"args: {argument_text(node.args, _LONGEST)}")
        if node.kwargs:
            lines.append(f"kwargs: {argument_text(dict(node.kwargs), _LONGEST)}")
    if shape:
        lines.append(f"value: {shape}")
    lines.append(str(node.meta.get("drawn_note", "")))
    # The line of an output is where the capture was asked for, which says nothing about the program.
    lines += [] if kind == "guard" or node.op == "output" else source_lines(node)
    return "\n".join(line for line in lines if line)


def source_lines(node: Any) -> list[str]:
    """The user's line that made the node: the innermost one outside of torch, as `folder/file.py:12` and its text."""
    line = source_of(node)
    return [] if line is None else [f"{short_path(line.file)}:{line.line}  {shortened(line.text, 160)}".rstrip()]


def short_path(path: str) -> str:
    """The last two parts: enough to find the file, and the same on every machine.

    >>> short_path("/home/someone/project/model.py")
    'project/model.py'
    """
    return "/".join(path.replace("\\", "/").split("/")[-2:])


def _guard_condition(node: Any, root: Any) -> tuple[str, str]:
    """What a guard asks for, and the user's line that made it necessary."""
    asked = guards.guards_of(node)
    if asked:
        wanted = [f"{guard.condition} is {argument_text(guard.expected, 60)}" for guard in asked]
        return shortened("; ".join(wanted), 200), _PATH.sub(r"\1", asked[0].where)
    guard = find_attribute(root, node.target)[0] if node.op == "call_module" else node.target
    conditions = getattr(guard, "conditions", None)
    return (shortened("; ".join(map(str, conditions)), 200) if conditions else "types of inputs"), ""


def require_graph(program: Any) -> Any:
    """The graph of a program, or an error that says what can be drawn."""
    graph = getattr(program, "graph", program)
    if not hasattr(graph, "nodes") or not all(map(is_node, list(graph.nodes)[:1])):
        raise GraftError(
            f"cannot draw a {type(program).__name__}: it has no graph of nodes\ngive what capture() or "
            "symbolic_trace() returns, its graph, or a torch.nn.Module"
        )
    return graph
