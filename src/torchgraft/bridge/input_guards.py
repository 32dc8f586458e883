"""What an exported program demands of its inputs, as conditions that are checked on every call.
The program itself is converted in `torch_export.py`.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Iterable
from typing import Any, NoReturn

import sympy  # type: ignore[import-untyped]
import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from torchgraft.bridge.conditions import compiled
from torchgraft.errors import GuardError

# torch.export notes 2 as the least size of a dimension only to say that 0 and 1 were not looked at.
_LEAST_MEANT = 3


class InputGuards(torch.nn.Module):
    """Raises GuardError unless every condition holds; a condition is a Python expression over the names of the inputs.

    It also refuses `train()` and `eval()`, as the module of an ExportedProgram does: the mode was fixed while exporting.

    >>> guards = InputGuards(["x"], ["x.size()[1] == 4"])
    >>> guards(torch.ones(2, 4))
    >>> guards(torch.ones(2, 5))  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    torchgraft.errors.GuardError: the exported program does not take these inputs: ...
    """

    # torch.fx's dead code elimination looks for this.
    _is_impure = True

    def __init__(self, names: Iterable[str], conditions: Iterable[str]) -> None:
        super().__init__()
        self.names = list(names)
        self.conditions = list(conditions)
        self._check = compiled(self.names, self.conditions, _refuse)

    def forward(self, *values: Any) -> None:
        """Check the inputs, given in the order of `names`."""
        self._check(*values)

    def train(self, mode: bool = True) -> NoReturn:
        """Refuse: layers such as dropout and batch norm were exported for one mode."""
        raise NotImplementedError(
            f"cannot switch an exported program to {'training' if mode else 'evaluation'} mode: what its layers do in the "
            "mode of the export is fixed; export the model again in the other mode"
        )

    def extra_repr(self) -> str:
        """The conditions, one a line."""
        return "\n".join(self.conditions)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_check"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._check = compiled(self.names, self.conditions, _refuse)


def _refuse(condition: str, left: str, found: Any) -> NoReturn:
    text = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
    raise GuardError(
        f"the exported program does not take these inputs: {condition} does not hold, {left} is {text}; "
        "give inputs like those it was exported with, or export it again with dynamic_shapes that allow these"
    )


# ---- finding the conditions ----


def input_conditions(program: ExportedProgram, inputs: list[Any]) -> list[str]:
    """Conditions over the input nodes: constants, sizes, ranges and relations of symbolic sizes, guards of the tracer."""
    sizes = _Sizes(program.range_constraints)
    for node in inputs:
        sizes.input(node._name, node.meta.get("val"))
    sizes.relate()
    conditions = sizes.conditions + _aliases(program, inputs)
    conditions += _traced_guards(program, [node._name for node in inputs])
    normal = [ast.unparse(ast.parse(condition, mode="eval")) for condition in conditions]
    return list(dict.fromkeys(normal))


def kinds_of_inputs(inputs: list[Any]) -> list[str]:
    """That inputs are tensors, and plain ones, or numbers and texts of the type they were: `True == 1` is true."""
    conditions = []
    for node in inputs:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            conditions += [f"is_plain_tensor({node._name})", f"{node._name}.layout == {value.layout}"]
        elif type(value) in (bool, int, float, str):
            conditions.append(f"is_exactly({type(value).__name__}, {node._name})")
    return conditions


# What a model may ask of a tensor, and how that is said of an input; torch.export takes the example's answer without a word.
_LAYOUT = frozenset({"stride", "storage_offset"})
_HISTORY: dict[str, str] = {
    "requires_grad": "{}.requires_grad",
    "is_leaf": "{}.is_leaf",
    "retains_grad": "{}.retains_grad",
    "grad_fn": "({}.grad_fn is None)",
    "grad": "({}.grad is None)",
    "_base": "({}._base is None)",
    "_is_view": "{}._is_view()",
    "is_inference": "{}.is_inference()",
    "_version": "{}._version",
    "storage_offset": "{}.storage_offset()",
    "device": "str({}.device)",
    "class": "isinstance({}, torch.nn.Parameter)",
}
_DEVICES = ("device", "get_device", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu")
# By what they are asked for: the names of facts above.
FACTS: dict[str, str] = {
    **{name: name for name in (*_LAYOUT, *_HISTORY) if name != "class"},
    **dict.fromkeys(("is_contiguous", "untyped_storage", "data_ptr"), "stride"),
    **dict.fromkeys(_DEVICES, "device"),
}


def facts_of_inputs(program: ExportedProgram, inputs: list[Any], asked: set[str]) -> list[str]:
    """That inputs lie in memory, and came about, as those of the example did, where the model asks for that."""
    if not asked or not program.example_inputs:
        return []
    conditions = []
    for node, value in zip(inputs, pytree.tree_leaves(program.example_inputs), strict=False):
        if isinstance(value, torch.Tensor):
            is_fixed = all(type(size) is int for size in node.meta["val"].shape)
            conditions += facts_of_tensor(node._name, value, asked, is_fixed)
    return conditions


def facts_of_tensor(name: str, value: torch.Tensor, asked: set[str], is_fixed: bool = True) -> list[str]:
    """What is asked about a tensor, as conditions with the answers of an example; `is_fixed` says that its sizes are.

    >>> facts_of_tensor("x", torch.ones(2, 3), {"stride", "is_leaf"})
    ['x.stride() == (3, 1)', 'x.is_leaf == True', 'x.requires_grad == False']
    """
    if value.layout is not torch.strided:
        return []
    asked = asked | {"requires_grad"} if asked & _HISTORY.keys() - {"device", "class"} else asked
    conditions = []
    if asked & _LAYOUT and is_fixed:
        conditions.append(f"{name}.stride() == {tuple(value.stride())}")
    elif asked & _LAYOUT:
        conditions.append(f"{name}.is_contiguous() == {value.is_contiguous()}")
    for fact in sorted(asked & _HISTORY.keys()):
        text = _HISTORY[fact].format(name)
        conditions.append(f"{text} == {eval(text, {name: value, 'torch': torch})!r}")
    return conditions


def _aliases(program: ExportedProgram, inputs: list[Any]) -> list[str]:
    """torch.export takes a tensor that was given twice for one input, and the program then looks at one of them only."""
    if not program.example_inputs:
        return []
    first: dict[int, Any] = {}
    conditions = []
    for node, value in zip(inputs, pytree.tree_leaves(program.example_inputs), strict=False):
        other = first.setdefault(id(value), node) if isinstance(value, torch.Tensor) else node
        if other is not node and not (other.users and node.users):
            conditions.append(f"{node._name} is {other._name}")
    return conditions


class _Sizes:
    """Collects the conditions that follow from what the exporter noted about each input."""

    def __init__(self, ranges: dict[Any, Any]) -> None:
        self.conditions: list[str] = []
        self._ranges = ranges
        self._sources: dict[Any, str] = {}

    def input(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.conditions.append(f"{name}.dim() == {value.dim()}")
            for dimension, size in enumerate(value.shape):
                self._size(f"{name}.size()[{dimension}]", size)
        elif isinstance(value, torch.SymInt):
            self._size(name, value)
        elif isinstance(value, float) and math.isnan(value):
            self.conditions.append(f"{name} != {name}")
        elif value is None or isinstance(value, (int, float, str)):
            self.conditions.append(f"{name} == {value!r}")

    def _size(self, text: str, size: int | torch.SymInt) -> None:
        if isinstance(size, int):
            self.conditions.append(f"{text} == {size}")
            return
        expression = size.node.expr
        if expression in self._sources:
            self.conditions.append(f"{text} == {self._sources[expression]}")
            return
        self._sources[expression] = text
        bounds = self._ranges.get(expression)
        if bounds is not None:
            if bounds.lower >= _LEAST_MEANT:
                self.conditions.append(f"{text} >= {int(bounds.lower)}")
            if bounds.upper.is_finite and bounds.upper.is_number and bounds.upper < 2**62:
                self.conditions.append(f"{text} <= {int(bounds.upper)}")

    def relate(self) -> None:
        """Sizes such as 2*n + 1: equal to what they say where n is a size of an input, otherwise n must be whole."""
        derived = [(expression, text) for expression, text in self._sources.items() if not expression.is_Symbol]
        known = {expression: text for expression, text in self._sources.items() if expression.is_Symbol}
        for expression, text in derived:
            symbols = expression.free_symbols
            if len(symbols) == 1 and not symbols & known.keys():
                solution = self._solve(expression, next(iter(symbols)), text)
                if solution is not None:
                    known[next(iter(symbols))] = solution
            elif symbols <= known.keys():
                self.conditions.append(f"{text} == {_python(expression, known)}")

    def _solve(self, expression: Any, symbol: Any, text: str) -> str | None:
        factor, rest = expression.coeff(symbol), expression.subs(symbol, 0)
        if not (factor.is_Integer and rest.is_Integer and factor != 0 and expression - factor * symbol - rest == 0):
            return None
        start = text if rest == 0 else f"({text} - {rest})"
        if factor == 1:
            return start
        self.conditions.append(f"{start} % {factor} == 0")
        return f"({start} // {factor})"


def _python(expression: Any, names: dict[Any, str]) -> str:
    return PythonPrinter().doprint(expression.xreplace({symbol: sympy.Symbol(text) for symbol, text in names.items()}))


def _traced_guards(program: ExportedProgram, names: list[str]) -> list[str]:
    """Conditions that the tracer met in the model (`if x.shape[0] % 2 == 0`), which it writes over a dict `L` of inputs."""
    paths = _paths(program)
    result = []
    for guard in getattr(program, "_guards_code", ()):
        text = re.sub(r"L\['flat_args'\]\[(\d+)\]", lambda found: names[int(found[1])], guard)
        # The leaves of *args are parameters of their own: args_0, args_1.
        text = re.sub(r"L\['(\w+)'\]\[(\d+)\]", lambda found: _split_name(found, paths), text)
        for path, index in sorted(paths.items(), key=lambda item: -len(item[0])):
            text = text.replace(f"L{path}", names[index])
        if "L[" in text:
            warnings.warn(
                f"from_export leaves out a guard of the exported program that speaks of no input: {guard}", stacklevel=5
            )
        else:
            result.append(text.replace("\n", " ").strip())
    return result


def _split_name(found: re.Match[str], paths: dict[str, int]) -> str:
    alone = f"['{found[1]}_{found[2]}']"
    return f"L{alone}" if any(path.startswith(alone) for path in paths) else found[0]


def _paths(program: ExportedProgram) -> dict[str, int]:
    """From the way to each leaf of the inputs, as the tracer writes it, to its number."""
    spec = program.call_spec.in_spec
    assert spec is not None
    args, kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    signature = program.module_call_graph[0].signature
    names = (signature and signature.forward_arg_names) or [f"arg_{index}" for index in range(len(args))]
    inputs = {**dict(zip(names, args, strict=False)), **kwargs}
    return {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(inputs)}
