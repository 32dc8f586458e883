"""The questions about nodes: opcodes, declared effects, regions, Python's operators, and answers that stay true."""

import functools
import math
import operator
import warnings

import pytest
import torch

import torchgraft
from torchgraft.analysis.effects import Effects, effects_of, is_impure
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.graph import Graph
from torchgraft.ir.node import _side_effectful_functions


@pytest.fixture
def graph() -> Graph:
    return Graph()


def test_inputs_and_outputs_always_stay(graph):
    x = graph.placeholder("x")
    output = graph.output(x)
    assert is_impure(x) and is_impure(output)
    assert x.is_impure() and output.is_impure(impure_random=False)
    assert effects_of(x).writes == {"<outside>"}


def test_fetching_an_attribute_has_no_effect():
    root = torch.nn.BatchNorm1d(2)
    graph = Graph(root)
    buffer = graph.get_attr("running_mean")
    assert not is_impure(buffer)
    assert effects_of(buffer) == Effects(shares=frozenset({"running_mean"}))
    write = graph.call_method("add_", (buffer, 1))
    assert effects_of(write).writes == {buffer}


IN_PLACE = [name for name in dir(operator) if name.startswith("i") and hasattr(operator, f"__{name[1:]}__")]


def test_the_list_of_in_place_operators_is_what_python_has():
    names = "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor"
    assert sorted(IN_PLACE) == names.split()


@pytest.mark.parametrize("name", [*IN_PLACE, "setitem", "delitem"])
def test_in_place_operators_write_their_first_operand(graph, name):
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert effects_of(graph.call_function(getattr(operator, name), (x, y))).writes == {x}
    dunder = f"__{name}__"
    if name != "iconcat":
        assert effects_of(graph.call_method(dunder, (x, y))).writes == {x}
        assert effects_of(graph.call_function(getattr(operator, dunder), (x, y))).writes == {x}


OTHERS = sorted(
    {name for name in operator.__all__ if not name.startswith("_")}
    - {*IN_PLACE, "setitem", "delitem", "attrgetter", "itemgetter", "methodcaller", "call", "length_hint", "indexOf"}
)


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators_only_compute(graph, name):
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert not effects_of(graph.call_function(getattr(operator, name), (x, y)))


def test_a_call_on_constants_says_nothing_about_other_calls(graph):
    x = graph.placeholder("x")
    for _ in range(2):
        assert not is_impure(graph.call_function(operator.iadd, (1, 2)))
        assert is_impure(graph.call_function(operator.call, (torch.relu, x)))
        assert is_impure(graph.call_function(operator.iadd, (x, 2)))
        assert not is_impure(graph.call_function(torch.add, (x, 2)))
        assert is_impure(graph.call_function(torch.add, (x, 2), {"out": x}))
        assert not is_impure(graph.call_function(torch.dropout, (x, 0.5, False)))
        assert is_impure(graph.call_function(torch.dropout, (x, 0.5, True)))
        assert not is_impure(graph.call_method("add", (x, 2)))
        assert is_impure(graph.call_method("add", (x, 2), {"out": x}))


def test_getters_only_compute_and_callers_are_unknown(graph):
    x = graph.placeholder("x")
    assert not effects_of(graph.call_function(operator.attrgetter("shape"), (x,)))
    assert not effects_of(graph.call_function(operator.itemgetter(0), (x,)))
    assert effects_of(graph.call_function(operator.methodcaller("mul_", 2), (x,)))
    assert effects_of(graph.call_function(operator.call, (x,)))


PURE_BUILTINS = [
    abs,
    len,
    int,
    float,
    bool,
    str,
    tuple,
    list,
    max,
    min,
    sum,
    range,
    isinstance,
    getattr,
    slice,
    round,
    id,
]


@pytest.mark.parametrize("function", [*PURE_BUILTINS, math.sqrt, math.floor, math.prod], ids=lambda f: f.__name__)
def test_builtins_only_compute(graph, function):
    x, y = graph.placeholder("x"), graph.placeholder("y")
    arguments = (x, y) if function in (isinstance, getattr) else (x,)
    assert not effects_of(graph.call_function(function, arguments))


@pytest.mark.parametrize("function", [print, setattr, delattr, exec, eval, open, input, __import__, vars, globals])
def test_builtins_with_effects_stay(graph, function):
    assert is_impure(graph.call_function(function, (graph.placeholder("x"),)))


def test_declared_effects_are_honoured_at_once_and_do_not_stick(graph):
    plain = graph.call_function(torch.sinh, (graph.placeholder("x"),))
    tried = graph.call_function(torch.nn.functional.silu, (plain,))
    assert not is_impure(plain) and not is_impure(tried)
    try:
        assert torchgraft.has_side_effect(torch.sinh) is torch.sinh
        torchgraft.has_side_effect(torch.nn.functional.silu)
        assert is_impure(plain) and is_impure(tried)
    finally:
        _side_effectful_functions.difference_update({torch.sinh, torch.nn.functional.silu})
    assert not is_impure(plain) and not is_impure(tried)


def test_effects_declared_to_torch_fx_are_honoured(graph):
    node = graph.call_function(torch.sinh, (graph.placeholder("x"),))
    assert not is_impure(node)
    torch.fx.node.has_side_effect(torch.sinh)
    try:
        assert is_impure(node)
    finally:
        torch.fx.node._side_effectful_functions.discard(torch.sinh)


# ---- a user's own code ----


def double(x):
    raise AssertionError("an analysis runs no code of a user's")


class Double(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: double(x))


@pytest.mark.parametrize("target", [double, Double.apply, lambda x: double(x), functools.partial(double)])
def test_a_users_function_may_do_anything(graph, target):
    effects = effects_of(graph.call_function(target, (graph.placeholder("x"),)))
    assert effects.unknown and "mark it with torchgraft.pure if it only computes" in effects.reasons[0]


def test_a_function_that_is_marked_pure_only_computes(graph):
    @torchgraft.pure
    def view_of(x, sizes):
        return double(x)

    x, y = graph.placeholder("x"), graph.placeholder("y")
    effects = effects_of(graph.call_function(view_of, (x, [y])))
    assert not effects and effects.shares == {x, y}


def test_diagnostics_stay_although_they_change_nothing(graph):
    assert is_impure(graph.call_function(warnings.warn, ("message",)))


def test_regions_stay(graph):
    enter = graph.call_function(enter_context, (torch.no_grad,))
    leave = graph.call_function(exit_context, (enter,))
    assert is_impure(enter) and is_impure(leave)


def test_anything_marked_stays(graph):
    def marked(x):
        return x

    marked.__torchgraft_effect__ = True
    assert is_impure(graph.call_function(marked, (graph.placeholder("x"),)))


def test_targets_that_cannot_be_hashed_or_weakly_referenced(graph):
    class Callable(dict):
        __torchgraft_pure__ = True

        def __call__(self, x):
            return x * 2

    node = graph.call_function(torch.relu, (graph.placeholder("x"),))
    node.target = Callable()
    assert not is_impure(node)


def test_unhashable_and_odd_arguments(graph):
    x = graph.placeholder("x")
    constant = torch.zeros(2)
    assert not is_impure(graph.call_function(torch.add, (x, constant)))
    assert effects_of(graph.call_function(torch.add_ if hasattr(torch, "add_") else torch.relu_, (constant,))).writes
    assert not is_impure(graph.call_function(operator.getitem, (x, (slice(None), slice(0, x), None, ...))))
    assert not is_impure(graph.call_function(torch.cat, ([x, x],), {"dim": 1}))
    assert effects_of(graph.call_function(torch.cat, ([x, x],), {"out": x})).writes == {x}


def test_inputs_are_told_apart_by_position(graph):
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for first, second in [(x, y), (y, x), (x, x)]:
        assert effects_of(graph.call_function(torch.nn.functional.embedding, (first, second, None, 1.0))).writes == {
            second
        }
        keywords = {"max_norm": 1.0, "weight": second, "input": first}
        assert effects_of(graph.call_function(torch.nn.functional.embedding, (), keywords)).writes == {second}


def test_constants_that_are_equal_but_of_different_types_are_told_apart(graph):
    x = graph.placeholder("x")
    results = [
        effects_of(graph.call_function(torch.nn.functional.dropout, (x, p))).random for p in (0, 0.5, 0.0, False)
    ]
    assert results == [False, True, False, False]
    assert effects_of(graph.call_function(torch.add, (x, True))) == effects_of(graph.call_function(torch.add, (x, 1)))


def test_effects_are_true_where_there_are_any():
    assert not Effects()
    assert not Effects(shares=frozenset({"x"}))
    assert Effects(random=True) and Effects(unknown=True) and Effects(writes=frozenset({"x"}))


def test_programs_given_to_higher_order_operators_are_read():
    root = torch.nn.Module()
    root.pure = torchgraft.symbolic_trace(lambda x: x.relu())
    root.impure = torchgraft.symbolic_trace(lambda x: x.relu_())
    root.users = torch.nn.Identity()
    graph = Graph(root)
    x = graph.placeholder("x")
    pure, impure, users = map(graph.get_attr, ("pure", "impure", "users"))
    cond = torch.ops.higher_order.cond
    assert not is_impure(graph.call_function(cond, (x, pure, pure, [x])))
    assert x in effects_of(graph.call_function(cond, (x, pure, impure, [x]))).writes
    assert effects_of(graph.call_function(cond, (x, pure, users, [x]))).unknown


def test_items_and_attributes_share_what_holds_them_and_nothing_else(graph):
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert effects_of(graph.call_function(operator.getitem, (x, (slice(0, y), None)))).shares == {x}
    assert effects_of(graph.call_function(getattr, (x, "shape"))).shares == set()
    assert effects_of(graph.call_function(getattr, (x, "dtype"))).shares == set()
    assert effects_of(graph.call_function(getattr, (x, "mT"))).shares == {x}
    assert effects_of(graph.call_function(getattr, (x, "grad"))).shares == {x}
