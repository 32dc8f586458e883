"""`symbolic_shapes`: every shape of a program as an expression of named input sizes, such as `(batch, 4*t, 64)`.
The expressions are worked out by torch's own symbolic sizes, which live under torch.fx; that is why this is in `bridge/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv

from torchgraft.analysis.dry_run import DryRun, program_of, where
from torchgraft.codegen.calling import example_inputs, placeholder_values
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError, GuardError
from torchgraft.ir.arguments import map_aggregate
from torchgraft.ir.node import Node
from torchgraft.ir.printing import known_value
from torchgraft.results.shown import NamedTexts

Dimensions = Mapping[str, Sequence[str | int | None]]

# Sizes to try where none are given: different from one another, large enough for most strides, divisible by most factors.
_EXAMPLE_SIZES = tuple(range(96, 3000, 32))


class Dimension:
    """A size that depends on the inputs: an expression of named sizes. Equal to its text and to an equal expression."""

    def __init__(self, expression: sympy.Expr) -> None:
        self.expression = expression

    def __call__(self, **sizes: int) -> int:
        """The number that it is for these sizes."""
        names = {str(symbol): symbol for symbol in self.expression.free_symbols}
        missing = names.keys() - sizes.keys()
        if missing:
            raise GraftError(
                f"cannot evaluate {self}: no size is given for {', '.join(sorted(missing))}; give one by name"
            )
        return int(self.expression.xreplace({symbol: sympy.Integer(sizes[name]) for name, symbol in names.items()}))

    def __eq__(self, other: object) -> bool:
        return other == str(self) if isinstance(other, str) else getattr(other, "expression", None) == self.expression

    def __hash__(self) -> int:
        return hash(str(self))

    def __repr__(self) -> str:
        return _text(self.expression)


class SymbolicShapes(NamedTexts):
    """Shapes by the names of nodes: tuples of numbers and `Dimension`s, in the structure of the value.

    `fixed` says which names turned out to be one number. `conditions` are what torch took for granted on the way (a size is
    not 1, a length divides evenly), in the same names: the expressions hold where these do.

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: torch.cat([x, x]))
    >>> torchgraft.symbolic_shapes(program, {"x": ("batch", 8)})["cat"]
    (2*batch, 8)
    """

    def __init__(self, fixed: dict[str, int], conditions: tuple[str, ...]) -> None:
        super().__init__()
        self.fixed = fixed
        self.conditions = conditions

    def _notes(self) -> list[str]:
        return [f"where {name} is {size}" for name, size in self.fixed.items()]


def symbolic_shapes(program: Any, dimensions: Dimensions, args: Any = ()) -> SymbolicShapes:
    """The shape of every value of a program as expressions of named input sizes; nothing is computed.

    `dimensions` names the sizes of inputs: a name, a number, or None for the size that the example has; the same name means the
    same size. Example inputs give dtypes and sizes to reason about; without them inputs are float32. An input that is not
    named keeps its sizes. A size that depends on values (`nonzero`) is a name of its own, `u0`, `u1` and so on.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: torch.cat([x, x], 1).flatten(1))
    >>> symbolic_shapes(program, {"x": ("batch", "t", 64)})["flatten"]
    (batch, 128*t)
    """
    args, _ = example_inputs(args)
    if not isinstance(program, GraphModule):
        program = program_of(program, args or _examples(dimensions))
    try:
        return _found(program, dimensions, args, small_sizes=False)
    except GuardError:
        # The program was captured for a size of 0 or 1, and holds for no other.
        return _found(program, dimensions, args, small_sizes=True)


def _found(program: GraphModule, dimensions: Dimensions, args: tuple[Any, ...], small_sizes: bool) -> SymbolicShapes:
    environment = _Environment(dimensions, small_sizes)
    inputs = environment.inputs(program, args)
    found: dict[str, Any] = {}

    def note(node: Node, value: Any) -> None:
        shape = environment.shape(value)
        if shape is not None:
            found[node.name] = shape

    run = DryRun(program, inputs, node_done=note)
    try:
        # The python dispatcher keeps sizes symbolic in operators whose C++ code asks for plain numbers.
        with torch.no_grad(), enable_python_dispatcher():
            run.forward()
    except GuardOnDataDependentSymNode as error:
        node = run.place.node
        raise GraftError(
            f"cannot work out the shape of {'a node' if node is None else repr(node.name)}: it depends on the values of a tensor "
            f"({str(error).splitlines()[0]}); at {'an unknown line' if node is None else where(node)}; "
            "leave it out, or give its size to the operator"
        ) from error
    result = SymbolicShapes(environment.fixed(), environment.conditions())
    result.update({name: environment.renamed(shape) for name, shape in found.items()})
    return result


def _examples(dimensions: Dimensions) -> tuple[torch.Tensor, ...]:
    """Inputs for a model that has to be captured first and comes without any."""
    sizes = dict(zip(_names(dimensions), _EXAMPLE_SIZES, strict=False))
    shapes = [[sizes[size] if isinstance(size, str) else size or 1 for size in shape] for shape in dimensions.values()]
    return tuple(torch.empty(shape, device="meta") for shape in shapes)


def _names(dimensions: Dimensions) -> list[str]:
    return list(dict.fromkeys(size for shape in dimensions.values() for size in shape if isinstance(size, str)))


class _Environment:
    """One symbol of torch for each name, and the way back from torch's symbols to the names."""

    def __init__(self, dimensions: Dimensions, small_sizes: bool) -> None:
        self.dimensions = dimensions
        self.small_sizes = small_sizes
        self.shape_env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=True)
        self.sizes: dict[str, Any] = {}
        self.symbols: dict[str, sympy.Symbol] = {}

    def inputs(self, program: GraphModule, args: tuple[Any, ...]) -> dict[Node, Any]:
        nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
        examples = placeholder_values(program, args) if args else {node: known_value(node) for node in nodes}
        known = {**{str(node.target): node for node in nodes}, **{node.name: node for node in nodes}}
        unknown = [name for name in self.dimensions if name not in known]
        if unknown:
            raise GraftError(
                f"cannot name the sizes of {', '.join(map(repr, unknown))}: the inputs are "
                f"{', '.join(repr(node.name) for node in nodes)}; use one of these"
            )
        shapes = {known[name]: shape for name, shape in self.dimensions.items()}
        return {node: self._input(node, shapes.get(node), examples[node], bool(args)) for node in nodes}

    def _input(self, node: Node, shape: Sequence[str | int | None] | None, example: Any, given: bool) -> Any:
        if shape is None:
            if given:
                return example
            if example is None and not node.args:
                raise GraftError(
                    f"cannot make an example of input '{node.name}': name its sizes or give example inputs"
                )
            return example if example is not None else node.args[0]
        seen = getattr(example, "shape", None)
        if seen is not None and len(seen) != len(shape):
            raise GraftError(
                f"input '{node.name}' has {len(seen)} dimensions, and {len(shape)} are named: "
                f"{tuple(seen)} against {tuple(shape)}; name each one"
            )
        sizes = [self._size(node, axis, size, seen) for axis, size in enumerate(shape)]
        with self.mode:
            return torch.empty(
                sizes, dtype=getattr(example, "dtype", torch.float32), device=getattr(example, "device", "cpu")
            )

    def _size(self, node: Node, axis: int, size: str | int | None, seen: Sequence[int] | None) -> Any:
        if size is None and seen is None:
            raise GraftError(
                f"dimension {axis} of input '{node.name}' is None, and there is no example to take it from"
            )
        if not isinstance(size, str):
            return size if size is not None else seen[axis]  # type: ignore[index]
        if size not in self.sizes:
            example = int(seen[axis]) if seen is not None else 0
            if example < 2 and not self.small_sizes:
                # Broadcasting treats 1 unlike any other size, so an example of 1 would say nothing about the rest.
                example = _EXAMPLE_SIZES[len(self.sizes)]
            source = ConstantSource(size)
            symbol = self.shape_env.create_symbol(
                example, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None, do_not_specialize_zero_one=True
            )
            self.sizes[size] = self.shape_env.create_symintnode(symbol, hint=example, source=source)
            self.symbols[size] = symbol
        return self.sizes[size]

    # ---- back to names ----

    def shape(self, value: Any) -> Any:
        """The shapes in a value, in torch's symbols, or None where there are none."""
        if isinstance(value, torch.Tensor):
            return tuple(_expression(size) for size in value.shape)
        if isinstance(value, torch.SymInt):
            return _expression(value)
        if isinstance(value, (tuple, list)):
            parts = [self.shape(item) if not isinstance(item, int) else item for item in value]
            return None if any(part is None for part in parts) else tuple(parts)
        return None

    def renamed(self, shape: Any) -> Any:
        def rename(leaf: Any) -> Any:
            if not isinstance(leaf, sympy.Basic):
                return leaf
            expression = self._with_names(leaf)
            return int(expression) if expression.is_number else Dimension(expression)

        return map_aggregate(shape, rename)

    def _with_names(self, expression: Any) -> Any:
        simple = self.shape_env.simplify(expression)
        return simple.xreplace({symbol: sympy.Symbol(name, integer=True) for name, symbol in self.symbols.items()})

    def fixed(self) -> dict[str, int]:
        simple = {name: self.shape_env.simplify(symbol) for name, symbol in self.symbols.items()}
        return {name: int(value) for name, value in simple.items() if value.is_number}

    def conditions(self) -> tuple[str, ...]:
        texts = [_text(self._with_names(guard.expr)) for guard in self.shape_env.guards]
        return tuple(dict.fromkeys(text for text in texts if text != "True"))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def _text(expression: Any) -> str:
    """An expression as people write it: torch's printer puts divisions in two pairs of parentheses."""
    text = str(expression)
    while True:
        shorter = re.sub(r"\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)", r"(\1)", text)
        if shorter == text:
            return text
        text = shorter
