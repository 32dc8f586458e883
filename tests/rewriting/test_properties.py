"""Random programs, with in-place calls and views among them: replacing a pattern by its equal must change no value.
Where a program has no effects and the pattern one result, torch.fx must find the same number of matches.
"""

import torch
import torch.fx
import torch.fx.subgraph_rewriter
from hypothesis import given, settings
from hypothesis import strategies as st

import torchgraft
from torchgraft.rewriting import replace_pattern

UNARY = (torch.relu, torch.neg, torch.sin, torch.cos)
BINARY = (torch.add, torch.sub)
ALIASES = (lambda a: a.view(-1), lambda a: a.detach(), lambda a: a[:], lambda a: a.contiguous())
EFFECTS = (lambda a: a.add_(1), lambda a: a.mul_(0.5), lambda a: torch.relu_(a), lambda a: a.__setitem__(0, 1.0))


@st.composite
def instructions(draw, effects: bool):
    """A straight-line program: each line calls something on values made before; -1 is the latest one."""
    kinds = [UNARY, UNARY, BINARY, ALIASES, EFFECTS] if effects else [UNARY, UNARY, BINARY]
    lines = []
    for number in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(kinds))
        # Mostly the latest value, so that chains long enough to match come about.
        operand = st.one_of(st.just(-1), st.just(-1), st.integers(0, number + 1))
        lines.append((draw(st.sampled_from(kind)), kind is BINARY, draw(operand), draw(operand)))
    return lines


def as_function(lines):
    def program(x, y):
        values = [x, y]
        for call, is_binary, first, second in lines:
            operands = [values[index % len(values)] for index in ((first, second) if is_binary else (first,))]
            result = call(*operands)
            if result is not None:
                values.append(result)
        return values[-1], values[len(values) // 2]

    return program


def relu_and_sum(a, b):
    first = torch.relu(a)
    return first, torch.add(first, b)


def relu_and_sum_by_other_means(a, b):
    first = torch.clamp(a, min=0)
    return first, first + b


def add_one_then_relu(a):
    a.add_(1)
    return torch.relu(a)


def add_one_then_relu_by_other_means(a):
    a.sub_(-1)
    return torch.clamp(a, min=0)


EQUALS = [
    (lambda a: torch.relu(a), lambda a: torch.clamp(a, min=0)),
    (lambda a: torch.neg(torch.relu(a)), lambda a: torch.clamp(a, min=0) * -1),
    (lambda a: torch.neg(torch.neg(a)), lambda a: a * 1),
    (lambda a: torch.add(a, a), lambda a: a * 2),
    (lambda a: torch.add(torch.sin(a), torch.cos(a)), lambda a: torch.cos(a) + torch.sin(a)),
]
EQUALS_OF_SEVERAL = [
    (lambda a, b: torch.add(a, b), lambda a, b: b + a),
    (lambda a, b: torch.sub(torch.sin(a), torch.neg(b)), lambda a, b: b + torch.sin(a)),
    (lambda a: (torch.sin(a), torch.cos(a)), lambda a: (a.sin(), a.cos())),
    (lambda a, b: (torch.relu(a), torch.neg(b)), lambda a, b: (torch.clamp(a, min=0), b * -1)),
    (relu_and_sum, relu_and_sum_by_other_means),
]
EQUAL_EFFECTS = [
    (lambda a: torch.relu(a.add_(1)), lambda a: torch.clamp(a.sub_(-1), min=0)),
    (lambda a: a.mul_(0.5), lambda a: a.div_(2)),
    (add_one_then_relu, add_one_then_relu_by_other_means),
]


@given(
    instructions(effects=True),
    st.lists(st.sampled_from(EQUALS + EQUALS_OF_SEVERAL + EQUAL_EFFECTS), min_size=1, max_size=3),
)
@settings(max_examples=250, deadline=None)
def test_replacing_equals_by_equals_changes_nothing(lines, rewrites) -> None:
    program = as_function(lines)
    traced = torchgraft.symbolic_trace(program)
    for pattern, replacement in rewrites:
        replace_pattern(traced, pattern, replacement)
        traced.graph.lint()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(5, generator=generator) for _ in range(2)]
    ours, eager = [value.clone() for value in inputs], [value.clone() for value in inputs]
    torch.testing.assert_close(traced(*ours), program(*eager))
    torch.testing.assert_close(ours, eager)


@given(instructions(effects=False), st.sampled_from(EQUALS + EQUALS_OF_SEVERAL[:2]))
@settings(max_examples=200, deadline=None)
def test_torch_fx_finds_as_many(lines, equals) -> None:
    program = as_function(lines)
    ours, theirs = torchgraft.symbolic_trace(program), torch.fx.symbolic_trace(program)
    found = replace_pattern(ours, *equals)
    assert len(found) == len(torch.fx.subgraph_rewriter.replace_pattern(theirs, *equals))
    assert [node.op for node in ours.graph.nodes].count("output") == 1
    assert replace_pattern(ours, *equals) == []
    inputs = torch.randn(5), torch.randn(5)
    torch.testing.assert_close(ours(*inputs), theirs(*inputs))


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_chains(length: int, period: int, replacement_length: int) -> None:
    def repeated(call, times: int):
        def function(a):
            for _ in range(times):
                a = call(a)
            return a

        return function

    traced = torchgraft.symbolic_trace(repeated(torch.relu, length))
    matches = replace_pattern(traced, repeated(torch.relu, period), repeated(torch.neg, replacement_length))
    assert len(matches) == length // period
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    # The first match is the one that starts first, so what is left over stands at the end.
    assert calls == [torch.neg] * (replacement_length * len(matches)) + [torch.relu] * (length % period)
    traced.graph.lint()
