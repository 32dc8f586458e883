"""What an exported program demands of its inputs, as conditions that are checked on every call.
The program itself is converted in `torch_export.py`.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import sympy  # type: ignore[import-untyped]
import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

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
        self._check = _compiled(self.names, self.conditions)

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
        return "\n".join(self.conditions)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_check"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._check = _compiled(self.names, self.conditions)


def _compiled(names: Iterable[str], conditions: Iterable[str]) -> Callable[..., None]:
    """One function of the inputs for all conditions: it runs on every call, and torch.compile can look into it."""

    def require(holds: Any, condition: str, left: str, found: Callable[[], Any]) -> None:
        if not isinstance(holds, bool):  # a traced value: the condition becomes part of the traced program
            torch._assert(holds, f"{condition} does not hold")
        elif not holds:
            _refuse(condition, left, found())

    lines = [f"def check({', '.join(names)}):", "    pass"]
    for condition in conditions:
        expression = ast.parse(condition, mode="eval").body
        left = ast.unparse(expression.left) if isinstance(expression, ast.Compare) else condition
        lines.append(f"    _torchgraft_require({condition}, {condition!r}, {left!r}, lambda: {left})")
    scope: dict[str, Any] = {**SYMPY_INTERP, "math": math, "inf": math.inf, "torch": torch}
    scope["_torchgraft_require"] = require
    exec(compile("\n".join(lines), "<conditions of a program>", "exec"), scope)
    return scope["check"]


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


def _aliases(program: ExportedProgram, inputs: list[Any]) -> list[str]:
    """torch.export takes a tensor that was given twice for one input, and the program then looks at one of them only."""
    if not program.example_inputs:
        return []
    first: dict[int, Any] = {}
    conditions = []
    for node, value in zip(inputs, pytree.tree_leaves(program.example_inputs), strict=False):
        other = first.setdefault(id(value), node) if isinstance(value, torch.Tensor) else node
        if other is not node and not (other._users and node._users):
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
