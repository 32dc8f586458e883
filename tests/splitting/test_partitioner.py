"""The partitioner, operator support and fusing beside torch.fx's, then on random programs with effects."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.passes import operator_support as their_support
from torch.fx.passes.infra import partitioner as theirs

import torchgraft
from tests.properties.strategies import Program, programs
from tests.splitting.test_properties import check
from torchgraft.splitting import operator_support as our_support
from torchgraft.splitting import partitioner as ours
from torchgraft.splitting.fusing import fuse_by_partitions, validate_partition

LIBRARIES = [(torch.fx, theirs, their_support), (torchgraft, ours, our_support)]


class Model(nn.Module):
    """Supported and unsupported calls in turn, with a parameter, a tuple and a value that skips a group."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, a, b):
        x = torch.sin(a) + torch.cos(b)
        y = torch.relu(x)
        z = torch.sin(y) + torch.cos(y) * self.scale
        w = torch.relu(z)
        first, second = torch.split(torch.sin(w), 1)
        return torch.sin(first) * torch.sin(second) + z, z


def run(library: Any, partitioner: Any, support: Any, supports: Any, **options: Any) -> tuple[Any, Any]:
    module = library.symbolic_trace(Model())
    made = partitioner.CapabilityBasedPartitioner(
        module,
        support.create_op_support(lambda modules, node: node.op == "call_function" and supports(node)),
        **options,
    )
    proposed = made.propose_partitions()
    groups = [[node.name for node in partition.nodes] for partition in proposed]
    return groups, made.fuse_partitions(proposed)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("without", ["relu", "cos", "relu sin", "add relu", "split", "", "mul sin cos"])
def test_the_same_groups_as_torch_fx(without: str, single: bool) -> None:
    def supports(node: Any) -> bool:
        return node.name.rstrip("_0123456789") not in without.split()

    (their_groups, their_module), (our_groups, our_module) = [
        run(*library, supports, allows_single_node_partition=single) for library in LIBRARIES
    ]
    assert len(our_groups) <= len(their_groups)
    inputs = torch.randn(2), torch.randn(2)
    expected = Model()(*inputs)
    torch.testing.assert_close(our_module(*inputs), expected)
    torch.testing.assert_close(their_module(*inputs), expected)
    if without == "relu":
        assert our_groups == their_groups
        assert our_module.code.strip() == their_module.code.strip()


@given(programs(), st.integers(0, 2**32), st.booleans(), st.booleans())
@settings(max_examples=120)
def test_fusing_changes_nothing(program: Program, seed: int, single: bool, horizontal: bool) -> None:
    chance = random.Random(seed)

    def cut(module: Any) -> Any:
        support = our_support.create_op_support(lambda modules, node: chance.random() < 0.6)
        return ours.CapabilityBasedPartitioner(
            module, support, single, skip_horizontal_fusion=horizontal
        ).partition_and_fuse()

    check(program, cut)


def test_support_tables() -> None:
    for library, partitioner, support in LIBRARIES:
        module = library.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        modules = dict(module.named_modules())
        table = support.OperatorSupport({"torch.nn.modules.linear.Linear": None})
        assert [table.is_node_supported(modules, node) for node in module.graph.nodes] == [True, True, False, True]
        declined = support.chain(table, support.OpSupports.decline_if_node_in_names({"_0"}))
        assert [declined.is_node_supported(modules, node) for node in module.graph.nodes] == [True, False, False, True]
        either = support.any_chain(table, support.create_op_support(lambda modules, node: node.name == "_1"))
        assert [either.is_node_supported(modules, node) for node in module.graph.nodes] == [True, True, True, True]
        del partitioner


def test_dtypes_of_arguments() -> None:
    module = torchgraft.symbolic_trace(lambda x, y: torch.add(x, y))
    x, y, add, _ = module.graph.nodes
    table = our_support.OperatorSupport({"torch.add": (([torch.float32], None), {})})
    with pytest.raises(
        torchgraft.GraphError, match="nothing is known about the dtype of node 'x'; propagate shapes first"
    ):
        table.is_node_supported({}, add)
    x.meta["type"] = torch.float32
    assert table.is_node_supported({}, add)
    x.meta["type"] = torch.int64
    assert not table.is_node_supported({}, add)
    declined = our_support.OpSupports.decline_if_input_dtype(torch.int64)
    y.meta["type"] = torch.float32
    assert not declined.is_node_supported({}, add)


def test_a_group_that_a_value_leaves_and_enters_again() -> None:
    module = torchgraft.symbolic_trace(lambda x: torch.cos(torch.relu(torch.sin(x))))
    _, sin, relu, cos, _ = module.graph.nodes
    assert not validate_partition([sin, cos])
    with pytest.raises(torchgraft.GraphError, match="Invalid partition, found dependency cycles"):
        fuse_by_partitions(module, [{sin: None, cos: None}])
    assert [node.name for node in module.graph.nodes] == ["x", "sin", "relu", "cos", "output"]
    with pytest.raises(torchgraft.GraphError, match="cannot fuse node 'relu' twice"):
        fuse_by_partitions(module, [{relu: None}, {relu: None}])


def test_a_group_that_a_write_comes_between() -> None:
    """No value leaves the group, but a write stands between its two reads."""

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        first = torch.sin(y)
        y.add_(1)
        return first + torch.cos(y)

    module = torchgraft.symbolic_trace(program)
    nodes = {node.name: node for node in module.graph.nodes}
    with pytest.raises(torchgraft.GraphError, match="Invalid partition"):
        fuse_by_partitions(module, [{nodes["sin"]: None, nodes["cos"]: None}])
    fused = fuse_by_partitions(module, [{nodes["cos"]: None, nodes["add"]: None}])
    assert torch.equal(fused(torch.ones(2)), program(torch.ones(2)))


def test_groups_side_by_side_that_effects_bind() -> None:
    """A read in the first, a write of it in the second, and the other way round: apart, each would wait for the other."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = x * 1, y * 1
        c = torch.sin(b)
        a.add_(1)
        d = torch.sin(a)
        b.add_(1)
        return torch.relu(torch.cos(a) + d) + torch.cos(b) + c

    module = torchgraft.symbolic_trace(program)
    support = our_support.create_op_support(lambda modules, node: node.name != "relu")
    made = ours.CapabilityBasedPartitioner(module, support, skip_horizontal_fusion=True)
    fused = made.partition_and_fuse()
    x, y = torch.randn(3), torch.randn(3)
    assert torch.equal(fused(x.clone(), y.clone()), program(x.clone(), y.clone()))


def test_bookends() -> None:
    module = torchgraft.symbolic_trace(lambda x: torch.relu(torch.flatten(torch.sin(torch.flatten(x)))))
    support = our_support.create_op_support(lambda modules, node: node.target is not torch.relu)
    made = ours.CapabilityBasedPartitioner(
        module, support, non_compute_ops=["torch.flatten"], allows_single_node_partition=True
    )
    partitions = made.propose_partitions()
    made.remove_bookend_non_compute_ops(partitions)
    assert [[node.name for node in partition.nodes] for partition in partitions] == [["sin"]]
