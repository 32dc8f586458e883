"""That the work grows with the program and not with its square: counted, not timed.
Timings beside torch.fx are in `benchmarks/`.
"""

import collections
import sys
from collections.abc import Callable

import pytest
import torch

import torchgraft
from torchgraft.rewriting import PerMatch, replace_pattern, rewrite
from torchgraft.rewriting.matching import SubgraphMatcher
from torchgraft.rewriting.pattern import Pattern, Program


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
    assert large <= 12 * small


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
    "replaced_by",
    [0, 1, 3, 30],
)
def test_all_work_grows_with_the_program(make, replaced_by: int) -> None:
    def replacement(a):
        for _ in range(replaced_by):
            a = torch.sigmoid(a)
        return a

    def work(length: int) -> int:
        program = make(length)
        return calls_made(lambda: replace_pattern(program, neg_relu, replacement))

    work(10)  # what is remembered from the first time on
    small, large = work(60), work(600)
    assert large <= 12 * small


@pytest.mark.parametrize("replacement", [lambda a: torch.sigmoid(a), PerMatch(lambda found: torch.nn.Sigmoid())])
@pytest.mark.parametrize("kept", [torch.nn.Tanh, torch.nn.ReLU])
def test_modules_that_are_replaced_or_made_take_no_more(replacement, kept) -> None:
    def work(length: int) -> int:
        layers = [torch.nn.Softmax(1) if number % 2 else kept() for number in range(length)]
        program = torchgraft.symbolic_trace(torch.nn.Sequential(*layers))
        return calls_made(lambda: rewrite(program, lambda a: torch.softmax(a, 1), replacement))

    work(10)
    small, large = work(60), work(600)
    assert large <= 12 * small


def test_hopeless_patterns_do_not_explode() -> None:
    """Nine results that share nothing, the last of which cannot be had: torch.fx would try every combination."""

    def pattern(a, b, c, d, e, f, g, h, i):
        first = [torch.relu(value) for value in (a, b, c, d, e, f, g, h)]
        return *first, torch.sin(torch.cos(i))

    program = torchgraft.symbolic_trace(lambda x: torch.stack([torch.relu(x + n) for n in range(40)] + [torch.sin(x)]))
    assert comparisons(program, pattern) < 2_000


def test_deep_programs_need_no_deep_stack() -> None:
    program = chain(6_000)
    assert len(replace_pattern(program, neg_relu, lambda a: torch.sigmoid(a))) == 3_000
