"""`rewrite`: replace what means the same as a pattern, under conditions, by something fixed or computed for each match.
Finding is in `meaning_matching.py`, editing in `replace.py`; why nothing was found is said in `explain.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraphError
from torchgraft.ir.graph import Graph
from torchgraft.ir.names import snake_case
from torchgraft.ir.node import Node
from torchgraft.rewriting.found import Condition, Found
from torchgraft.rewriting.matching import InternalMatch, SubgraphMatcher
from torchgraft.rewriting.meaning_matching import MeaningMatcher, MeaningPattern
from torchgraft.rewriting.pattern import MISSING, Pattern, Program, ProgramLike
from torchgraft.rewriting.replace import Edit, Replacement, Rewrite

Where = Condition | Mapping[str, Callable[[Any], bool]]


class PerMatch:
    """A replacement that is made for each match: `PerMatch(make)` calls `make(found)` and uses what it returns.

    `make` sees the modules and tensors that were matched and may compute new ones. A module that it returns is called on the
    pattern's inputs, and becomes part of the program as it is; a function is captured.

    >>> import torchgraft
    >>> from torchgraft.rewriting import call_any
    >>> def halved(found):
    ...     layer = torch.nn.Linear(2, 2)
    ...     layer.weight.data = found.modules["layer"].weight.data / 2
    ...     layer.bias.data = found.modules["layer"].bias.data / 2
    ...     return layer
    >>> module = torchgraft.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    >>> found = torchgraft.rewrite(module, lambda x: call_any(torch.nn.Linear, x, name="layer") / 2, PerMatch(halved))
    >>> len(found)
    0
    """

    def __init__(self, make: Callable[[Found], ProgramLike]) -> None:
        self.make = make


def rewrite(
    program: GraphModule,
    pattern: ProgramLike,
    replacement: ProgramLike | PerMatch,
    *,
    where: Where | None = None,
    mode: str = "meaning",
) -> list[Found]:
    """Replace every occurrence of what the pattern means, in place, and return what was found.

    Pattern and replacement are functions or modules with the same parameters. A parameter matches any value or constant (not
    None, which is what is left out), the same one wherever it is used; `call_any` matches any call of some kind. With
    `mode="meaning"` a call matches however it is spelled: as a function, method, operator or module, by position or by keyword,
    with defaults written or not, with operands of `+` and other commuting operators in either order. `mode="spelling"` is what
    `replace_pattern` does.

    `where` decides which matches count: a function of `Found`, or a dict from parameters to functions of what they matched.
    The replacement may be `PerMatch(make)`, which computes one for each match.

    Matches never overlap: the one whose last node comes first counts, and its nodes are in no other. Matches that stand side by
    side, one giving its result to the next, all count. A match that does not count stands in nobody's way. Values that the
    pattern does not return must not be used outside of it. Where the replacement would have to stand on the other side of a write
    to memory that it touches, the match is left as it is.

    >>> import torchgraft
    >>> module = torchgraft.symbolic_trace(lambda x: torch.nn.functional.softmax(x, dim=1) + x.softmax(1))
    >>> len(rewrite(module, lambda a: torch.softmax(a, 1), lambda a: torch.exp(a)))
    2
    >>> module = torchgraft.symbolic_trace(lambda x: torch.nn.functional.dropout(x, 0.1))
    >>> rewrite(module, lambda a, p: torch.dropout(a, p, True), lambda a, p: a, where={"p": lambda p: p > 0.5})
    []
    """
    subject = Program.to_edit(program)
    matcher = make_matcher(subject, pattern, mode)
    editing = Rewrite(subject, matcher)
    conditions = as_conditions(where, matcher.pattern)
    found_of: dict[int, Found] = {}

    def counts(match: InternalMatch, graph: Graph, pattern_graph: Graph) -> bool:
        found = Found(subject, match)
        found_of[id(match)] = found
        return all(condition(found) for condition in conditions)

    edits = editing.find([counts])
    common, make = None, None
    if isinstance(replacement, PerMatch):
        make = _maker(replacement.make, subject, editing, found_of)
    else:
        common = Replacement(Program.of(replacement, "replacement"), matcher.pattern)
        _check_order(common)
    fetched = [
        value
        for edit in edits
        for value in edit.match.nodes_map.values()
        if isinstance(value, Node) and value.op == "get_attr"
    ]
    called = {node.target for edit in edits for node in edit.region if node.op == "call_module"}
    editing.choose(edits, common, make)
    editing.apply(edits)
    _tidy(program, fetched, called)
    return [_finished(found_of[id(edit.match)], edit) for edit in edits]


def _check_order(replacement: Replacement) -> None:
    """Parameters belong together by their places; the same names in other places are most likely a mistake."""
    names = [str(new.target) for new, _ in replacement.inputs]
    expected = [str(old.target) for _, old in replacement.inputs]
    if names != expected and sorted(names) == sorted(expected):
        raise GraphError(
            f"cannot tell which inputs belong together: the pattern has ({', '.join(expected)}), the replacement "
            f"({', '.join(names)}); they are paired by their places, so give both the same order or other names"
        )


def make_matcher(program: Program, pattern: ProgramLike, mode: str) -> SubgraphMatcher:
    """The matcher of one mode, for a pattern that is captured here."""
    captured = Program.of(pattern, "pattern")
    if mode == "meaning":
        return MeaningMatcher(MeaningPattern(captured), program)
    if mode == "spelling":
        return SubgraphMatcher(Pattern(captured), program)
    raise GraphError(f'cannot match by {mode!r}: the modes are "meaning" and "spelling"')


def as_conditions(where: Where | None, pattern: Pattern) -> list[Condition]:
    """The conditions of `where`, each as a function of a match."""
    if where is None:
        return []
    if callable(where):
        return [where]
    names = [node.target for node in pattern.placeholders]
    for name in where:
        if name not in names:
            raise GraphError(
                f"cannot ask about '{name}': the pattern's parameters are {', '.join(names)}; name one of them in `where`"
            )
    return [lambda found, name=name, test=test: test(found[name]) for name, test in where.items()]  # type: ignore[misc]


def _maker(
    make: Callable[[Found], ProgramLike], program: Program, editing: Rewrite, found_of: dict[int, Found]
) -> Callable[[InternalMatch, Graph, Graph], ProgramLike]:
    names: dict[int, str] = {}
    taken: dict[str, int] = {}

    def replacement(match: InternalMatch, graph: Graph, pattern_graph: Graph) -> ProgramLike:
        made = make(found_of[id(match)])
        if not isinstance(made, torch.nn.Module):
            return made
        if id(made) not in names:
            names[id(made)] = _free_name(program, found_of[id(match)], made, taken)
            editing.adoption.keep(made)
        return _calling(made, names[id(made)], match.pattern)

    return replacement


def _free_name(program: Program, found: Found, module: torch.nn.Module, taken: dict[str, int]) -> str:
    """A name that nothing has; `taken` counts on from the last number that a name was given."""
    calls = [node for node in found.nodes.values() if node.op == "call_module"]
    wish = name = f"{min(calls).target}_replaced" if calls else snake_case(type(module).__name__)
    while name in taken or program.attribute(name) is not MISSING:
        taken[wish] = taken.get(wish, 0) + 1
        name = f"{wish}_{taken[wish]}"
    taken.setdefault(name, 0)
    return name


def _calling(module: torch.nn.Module, name: str, pattern: Pattern) -> GraphModule:
    """A program that is nothing but a call of the module."""
    graph = Graph()
    inputs = [graph.placeholder(node.target) for node in pattern.placeholders]
    graph.output(graph.call_module(name, tuple(inputs)))
    return GraphModule({name: module}, graph)


def _tidy(program: GraphModule, fetched: list[Node], called: set[str]) -> None:
    """Take out what only the replaced nodes needed."""
    for node in dict.fromkeys(fetched):
        if not node._erased and not node._users:
            program.graph.erase_node(node)
    if called:
        used = {node.target for node in program.graph.nodes if node.op in ("call_module", "get_attr")}
        used |= {path[:end] for path in used for end, letter in enumerate(path) if letter == "."}
        for target in called - used:
            program.delete_submodule(target)


def _finished(found: Found, edit: Edit) -> Found:
    found.replacements = edit.new_nodes
    return found
