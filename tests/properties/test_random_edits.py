"""Random edits of a graph: after each one the invariants hold and the module runs the graph as it now is, or the edit raised
and changed nothing. What the invariants are is said in `graph_state.py`.
"""

from __future__ import annotations

import copy
import keyword
import operator
import pickle
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from tests.properties.graph_state import (
    check_consistent,
    check_lint,
    evaluate,
    is_well_formed,
    picture,
    refused_without_change,
)
from torchgraft import Graph, GraphModule, Node, pure

WHERE = st.integers(0, 40)
FUNCTIONS = st.sampled_from([torch.add, torch.sub, torch.mul, operator.add, torch.maximum])
METHODS = st.sampled_from(["relu", "neg", "sin", "clone"])
NAMES = st.sampled_from(["value", "relu", "x", "add_1", "weight", "result_2", "layer"])
BAD_NAMES = st.sampled_from(["if", "2x", "", "a b", "torch", "len", "a.b", "None"])


@pure
def mean_of(values: list[torch.Tensor], weights: dict[str, Any] | None = None) -> torch.Tensor:
    """Takes a list and a dict, so that arguments nest."""
    total = sum(values[1:], values[0])
    return total / len(values) + sum((weights or {}).values(), 0)


class Holder(nn.Module):
    """What the graphs may refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.tensor([[0.5, -1.0], [2.0, 0.25]]))
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[1.0, -0.5], [0.25, 2.0]]))
            self.linear.bias.zero_()


class Edits(RuleBasedStateMachine):
    """One graph, its module, a foreign graph, and nodes that were erased."""

    @initialize()
    def start(self) -> None:
        graph = Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        weight = graph.get_attr("weight")
        total = graph.call_function(torch.add, (x, y))
        product = graph.call_function(torch.mul, (total, weight))
        graph.output(product)
        self.module = GraphModule(Holder(), graph)
        self.module.linear = Holder().linear
        self.foreign = Graph()
        self.stranger = self.foreign.call_method("relu", (self.foreign.placeholder("z"),))
        self.foreign.output((self.stranger,))
        self.dead: list[Node] = []

    @property
    def graph(self) -> Graph:
        return self.module.graph

    def node(self, index: int) -> Node:
        nodes = list(self.graph.nodes)
        return nodes[index % len(nodes)]

    def operand(self, index: int) -> Node:
        nodes = [node for node in self.graph.nodes if node.op != "output"]
        return nodes[index % len(nodes)]

    def earlier(self, index: int, than: Node) -> Node | None:
        nodes = [node for node in self.graph.nodes if node < than and node.op != "output"]
        return nodes[index % len(nodes)] if nodes else None

    # ---- what always holds ----

    @invariant()
    def is_consistent(self) -> None:
        if not hasattr(self, "module"):
            return
        check_consistent(self.graph)
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        if check_lint(self.graph) and len(inputs) == len({node.target for node in inputs}):
            values = [torch.tensor([[1.0, -2.0], [0.5, 3.0]]) + number for number in range(len(inputs))]
            expected, found = evaluate(self.module, values), self.module(*values)
            if expected is None:
                assert found is None
            else:
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)

    # ---- making ----

    @rule(function=FUNCTIONS, place=WHERE, first=WHERE, second=WHERE, before=st.booleans())
    def create(self, function: Any, place: int, first: int, second: int, before: bool) -> None:
        at = self.node(place)
        point = self.graph.inserting_before(at) if before else self.graph.inserting_after(at)
        with point:
            made = self.graph.call_function(function, (self.operand(first), self.operand(second)))
        assert (made.next if before else made.prev) is at

    @rule(method=METHODS, source=WHERE)
    def create_used(self, method: str, source: int) -> None:
        """A node that the result depends on, made where it belongs."""
        output = next((node for node in self.graph.nodes if node.op == "output"), None)
        if output is None:
            return
        value = self.earlier(source, output)
        if value is None:
            return
        with self.graph.inserting_before(output):
            made = self.graph.call_method(method, (value,))
            output.args = (self.graph.call_function(torch.add, (made, value), {"alpha": 2}),)

    @rule(first=WHERE, second=WHERE, place=WHERE)
    def create_nested(self, first: int, second: int, place: int) -> None:
        at = self.node(place)
        a, b = self.earlier(first, at), self.earlier(second, at)
        if a is None or b is None or at.op == "placeholder":
            return
        with self.graph.inserting_before(at):
            self.graph.call_function(mean_of, ([a, b, a],), {"weights": {"one": b}})

    @rule(source=WHERE, place=WHERE)
    def create_module_call(self, source: int, place: int) -> None:
        at = self.node(place)
        value = self.earlier(source, at)
        if value is not None and at.op != "placeholder":
            with self.graph.inserting_before(at):
                self.graph.call_module("linear", (value,))

    @rule()
    def create_with_bad_arguments(self) -> None:
        graph = self.graph
        bad = [self.stranger, *self.dead[-1:]]
        for node in bad:
            refused_without_change(graph, lambda node=node: graph.call_function(torch.relu, (node,)))
            refused_without_change(graph, lambda node=node: graph.call_function(mean_of, ([self.operand(0), node],)))
        refused_without_change(graph, lambda: graph.create_node("call_everything", torch.relu))
        refused_without_change(graph, lambda: graph.create_node("call_function", "relu"))
        refused_without_change(graph, lambda: graph.create_node("call_method", torch.relu, (self.operand(0),)))
        refused_without_change(graph, lambda: graph.create_node("call_function", torch.relu, [self.operand(0)]))

    @rule(index=WHERE, first=WHERE)
    def copy_node(self, index: int, first: int) -> None:
        node = self.node(index)
        if node.op in ("output", "placeholder"):
            return
        with self.graph.inserting_after(node):
            made = self.graph.node_copy(node)
        assert made.args == node.args and made.target is node.target and made.meta == node.meta

    @rule(value=WHERE)
    def copy_graph(self, value: int) -> None:
        output = next((node for node in self.graph.nodes if node.op == "output"), None)
        given = self.earlier(value, output) if output is not None else None
        if given is None:
            return
        (placeholder,) = self.foreign.find_nodes(op="placeholder")
        with self.graph.inserting_before(output):
            result = self.graph.graph_copy(self.foreign, {placeholder: given})
        output.args = (result[0],)

    # ---- changing ----

    @rule(index=WHERE)
    def erase(self, index: int) -> None:
        node = self.node(index)
        if len(self.graph.nodes) < 3:
            return
        if node.users:
            refused_without_change(self.graph, lambda: self.graph.erase_node(node))
            return
        self.graph.erase_node(node)
        self.dead.append(node)
        before = str(self.graph)
        with pytest.warns(UserWarning, match="already erased"):
            self.graph.erase_node(node)
        assert str(self.graph) == before

    @precondition(lambda self: self.dead)
    @rule(other=WHERE)
    def use_the_dead(self, other: int) -> None:
        dead, live = self.dead[-1], self.operand(other)
        refused_without_change(self.graph, lambda: setattr(dead, "args", (live,)))
        assert dead.replace_all_uses_with(live) == []
        refused_without_change(self.graph, lambda: live.append(dead))
        refused_without_change(self.graph, lambda: self.graph.inserting_before(dead))
        refused_without_change(self.graph, lambda: setattr(dead, "name", "again"))
        if live.users:
            refused_without_change(self.graph, lambda: live.replace_all_uses_with(dead))
            refused_without_change(self.graph, lambda: next(iter(live.users)).replace_input_with(live, dead))

    @rule(old=WHERE, new=WHERE, keep=st.booleans())
    def replace_uses(self, old: int, new: int, keep: bool) -> None:
        source, target = self.operand(old), self.operand(new)
        users = list(source.users)
        changed = source.replace_all_uses_with(target, (lambda user: user.op != "output") if keep else None)
        assert changed == [user for user in users if not keep or user.op != "output"]
        if source is not target:
            assert all(source not in user.all_input_nodes for user in changed)

    @rule(old=WHERE)
    def replace_by_a_stranger(self, old: int) -> None:
        source = self.operand(old)
        if source.users:
            refused_without_change(self.graph, lambda: source.replace_all_uses_with(self.stranger))
            refused_without_change(self.graph, lambda: source.replace_all_uses_with(self.stranger, propagate_meta=True))

    @rule(user=WHERE, new=WHERE)
    def replace_input(self, user: int, new: int) -> None:
        node = self.node(user)
        if node.all_input_nodes:
            node.replace_input_with(node.all_input_nodes[0], self.operand(new))

    @rule(user=WHERE, new=WHERE, way=st.sampled_from(["args", "kwargs", "update_arg", "update_kwarg"]))
    def assign_arguments(self, user: int, new: int, way: str) -> None:
        node, value = self.node(user), self.operand(new)
        if node.target in (torch.add, torch.sub, torch.mul) and len(node.args) == 2:
            if way == "args":
                node.args = (node.args[1], value)
            elif way == "kwargs":
                node.args, node.kwargs = (value,), {"other": node.args[1]}
            elif way == "update_arg":
                node.update_arg(1, value)
            else:
                node.args = node.args[:1]
                node.update_kwarg("other", value)

    @rule(user=WHERE)
    def assign_bad_arguments(self, user: int) -> None:
        node = self.node(user)
        refused_without_change(self.graph, lambda: setattr(node, "args", (self.stranger,)))
        refused_without_change(self.graph, lambda: setattr(node, "kwargs", {"other": [self.stranger]}))
        refused_without_change(self.graph, lambda: node.insert_arg(7, 1))

    @rule(anchor=WHERE, moved=WHERE, before=st.booleans())
    def move(self, anchor: int, moved: int, before: bool) -> None:
        at, node = self.node(anchor), self.node(moved)
        if at is node:
            return
        at.prepend(node) if before else at.append(node)
        assert (node.next if before else node.prev) is at
        refused_without_change(self.graph, lambda: at.append(self.stranger))

    @rule(index=WHERE, name=NAMES)
    def rename(self, index: int, name: str) -> None:
        node = self.node(index)
        if node.name == name:
            return
        if any(other.name == name for other in self.graph.nodes):
            refused_without_change(self.graph, lambda: setattr(node, "name", name))
            return
        try:
            node.name = name
        except RuntimeError as error:  # names of erased nodes may stay taken
            assert "taken" in str(error)
        else:
            assert node.name == name

    @rule(index=WHERE, name=BAD_NAMES)
    def rename_badly(self, index: int, name: str) -> None:
        node = self.node(index)
        node.name = name  # made legal
        assert node.name.isidentifier() and not keyword.iskeyword(node.name)
        assert node.name not in ("torch", "len")

    @rule(index=WHERE, function=FUNCTIONS)
    def retarget(self, index: int, function: Any) -> None:
        node = self.node(index)
        if (
            node.op == "call_function"
            and node.target is not mean_of
            and "alpha" not in node.kwargs
            and len(node.args) == 2
        ):
            node.target = function

    @rule(index=WHERE)
    def note_something(self, index: int) -> None:
        self.node(index).meta["note"] = [1, {"two": 2}]

    # ---- asking and copying ----

    @rule(function=FUNCTIONS)
    def find(self, function: Any) -> None:
        nodes = list(self.graph.nodes)
        found = self.graph.find_nodes(op="call_function", target=function)
        assert found == [node for node in nodes if node.op == "call_function" and node.target is function]
        assert self.graph.find_nodes(op="placeholder") == [node for node in nodes if node.op == "placeholder"]

    @rule(way=st.sampled_from(["graph", "module", "pickle"]))
    def go_on_with_a_copy(self, way: str) -> None:
        if not is_well_formed(self.graph):
            return
        old, before = self.module, [(n.op, n.name, str(n.args), str(n.kwargs), str(n.meta)) for n in self.graph.nodes]
        if way == "graph":
            self.module = GraphModule(old, copy.deepcopy(old.graph))
            self.module.linear = old.linear
        elif way == "module":
            self.module = copy.deepcopy(old)
        else:
            self.module = pickle.loads(pickle.dumps(old))
        self.dead.clear()
        assert [(n.op, n.name, str(n.args), str(n.kwargs), str(n.meta)) for n in self.graph.nodes] == before
        assert not set(self.graph.nodes) & set(old.graph.nodes)
        first, picture_of_old = next(iter(self.graph.nodes)), picture(old.graph)
        first.append(self.graph.call_function(torch.add, (first, first)))
        assert picture(old.graph) == picture_of_old

    @rule()
    def remove_dead_code(self) -> None:
        if not is_well_formed(self.graph):
            refused_without_change(self.graph, self.graph.eliminate_dead_code)
            return
        self.graph.eliminate_dead_code()
        assert all(node.users or node.op in ("placeholder", "output") for node in self.graph.nodes)
        assert not self.graph.eliminate_dead_code()

    @rule(index=WHERE, source=WHERE)
    def erase_an_insertion_point(self, index: int, source: int) -> None:
        """A node around which a `with` block stands goes away inside an inner block."""
        node = self.node(index)
        if node.users or node.op in ("placeholder", "output"):
            return
        value = self.earlier(source, node)
        if value is None:
            return
        with self.graph.inserting_after(node):
            with self.graph.inserting_before(value):
                self.graph.erase_node(node)
            self.dead.append(node)
        # What becomes of a node that is made between the two is asked in test_found_programs.py.
        made = self.graph.call_method("relu", (value,))
        assert made.next.op == "root"

    # ---- walking while editing (rule 4) ----

    @rule(
        at=WHERE,
        action=st.sampled_from(["insert after", "insert before", "erase next", "erase me", "replace me"]),
        back=st.booleans(),
    )
    def walk(self, at: int, action: str, back: bool) -> None:
        nodes = list(self.graph.nodes)
        stop = nodes[at % len(nodes)]
        expected = nodes[::-1] if back else list(nodes)
        visited = []
        for node in reversed(self.graph.nodes) if back else self.graph.nodes:
            visited.append(node)
            if node is stop:
                self._edit_in_walk(node, action, expected, back)
        assert visited == expected

    def _edit_in_walk(self, node: Node, action: str, expected: list[Node], back: bool) -> None:
        position = expected.index(node)
        if action.startswith("insert"):
            after = action == "insert after"
            with self.graph.inserting_after(node) if after else self.graph.inserting_before(node):
                made = self.graph.call_method("relu", (self.operand(0),))
            if after is not back:
                expected.insert(position + 1, made)
        elif action == "erase next":
            following = expected[position + 1 :]
            if following and not following[0].users and len(expected) > 3:
                self.graph.erase_node(following[0])
                self.dead.append(following[0])
                expected.remove(following[0])
        elif node.op not in ("output", "placeholder"):
            if action == "replace me":
                with self.graph.inserting_after(node):
                    made = self.graph.node_copy(node)
                node.replace_all_uses_with(made)
                if not back:
                    expected.insert(position + 1, made)
            if not node.users and len(expected) > 3:
                self.graph.erase_node(node)
                self.dead.append(node)


TestEdits = Edits.TestCase
TestEdits.settings = settings(max_examples=60, stateful_step_count=30)
