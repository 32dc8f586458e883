"""One node: the rules of the IR that a single node keeps (1, 2, 3 and 6), and its edits.
What torch.fx's nodes can do, too, is examined in tests/compatibility/test_node.py.
"""

import copy
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import nn

import torchgraft as fx
from torchgraft.ir.arguments import immutable_dict, immutable_list
from torchgraft.ir.node import map_arg, substitute


class Pair(NamedTuple):
    first: object
    second: object


class Diamond:
    """x -> a, b -> c -> output, with a second input y that nothing uses."""

    def __init__(self) -> None:
        self.graph = graph = fx.Graph()
        self.x = graph.placeholder("x")
        self.y = graph.placeholder("y")
        self.a = graph.call_function(torch.relu, (self.x,))
        self.b = graph.call_function(torch.neg, (self.x,))
        self.c = graph.call_function(torch.add, (self.a, self.b))
        self.out = graph.output(self.c)

    def dead(self) -> fx.Node:
        node = self.graph.call_function(torch.abs, (self.x,))
        self.graph.erase_node(node)
        return node


@pytest.fixture
def diamond() -> Diamond:
    return Diamond()


def assert_users_are_right(graph: fx.Graph) -> None:
    for node in graph.nodes:
        for source in node.all_input_nodes:
            assert node in source.users
        for user in node.users:
            assert user in graph.nodes
            assert node in user.all_input_nodes


class TestRule1DeadNodes:
    """A node belongs to its graph for life, and is dead after `erase_node`; using a dead node raises."""

    USES = {
        "as an argument of a new node": lambda d, dead: d.graph.call_function(torch.neg, (dead,)),
        "deep inside an argument": lambda d, dead: d.graph.call_function(torch.cat, ([{"k": (dead,)}],)),
        "in a slice": lambda d, dead: d.graph.call_function(torch.neg, (slice(dead, None),)),
        "as a keyword argument": lambda d, dead: d.graph.call_function(torch.neg, (), {"input": dead}),
        "as the output": lambda d, dead: d.graph.output(dead),
        "by assigning args": lambda d, dead: setattr(d.a, "args", (dead,)),
        "by assigning kwargs": lambda d, dead: setattr(d.a, "kwargs", {"input": dead}),
        "by update_arg": lambda d, dead: d.a.update_arg(0, dead),
        "by insert_arg": lambda d, dead: d.a.insert_arg(0, dead),
        "by update_kwarg": lambda d, dead: d.a.update_kwarg("input", dead),
        "as a replacement": lambda d, dead: d.a.replace_all_uses_with(dead),
        "as a new input": lambda d, dead: d.a.replace_input_with(d.x, dead),
        "editing its args": lambda d, dead: setattr(dead, "args", (d.x,)),
        "editing its kwargs": lambda d, dead: setattr(dead, "kwargs", {}),
        "editing its target": lambda d, dead: setattr(dead, "target", torch.neg),
        "editing its opcode": lambda d, dead: setattr(dead, "op", "call_method"),
        "editing its type": lambda d, dead: setattr(dead, "type", int),
        "renaming it": lambda d, dead: setattr(dead, "name", "other"),
        "replacing its input": lambda d, dead: dead.replace_input_with(d.x, d.y),
        "inserting before it": lambda d, dead: d.graph.inserting_before(dead),
        "inserting after it": lambda d, dead: d.graph.inserting_after(dead),
        "moving it": lambda d, dead: d.a.append(dead),
        "prepending to it": lambda d, dead: dead.prepend(d.out),
    }

    @pytest.mark.parametrize("use", USES.values(), ids=USES)
    def test_a_dead_node_refuses(self, diamond: Diamond, use) -> None:
        dead = diamond.dead()
        with pytest.raises(fx.GraphError, match=r"'abs_1'.*erased"):
            use(diamond, dead)
        assert_users_are_right(diamond.graph)
        diamond.graph.lint()

    def test_erasing_a_dead_node_again_warns_as_in_torch_fx(self, diamond: Diamond) -> None:
        """Programs replace and erase what one of their own functions has erased already; there is nothing left to do."""
        dead, count = diamond.dead(), len(diamond.graph.nodes)
        assert dead.replace_all_uses_with(diamond.x) == []
        with pytest.warns(UserWarning, match=r"erase_node\(abs_1\) on an already erased node"):
            diamond.graph.erase_node(dead)
        assert len(diamond.graph.nodes) == count
        diamond.graph.lint()

    def test_a_dead_node_refuses_append(self, diamond: Diamond) -> None:
        dead = diamond.dead()
        with pytest.raises(fx.GraphError, match="erased"):
            dead.append(diamond.a)

    def test_a_dead_node_leaves_its_inputs(self, diamond: Diamond) -> None:
        dead = diamond.dead()
        assert dead not in diamond.x.users
        assert dead.all_input_nodes == []
        assert dead not in list(diamond.graph.nodes)

    def test_a_used_node_cannot_be_erased_and_its_users_are_named(self, diamond: Diamond) -> None:
        with pytest.raises(
            fx.GraphError, match=r"erase Node x but it still had 2 users.*'relu', 'neg'.*replace_all_uses"
        ):
            diamond.graph.erase_node(diamond.x)
        assert diamond.x in list(diamond.graph.nodes)

    FOREIGN = {
        "as an argument": lambda d, other: d.graph.call_function(torch.neg, (other,)),
        "by assigning args": lambda d, other: setattr(d.a, "args", (other,)),
        "as a replacement": lambda d, other: d.a.replace_all_uses_with(other),
        "moved in": lambda d, other: d.a.append(other),
        "erased here": lambda d, other: d.graph.erase_node(other),
        "as an insertion point": lambda d, other: d.graph.inserting_before(other),
    }

    @pytest.mark.parametrize("use", FOREIGN.values(), ids=FOREIGN)
    def test_a_node_of_another_graph_is_refused(self, diamond: Diamond, use) -> None:
        other = fx.Graph().placeholder("elsewhere")
        with pytest.raises(fx.GraphError, match=r"(?s)elsewhere.*(this Graph|another graph|wrong graph|another one)"):
            use(diamond, other)
        assert_users_are_right(diamond.graph)
        assert not other.users

    def test_a_refused_edit_changes_nothing(self, diamond: Diamond) -> None:
        with pytest.raises(fx.GraphError):
            diamond.c.args = (diamond.x, diamond.dead())
        assert diamond.c.args == (diamond.a, diamond.b)
        assert_users_are_right(diamond.graph)


class TestRule2Arguments:
    """`args` and `kwargs` are immutable; assigning them is the one way to edit, and keeps `users` right on both sides."""

    def test_containers_are_frozen_through_and_through(self, diamond: Diamond) -> None:
        node = diamond.graph.call_function(torch.cat, ([diamond.x, {"k": [1]}],), {"names": ["n"]})
        assert type(node.args) is tuple
        assert type(node.args[0]) is immutable_list
        assert type(node.args[0][1]) is immutable_dict
        assert type(node.args[0][1]["k"]) is immutable_list
        assert type(node.kwargs) is immutable_dict
        assert type(node.kwargs["names"]) is immutable_list

    def test_empty_kwargs_are_immutable_too(self, diamond: Diamond) -> None:
        with pytest.raises(TypeError, match="immutable"):
            diamond.a.kwargs["k"] = 1

    def test_the_callers_own_list_is_not_the_nodes(self, diamond: Diamond) -> None:
        given = [diamond.x, diamond.y]
        node = diamond.graph.call_function(torch.cat, (given,))
        given.clear()
        assert node.args == ([diamond.x, diamond.y],)

    def test_named_tuples_and_slices_keep_their_kind(self, diamond: Diamond) -> None:
        node = diamond.graph.call_function(torch.neg, (Pair(diamond.x, 1), slice(diamond.y, None)))
        assert type(node.args[0]) is Pair
        assert node.args[1] == slice(diamond.y, None)
        assert node.all_input_nodes == [diamond.x, diamond.y]

    def test_a_proxy_is_its_node(self, diamond: Diamond) -> None:
        diamond.c.args = (fx.Proxy(diamond.x), [fx.Proxy(diamond.y)])
        assert diamond.c.args == (diamond.x, [diamond.y])
        assert diamond.c in diamond.y.users
        diamond.graph.lint()

    def test_assigning_args_updates_both_sides(self, diamond: Diamond) -> None:
        diamond.c.args = (diamond.y, [diamond.a, diamond.y])
        assert list(diamond.y.users) == [diamond.c]
        assert list(diamond.a.users) == [diamond.c]
        assert not diamond.b.users
        assert_users_are_right(diamond.graph)

    def test_a_list_may_be_assigned_and_becomes_a_tuple(self, diamond: Diamond) -> None:
        diamond.c.args = [diamond.x, 2]
        assert diamond.c.args == (diamond.x, 2)

    def test_an_input_that_stays_in_kwargs_stays_a_user(self, diamond: Diamond) -> None:
        diamond.c.kwargs = {"alpha": diamond.a}
        diamond.c.args = (diamond.b, 1)
        assert diamond.c in diamond.a.users
        assert_users_are_right(diamond.graph)

    def test_single_edits(self, diamond: Diamond) -> None:
        node = diamond.c
        node.update_arg(0, diamond.y)
        node.insert_arg(1, 7)
        node.update_kwarg("alpha", diamond.x)
        assert (node.args, node.kwargs) == ((diamond.y, 7, diamond.b), {"alpha": diamond.x})
        assert not diamond.a.users
        assert_users_are_right(diamond.graph)

    @pytest.mark.parametrize("index", [-1, 3])
    def test_insert_arg_outside_the_arguments_is_refused(self, diamond: Diamond, index: int) -> None:
        with pytest.raises(fx.GraphError, match=f"at index {index} of node 'add'.*between 0 and"):
            diamond.c.insert_arg(index, 1)

    def test_replace_input_with_reaches_every_place(self, diamond: Diamond) -> None:
        node = diamond.graph.call_function(torch.cat, ([diamond.a, (diamond.a,)],), {"k": slice(diamond.a, 1)})
        node.replace_input_with(diamond.a, diamond.y)
        assert node.args == ([diamond.y, (diamond.y,)],)
        assert node.kwargs == {"k": slice(diamond.y, 1)}
        assert_users_are_right(diamond.graph)

    def test_replace_input_with_leaves_other_inputs_alone(self, diamond: Diamond) -> None:
        diamond.a.replace_input_with(diamond.y, diamond.b)
        assert diamond.a.args == (diamond.x,)
        assert_users_are_right(diamond.graph)

    def test_replace_input_with_on_a_node_without_inputs_does_nothing(self, diamond: Diamond) -> None:
        diamond.y.replace_input_with(diamond.x, diamond.b)
        assert diamond.y.args == ()
        assert_users_are_right(diamond.graph)

    def test_replace_all_uses_with_itself_changes_nothing(self, diamond: Diamond) -> None:
        diamond.a.replace_all_uses_with(diamond.a)
        assert diamond.c.args == (diamond.a, diamond.b)
        assert_users_are_right(diamond.graph)

    def test_replace_all_uses_may_skip_some(self, diamond: Diamond) -> None:
        changed = diamond.x.replace_all_uses_with(diamond.y, lambda user: user is diamond.b)
        assert changed == [diamond.b]
        assert list(diamond.x.users) == [diamond.a]
        assert list(diamond.y.users) == [diamond.b]

    def test_metadata_is_only_propagated_to_a_node_without_any(self, diamond: Diamond) -> None:
        diamond.a.meta["k"] = 1
        diamond.a.replace_all_uses_with(diamond.y, propagate_meta=True)
        assert diamond.y.meta == {"k": 1}
        with pytest.raises(fx.GraphError, match=r"(?s)from node 'neg' to 'y'.*already has .meta keys.*: k"):
            diamond.b.replace_all_uses_with(diamond.y, propagate_meta=True)


class TestRule3Order:
    """`users` is ordered, so every walk is deterministic."""

    def test_users_are_in_the_order_of_first_use(self, diamond: Diamond) -> None:
        later = diamond.graph.call_function(torch.abs, (diamond.x,))
        assert list(diamond.x.users) == [diamond.a, diamond.b, later]

    def test_using_again_keeps_the_place(self, diamond: Diamond) -> None:
        diamond.a.args = (diamond.x, diamond.x)
        assert list(diamond.x.users) == [diamond.a, diamond.b]

    def test_inputs_are_in_the_order_of_first_mention(self, diamond: Diamond) -> None:
        node = diamond.graph.call_function(
            torch.neg, ([diamond.b], diamond.a, (diamond.b, {"k": diamond.y})), {"k": diamond.x}
        )
        assert node.all_input_nodes == [diamond.b, diamond.a, diamond.y, diamond.x]

    def test_all_input_nodes_is_the_callers_own_list(self, diamond: Diamond) -> None:
        diamond.c.all_input_nodes.clear()
        assert diamond.c.all_input_nodes == [diamond.a, diamond.b]


class TestRule6Staleness:
    """Every edit of a node marks its graph changed."""

    EDITS = {
        "op": lambda d: setattr(d.a, "op", "call_method"),
        "target": lambda d: setattr(d.a, "target", torch.neg),
        "name": lambda d: setattr(d.a, "name", "renamed"),
        "type": lambda d: setattr(d.a, "type", torch.Tensor),
        "args": lambda d: setattr(d.a, "args", (d.y,)),
        "kwargs": lambda d: setattr(d.a, "kwargs", {"input": d.y}),
        "update_arg": lambda d: d.a.update_arg(0, d.y),
        "insert_arg": lambda d: d.a.insert_arg(0, d.y),
        "update_kwarg": lambda d: d.a.update_kwarg("k", 1),
        "replace_input_with": lambda d: d.a.replace_input_with(d.x, d.y),
        "replace_all_uses_with": lambda d: d.a.replace_all_uses_with(d.y),
        "append": lambda d: d.b.append(d.a),
        "prepend": lambda d: d.a.prepend(d.b),
        "erase": lambda d: d.dead(),
        "create": lambda d: d.graph.call_function(torch.abs, (d.x,)),
    }

    @pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
    def test_every_edit_marks_the_graph(self, diamond: Diamond, edit) -> None:
        module = fx.GraphModule(nn.Module(), diamond.graph)
        module.recompile()
        assert diamond.graph._fresh
        edit(diamond)
        assert not diamond.graph._fresh
        assert type(module)._python_code is None

    def test_looking_is_no_edit(self, diamond: Diamond) -> None:
        module = fx.GraphModule(nn.Module(), diamond.graph)
        module.recompile()
        str(diamond.graph), diamond.graph.lint(), diamond.a.meta.update(k=1), diamond.a < diamond.b, module.code
        diamond.a.name = "relu"
        assert diamond.graph._fresh


class TestFields:
    def test_an_unknown_opcode_is_refused(self, diamond: Diamond) -> None:
        with pytest.raises(fx.GraphError, match="opcode of node 'relu' to 'call'.*use one of placeholder"):
            diamond.a.op = "call"

    @pytest.mark.parametrize(
        ("name", "legal"),
        [("cat-3", "cat_3"), ("a b", "a_b"), ("class", "class_1"), ("len", "len_1"), ("torch", "torch_1"), ("", "_unnamed"),
         ("1", "_1"), ("self", "self_1")],
    )  # fmt: skip
    def test_a_name_that_code_cannot_use_is_made_legal(self, diamond: Diamond, name: str, legal: str) -> None:
        diamond.a.name = name
        assert diamond.a.name == legal
        assert torch.equal(fx.GraphModule({}, diamond.graph)(torch.ones(1), None), torch.zeros(1))

    def test_a_name_is_a_string(self, diamond: Diamond) -> None:
        with pytest.raises(fx.GraphError, match="cannot rename node 'relu' to 3: a name is a string; give one"):
            diamond.a.name = 3
        assert diamond.a.name == "relu"

    def test_a_taken_name_is_refused(self, diamond: Diamond) -> None:
        with pytest.raises(fx.GraphError, match="'relu' to 'neg': the name is taken"):
            diamond.a.name = "neg"

    def test_free_attributes_may_be_set(self, diamond: Diamond) -> None:
        diamond.a.note = 3
        assert diamond.a.note == 3

    def test_stack_trace_is_kept_in_the_metadata(self, diamond: Diamond) -> None:
        assert diamond.a.stack_trace is None
        diamond.a.stack_trace = "somewhere"
        assert diamond.a.meta == {"stack_trace": "somewhere"}

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_a_node_cannot_be_copied_alone(self, diamond: Diamond, duplicate) -> None:
        with pytest.raises(TypeError, match="'relu' alone.*graph"):
            duplicate(diamond.a)


class TestPlaces:
    def test_next_and_prev(self, diamond: Diamond) -> None:
        assert diamond.a.next is diamond.b
        assert diamond.b.prev is diamond.a
        assert diamond.out.next is diamond.x.prev

    @pytest.mark.parametrize(
        ("move", "expected"),
        [
            (lambda d: d.b.append(d.a), "x y neg relu add output"),
            (lambda d: d.a.append(d.b), "x y relu neg add output"),
            (lambda d: d.a.append(d.a), "x y relu neg add output"),
            (lambda d: d.a.prepend(d.a), "x y relu neg add output"),
            (lambda d: d.a.prepend(d.b), "x y neg relu add output"),
            (lambda d: d.b.prepend(d.a), "x y relu neg add output"),
            (lambda d: d.x.prepend(d.y), "y x relu neg add output"),
            (lambda d: d.out.append(d.y), "x relu neg add output y"),
        ],
    )
    def test_moving(self, diamond: Diamond, move, expected: str) -> None:
        move(diamond)
        assert [node.name for node in diamond.graph.nodes] == expected.split()
        assert [node.name for node in reversed(diamond.graph.nodes)] == expected.split()[::-1]
        assert len(diamond.graph.nodes) == 6
        assert sorted(diamond.graph.nodes) == list(diamond.graph.nodes)

    def test_comparing(self, diamond: Diamond) -> None:
        assert diamond.x < diamond.a
        assert diamond.a > diamond.x
        assert diamond.a <= diamond.a
        assert diamond.a >= diamond.a
        assert not diamond.a < diamond.a


class TestTrees:
    def test_map_arg_visits_only_nodes(self, diamond: Diamond) -> None:
        seen = []
        tree = (diamond.x, [1, diamond.y], {"k": slice(diamond.a, None)}, Pair(diamond.b, "s"))
        assert map_arg(tree, lambda node: seen.append(node) or node) == tree
        assert seen == [diamond.x, diamond.y, diamond.a, diamond.b]

    def test_substitute(self, diamond: Diamond) -> None:
        tree = (diamond.x, [diamond.x, 1], {"k": diamond.x}, Pair(diamond.x, diamond.y))
        expected = (3, [3, 1], {"k": 3}, Pair(3, diamond.y))
        assert substitute(tree, diamond.x, 3) == expected

    def test_map_arg_needs_a_function(self) -> None:
        with pytest.raises(fx.GraphError, match="not int"):
            map_arg((1,), 3)


@pytest.mark.parametrize("index", [1, 5, -2])
def test_update_arg_out_of_range(index: int) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    relu = graph.call_function(torch.relu, (x,))
    with pytest.raises(IndexError, match=f"cannot replace argument {index} of node 'relu': it has 1") as caught:
        relu.update_arg(index, x)
    assert isinstance(caught.value, fx.GraftError)
    relu.update_arg(-1, 2)
    assert relu.args == (2,)
