"""Node: its fields, its arguments and users, its place in the list, and how it prints.

Making and erasing nodes is examined with Graph.
"""

import operator
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.compatibility.networks import OneLinear


def diamond(fx: ModuleType):
    """x -> left and right -> total -> output."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    left = graph.call_function(torch.relu, (x,))
    right = graph.call_function(torch.neg, (x,))
    total = graph.call_function(torch.add, (left, right), {"alpha": 2})
    output = graph.output(total)
    return graph, x, left, right, total, output


def names(graph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_fields(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    assert (total.op, total.target, total.name) == ("call_function", torch.add, "add")
    assert total.graph is graph
    assert total.args == (left, right)
    assert total.kwargs == {"alpha": 2}
    assert total.type is None
    assert total.meta == {}
    assert isinstance(total.args, tuple)
    assert isinstance(total.kwargs, dict)


def test_users_are_ordered_and_mapping_like(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    assert list(x.users) == [left, right]
    assert list(x.users.keys()) == [left, right]
    assert left in x.users
    assert len(x.users) == 2
    assert list(output.users) == []


def test_one_user_with_two_uses_counts_once(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    square = graph.call_function(operator.mul, (x, x))
    assert list(x.users) == [square]
    assert square.all_input_nodes == [x]


def test_assigning_args_updates_users(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    total.args = (left, left)
    assert total.args == (left, left)
    assert list(right.users) == []
    assert list(left.users) == [total]
    assert total.all_input_nodes == [left]


def test_assigning_kwargs_updates_users(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    total.kwargs = {"alpha": 3, "out": x}
    assert total.kwargs == {"alpha": 3, "out": x}
    assert list(x.users) == [left, right, total]
    assert total.all_input_nodes == [left, right, x]


def test_all_input_nodes_looks_into_structures_in_order(fx: ModuleType) -> None:
    graph = fx.Graph()
    a, b, c, d, e = (graph.placeholder(name) for name in "abcde")
    node = graph.call_function(print, ([a, (b, 1)], {"k": c}, slice(d, None)), {"end": e})
    assert node.all_input_nodes == [a, b, c, d, e]
    assert all(list(value.users) == [node] for value in (a, b, c, d, e))


def test_update_arg(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    total.update_arg(1, x)
    assert total.args == (left, x)
    assert list(right.users) == []
    assert total in x.users


def test_update_kwarg(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    total.update_kwarg("alpha", x)
    assert total.kwargs == {"alpha": x}
    total.update_kwarg("new", 1)
    assert total.kwargs == {"alpha": x, "new": 1}
    assert total in x.users


def test_insert_arg(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    total.insert_arg(0, x)
    total.insert_arg(3, 5)
    total.insert_arg(1, [x, 7])
    assert total.args == (x, [x, 7], left, right, 5)
    assert list(x.users) == [left, right, total]
    for bad in (-1, 6):
        with pytest.raises((AssertionError, IndexError, ValueError)):
            total.insert_arg(bad, 1)


def test_args_lists_are_immutable(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.cat, ([x, x],), {"options": {"dim": 0}})
    for change in (
        lambda: node.args[0].append(x),
        lambda: node.args[0].clear(),
        lambda: node.args[0].__setitem__(0, x),
        lambda: node.kwargs.update(dim=1),
        lambda: node.kwargs.__setitem__("dim", 1),
        lambda: node.kwargs["options"].pop("dim"),
    ):
        with pytest.raises((TypeError, NotImplementedError)):
            change()
    assert isinstance(node.args[0], list)
    assert isinstance(node.kwargs["options"], dict)


def test_arguments_are_taken_at_their_value_when_given(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    values = [x]
    node = graph.call_function(torch.cat, (values,))
    values.append(x)
    assert node.args == ([x],)


def test_next_and_prev(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    assert x.next is left
    assert left.prev is x
    assert total.next is output
    assert output.prev is total


def test_append_and_prepend_move_nodes(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    left.prepend(right)
    assert names(graph) == ["x", "neg", "relu", "add", "output"]
    left.append(right)
    assert names(graph) == ["x", "relu", "neg", "add", "output"]
    graph.lint()
    assert len(graph.nodes) == 5


def test_moving_a_node_into_another_graph_is_refused(fx: ModuleType) -> None:
    graph, x, *_ = diamond(fx)
    _, stranger, *_ = diamond(fx)
    with pytest.raises(Exception, match="(?i)graph"):
        x.prepend(stranger)


def test_replace_all_uses_with(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    changed = left.replace_all_uses_with(right)
    assert changed == [total]
    assert total.args == (right, right)
    assert list(left.users) == []
    assert list(right.users) == [total]


def test_replace_all_uses_reaches_structures_and_kwargs(fx: ModuleType) -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    node = graph.call_function(print, ([a, (a, 1)], slice(a, None)), {"end": {"k": a}})
    output = graph.output((a, node))
    assert a.replace_all_uses_with(b) == [node, output]
    assert node.args == ([b, (b, 1)], slice(b, None))
    assert node.kwargs == {"end": {"k": b}}
    assert output.args == ((b, node),)
    assert list(a.users) == []


def test_replace_all_uses_with_a_filter(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    with graph.inserting_after(x):
        copy_of_x = graph.call_method("clone", (x,))
    changed = x.replace_all_uses_with(copy_of_x, delete_user_cb=lambda user: user is not copy_of_x)
    assert changed == [left, right]
    assert copy_of_x.args == (x,)
    assert list(x.users) == [copy_of_x]
    assert left.args == (copy_of_x,)
    graph.lint()


def test_replace_all_uses_can_carry_metadata_over(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    left.meta["shape"] = (1, 2)
    left.replace_all_uses_with(right, propagate_meta=True)
    assert right.meta == {"shape": (1, 2)}
    with pytest.raises((AssertionError, ValueError), match="(?i)meta"):
        left.replace_all_uses_with(right, propagate_meta=True)


def test_replace_input_with(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    total.replace_input_with(left, x)
    assert total.args == (x, right)
    assert list(left.users) == []
    assert list(x.users) == [left, right, total]


def test_target_and_op_may_be_assigned(fx: ModuleType) -> None:
    def forward(x):
        return torch.relu(x)

    traced = fx.symbolic_trace(forward)
    (node,) = traced.graph.find_nodes(op="call_function", target=torch.relu)
    node.target = torch.neg
    traced.recompile()
    assert traced(torch.tensor(2.0)).item() == -2.0
    node.op, node.target = "call_method", "abs"
    traced.recompile()
    assert traced(torch.tensor(-2.0)).item() == 2.0


def test_name_may_be_assigned(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: torch.relu(x))
    (node,) = traced.graph.find_nodes(op="call_function", target=torch.relu)
    node.name = "activation"
    traced.recompile()
    assert "activation = torch.relu(x)" in traced.code


def test_rename_keeps_names_unique(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    left._rename("neg")
    assert left.name == "neg_1"
    left._rename("fresh")
    assert left.name == "fresh"
    graph.lint()


def test_repr_and_str_are_the_name(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    assert repr(left) == "relu"
    assert str(left) == "relu"
    assert f"{total.args}" == "(relu, neg)"


def test_format_node(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x", type_expr=torch.Tensor)
    y = graph.placeholder("y", default_value=3)
    weight = graph.get_attr("block.weight")
    relu = graph.call_function(torch.relu, (x,), {"flag": [y, 1.5]})
    total = graph.call_function(operator.add, (relu, weight))
    length = graph.call_function(len, (x,))
    pooled = graph.call_function(functional.adaptive_avg_pool2d, (x, (1,)))
    method = graph.call_method("view", (total, -1, "text"), type_expr=torch.Tensor)
    module = graph.call_module("block.0", (method,))
    output = graph.output((module, length, pooled))
    assert x.format_node() == "%x : torch.Tensor [num_users=3] = placeholder[target=x]"
    assert y.format_node() == "%y : [num_users=1] = placeholder[target=y](default=3)"
    assert weight.format_node() == "%block_weight : [num_users=1] = get_attr[target=block.weight]"
    assert relu.format_node() == (
        "%relu : [num_users=1] = call_function[target=torch.relu](args = (%x,), kwargs = {flag: [%y, 1.5]})"
    )
    assert total.format_node() == (
        "%add : [num_users=1] = call_function[target=operator.add](args = (%relu, %block_weight), kwargs = {})"
    )
    assert length.format_node() == (
        "%len_1 : [num_users=1] = call_function[target=builtins.len](args = (%x,), kwargs = {})"
    )
    assert pooled.format_node() == (
        "%adaptive_avg_pool2d : [num_users=1] = call_function[target=torch.nn.functional.adaptive_avg_pool2d]"
        "(args = (%x, (1,)), kwargs = {})"
    )
    assert method.format_node() == (
        "%view : torch.Tensor [num_users=1] = call_method[target=view](args = (%add, -1, text), kwargs = {})"
    )
    assert module.format_node() == (
        "%block_0 : [num_users=1] = call_module[target=block.0](args = (%view,), kwargs = {})"
    )
    assert output.format_node() == "return (block_0, len_1, adaptive_avg_pool2d)"


def test_order_of_nodes_is_their_order_in_the_graph(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    assert x < left < right < total < output
    assert total > left
    assert left <= left
    assert left >= left
    assert sorted([output, right, x]) == [x, right, output]
    with graph.inserting_before(left):
        early = graph.call_method("early", (x,))
    assert x < early < left
    left.prepend(right)
    assert right < left


def test_nodes_are_equal_only_to_themselves_and_hash(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    assert left == left
    assert left != right
    assert len({x, left, left}) == 2


def test_metadata_is_a_dictionary_of_the_user(fx: ModuleType) -> None:
    graph, x, left, *_ = diamond(fx)
    left.meta["anything"] = object
    assert left.meta["anything"] is object
    left.meta = {"replaced": True}
    assert left.meta == {"replaced": True}


def test_free_attributes_may_be_set(fx: ModuleType) -> None:
    graph, x, left, *_ = diamond(fx)
    left.my_pass_data = 3
    assert left.my_pass_data == 3
    assert not hasattr(x, "my_pass_data")


def test_stack_trace_lives_in_the_metadata(fx: ModuleType) -> None:
    graph, x, left, *_ = diamond(fx)
    assert left.stack_trace is None
    left.stack_trace = "File here"
    assert left.stack_trace == "File here"
    assert left.meta["stack_trace"] == "File here"


def test_is_impure(fx: ModuleType) -> None:
    graph, x, left, right, total, output = diamond(fx)
    assert x.is_impure()
    assert output.is_impure()
    assert not left.is_impure()
    assert graph.call_function(operator.setitem, (x, 0, 1)).is_impure()
    assert graph.call_function(torch._assert, (x, "message")).is_impure()
    assert not graph.get_attr("weight").is_impure()


def test_random_draws_are_impure_unless_told_otherwise(fx: ModuleType) -> None:
    graph = fx.Graph()
    draw = graph.call_function(torch.rand, (3,))
    assert draw.is_impure()
    assert draw.is_impure(impure_random=True)


def test_normalized_arguments_of_a_module(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(OneLinear())
    (node,) = traced.graph.find_nodes(op="call_module")
    x = next(iter(traced.graph.nodes))
    args, kwargs = node.normalized_arguments(traced, normalize_to_only_use_kwargs=True)
    assert args == ()
    assert kwargs == {"input": x}


def test_normalized_arguments_of_a_function(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: functional.relu(x))
    (node,) = traced.graph.find_nodes(op="call_function", target=functional.relu)
    x = next(iter(traced.graph.nodes))
    pair = node.normalized_arguments(traced, normalize_to_only_use_kwargs=True)
    assert pair.args == ()
    assert pair.kwargs == {"input": x, "inplace": False}


def test_normalized_arguments_of_other_nodes(fx: ModuleType) -> None:
    graph, x, *_ = diamond(fx)
    assert x.normalized_arguments(nn.Module()) is None
    assert graph.call_method("relu", (x,)).normalized_arguments(nn.Module()) is None


def test_type_may_be_assigned(fx: ModuleType) -> None:
    traced = fx.symbolic_trace(lambda x: torch.relu(x))
    for node in traced.graph.nodes:
        node.type = torch.Tensor
    traced.recompile()
    assert "def forward(self, x : torch.Tensor) -> torch.Tensor:" in traced.code
    assert "relu : torch.Tensor = torch.relu(x)" in traced.code
