"""Which values of a program may share memory, where that memory is written, and which values outlive the run.
What a single node does is known to `analysis/effects`; whether nodes that change places could notice, to `interference.py`.

Memory is told apart in classes, found in linear time: values that may share anything are in one class. A class that is never
written can be read whenever one likes. Questions are answered from the program as it was when `Aliases` was made.
"""

from __future__ import annotations

import bisect
import operator
from functools import cached_property
from typing import Any

import torch

from torchgraft.analysis.effects import Effects, effects_of, is_impure
from torchgraft.analysis.effects.calls import submodule, writes_only_numbers
from torchgraft.analysis.effects.findings import NO_PLACES, OUTSIDE
from torchgraft.analysis.effects.nodes import shares_of
from torchgraft.analysis.effects.operators import ARITHMETIC, Operator, operator_of
from torchgraft.analysis.effects.state import INPUTS, Places, storage_of
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import check_inputs, is_guard
from torchgraft.ir.modules import is_from_torch
from torchgraft.ir.node import Node

REGION_ENDS = frozenset({enter_context, exit_context})
_INTERFACE = ("placeholder", "output")


class Aliases:
    """Facts about the memory of one program."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.root = graph.owning_module
        self._shares: dict[Node, frozenset[Any]] = {}

    @cached_property
    def position(self) -> dict[Node, int]:
        """The number of each node."""
        return {node: number for number, node in enumerate(self.graph.nodes)}

    @cached_property
    def region(self) -> dict[Node, Node | None]:
        """The innermost region (no_grad, autocast, …) that a node stands in, named by the node that opens it."""
        opened: list[Node | None] = [None]
        region: dict[Node, Node | None] = {}
        for node in self.graph.nodes:
            target = node._target
            if target is exit_context:
                opened.pop()
            region[node] = opened[-1]
            if target is enter_context:
                opened.append(node)
        return region

    def is_in(self, node: Node, context: Any) -> bool:
        """Whether a node stands in a region of this kind, such as torch.autocast."""
        region = self.region[node]
        while region is not None:
            if region._args[0] is context:
                return True
            region = self.region[region]
        return False

    @cached_property
    def effects(self) -> dict[Node, Effects]:
        """What does more than return a value; guards and the ends of regions write nothing and are not among them."""
        return {node: effects_of(node) for node in self.graph.nodes if self._does_more(node)}

    def _does_more(self, node: Node) -> bool:
        return node._op not in _INTERFACE and not is_fixed(node) and is_impure(node)

    # ---- single nodes ----

    def is_pure(self, node: Node) -> bool:
        """Whether the node only returns a value, the same for the same arguments."""
        return node._op not in _INTERFACE and not is_fixed(node) and not self._does_more(node)

    def is_fresh(self, node: Node) -> bool:
        """Whether the value surely shares no memory with anything that was there before."""
        return node._op in ("call_function", "call_method", "call_module") and not self.shares(node)

    def shares(self, node: Node) -> frozenset[Any]:
        """What the value of a node may share memory with: input nodes, paths of state, or what lies outside."""
        result = self._shares.get(node)
        if result is None:
            is_nothing = node._op == "call_function" and is_guard(node._target)  # it looks, and returns None
            result = self._shares[node] = NO_PLACES if is_nothing or self._is_computed(node) else shares_of(node)
        return result

    def _is_computed(self, node: Node) -> bool:
        """Whether an operator of Python's computes a new value; of two lists it would hold what they hold."""
        return is_arithmetic(node) and (_has_number(node) or has_operand_of(self._tensors, node))

    @cached_property
    def _tensors(self) -> set[Node]:
        return tensor_nodes(self.graph)

    def is_tensor(self, node: Node) -> bool:
        """Whether the value of a node is surely one tensor: by the schema of the operator, by the annotation of a module
        of torch, or by what a pass has noted.
        """
        return node in self._tensors

    def writes_only_numbers(self, node: Node) -> bool:
        """Whether a node that writes changes elements, and cannot make one value hold or share another, as a list can."""
        is_item = getattr(node._target, "__module__", None) == "_operator" and bool(node._args)
        return node._args[0] in self._tensors if is_item else writes_only_numbers(node)

    # ---- classes of memory ----

    @cached_property
    def has_writes(self) -> bool:
        """Whether anything in the program writes memory."""
        return any(effects.writes or effects.unknown for effects in self.effects.values())

    def is_written(self, node: Node) -> bool:
        """Whether the memory of a value may be written by any node of the program."""
        return bool(self._anything) or self.class_of(node) in self._writes

    def is_state_written(self, tensor: torch.Tensor, besides: Node | None = None) -> bool:
        """Whether a tensor of the module may be written by any node of the program, one perhaps left out."""
        positions = [*self._anything, *self._writes.get(self.class_of(storage_of(tensor)), ())]
        return any(position != self.position.get(besides, -1) for position in positions)  # type: ignore[arg-type]

    def is_known_to_be_written(self, value: torch.Tensor | Node) -> bool:
        """Whether a node is known to write a tensor of the module, or the memory of a node's value; calls of which nobody knows
        what they do are not counted."""
        key = value if isinstance(value, Node) else storage_of(value)
        return bool(self._writes.get(self.class_of(key), ()))

    def is_known_to_change_between(self, value: Node, user: Node) -> bool:
        """Whether a node is known to write the memory of a value after it was made and before a later node."""
        first, last = self.position[value], self.position[user]
        return any(first < position < last for position in self._writes.get(self.class_of(value), ()))

    def is_input_or_state(self, node: Node) -> bool:
        """Whether the memory of a value may be that of an input, of the module's state, or of something outside."""
        return self.class_of(node) in self.held_outside

    def is_touched_between(self, node: Node, first: int, last: int) -> bool:
        """Whether anything that the node reads or returns may be written at positions after `first` and before `last`."""
        if _any_between(self._anything, first, last):
            return True
        return any(_any_between(self._writes.get(place, ()), first, last) for place in self.places_read(node))

    def places_read(self, node: Node) -> set[Any]:
        """The classes of everything that the node may read or return."""
        places = {self.class_of(source) for source in node._inputs}
        places.add(self.class_of(node))
        if node._op == "call_module":
            places.add(self._state_class(node._target))
        return places

    def places_written(self, node: Node) -> set[Any] | None:
        """The classes that the node may write; None where it may write anything."""
        effects = self.effects.get(node)
        if effects is None:
            return set()
        if effects.unknown or OUTSIDE in effects.writes:
            return None
        return {
            self._state_class(place) if isinstance(place, str) else self.class_of(place) for place in effects.writes
        }

    def outlives(self, node: Node) -> bool:
        """Whether the memory of a value may still be seen, through this value, after the run."""
        return node in self._outliving

    def class_of(self, memory: Any) -> Any:
        """The class of the memory of a value, or of a storage, comparable with those of others."""
        return self._places.find(memory)

    def _state_class(self, path: str) -> Any:
        return self._places.find(self._places.state(path))

    @cached_property
    def _places(self) -> Places:
        """All memory of the program, with what may be shared joined."""
        places = Places(self.root)

        def join(node: Node, place: Any) -> None:
            places.join(node, place if isinstance(place, Node) else places.state(place))

        for node in self.graph.nodes:
            if node._op == "placeholder":
                # Two inputs may be one tensor.
                places.join(node, INPUTS)
            elif node._op != "output":
                for place in self.shares(node):
                    join(node, place)
                if node._op == "call_module":
                    places.state(node._target)  # joins what the module holds
        for node, effects in self.effects.items():
            for place in effects.writes:
                if not isinstance(place, Node):
                    places.state(place)
            if effects.unknown or OUTSIDE in effects.writes:
                for source in node._inputs:
                    places.join(source, OUTSIDE)
            elif effects.writes and not self.writes_only_numbers(node):
                # A list can come to hold, and a module to keep, what it is given.
                for place in (*node._inputs, *effects.writes):
                    join(node, place)
        return places

    @cached_property
    def _anything(self) -> list[int]:
        """The positions of nodes that may write anything."""
        return [self.position[node] for node in self.effects if self.places_written(node) is None]

    @cached_property
    def _writes(self) -> dict[Any, list[int]]:
        """For each class the positions of the nodes that write it, in order."""
        result: dict[Any, list[int]] = {}
        for node in self.effects:
            for place in self.places_written(node) or ():
                result.setdefault(place, []).append(self.position[node])
        return result

    @cached_property
    def held_outside(self) -> set[Any]:
        """The classes that inputs, the module's state and the world outside hold on to."""
        places = [INPUTS, OUTSIDE, *[place for place in self._places if not isinstance(place, Node)]]
        return {self._places.find(place) for place in places}

    @cached_property
    def _outliving(self) -> set[Node]:
        """Found backwards from the output, and from what is stored away.

        The result of `a + b` is never `a` itself: of two lists it holds what they hold. So if `a` was made by such an operator
        too, what it holds is older than `a`, and no memory of its own is seen.
        """
        result: set[Node] = set()
        only_contents: set[Node] = set()
        for node in reversed(self.graph.nodes):
            if node._op == "output" or self._stores(node):
                result.update(node._inputs)
            elif node in result or node in only_contents:
                shared = [place for place in self.shares(node) if isinstance(place, Node)]
                inner = [place for place in shared if is_arithmetic(node) and is_arithmetic(place)]
                only_contents.update(inner)
                result.update(set(shared).difference(inner))
        return result

    def _stores(self, node: Node) -> bool:
        """Whether the node may make something keep what it is given."""
        effects = self.effects.get(node)
        if effects is None or not (effects.unknown or effects.writes):
            return False
        return not self.writes_only_numbers(node)


def is_fixed(node: Node) -> bool:
    """Whether a node is a guard or an end of a region: it stays, and it stays where it is."""
    return node._op == "call_function" and (is_guard(node._target) or node._target in REGION_ENDS)


def _has_number(node: Node) -> bool:
    """Whether a number is among the operands, which a list takes only to be repeated."""
    kinds = [type(value) for value in node._args]
    return float in kinds or (int in kinds and node._target is not operator.mul)


def _any_between(positions: Any, first: int, last: int) -> bool:
    index = bisect.bisect_right(positions, first)
    return index < len(positions) and positions[index] < last


# ---- which values are tensors ----


_CASTS = frozenset({"half", "float", "double", "bfloat16", "long", "int", "bool", "cpu", "cuda"})
_SEVERAL_TENSORS = frozenset(
    {"unbind", "chunk", "split", "tensor_split", "topk", "sort", "var_mean", "std_mean", "split_with_sizes", "hsplit"}
)


def tensor_nodes(graph: Graph) -> set[Node]:
    """The nodes whose value is surely one tensor.

    >>> graph = Graph()
    >>> x = graph.placeholder("x")
    >>> graph.call_method("relu", (graph.call_function(operator.add, (x, 1)),))
    relu
    >>> sorted(tensor_nodes(graph), key=str)
    [add, relu]
    """
    operators: dict[Any, Operator | None] = {}
    result = _used_as_tensors(graph, operators)
    for node in graph.nodes:
        if node._op == "call_module":
            module = submodule(graph.owning_module, node._target)
            is_one = module is not None and is_from_torch(module) and _says_tensor(type(module).forward)
        elif node._op == "placeholder":
            is_one = node._type is torch.Tensor
        elif node._target is operator.getitem:
            is_one = _is_item_of_tensors(node, result)
        elif is_arithmetic(node):
            is_one = has_operand_of(result, node)
        else:
            is_one = _returns_tensor(node, operators)
        if is_one:
            result.add(node)
    return result


def is_arithmetic(node: Node) -> bool:
    """Whether a node calls an operator of Python's that computes on numbers and tensors."""
    return node._op == "call_function" and type(node._target).__hash__ is not None and node._target in ARITHMETIC


def has_operand_of(tensors: set[Node], node: Node) -> bool:
    """Whether a tensor is an operand itself, and not in a list that is one."""
    return any(type(value) is Node and value in tensors for value in node._args)


def _used_as_tensors(graph: Graph, operators: dict[Any, Operator | None]) -> set[Node]:
    """The values that operators take, or guards check, for tensors; where they are none, a program raises, pass or no pass."""
    result: set[Node] = set()
    for node in graph.nodes:
        if node._target is check_inputs:
            found, expected = node._args[:2]
            result.update(value for name, value in found.items() if type(value) is Node and expected[name] == "tensor")
            continue
        first = node._args[0] if node._args else None
        if type(first) is Node and first not in result and node._op in ("call_function", "call_method"):
            found = _operator(node, operators)
            if found is not None and found.signatures:
                if all(s.parameters and s.parameters[0].type == "Tensor" for s in found.signatures):
                    result.add(first)
    return result


def _returns_tensor(node: Node, operators: dict[Any, Operator | None]) -> bool:
    if node._op == "call_method" and node._target in _CASTS:
        return True
    found = _operator(node, operators) if node._op in ("call_function", "call_method") else None
    if found is not None and found.signatures:
        return all(signature.returns == "tensor" for signature in found.signatures)
    is_functional = getattr(node._target, "__module__", None) == "torch.nn.functional"
    if node._op == "call_function" and is_functional and _says_tensor(node._target):
        return True
    meta = node._meta or {}
    known = meta.get("tensor_meta", meta.get("val"))
    return hasattr(known, "dtype") and hasattr(known, "shape")


def _operator(node: Node, operators: dict[Any, Operator | None]) -> Operator | None:
    try:
        return operators[node._op, node._target]
    except KeyError:
        found = operators[node._op, node._target] = operator_of(node._op, node._target)
        return found
    except TypeError:  # a callable object that cannot be a key
        return None


def _says_tensor(function: Any) -> bool:
    return getattr(function, "__annotations__", {}).get("return") is torch.Tensor


def _is_item_of_tensors(node: Node, tensors: set[Node]) -> bool:
    """Whether an item is a tensor: that of a tensor, of several tensors, or one taken by several indices at once."""
    source, index = node._args
    if source in tensors or type(index) is tuple:
        return True
    name = getattr(source._target, "__name__", source._target) if isinstance(source, Node) else None
    return type(index) is int and name in _SEVERAL_TENSORS
