"""The collaborators of a watcher, each by itself: what is asked once, which node a value is, what flows, what is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torchgraft.capturing.flowing.sizes import unwrapped
from torchgraft.capturing.state.model_state import ModelState
from torchgraft.capturing.tracer_base import TracerBase
from torchgraft.capturing.watching.reruns import KeepWhole, RunAgain
from torchgraft.capturing.watching.watcher import Watcher
from torchgraft.ir.guards import check_value, is_guard
from torchgraft.ir.modules import paths_of_modules


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.note = torch.ones(2)


@pytest.fixture
def watcher() -> Watcher:
    root = Model()
    return Watcher(root, ModelState(paths_of_modules(root)), lambda module, path: False)


@pytest.fixture
def x(watcher: Watcher) -> torch.Tensor:
    tensor = torch.ones(4, 2)
    watcher.values.add_input(tensor, watcher.graph.placeholder("x"))
    return tensor


def guards(watcher: Watcher) -> Iterator[Any]:
    return (node for node in watcher.graph.nodes if is_guard(node.target))


def test_a_watcher_has_no_other_ancestor_and_no_class_beside_it_has_many_members(watcher: Watcher) -> None:
    assert Watcher.__bases__ == (TracerBase,)
    parts = [part for part in vars(watcher).values() if type(part).__module__.startswith("torchgraft.capturing.watch")]
    assert len(parts) >= 8
    for part in parts:
        assert len({*vars(part), *vars(type(part))} - {*vars(object), "__module__", "__dict__", "__weakref__"}) <= 30


def test_a_guard_is_written_once(watcher: Watcher, x: torch.Tensor) -> None:
    node = watcher.values.node_of(x)
    for _ in range(2):
        assert watcher.guards.fact(node, "ndim", 2) == 2
    (guard,) = guards(watcher)
    assert guard.target is check_value and guard.args[1:3] == (2, "ndim of 'x'")


def test_a_plain_run_checks_nothing_and_hands_out_plain_values(watcher: Watcher, x: torch.Tensor) -> None:
    watcher.flow.be_plain()
    node = watcher.values.node_of(x)
    watcher.guards.fact(node, "ndim", 2)
    assert type(watcher.flow.number(node, "numel", 8, lambda: node, "x.numel()")) is int
    assert not list(guards(watcher)) and watcher.is_plain


def test_sizes_flow_until_python_asks(watcher: Watcher, x: torch.Tensor) -> None:
    node = watcher.values.node_of(x)
    sizes = watcher.flow.sizes(node, x)
    assert watcher.flow.sizes(node, x) is sizes and unwrapped(sizes[0]) is not None
    assert not list(guards(watcher))
    assert sizes[0] == 4
    assert [guard.args[2] for guard in guards(watcher)] == ["(x.size(0) == 4)"]


def test_what_a_run_has_handed_out_is_plain_when_it_is_over(watcher: Watcher, x: torch.Tensor) -> None:
    graph, node = watcher.graph, watcher.values.node_of(x)
    size, dtype = watcher.flow.sizes(node, x)[0], watcher.flow.dtype(node, x.dtype)
    watcher.end()
    length = len(graph.nodes)
    assert size + 1 == 5 and hash(size) == hash(4) and dtype == torch.float32 and hash(dtype) == hash(torch.float32)
    assert len(graph.nodes) == length
    assert not vars(watcher)


def test_no_table_is_given_a_number_or_dtype_of_the_run(watcher: Watcher, x: torch.Tensor) -> None:
    asked: list[str] = []
    watcher.flow.ask_plainly = asked.append
    node = watcher.values.node_of(x)
    for key in (watcher.flow.sizes(node, x)[0], watcher.flow.dtype(node, x.dtype)):
        with pytest.raises(RunAgain) as request:
            {key: 1}
        request.value.prepare()
    assert asked == ["numbers", "dtypes"]


def test_the_node_of_a_tensor(watcher: Watcher, x: torch.Tensor) -> None:
    values, root = watcher.values, watcher.root
    outside = torch.zeros(1)
    made = values.register(torch.ones(1), watcher.create_call("call_function", torch.ones, (1,), {}), {})
    assert values.node_of(root.linear.weight).target == "linear.weight"  # type: ignore[union-attr, arg-type]
    assert values.node_of(root.note).target == "note"  # type: ignore[arg-type]
    assert values.node_of(outside) is values.node_of(outside) and values.node_of(outside).target == "_tensor_constant0"
    assert values.node_of(made).target is torch.ones and values.is_made(made)
    assert [values.is_static(tensor) for tensor in (x, made, outside)] == [False, False, True]
    assert [values.is_input(tensor) for tensor in (x, made)] == [True, False]


def test_parts_of_a_result_have_nodes_when_they_are_used(watcher: Watcher, x: torch.Tensor) -> None:
    call = watcher.create_call("call_method", "chunk", (watcher.values.node_of(x), 2), {})
    first, second = watcher.values.register((torch.ones(2), torch.ones(2)), call, {})
    length = len(watcher.graph.nodes)
    assert watcher.values.node_of(second).args == (call, 1)
    assert len(watcher.graph.nodes) == length + 1


def test_what_is_handed_through_unchanged_gets_an_identity_of_its_own(watcher: Watcher, x: torch.Tensor) -> None:
    node = watcher.create_call("call_function", torch.dropout, (watcher.values.node_of(x), 0.5, False), {})
    result = watcher.values.register(x, node, {id(x): x._version})
    assert result is not x and watcher.values.node_of(result) is node


def test_objects_that_were_changed_since(watcher: Watcher) -> None:
    cache: list[int] = [1]
    watcher.values.add_object(cache, watcher.graph.placeholder("cache"))
    assert cache in watcher.values.objects and not watcher.values.objects.changed()
    cache.append(2)
    assert watcher.values.objects.changed() == [(cache, {0: 1}, {0: 1, 1: 2})]


def test_arguments_are_nodes_for_the_program_and_plain_for_torch(watcher: Watcher, x: torch.Tensor) -> None:
    node = watcher.values.node_of(x)
    size = watcher.flow.sizes(node, x)[0]
    assert watcher.arguments.simple((x, 2), {}) == (((node, 2), {}), {id(x): x._version})
    assert watcher.arguments.simple((x, [size]), {})[0] is None
    (lowered, _), plain, _ = watcher.arguments.taken((x, [size, 1]), {}, {})
    assert lowered[1][0].target == "size" and plain == (x, [4, 1]) and type(plain[1][0]) is int


def test_writes_to_the_model_are_noted_or_refused(watcher: Watcher) -> None:
    root = watcher.root
    watcher.writes.before_attribute(root, "note", root.note)
    assert not watcher.writes.written  # it is what is there already
    watcher.writes.before_attribute(root, "flag", True)
    assert "it writes self.flag" in watcher.writes.written[root]
    with pytest.raises(KeepWhole, match=r"self\.training"):
        watcher.writes.before_attribute(root, "training", False)
    with pytest.raises(KeepWhole, match="the attribute mark of a tensor"):
        watcher.writes.before_tensor_attribute(torch.ones(1), "mark")


def test_a_mode_is_one_node_and_decides_with_a_guard(watcher: Watcher) -> None:
    assert watcher.modes.node(watcher.root) is watcher.modes.node(watcher.root)
    assert watcher.modes.decides(watcher.root) is True and watcher.modes.decides(watcher.root) is True
    assert len(list(guards(watcher))) == 1
    other = nn.Dropout()
    assert watcher.modes.decides(other) is True and watcher.modes.asked_outside == [(other, watcher.root)]
