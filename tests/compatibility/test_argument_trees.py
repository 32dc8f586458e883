"""Functions over argument trees, map_arg and map_aggregate, and the immutable collections arguments are kept in.

What a tracer accepts as an argument is examined in test_arguments.
"""

import collections
import copy
import pickle
from types import ModuleType

import pytest
import torch
from torch.utils import _pytree as pytree

Size = collections.namedtuple("Size", ["height", "width"])


def nodes(fx: ModuleType):
    graph = fx.Graph()
    return graph.placeholder("a"), graph.placeholder("b")


def test_map_arg_visits_only_nodes(fx: ModuleType) -> None:
    a, b = nodes(fx)
    seen = []
    result = fx.map_arg((a, [1, b], {"k": (a, "text")}), lambda node: seen.append(node) or node.name.upper())
    assert seen == [a, b, a]
    assert result == ("A", [1, "B"], {"k": ("A", "text")})


def test_map_arg_keeps_kinds_of_containers(fx: ModuleType) -> None:
    a, b = nodes(fx)
    assert fx.map_arg(slice(a, None, b), lambda node: 5) == slice(5, None, 5)
    assert fx.map_arg([a], lambda node: 5) == [5]
    assert fx.map_arg((a,), lambda node: 5) == (5,)
    assert fx.map_arg({"k": a}, lambda node: 5) == {"k": 5}
    assert fx.map_arg(a, lambda node: 5) == 5
    assert fx.map_arg(3, lambda node: 5) == 3
    assert fx.map_arg(None, lambda node: 5) is None


def test_map_arg_keeps_named_tuples(fx: ModuleType) -> None:
    a, b = nodes(fx)
    result = fx.map_arg(Size(a, b), lambda node: node.name)
    assert isinstance(result, Size)
    assert result == Size("a", "b")


def test_map_arg_needs_a_function(fx: ModuleType) -> None:
    with pytest.raises((AssertionError, TypeError)):
        fx.map_arg((1,), 3)


def test_map_aggregate_visits_every_leaf(fx: ModuleType) -> None:
    seen = []
    result = fx.node.map_aggregate((1, [2, {"k": slice(3, None, 4)}], "s"), lambda leaf: seen.append(leaf) or leaf)
    assert seen == [1, 2, 3, None, 4, "s"]
    assert result == (1, [2, {"k": slice(3, None, 4)}], "s")


def test_map_aggregate_transforms(fx: ModuleType) -> None:
    double = lambda value: value * 2 if isinstance(value, int) else value
    assert fx.node.map_aggregate({"a": [1, (2, None)]}, double) == {"a": [2, (4, None)]}
    result = fx.node.map_aggregate(Size(1, 2), double)
    assert isinstance(result, Size) and result == Size(2, 4)


def test_results_of_mapping_are_immutable(fx: ModuleType) -> None:
    result = fx.node.map_aggregate([1, {"k": 2}], lambda value: value)
    assert isinstance(result, fx.immutable_collections.immutable_list)
    assert isinstance(result[1], fx.immutable_collections.immutable_dict)


def test_immutable_list_is_a_list_that_refuses_changes(fx: ModuleType) -> None:
    values = fx.immutable_collections.immutable_list([3, 1, 2])
    assert values == [3, 1, 2]
    assert isinstance(values, list)
    assert values[0] == 3
    assert values[1:] == [1, 2]
    assert sorted(values) == [1, 2, 3]
    for change in (
        lambda: values.append(4),
        lambda: values.extend([4]),
        lambda: values.insert(0, 4),
        lambda: values.pop(),
        lambda: values.remove(3),
        lambda: values.clear(),
        lambda: values.sort(),
        lambda: values.reverse(),
        lambda: values.__setitem__(0, 1),
        lambda: values.__delitem__(0),
        lambda: values.__iadd__([1]),
    ):
        with pytest.raises((TypeError, NotImplementedError)):
            change()
    assert values == [3, 1, 2]


def test_immutable_dict_is_a_dict_that_refuses_changes(fx: ModuleType) -> None:
    values = fx.immutable_collections.immutable_dict({"a": 1})
    assert values == {"a": 1}
    assert isinstance(values, dict)
    for change in (
        lambda: values.update(b=1),
        lambda: values.pop("a"),
        lambda: values.popitem(),
        lambda: values.clear(),
        lambda: values.setdefault("b", 1),
        lambda: values.__setitem__("a", 2),
        lambda: values.__delitem__("a"),
        lambda: values.__ior__({"b": 2}),
    ):
        with pytest.raises((TypeError, NotImplementedError)):
            change()
    assert values == {"a": 1}


def test_immutable_collections_hash(fx: ModuleType) -> None:
    collections_of = fx.immutable_collections
    assert hash(collections_of.immutable_list([1, 2])) == hash(collections_of.immutable_list([1, 2]))
    assert hash(collections_of.immutable_dict(a=1)) == hash(collections_of.immutable_dict(a=1))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))],
                         ids=["copy", "deepcopy", "pickle"])  # fmt: skip
def test_immutable_collections_can_be_copied_and_pickled(fx: ModuleType, duplicate) -> None:
    values = fx.immutable_collections.immutable_list([1, fx.immutable_collections.immutable_dict({"k": [2]})])
    other = duplicate(values)
    assert other == values
    assert type(other) is type(values)
    assert type(other[1]) is type(values[1])


def test_immutable_collections_are_pytrees(fx: ModuleType) -> None:
    values = fx.immutable_collections.immutable_list([1, fx.immutable_collections.immutable_dict({"k": 2})])
    leaves, spec = pytree.tree_flatten(values)
    assert leaves == [1, 2]
    rebuilt = pytree.tree_unflatten([10, 20], spec)
    assert rebuilt == [10, {"k": 20}]
    assert type(rebuilt) is type(values)
    assert pytree.tree_map(lambda v: v + 1, values) == [2, {"k": 3}]


def test_arguments_of_a_node_work_with_torch(fx: ModuleType) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.reshape, (x, [2, 3]))
    assert torch.reshape(torch.arange(6), node.args[1]).shape == (2, 3)
