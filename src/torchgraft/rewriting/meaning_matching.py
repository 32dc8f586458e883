"""Finding where something that means the same as a pattern occurs in a program, however either is spelled.
What a call means is said in `meaning.py` and `modules.py`; the walk, the joining of several results and what counts as a match
are those of `matching.py`. Linear in the program: each starting node costs at most the size of the pattern, times the orders
of operands that are tried, of which there are at most `ORDERS_TRIED`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchgraft.errors import GraphError
from torchgraft.ir.modules import has_hooks
from torchgraft.ir.node import Node
from torchgraft.rewriting.found import call_any, is_fetch, pattern_name
from torchgraft.rewriting.matching import _UNBOUND, Binding, SubgraphMatcher, same_value
from torchgraft.rewriting.meaning import Meaning, coarse_key, meaning_of_call
from torchgraft.rewriting.modules import State, coarse_key_of_module, meaning_of_module_call
from torchgraft.rewriting.pattern import Literal, Operation, Pattern, Program, Wildcard

# Orders of commuting operands that are tried from one starting node.
ORDERS_TRIED = 64

# What differed, in words: only put together if somebody asks.
Complaint = Callable[[], str]
Pairs = list[tuple[Any, Any, str]]


@dataclass(slots=True, eq=False)
class AnyState:
    """A weight of a module in the pattern: matches any parameter or buffer."""

    path: str


class AnyKind:
    """The operation of `call_any`: what it may be a call of."""

    __slots__ = ("inputs", "keys", "types")

    def __init__(self, kinds: Any, inputs: tuple[Any, ...]) -> None:
        kinds = kinds if isinstance(kinds, list | tuple) else (kinds,)
        self.types = tuple([kind for kind in kinds if isinstance(kind, type) and issubclass(kind, torch.nn.Module)])
        functions = [kind for kind in kinds if kind not in self.types]
        self.keys = frozenset([_key_of_function(function) for function in functions])
        self.inputs = inputs


class MeaningPattern(Pattern):
    """A pattern whose operations are known by what they mean."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.meanings: dict[Operation, tuple[Any, Any, bool]] = {}
        self.any_kinds: dict[Operation, AnyKind] = {}
        names: set[str] = set()
        for operation in self.operations:
            node = operation.node
            if node.op == "call_function" and node.target is call_any:
                if pattern_name(node) in names:
                    raise GraphError(
                        f"cannot match a pattern with two calls named '{pattern_name(node)}': nobody could tell them apart; "
                        "give each call_any another name"
                    )
                names.add(pattern_name(node))
                inputs = tuple([self._template(item) for item in node.args[1:]])
                self.any_kinds[operation] = AnyKind(node.args[0], inputs)
            elif operation.op != "get_attr":
                meaning = meaning_of(node, program)
                arguments = {
                    key: AnyState(value.path) if isinstance(value, State) else self._template(value)
                    for key, value in meaning.arguments.items()
                }
                self.meanings[operation] = (meaning.key, arguments, meaning.commutes)


def meaning_of(node: Node, program: Program) -> Meaning:
    """The meaning of any call."""
    if node.op == "call_module":
        return meaning_of_module_call(node, program.attribute(node.target))
    return meaning_of_call(node)


class MeaningMatcher(SubgraphMatcher):
    """Finds the non-overlapping occurrences of what a pattern means."""

    pattern: MeaningPattern
    narrow = False

    def __init__(self, pattern: MeaningPattern, program: Program) -> None:
        super().__init__(pattern, program)
        # Fetching an attribute does nothing, so whoever else uses it may go on doing so: it is never part of what is replaced.
        self._operation_indices = [operation.index for operation in pattern.operations if operation.op != "get_attr"]
        self._meanings: dict[Node, Meaning] = {}
        # How far the best failed attempt came (nodes that agreed), where, and what differed; kept if `explaining`.
        self.explaining = False
        self.nearest: tuple[int, Node, Complaint] | None = None

    # ---- candidates ----

    def _candidates(self, nodes: Iterable[Node], node_name_match: str) -> list[list[Node]]:
        result: list[list[Node]] = [[] for _ in self.pattern.sinks]
        wanted: dict[Any, list[int]] = {}
        typed: list[tuple[int, tuple[type, ...]]] = []
        fetching = [number for number, sink in enumerate(self.pattern.sinks) if sink.op == "get_attr"]
        for number, sink in enumerate(self.pattern.sinks):
            if sink in self.pattern.any_kinds:
                kind = self.pattern.any_kinds[sink]
                for key in kind.keys:
                    wanted.setdefault(key, []).append(number)
                if kind.types:
                    typed.append((number, kind.types))
            elif sink.op != "get_attr":
                wanted.setdefault(self._coarse(sink.node, self.pattern.program), []).append(number)
        for node in nodes:
            op = node.op
            if op == "placeholder" or op == "output":
                continue
            if op == "get_attr":
                numbers: Iterable[int] = fetching
            else:
                numbers = wanted.get(self._coarse(node, self.program), ())
                if typed and op == "call_module":
                    module = self.program.attribute(node.target)
                    if not has_hooks(module):
                        numbers = [*numbers, *[number for number, types in typed if isinstance(module, types)]]
            for number in numbers:
                result[number].append(node)
        return result

    @staticmethod
    def _coarse(node: Node, program: Program) -> Any:
        return coarse_key_of_module(program.attribute(node.target)) if node.op == "call_module" else coarse_key(node)

    # ---- one sink ----

    def _bindings(self, sink: Operation, node: Node) -> Iterator[Binding]:
        binding: Binding = [_UNBOUND] * self.pattern.size
        waiting: list[tuple[Binding, Pairs]] = [(binding, [(sink, node, "the result")])]
        for _ in range(ORDERS_TRIED):
            if not waiting:
                return
            binding, pairs = waiting.pop()
            if self._agrees(binding, pairs, waiting):
                yield binding

    def _agrees(self, binding: Binding, pairs: Pairs, waiting: list[tuple[Binding, Pairs]]) -> bool:
        """Work through the pairs of template and value; where operands commute, leave the other order waiting."""
        while pairs:
            template, value, where = pairs.pop()
            kind = type(template)
            problem: Complaint | None = None
            if kind is Wildcard:
                bound = binding[template.index]
                if value is None:
                    problem = partial(_is_other, value, "a value")  # what is left out matches nothing
                elif bound is _UNBOUND:
                    binding[template.index] = value
                elif bound is not value and not same_value(bound, value):
                    problem = partial(_two_values, bound, value)
            elif kind is Operation:
                bound = binding[template.index]
                if bound is _UNBOUND:
                    if not self._opens(template, value, where, binding, pairs, waiting):
                        return False
                elif bound is not value and bound != value:
                    problem = partial(_two_values, bound, value)
            elif kind is Literal:
                if not same_value(template.value, value):
                    problem = partial(_differs, template.value, value)
            elif kind is AnyState:
                if not isinstance(value, State) and not is_fetch(value):
                    problem = partial(_is_other, value, "a weight")
            else:
                inner: list[tuple[Any, Any]] = []
                if not self._open_container(template, value, inner):
                    problem = partial(_is_other, value, "something else")
                pairs.extend([(item, part, where) for item, part in inner])
            if problem is not None:
                return self._complain(binding, value, where, problem)
        return True

    def _opens(
        self,
        operation: Operation,
        value: Any,
        where: str,
        binding: Binding,
        pairs: Pairs,
        waiting: list[tuple[Binding, Pairs]],
    ) -> bool:
        """Bind an operation to a value that means the same, and add its arguments to the pairs."""
        self.comparisons += 1
        if operation.op == "get_attr":
            return self._opens_attribute(operation, value, where, binding)
        if not isinstance(value, Node) or value in self._claimed or value.op in ("placeholder", "get_attr", "output"):
            return self._complain(
                binding, value, where, lambda: f"is {_text(value)}, the pattern calls {_called(operation)}"
            )
        found = self._inputs_of_any(operation, value)
        if found is None:
            meaning = self._meaning(value)
            key, arguments, commutes = self.pattern.meanings.get(operation, (None, {}, False))
            if meaning.key != key or meaning.arguments.keys() != arguments.keys():
                return self._complain(binding, value, where, lambda: self._other_call(operation, value))
            found = [(arguments[name], meaning.arguments[name], _place(name, value)) for name in arguments]
            if commutes and meaning.commutes:
                (first, a, place), (second, b, other_place) = found[:2]
                swapped = [(first, b, other_place), (second, a, place), *found[2:]]
                other_order = self._may_agree(swapped, binding)
                if other_order and not self._may_agree(found, binding):
                    found = swapped
                elif other_order:
                    other = list(binding)
                    other[operation.index] = value
                    waiting.append((other, [*pairs, *reversed(swapped)]))
        if operation.user_count is not None and operation.user_count != len(value._users):
            return self._complain(binding, value, where, lambda: _used_elsewhere(operation, value))
        binding[operation.index] = value
        pairs.extend(reversed(found))
        return True

    def _opens_attribute(self, operation: Operation, value: Any, where: str, binding: Binding) -> bool:
        path = value.path if isinstance(value, State) else value.target if is_fetch(value) else None
        found = self.program.attribute(path) if path is not None else None
        if path is None or (
            type(found) is not operation.attribute if operation.attribute else path != operation.target
        ):
            return self._complain(
                binding, value, where, lambda: f"is {_text(value)}, the pattern fetches '{operation.target}'"
            )
        binding[operation.index] = value
        return True

    def _inputs_of_any(self, operation: Operation, node: Node) -> Pairs | None:
        """For `call_any`: the values that a call is given, beside what the pattern wants; None if it is another operation."""
        kind = self.pattern.any_kinds.get(operation)
        if kind is None:
            return None
        module = self.program.attribute(node.target) if node.op == "call_module" else None
        if isinstance(module, kind.types) and not has_hooks(module):
            values = [*node.args, *node.kwargs.values()]
        elif self._coarse(node, self.program) in kind.keys:
            values = [value for value in self._meaning(node).arguments.values() if isinstance(value, Node | State)]
        else:
            return None
        if len(values) < len(kind.inputs):
            return None
        return [
            (template, value, f"an input of '{node.name}'")
            for template, value in zip(kind.inputs, values, strict=False)
        ]

    def _may_agree(self, found: Pairs, binding: Binding) -> bool:
        """Whether the first two arguments could be in this order, seen from outside."""
        return all(self._could_be(template, value, binding) for template, value, _ in found[:2])

    def _could_be(self, template: Any, value: Any, binding: Binding) -> bool:
        kind = type(template)
        if kind is Wildcard:
            bound = binding[template.index]
            return bound is _UNBOUND or same_value(bound, value)
        if kind is Literal:
            return same_value(template.value, value)
        if kind is not Operation or template.op == "get_attr":
            return True
        if not isinstance(value, Node) or value.op in ("placeholder", "get_attr"):
            return False
        if template in self.pattern.any_kinds:
            return self._inputs_of_any(template, value) is not None
        return self._meaning(value).key == self.pattern.meanings[template][0]

    def _meaning(self, node: Node) -> Meaning:
        meaning = self._meanings.get(node)
        if meaning is None:
            meaning = self._meanings[node] = meaning_of(node, self.program)
        return meaning

    # ---- why not ----

    def _complain(self, binding: Binding, value: Any, where: str, what: Complaint) -> bool:
        if self.explaining:
            agreed = [item for item in binding[: len(self.pattern.nodes)] if isinstance(item, Node)]
            calls = sum(binding[index] is not _UNBOUND for index in self._operation_indices)
            start = agreed[0] if agreed else value
            if isinstance(start, Node) and (self.nearest is None or calls > self.nearest[0]):
                self.nearest = calls, start, lambda: f"{where} {what()}"
        return False

    def _other_call(self, operation: Operation, node: Node) -> str:
        meaning = self._meaning(node)
        if operation not in self.pattern.meanings or meaning.key != self.pattern.meanings[operation][0]:
            return (
                f"is made by '{node.name}', a call of {_key_text(meaning.key)}; the pattern calls {_called(operation)}"
            )
        wanted = self.pattern.meanings[operation][1]
        missing = [str(name) for name in wanted if name not in meaning.arguments]
        extra = [str(name) for name in meaning.arguments if name not in wanted]
        return f"is given other arguments by '{node.name}' ({', '.join(extra)}; the pattern has {', '.join(missing)})"

    def calls_of(self, operation: Operation) -> str:
        """What an operation of the pattern is a call of, in words."""
        if operation in self.pattern.meanings:
            return _key_text(self.pattern.meanings[operation][0])
        return _called(operation)


def _key_of_function(function: Any) -> Any:
    from torchgraft.ir.graph import Graph

    return coarse_key(Graph().call_function(function))


def _place(name: Any, node: Node) -> str:
    if isinstance(name, str) and name.startswith("."):
        return f"the setting '{name[1:]}' of '{node.name}'"
    return f"argument {name!r} of '{node.name}'"


def _text(value: Any) -> str:
    if isinstance(value, Node):
        return f"'{value.name}'"
    return f"the weight '{value.path}'" if isinstance(value, State) else repr(value)


def _key_text(key: Any) -> str:
    if isinstance(key, str):
        return key
    return str(getattr(key[1], "__name__", key[1])) if isinstance(key, tuple) else str(key)


def _called(operation: Operation) -> str:
    node = operation.node
    if node.target is call_any:
        return f"any {_kinds_text(node.args[0])} ('{pattern_name(node)}')"
    return str(getattr(node.target, "__name__", node.target))


def _kinds_text(kinds: Any) -> str:
    kinds = kinds if isinstance(kinds, list | tuple) else (kinds,)
    return " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)


def _is_other(value: Any, wanted: str) -> str:
    return f"is {_text(value)}, the pattern has {wanted}"


def _differs(wanted: Any, found: Any) -> str:
    return f"is {_text(found)}, the pattern has {wanted!r}"


def _two_values(first: Any, second: Any) -> str:
    return f"is {_text(second)}, the pattern has the same value here as elsewhere, where it is {_text(first)}"


def _used_elsewhere(operation: Operation, node: Node) -> str:
    users = ", ".join(f"'{user.name}'" for user in node._users)
    return (
        f"is made by '{node.name}', which {len(node._users)} nodes use ({users}) and {operation.user_count} in the pattern; "
        "a value that the pattern does not return must not be used outside of it"
    )
