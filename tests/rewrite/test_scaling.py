"""That the work grows with the program and not with its square: counted, not timed.
Timings beside torch.fx are in `benchmarks/`.
"""

import collections
import sys
from collections.abc import Callable

import pytest
import torch

import torchgraft
from torchgraft.rewrite import replace_pattern
from torchgraft.rewrite.matching import SubgraphMatcher
from torchgraft.rewrite.pattern import Pattern
from torchgraft.rewrite.program import Program


def chain(length: int) -> torchgraft.GraphModule:
    def program(x):
        for _ in range(length // 2):
            x = torch.neg(torch.relu(x))
        return x

    return torchgraft.symbolic_trace(program)


def fan(length: int) -> torchgraft.GraphModule:
    """Everything reads one value, and one call reads everything."""
    return torchgraft.symbolic_trace(lambda x: torch.stack([torch.neg(torch.relu(x)) for _ in range(length // 2)]))


def spread(length: int) -> torchgraft.GraphModule:
    """The two halves of every match lie half a program apart."""

    def program(x):
        return torch.stack([torch.neg(value) for value in [torch.relu(x) for _ in range(length // 2)]])

    return torchgraft.symbolic_trace(program)


def neg_relu(a):
    return torch.neg(torch.relu(a))


def relu_only(a):
    return torch.relu(a), torch.sigmoid(a)


PATTERNS = {
    "two calls": neg_relu,
    "two results, one input": lambda a: (torch.relu(a), torch.neg(a)),
    "two results, nothing shared": lambda a, b: (torch.relu(a), torch.neg(b)),
    "two results, one of them inside": lambda a: (lambda inner: (inner, torch.neg(inner)))(torch.relu(a)),
    "almost": lambda a: torch.neg(torch.relu(torch.neg(torch.relu(torch.neg(torch.sigmoid(a)))))),
    "many results": lambda a, b, c, d: (torch.relu(a), torch.relu(b), torch.neg(c), torch.neg(d)),
}


def comparisons(program: torchgraft.GraphModule, pattern: Callable) -> int:
    matcher = SubgraphMatcher(Pattern(Program.of(pattern, "pattern")), Program(program.graph, program))
    matcher.match()
    return matcher.comparisons


@pytest.mark.parametrize("make", [chain, fan, spread])
@pytest.mark.parametrize("name", PATTERNS)
def test_comparisons_grow_with_the_program(make, name: str) -> None:
    small, large = (comparisons(make(length), PATTERNS[name]) for length in (400, 4_000))
    assert large <= 10.5 * small + 100


def calls_made(function: Callable[[], object]) -> int:
    """How many Python functions run during a call, which is what the time goes into."""
    counts: collections.Counter[str] = collections.Counter()

    def count(frame, event, argument) -> None:
        counts[event] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts["call"] + counts["c_call"]


@pytest.mark.parametrize("make", [chain, fan, spread])
@pytest.mark.parametrize(
    "replacement", [lambda a: torch.sigmoid(a), lambda a: a, lambda a: sum((torch.sin(a) for _ in range(30)), a)]
)
def test_all_work_grows_with_the_program(make, replacement) -> None:
    def work(length: int) -> int:
        program = make(length)
        return calls_made(lambda: replace_pattern(program, neg_relu, replacement))

    work(10)  # what is remembered from the first time on
    small, large = work(200), work(2_000)
    assert large <= 11 * small


def test_hopeless_patterns_do_not_explode() -> None:
    """Sixteen results that share nothing: torch.fx would try every combination."""

    def pattern(*inputs):
        return tuple(torch.relu(value) for value in inputs)

    graph = torchgraft.Graph()
    inputs = [graph.placeholder(f"input{number}") for number in range(16)]
    graph.output(tuple(graph.call_function(torch.relu, (value,)) for value in inputs[:-1]) + (torch.pi,))
    graph.output_node().args = ((*graph.output_node().args[0][:-1], graph.call_function(torch.sin, (inputs[-1],))),)
    graph.output_node().prev.append(graph.output_node())
    program = torchgraft.symbolic_trace(lambda x: torch.stack([torch.relu(x + n) for n in range(40)]))
    assert replace_pattern(program, graph, graph) == []


def test_deep_programs_need_no_deep_stack() -> None:
    program = chain(6_000)
    assert len(replace_pattern(program, neg_relu, lambda a: torch.sigmoid(a))) == 3_000
