"""`check_types`: whether the shapes that inputs are annotated with can agree with what the program does, node by node.
What is left open agrees with anything, so a program without annotations is never refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.analysis.dry_run import where
from torchgraft.analysis.fake import meta_module
from torchgraft.analysis.types.tensor_type import Dyn, TensorType, is_consistent, meet
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError, ShapeError
from torchgraft.interpreter import Interpreter
from torchgraft.ir.modules import is_from_torch
from torchgraft.ir.node import Node, map_arg
from torchgraft.ir.printing import known_value, target_text
from torchgraft.results.shown import NamedTexts

# What torch raises when shapes do not fit. Anything else says nothing about shapes, and the value stays open.
_MISFIT = (RuntimeError, ValueError, IndexError)
_DTYPES = (torch.float32, torch.int64, torch.bool)


class Types(NamedTexts):
    """What is known of every value, by the names of nodes: a TensorType, Dyn, or a structure of them."""


def check_types(program: GraphModule, annotations: Mapping[str, Any] | None = None) -> Types:
    """Follow the types of the inputs through a program, and raise ShapeError where two shapes cannot agree.

    Inputs are typed by `annotations`, by their annotation in `forward`, or by what shape propagation noted; others are Dyn. A
    node may be annotated too (`node.type`): its type must agree and makes what follows more precise. Each call is tried on meta
    tensors with many sizes for what is open; it is refused if none of them fits.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(torch.nn.Conv2d(3, 8, 3))
    >>> print(check_types(program, {"input": TensorType((Dyn, 3, 224, Dyn))})["output"])
    TensorType[(Dyn, 8, 222, Dyn)]
    """
    unknown = (
        set(annotations or {}) - {str(n.target) for n in program.graph.nodes} - {n.name for n in program.graph.nodes}
    )
    if unknown:
        raise GraftError(
            f"annotations are for {', '.join(sorted(unknown))}, and no node has that name; use names of inputs"
        )
    for name, annotation in (annotations or {}).items():
        _check_annotation(name, annotation)
    checker = _Checker(program, annotations or {})
    with torch.device("meta"), torch.no_grad():
        for node in program.graph.nodes:
            checker.values[node] = checker.refined(node, checker.value(node))
    return Types({node.name: _type(value) for node, value in checker.values.items()})


def _check_annotation(name: str, annotation: Any) -> None:
    dims = annotation.dims if isinstance(annotation, TensorType) else () if annotation is Dyn else None
    if dims is None:
        raise GraftError(
            f"the annotation of '{name}' is {annotation!r}, which is no type; give TensorType((Dyn, 3, 224)) or Dyn"
        )
    wrong = [size for size in dims if size is not Dyn and (type(size) is not int or size < 0)]
    if wrong:
        raise GraftError(
            f"the annotation of '{name}' has the size {wrong[0]!r}; sizes are whole numbers from 0, and Dyn where any will do"
        )


class _Checker:
    """Keeps what is known of each value while walking through a program."""

    def __init__(self, program: GraphModule, annotations: Mapping[str, Any]) -> None:
        self.annotations = annotations
        self.runner = Interpreter(meta_module(program), graph=program.graph)
        self.values: dict[Node, Any] = {}
        # Models repeat themselves: the same call on the same types has the same answer.
        self.answers: dict[Any, Any] = {}
        self.reshaping: set[Node] = set()

    def value(self, node: Node) -> Any:
        if node._op == "placeholder":
            return self._input(node)
        if node._op == "get_attr":
            return abstract(self.runner.fetch_attr(node._target))
        arguments = map_arg((node._args, node._kwargs), self.values.__getitem__)
        if node._op == "output":
            return arguments[0][0]
        module = self.runner.fetch_attr(node._target) if node._op == "call_module" else None
        holes = Holes.of(_plain_containers(arguments), [] if module is None else module.parameters())
        if holes.has_unknown_object:
            return Dyn
        key = _call_key(node, module, holes)
        if key in self.answers:
            return self.answers[key]
        answer = self._tried(node, holes)
        if node not in self.reshaping:
            self.answers[key] = answer
        return answer

    def _input(self, node: Node) -> Any:
        found = self.annotations.get(node.name, self.annotations.get(str(node._target), node._type))
        known = known_value(node)
        if isinstance(found, TensorType):
            return Shaped(tuple(found.dims), getattr(known, "dtype", None))
        if hasattr(known, "shape") and hasattr(known, "dtype"):
            return Shaped(tuple(known.shape), known.dtype)
        return Dyn

    def refined(self, node: Node, value: Any) -> Any:
        """The value with what the node's own annotation adds to it."""
        wanted = self.annotations.get(node.name, node._type)
        if not isinstance(wanted, TensorType) or node._op in ("placeholder", "output"):
            return value
        found = _type(value)
        if not is_consistent(found, wanted):
            raise ShapeError(
                f"shapes cannot agree: node '{node.name}' is annotated {wanted} and makes {found}; at {where(node)}; "
                "change the annotation or the program"
            )
        both = meet(found, wanted)
        return Shaped(tuple(both.dims), getattr(value, "dtype", None))

    def _tried(self, node: Node, holes: Holes) -> Any:
        """What is true of all results of the call, over the sizes that fit."""
        trials = _Trials(node, holes, self._run)
        for dtype in _DTYPES if holes.has_unknown_dtype else _DTYPES[:1]:
            trials.attempt_all(holes.fillings(), dtype)
            if trials.fits:
                trials.attempt_all(holes.doubled(trials.fitting), dtype)
                return self._with_sure_dtypes(trials, dtype) if holes.has_unknown_dtype else trials.result
        trials.attempt_all(holes.last_fillings(), torch.float32)
        if trials.fits:
            trials.attempt_all(holes.doubled(trials.fitting), torch.float32)
            return trials.result
        if trials.failed_otherwise:
            return Dyn
        if holes.has_unknown_number:
            # A number that was read from an open size belongs with it, and trying them apart proves nothing.
            return Dyn
        module = self.runner.fetch_attr(node._target) if node._op == "call_module" else None
        raise ShapeError(_disagreement(node, module, holes, trials)) from trials.misfit

    def _with_sure_dtypes(self, trials: _Trials, guessed: torch.dtype) -> Any:
        """The result without the dtypes that rest on the guess for an open one: those that another guess changes."""
        result = trials.result
        for dtype in _DTYPES:
            if dtype is not guessed:
                trials.attempt(trials.fitting, dtype)
        for leaf, other in zip(pytree.tree_leaves(result), pytree.tree_leaves(trials.result), strict=False):
            if isinstance(leaf, Shaped):
                leaf.dtype = getattr(other, "dtype", None)
        return result

    def _run(self, node: Node, args: Any, kwargs: Any) -> Any:
        before = [(leaf, leaf.shape) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        result = getattr(self.runner, node._op)(node._target, args, kwargs)
        if any(leaf.shape != shape for leaf, shape in before):
            # A shape that changes in place changes under everything that holds the tensor.
            self.reshaping.add(node)
            for source in node._inputs:
                self.values[source] = Dyn
        return result


def _call_key(node: Node, module: torch.nn.Module | None, holes: Holes) -> Any:
    """The same for calls with the same answer; the node itself where that cannot be said."""
    called = node._target
    if module is not None:
        if not is_from_torch(module):
            return node
        called = type(module), repr(module), module.training
    leaves, structure = pytree.tree_flatten(holes.tree)
    parts = [(leaf.dims, leaf.dtype) if isinstance(leaf, Shaped) else (type(leaf), repr(leaf)) for leaf in leaves]
    try:
        hash(called)
    except TypeError:
        return node
    return node._op, called, tuple(parts), str(structure)


class _Trials:
    """The runs of one call, and what is true of all that fitted."""

    def __init__(self, node: Node, holes: Holes, run: Callable[[Node, Any, Any], Any]) -> None:
        self.node = node
        self.holes = holes
        self.run = run
        self.result: Any = None
        self.fits = self.tried = 0
        self.fitting: list[int] = []
        self.misfit: BaseException | None = None
        self.failed_otherwise = False

    def attempt_all(self, fillings: Iterable[list[int]], dtype: torch.dtype) -> None:
        """Run the call on each, until one fails for another reason than shapes before any has fitted."""
        for filling in fillings:
            self.attempt(filling, dtype)
            if self.failed_otherwise and not self.fits:
                return

    def attempt(self, filling: list[int], dtype: torch.dtype) -> None:
        """Run the call once on tensors of these sizes."""
        self.tried += 1
        args, kwargs = self.holes.filled(filling, dtype)
        try:
            made = abstract(self.run(self.node, args, kwargs))
        except Exception as error:
            if isinstance(error, _MISFIT) and not isinstance(error, NotImplementedError):
                self.misfit = self.misfit or error
            elif dtype is not torch.bool:  # so much is not defined for truth values that it says nothing
                self.failed_otherwise = True
            return
        self.result = join(self.result, made) if self.fits else made
        self.fits += 1
        if self.fits == 1:
            self.fitting = filling


def _disagreement(node: Node, module: Any, holes: Holes, trials: _Trials) -> str:
    found = [str(_type(leaf)) for leaf in pytree.tree_leaves(holes.tree) if isinstance(leaf, (Shaped, UnknownNumber))]
    called = target_text(node._target)
    if module is not None and "\n" not in repr(module):
        called = f"{called} = {module!r}"
    open_sizes = f" (none of {trials.tried} ways to fill the open sizes fits)" if holes.count else ""
    reason = (str(trials.misfit) or type(trials.misfit).__name__).splitlines()[0]
    return (
        f"shapes cannot agree: node '{node.name}' calls {called} with {', '.join(found)}{open_sizes}: {reason}; "
        f"at {where(node)}; change the annotation or the program"
    )


def _type(value: Any) -> Any:
    """A value as a type: a TensorType for a tensor, Dyn for what is open."""
    if isinstance(value, Shaped):
        return value.type
    if isinstance(value, (tuple, list)):
        return type(value)([_type(item) for item in value])
    if isinstance(value, dict):
        return {key: _type(item) for key, item in value.items()}
    return Dyn if isinstance(value, UnknownNumber) else value


def _plain_containers(tree: Any) -> Any:
    """Immutable lists and dicts of a graph as those of Python, which trees can be mapped over."""
    if isinstance(tree, dict):
        return {key: _plain_containers(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_plain_containers(value) for value in tree]
    if type(tree) is tuple:
        return tuple([_plain_containers(value) for value in tree])
    if isinstance(tree, slice):
        parts = (tree.start, tree.stop, tree.step)
        return Dyn if any(isinstance(part, (UnknownNumber, Shaped, type(Dyn))) for part in parts) else tree
    return tree


# ---- values known in part, and what is tried in their place ----


_ALWAYS = (1, 2, 97, 128)
_MOST_SIZES = 10
_LARGEST = 1_000_000


@dataclass(eq=False)
class Shaped:
    """A tensor known by its sizes, some of which may be Dyn; the dtype is None where it is not known."""

    dims: tuple[Any, ...]
    dtype: torch.dtype | None = None

    @property
    def type(self) -> TensorType:
        return TensorType(self.dims)


@dataclass(eq=False)
class Holes:
    """The places of an argument tree that are left open, and the sizes that may matter in them."""

    tree: Any
    sizes: list[int] = field(default_factory=list)
    count: int = 0
    has_unknown_number: bool = False
    has_unknown_object: bool = False
    has_unknown_dtype: bool = False

    @classmethod
    def of(cls, tree: Any, related: Iterable[torch.Tensor] = ()) -> Holes:
        """Look through arguments; `related` are the tensors of a module, whose sizes its inputs have to fit."""
        holes = cls(tree)
        found, numbers = set(_ALWAYS), list[int]()
        tensors: list[Shaped] = []
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Shaped):
                tensors.append(leaf)
                holes.count += sum(size == Dyn for size in leaf.dims)
                holes.has_unknown_dtype |= leaf.dtype is None
                found |= {size for size in leaf.dims if size != Dyn}
            elif isinstance(leaf, UnknownNumber):
                holes.count += 1
                holes.has_unknown_number = True
            elif isinstance(leaf, type(Dyn)):
                holes.has_unknown_object = True
            elif type(leaf) is int:
                found.add(abs(leaf))
                numbers.append(abs(leaf))
        found |= {size for tensor in related for size in tensor.shape}
        ordered = sorted(size for size in found if size > 0)
        # The smallest show where a size is cut off, the largest where one is too small.
        kept = ordered if len(ordered) <= _MOST_SIZES else ordered[: _MOST_SIZES // 2] + ordered[-_MOST_SIZES // 2 :]
        products = {first * second for first in numbers for second in kept if 4 < first * second <= 1024}
        holes.sizes = kept + sorted(products - set(kept))[:6]
        # All parts of a view together, and what is left of that for an open size beside the known ones.
        whole = prod(number for number in numbers if number)
        known = {prod(size for size in leaf.dims if size != Dyn) for leaf in tensors}
        shares = {whole, *[whole // size for size in known if size and whole % size == 0]}
        holes.sizes += [size for size in sorted(shares) if size <= _LARGEST and size not in holes.sizes]
        return holes

    def fillings(self) -> Iterator[list[int]]:
        """Sizes for the open places: the same in all, and each alone different from the rest."""
        if not self.count:
            yield []
            return
        for size in self.sizes:
            yield [size] * self.count
        if self.count > 1:
            yield from self._one_apart(97)

    def last_fillings(self) -> Iterator[list[int]]:
        """Sizes to try when nothing has fitted so far."""
        if self.count > 1:
            for rest in (2, 1, 64):
                yield from self._one_apart(rest)

    def doubled(self, filling: list[int]) -> Iterator[list[int]]:
        """A filling that fits with each of its sizes twice as large, and all of them: it may be one of many, or the only one."""
        for place in range(self.count):
            yield [size * 2 if index == place else size for index, size in enumerate(filling)]
        if self.count > 1:
            yield [size * 2 for size in filling]

    def _one_apart(self, rest: int) -> Iterator[list[int]]:
        for place in range(self.count):
            for size in self.sizes:
                if size != rest:
                    yield [size if index == place else rest for index in range(self.count)]

    def filled(self, filling: list[int], unknown_dtype: torch.dtype) -> Any:
        """The tree with tensors and numbers in the place of what was known in part."""
        sizes = iter(filling)

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, Shaped):
                dims = [next(sizes) if size == Dyn else size for size in leaf.dims]
                return torch.empty(dims, dtype=leaf.dtype or unknown_dtype, device="meta")
            if isinstance(leaf, torch.device):
                return torch.device("meta")
            return next(sizes) if isinstance(leaf, UnknownNumber) else leaf

        return pytree.tree_map(fill, self.tree)


class UnknownNumber:
    """An integer that is not known, such as an open size that was read."""

    def __repr__(self) -> str:
        return "Dyn"


def abstract(value: Any) -> Any:
    """A value with what is known of its tensors in their place."""
    return pytree.tree_map_only(torch.Tensor, lambda t: Shaped(tuple(t.shape), t.dtype), _plain(value))


def join(first: Any, second: Any) -> Any:
    """What is true of two results of the same call."""
    if isinstance(first, Shaped) and isinstance(second, Shaped):
        if len(first.dims) != len(second.dims):
            return Dyn
        dims = tuple(a if a == b else Dyn for a, b in zip(first.dims, second.dims, strict=True))
        return Shaped(dims, first.dtype if first.dtype == second.dtype else None)
    if isinstance(first, (tuple, list)) and type(first) is type(second):
        if len(first) != len(second):
            return Dyn
        return type(first)([join(a, b) for a, b in zip(first, second, strict=True)])
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return {key: join(value, second[key]) for key, value in first.items()}
    if type(first) is int and type(second) is int:
        return first if first == second else UnknownNumber()
    if isinstance(first, UnknownNumber) and isinstance(second, (int, UnknownNumber)):
        return first
    return first if type(first) is type(second) and first == second else Dyn


def _plain(value: Any) -> Any:
    """Named tuples and sizes as tuples, so that two of them can be joined item by item."""
    if isinstance(value, tuple):
        return tuple([_plain(item) for item in value])
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
