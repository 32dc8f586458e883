"""A graph: walking while editing (rule 4), where new nodes go, order labels, owners and staleness (rule 6), hooks.
What torch.fx's graphs can do, too, is examined in tests/compatibility/.
"""

import gc
import itertools
import operator
import weakref

import pytest
import torch
from torch import nn

import torchgraft as fx


def chain(length: int = 3) -> fx.Graph:
    """x -> n0 -> n1 -> ... -> output"""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for number in range(length):
        value = graph.call_function(torch.relu, (value,), name=f"n{number}")
    graph.output(value)
    return graph


def names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def by_name(graph: fx.Graph) -> dict[str, fx.Node]:
    return {node.name: node for node in graph.nodes}


def insert(graph: fx.Graph, name: str, *, before: fx.Node | None = None, after: fx.Node | None = None) -> fx.Node:
    with graph.inserting_before(before) if before is not None else graph.inserting_after(after):
        return graph.call_function(torch.neg, (next(iter(graph.nodes)),), name=name)


class TestRule4WalkingWhileEditing:
    """Inserted after the current node: seen; inserted before it: not; erased: skipped."""

    def test_inserted_after_is_seen(self) -> None:
        graph, seen = chain(), []
        for node in graph.nodes:
            seen.append(node.name)
            if node.name == "n0":
                insert(graph, "new", after=node)
        assert seen == ["x", "n0", "new", "n1", "n2", "output"]

    def test_inserted_far_ahead_is_seen(self) -> None:
        graph, seen = chain(), []
        for node in graph.nodes:
            seen.append(node.name)
            if node.name == "n0":
                insert(graph, "new", before=graph.output_node())
        assert seen == ["x", "n0", "n1", "n2", "new", "output"]

    def test_inserted_before_is_not_seen(self) -> None:
        graph, seen = chain(), []
        for node in graph.nodes:
            seen.append(node.name)
            if node.op == "call_function":
                insert(graph, "new", before=node)
        assert seen == ["x", "n0", "n1", "n2", "output"]
        assert len(graph.nodes) == 8

    def test_the_current_node_may_be_erased(self) -> None:
        graph, seen = chain(), []
        for node in graph.nodes:
            seen.append(node.name)
            if node.op == "call_function":
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        assert seen == ["x", "n0", "n1", "n2", "output"]
        assert names(graph) == ["x", "output"]

    def test_what_was_erased_ahead_is_skipped(self) -> None:
        graph, seen = chain(), []
        for node in graph.nodes:
            seen.append(node.name)
            if node.name == "n0":
                for name in ("n1", "n2"):
                    ahead = by_name(graph)[name]
                    ahead.replace_all_uses_with(node)
                    graph.erase_node(ahead)
        assert seen == ["x", "n0", "output"]

    def test_the_current_node_and_its_follower_may_be_erased_together(self) -> None:
        graph, seen = chain(), []
        for node in graph.nodes:
            seen.append(node.name)
            if node.name == "n0":
                follower = node.next
                follower.replace_all_uses_with(node.args[0])
                graph.erase_node(follower)
                graph.erase_node(node)
        assert seen == ["x", "n0", "n2", "output"]
        assert names(graph) == ["x", "n2", "output"]

    def test_replacing_each_node_by_a_new_one_after_it(self) -> None:
        graph = chain()
        for node in list(graph.nodes):
            if node.op == "call_function":
                with graph.inserting_after(node):
                    new = graph.call_function(torch.neg, node.args)
                node.replace_all_uses_with(new)
                graph.erase_node(node)
        assert [node.target for node in graph.nodes][1:-1] == [torch.neg] * 3
        graph.lint()

    def test_walking_backwards(self) -> None:
        graph, seen = chain(), []
        for node in reversed(graph.nodes):
            seen.append(node.name)
            if node.name == "n1":
                insert(graph, "ahead", before=node)
                insert(graph, "behind", after=node)
        assert seen == ["output", "n2", "n1", "ahead", "n0", "x"]

    def test_dead_code_may_be_erased_in_one_walk_backwards(self) -> None:
        graph = chain()
        graph.output_node().args = (None,)
        for node in reversed(graph.nodes):
            if node.op == "call_function":
                graph.erase_node(node)
        assert names(graph) == ["x", "output"]

    def test_two_walks_do_not_disturb_each_other(self) -> None:
        graph = chain()
        pairs = [(first.name, second.name) for first in graph.nodes for second in graph.nodes]
        assert len(pairs) == 25

    def test_a_list_of_nodes_knows_its_length_and_prints(self) -> None:
        graph = chain()
        assert len(graph.nodes) == 5
        assert repr(graph.nodes) == "[x, n0, n1, n2, output]"


class TestInsertionPoints:
    def test_default_is_the_end(self) -> None:
        graph = chain()
        graph.call_function(torch.neg, (graph.output_node().args[0],))
        assert names(graph)[-1] == "neg"

    def test_before_keeps_the_order_and_after_reverses_it(self) -> None:
        graph = chain(1)
        node = by_name(graph)["n0"]
        with graph.inserting_before(node):
            graph.placeholder("a"), graph.placeholder("b")
        with graph.inserting_after(node):
            graph.call_function(torch.neg, (node,), name="c"), graph.call_function(torch.neg, (node,), name="d")
        assert names(graph) == ["x", "a", "b", "n0", "d", "c", "output"]

    def test_without_a_node_they_mean_the_beginning_and_the_end(self) -> None:
        graph = chain(0)
        with graph.inserting_before():
            graph.placeholder("first")
        with graph.inserting_after():
            graph.call_function(torch.neg, (None,))
        assert names(graph) == ["first", "x", "output", "neg"]

    def test_blocks_nest_and_an_exception_puts_the_point_back(self) -> None:
        graph = chain(1)
        with graph.inserting_before(by_name(graph)["n0"]):
            with pytest.raises(KeyError), graph.inserting_after(graph.output_node()):
                raise KeyError
            graph.placeholder("inner")
        graph.call_function(torch.neg, (None,))
        assert names(graph) == ["x", "inner", "n0", "output", "neg"]

    @pytest.mark.parametrize(("side", "expected"), [("before", "x new n1 output"), ("after", "x new n1 output")])
    def test_erasing_the_anchor_inside_its_block(self, side: str, expected: str) -> None:
        graph = chain(2)
        node = by_name(graph)["n0"]
        with getattr(graph, f"inserting_{side}")(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            graph.call_function(torch.neg, (None,), name="new")
        assert names(graph) == expected.split()

    @pytest.mark.parametrize("side", ["before", "after"])
    def test_an_anchor_erased_in_an_inner_block_leaves_its_place(self, side: str) -> None:
        graph = chain(3)
        node, x = by_name(graph)["n1"], by_name(graph)["x"]
        with getattr(graph, f"inserting_{side}")(node):
            with graph.inserting_before(graph.output_node()):
                node.replace_all_uses_with(x)
                graph.erase_node(node)
            graph.call_function(torch.neg, (x,), name="new")
        assert names(graph) == ["x", "n0", "new", "n2", "output"]
        assert [user.name for user in x.users] == ["n0", "n2", "new"]
        graph.lint()

    def test_neighbours_of_the_place_may_be_erased_too(self) -> None:
        graph = chain(3)
        with graph.inserting_before(by_name(graph)["n1"]):
            for name in ("n0", "n1", "n2"):
                node = by_name(graph)[name]
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            graph.call_function(torch.neg, (None,), name="new")
        assert names(graph) == ["x", "new", "output"]


class TestOrderLabels:
    @pytest.mark.parametrize("place", ["before", "after"])
    @pytest.mark.parametrize("anchor", ["x", "n0", "output"])
    def test_many_insertions_at_one_place(self, place: str, anchor: str) -> None:
        graph = chain(1)
        node = by_name(graph)[anchor]
        for _ in range(100):
            with getattr(graph, f"inserting_{place}")(node):
                graph.call_function(torch.neg, (None,))
        assert sorted(graph.nodes) == list(graph.nodes)
        assert len(graph.nodes) == 103

    def test_always_between_the_last_two(self) -> None:
        """Halving the room at alternating sides uses it up in the fewest insertions."""
        graph = chain(1)
        left, right = by_name(graph)["x"], by_name(graph)["n0"]
        for number in range(100):
            with graph.inserting_before(right):
                new = graph.call_function(torch.neg, (None,))
            left, right = (new, right) if number % 2 else (left, new)
        assert graph._order_is_stale
        assert sorted(graph.nodes) == list(graph.nodes)
        assert not graph._order_is_stale

    def test_stale_labels_and_then_appends_moves_and_erasures(self) -> None:
        graph = chain(1)
        node = by_name(graph)["n0"]
        new = [insert(graph, "new", after=node) for _ in range(40)]
        assert graph._order_is_stale
        node.append(new[5])
        new[7].prepend(new[30])
        graph.erase_node(new[0])
        graph.output_node().prepend(graph.call_function(torch.neg, (None,)))
        nodes = list(graph.nodes)
        assert all(first < second and second > first for first, second in itertools.pairwise(nodes))
        graph.lint()

    def test_lint_with_stale_labels_still_sees_a_use_before_its_definition(self) -> None:
        graph = chain(1)
        node = by_name(graph)["n0"]
        new = [insert(graph, "new", after=node) for _ in range(40)]
        assert graph._order_is_stale
        new[-1].args = (new[-2],)  # the newest stands first
        with pytest.raises(fx.GraphError, match="before it has been defined"):
            graph.lint()

    def test_copies_with_stale_labels(self) -> None:
        import copy

        graph = chain(1)
        for _ in range(40):
            insert(graph, "new", after=by_name(graph)["n0"])
        clone = copy.deepcopy(graph)
        assert names(clone) == names(graph)
        assert sorted(clone.nodes) == list(clone.nodes)
        clone.lint()


class TestMakingNodes:
    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda g: g.create_node("call", "x"), "opcode 'call': use one of"),
            (lambda g: g.create_node("call_function", "relu"), "call_function node: its target 'relu'.*a Callable"),
            (lambda g: g.create_node("call_module", torch.relu), "call_module node: its target.*a str"),
            (lambda g: g.create_node("call_function", torch.relu, [1]), "args must be a tuple, not list"),
            (lambda g: g.create_node("call_function", torch.relu, (), [1]), "kwargs must be a dict, not list"),
            (lambda g: g.call_function("relu"), "cannot call 'relu'.*method name goes to call_method"),
            (lambda g: g.output_node(), "no output node; make one"),
            (lambda g: g.find_nodes(op="call_function"), "needs a target"),
        ],
    )
    def test_mistakes_are_explained(self, make, words: str) -> None:
        graph = fx.Graph()
        with pytest.raises(fx.GraphError, match=words):
            make(graph)
        assert len(graph.nodes) == 0

    def test_defaults_of_inputs(self) -> None:
        graph = fx.Graph()
        assert graph.placeholder("x").args == ()
        assert graph.placeholder("y", default_value=None).args == (None,)

    @pytest.mark.parametrize(
        ("target", "name"),
        [
            (torch.relu, "relu"),
            (operator.add, "add"),
            (nn.functional.relu, "relu"),
            (nn.Linear, "linear"),
            (len, "len_1"),
        ],
    )
    def test_names_follow_targets(self, target, name: str) -> None:
        assert fx.Graph().call_function(target, ()).name == name

    def test_dunder_methods_lose_their_underscores(self) -> None:
        graph = fx.Graph()
        assert graph.call_method("__matmul__", (graph.placeholder("x"),)).name == "matmul"

    def test_a_name_is_not_given_again_after_its_node_was_erased(self) -> None:
        graph = fx.Graph()
        graph.erase_node(graph.placeholder("x"))
        assert graph.placeholder("x").name == "x_1"

    @pytest.mark.parametrize("method", ["get_attr", "call_module"])
    def test_a_missing_attribute_is_warned_about_at_once(self, method: str) -> None:
        module = fx.GraphModule(nn.Module(), chain())
        with pytest.warns(UserWarning, match="'a.b'.*has no attribute 'a'.*add_submodule"):
            getattr(module.graph, method)("a.b")

    def test_find_nodes_is_in_program_order(self) -> None:
        graph = chain()
        moved = by_name(graph)["n2"]
        by_name(graph)["n0"].prepend(moved)
        assert [node.name for node in graph.find_nodes(op="call_function", target=torch.relu)] == ["n2", "n0", "n1"]
        assert graph.find_nodes(op="call_method", target="relu") == []


class TestRule6OwnersAndStaleness:
    """Editing a graph marks every module that runs it stale; the next call regenerates."""

    def test_the_next_call_runs_the_edited_graph(self) -> None:
        module = fx.GraphModule(nn.Module(), chain(1))
        assert module(torch.ones(1)) == 1
        by_name(module.graph)["n0"].target = torch.neg
        assert module(torch.ones(1)) == -1
        assert "torch.neg" in module.code

    def test_an_edit_between_making_the_code_and_running_it(self) -> None:
        module = fx.GraphModule(nn.Module(), chain(1))
        assert "torch.relu" in module.code
        by_name(module.graph)["n0"].target = torch.neg
        assert module(torch.ones(1)) == -1

    @pytest.mark.parametrize("edit_first", [True, False])
    def test_two_modules_over_one_graph_both_follow_when_both_ran(self, edit_first: bool) -> None:
        graph = chain(1)
        first, second = fx.GraphModule(nn.Module(), graph), fx.GraphModule(nn.Module(), graph)
        assert first(torch.ones(1)) == second(torch.ones(1)) == 1
        by_name(graph)["n0"].target = torch.neg
        order = [first, second] if edit_first else [second, first]
        assert [module(torch.ones(1)).item() for module in order] == [-1, -1]

    def test_a_module_that_ran_before_the_second_was_made_follows_too(self) -> None:
        graph = chain(1)
        first = fx.GraphModule(nn.Module(), graph)
        assert first(torch.ones(1)) == 1
        second = fx.GraphModule(nn.Module(), graph)
        by_name(graph)["n0"].target = torch.neg
        assert second(torch.ones(1)) == -1
        assert first(torch.ones(1)) == -1

    def test_a_shallow_copy_does_not_cut_the_original_off(self) -> None:
        import copy

        first = fx.GraphModule(nn.Module(), chain(1))
        assert first(torch.ones(1)) == 1
        second = copy.copy(first)
        by_name(first.graph)["n0"].target = torch.neg
        assert second(torch.ones(1)) == -1
        assert first(torch.ones(1)) == -1

    def test_one_module_runs_and_the_other_never_did(self) -> None:
        graph = chain(1)
        first, second = fx.GraphModule(nn.Module(), graph), fx.GraphModule(nn.Module(), graph)
        assert first(torch.ones(1)) == 1
        by_name(graph)["n0"].target = torch.neg
        by_name(graph)["n0"].target = torch.abs
        assert first(torch.ones(1)) == second(torch.ones(1)) == 1

    def test_owning_module_is_the_only_one(self) -> None:
        graph = chain()
        assert graph.owning_module is None
        first = fx.GraphModule(nn.Module(), graph)
        assert graph.owning_module is first
        second = fx.GraphModule(nn.Module(), graph)
        assert graph.owning_module is None
        second.graph = chain()
        assert graph.owning_module is first

    def test_a_graph_does_not_keep_its_modules_alive(self) -> None:
        graph = chain()
        module = fx.GraphModule(nn.Module(), graph)
        reference = weakref.ref(module)
        del module
        gc.collect()
        assert reference() is None
        by_name(graph)["n0"].target = torch.neg

    def test_what_a_module_had_is_known_when_it_is_gone(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        graph = fx.symbolic_trace(model).graph
        assert graph.owning_module.get_submodule("0") is model[0]
        assert not isinstance(graph.owning_module, fx.GraphModule)
        relu = by_name(graph)["_1"]
        relu.replace_all_uses_with(relu.args[0])
        graph.lint()
        assert graph.eliminate_dead_code()
        assert [node.name for node in graph.nodes] == ["input_1", "_0", "output"]

    def test_a_module_given_another_graph_no_longer_follows_the_old_one(self) -> None:
        old, new = chain(1), chain(2)
        module = fx.GraphModule(nn.Module(), old)
        module(torch.ones(1))
        module.graph = new
        module(torch.ones(1))
        by_name(old)["n0"].target = torch.neg
        assert module(torch.ones(1)) == 1
        by_name(new)["n0"].target = torch.neg
        assert module(torch.ones(1)) == 0

    def test_changing_the_code_generator_is_an_edit(self) -> None:
        module = fx.GraphModule(nn.Module(), chain(1))
        module(torch.ones(1))

        class Doubling(fx.CodeGen):
            def generate_output(self, output_args, **options):
                return f"return 2 * {output_args}"

        module.graph.set_codegen(Doubling())
        assert module(torch.ones(1)) == 2

    def test_a_body_transformer_is_an_edit_and_so_is_its_end(self) -> None:
        module = fx.GraphModule(nn.Module(), chain(1))
        module(torch.ones(1))
        with module.graph.on_generate_code(lambda _: lambda body: [line.replace("relu", "neg") for line in body]):
            assert module(torch.ones(1)) == -1
        assert module(torch.ones(1)) == 1


class TestHooks:
    def test_creating_erasing_and_replacing_are_told(self) -> None:
        module, told = fx.GraphModule(nn.Module(), chain(1)), []
        module._register_create_node_hook(lambda node: told.append(("create", node.name)))
        module._register_erase_node_hook(lambda node: told.append(("erase", node.name)))
        module._register_replace_node_hook(lambda old, new, user: told.append(("replace", old.name, new, user.name)))
        node = by_name(module.graph)["n0"]
        with module.graph.inserting_after(node):
            new = module.graph.call_function(torch.neg, (node.args[0],), name="new")
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
        assert told == [("create", "new"), ("replace", "n0", "new", "output"), ("erase", "n0")]

    def test_replace_input_with_is_told(self) -> None:
        module, told = fx.GraphModule(nn.Module(), chain(1)), []
        x, node = list(module.graph.nodes)[:2]
        other = module.graph.placeholder("other")
        with module._set_replace_hook(lambda old, new, user: told.append((old, new, user))):
            node.replace_input_with(x, other)
        node.replace_input_with(other, x)
        assert told == [(x, "other", node)]

    def test_a_hook_that_was_taken_away_is_not_called(self) -> None:
        module, told = fx.GraphModule(nn.Module(), chain(1)), []
        for kind in ("create", "erase"):
            getattr(module, f"_register_{kind}_node_hook")(told.append)
            getattr(module, f"_unregister_{kind}_node_hook")(told.append)
        module.graph.erase_node(module.graph.call_function(torch.neg, (None,)))
        assert told == []

    def test_only_functions_can_be_hooks(self) -> None:
        with pytest.raises(fx.GraphError, match="(?s)must be a callable.*found str"):
            fx.GraphModule(nn.Module(), chain())._register_create_node_hook("hook")

    def test_hooks_of_one_module_survive_a_second_over_the_same_graph(self) -> None:
        graph, told = chain(), []
        first = fx.GraphModule(nn.Module(), graph)
        first._register_create_node_hook(told.append)
        second = fx.GraphModule(nn.Module(), graph)
        node = graph.call_function(torch.neg, (None,))
        assert told == [node]
        del second
