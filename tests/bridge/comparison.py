"""What it means that two programs of one library are the same, spelt out field by field; used by the tests of the bridge."""

import copy
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

import torchgraft


def described(value: Any) -> Any:
    """A tree with nodes as their names and the classes of containers spelt out, so that two programs can be compared."""
    if isinstance(value, (torch.fx.Node, torchgraft.Node)):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        # torch.fx itself turns a torch.Size in the arguments of a node into a tuple.
        return [tuple if type(value) is torch.Size else type(value), *map(described, value)]
    if isinstance(value, (set, frozenset)):
        return [type(value), *sorted(map(described, value))]
    if isinstance(value, dict):
        return [type(value), *[(described(key), described(item)) for key, item in value.items()]]
    if isinstance(value, slice):
        return [slice, described(value.start), described(value.stop), described(value.step)]
    return value


def node_record(node: Any) -> dict[str, Any]:
    """Everything there is to know about a node."""
    return {
        "op": node.op,
        "name": node.name,
        "target": node.target,
        "type": node.type,
        "args": described(node.args),
        "kwargs": described(node.kwargs),
        "users": [user.name for user in node.users],
        "inputs": [source.name for source in node.all_input_nodes],
        "meta": described(node.meta),
        "attributes": described(vars(node)),
    }


def assert_same_graph(actual: Any, expected: Any) -> None:
    """Two graphs of the same library, node for node."""
    assert type(actual) is type(expected)
    ours, theirs = list(actual.nodes), list(expected.nodes)
    assert [node.name for node in ours] == [node.name for node in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert node_record(one) == node_record(other)
    assert str(actual) == str(expected)
    assert actual._tracer_cls is expected._tracer_cls
    for wish in ("relu", "add", "x", "some_new_name", "conv_1"):
        assert copy.deepcopy(names(actual)).create_name(wish, None) == copy.deepcopy(names(expected)).create_name(
            wish, None
        )


def names(graph: Any) -> Any:
    """The namespace of a graph, without the nodes it may hold."""
    namespace = copy.copy(graph._graph_namespace)
    if hasattr(namespace, "_obj_to_name"):
        namespace._obj_to_name = {}
        return namespace
    return namespace.copy()


def assert_same_module(actual: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Two graph modules of the same library: program, code, and the state in them, which must be shared."""
    assert_same_graph(actual.graph, expected.graph)
    assert actual.code == expected.code
    assert type(actual).__name__ == type(expected).__name__
    assert actual.training == expected.training
    assert_shared_state(actual, expected)


def assert_shared_state(actual: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Every parameter, buffer and attribute of one module is that of the other."""
    for table in ("named_parameters", "named_buffers"):
        ours = dict(getattr(actual, table)(remove_duplicate=False))
        theirs = dict(getattr(expected, table)(remove_duplicate=False))
        assert list(ours) == list(theirs)
        assert all(ours[name] is theirs[name] for name in theirs)
    assert list(actual.state_dict()) == list(expected.state_dict())
    ours, theirs = [dict(module.named_modules(remove_duplicate=False)) for module in (actual, expected)]
    assert list(ours) == list(theirs)
    assert {name: module.training for name, module in ours.items()} == {
        name: module.training for name, module in theirs.items()
    }


def copied(inputs: Any) -> Any:
    """Inputs that a program may change, each with a gradient of its own."""
    return pytree.tree_map(
        lambda leaf: (
            leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
        ),
        inputs,
    )


def outcome(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, gradients: bool = True
) -> dict[str, Any]:
    """What a call returns, what it does to inputs and buffers, and the gradients of all inputs and parameters.

    The module is copied first, so that one can be run many times.
    """
    saved = [name for name, _ in module.named_buffers() if name in module.state_dict()]
    module = copy.deepcopy(module)
    args, kwargs = copied(args), copied(kwargs or {})
    torch.manual_seed(0)
    result = module(*args, **kwargs)
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if leaves and gradients:
        sum(leaf.double().pow(2).sum() for leaf in leaves).backward()
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return {
        "result": pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, result),
        "inputs": [leaf.detach() for leaf in tensors],
        "input gradients": [leaf.grad for leaf in tensors if leaf.is_leaf],
        "gradients": {name: parameter.grad for name, parameter in module.named_parameters()},
        "buffers": {name: module.get_buffer(name) for name in saved},
    }


def assert_same_outcome(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit."""
    for key, value in expected.items():
        ours, our_spec = pytree.tree_flatten(actual[key])
        theirs, their_spec = pytree.tree_flatten(value)
        assert our_spec == their_spec, key
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(other, torch.Tensor):
                assert one is not None and one.dtype == other.dtype
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=key)
            else:
                assert one == other, key
