"""Guards look at values and are not among their `users`; nothing that is done to a graph may lose one by accident."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchgraft
from torchgraft.ir.guards import check_kind, find_guards, is_guard
from torchgraft.ir.node import Node


class Asks(torch.nn.Module):
    """Asks for the class of an input and for the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            x = self.layer(x)
        return x * 2 if self.training else x


def guarded_graph() -> tuple[torchgraft.Graph, Node, Node, Node]:
    graph = torchgraft.Graph()
    x = graph.placeholder("x")
    relu = graph.call_function(torch.relu, (x,))
    guard = graph.call_function(check_kind, (relu, "torch.Tensor", "relu", "model.py:1"))
    graph.output(relu)
    return graph, x, relu, guard


def test_users_leave_guards_out_and_the_library_sees_them() -> None:
    program = torchgraft.symbolic_trace(Asks())
    x = next(iter(program.graph.nodes))
    assert [user.op for user in x.users] == ["call_module"]
    [training] = program.graph.find_nodes(op="get_attr", target="training")
    assert [is_guard(user.target) for user in training.users] == [True]  # nothing else uses it
    assert "%x : 'Any' [num_users=1]" in str(program.graph)
    assert len(program.guards) == 2


@pytest.mark.parametrize("again", [copy.deepcopy, lambda program: pickle.loads(pickle.dumps(program))])
def test_copies_leave_them_out_too(again: Any) -> None:
    program = again(torchgraft.symbolic_trace(Asks()))
    assert len(program.guards) == 2
    for node in program.graph.nodes:
        assert len({is_guard(user.target) for user in node.users}) < 2
        assert all(node in source._users for source in node.all_input_nodes)
    program.graph.lint()


def test_nodes_copied_one_by_one() -> None:
    graph, x, relu, guard = guarded_graph()
    other = torchgraft.Graph()
    copies = {x: other.placeholder("x")}
    for node in (relu, guard):
        copies[node] = other.node_copy(node, copies.__getitem__)
    assert list(copies[relu].users) == [copies[guard]]
    user = other.call_function(torch.abs, (copies[relu],))
    assert list(copies[relu].users) == [user]


def test_torch_fx_has_them_among_users_and_they_come_back_apart() -> None:
    program = torchgraft.symbolic_trace(Asks())
    theirs = torchgraft.to_fx(program)
    assert [user.op for user in next(iter(theirs.graph.nodes)).users] == ["call_function", "call_module"]
    back = torchgraft.from_fx(theirs)
    assert [user.op for user in next(iter(back.graph.nodes)).users] == ["call_module"]


def test_dead_code_keeps_what_a_guard_reads() -> None:
    graph, _, relu, guard = guarded_graph()
    graph.output_node().args = (next(iter(graph.nodes)),)
    graph._former_results.clear()
    assert list(relu.users) == [guard]
    graph.eliminate_dead_code()
    assert not relu._erased and not guard._erased


def test_a_pass_that_erases_what_has_no_users_leaves_what_a_guard_reads() -> None:
    program = torchgraft.capture(lambda x: x * 2 if x.sum() > 0 else x, (torch.ones(3),), level="function")
    for node in reversed(program.graph.nodes):
        if not node.users and not node.is_impure():
            program.graph.erase_node(node)
    with pytest.raises(torchgraft.GuardError):
        program(-torch.ones(3))


def test_replacing_takes_guards_along_and_does_not_return_them() -> None:
    graph, x, relu, guard = guarded_graph()
    with graph.inserting_after(relu):
        new = graph.call_function(torch.abs, (x,))
    assert relu.replace_all_uses_with(new) == [graph.output_node()]
    assert guard.args[0] is new and relu._users == {} and list(new.users) == [graph.output_node()]
    graph.erase_node(relu)
    graph.lint()
    assert len(find_guards(graph)) == 1


def test_a_guard_before_the_replacement_is_moved_behind_it() -> None:
    graph, _, relu, guard = guarded_graph()
    with graph.inserting_before(graph.output_node()):
        new = graph.call_function(torch.abs, (relu,))
    relu.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    assert guard.args[0] is new and new.next is guard and graph.output_node().args == (new,)
    graph.lint()


def test_a_callback_keeps_a_guard_where_it_is() -> None:
    graph, _, relu, guard = guarded_graph()
    with graph.inserting_before(graph.output_node()):
        new = graph.call_function(torch.abs, (relu,))
    relu.replace_all_uses_with(new, delete_user_cb=lambda user: user.op == "output")
    assert guard.args[0] is relu and guard.next is new
    graph.lint()


def test_erasing_a_value_that_a_guard_checks_is_refused() -> None:
    graph, x, relu, guard = guarded_graph()
    graph.output_node().args = (x,)
    with pytest.raises(
        torchgraft.GraphError, match="still had 1 users in the graph: 'guard'; erase these guards first"
    ):
        graph.erase_node(relu)
    graph.erase_node(guard)
    graph.erase_node(relu)
    graph.lint()


def test_a_call_that_becomes_a_guard_and_back() -> None:
    graph, _, relu, guard = guarded_graph()
    guard.target = print
    assert list(relu.users) == [guard, graph.output_node()]
    guard.target = check_kind
    assert list(relu.users) == [graph.output_node()]


def test_a_value_that_only_guards_use_stays_in_the_code() -> None:
    program = torchgraft.symbolic_trace(Asks())
    assert "check_training" in program.code and "training = None" in program.code
    with pytest.raises(torchgraft.GuardError):
        program.eval()(torch.ones(1, 3))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 100), st.integers(0, 100)), max_size=25))
@settings(deadline=None)
def test_any_edits_keep_both_sides_right(edits: list[tuple[int, int, int]]) -> None:
    """`users` is what reads a node, less the guards, whatever was done before."""
    graph = torchgraft.Graph()
    graph.placeholder("x")
    graph.output(next(iter(graph.nodes)))
    for kind, one, two in edits:
        calls = [node for node in graph.nodes if node.op != "output"]
        first, second = calls[one % len(calls)], calls[two % len(calls)]
        try:
            if kind == 0:
                with graph.inserting_after(first):
                    graph.call_function(torch.add, (first, first))
            elif kind == 1:
                with graph.inserting_after(first):
                    graph.call_function(check_kind, (first, "torch.Tensor", "x", "model.py:1"))
            elif kind == 2:
                graph.erase_node(first)
            elif kind == 3 and second < first and not is_guard(second.target):
                first.replace_all_uses_with(second)
            elif kind == 4 and first.op == "call_function":
                first.target = check_kind if is_guard(first.target) else torch.add
        except torchgraft.GraphError:
            assert kind == 2
    graph.lint()
    for node in graph.nodes:
        readers = [other for other in graph.nodes if node in other.all_input_nodes]
        assert set(node._users) == set(readers)
        assert set(node.users) == ({reader for reader in readers if not is_guard(reader.target)} or set(readers))


def test_the_library_goes_by_everything_that_reads_a_value() -> None:
    """`users` is for people; a pass that asks it takes what only a guard reads for dead."""
    source = Path(torchgraft.__file__).parent
    other_things = {"patch", "known[0]", "scene", "self.scene", "translation", "theirs", "self"}
    for_people = {"printing.py", "active.py", "node.py"}
    found = [
        f"{file.relative_to(source)}: {match.group(0)}"
        for file in source.rglob("*.py")
        for match in re.finditer(r"([\w.\[\]]+)\.users\b(?!`)", file.read_text(encoding="utf-8"))
        if match.group(1) not in other_things and file.name not in for_people
    ]
    assert found == []
