"""`split_module` and `split_by_tags` beside torch.fx's: names, order, inputs, outputs, code; then what torch.fx gets wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.fx.passes import split_module as their_file
from torch.fx.passes import split_utils as their_tags

import torchgraft
from tests.torch_versions import TORCH
from torchgraft.splitting import split_by_tags, split_module


class Documented(nn.Module):
    """The example of torch.fx's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.param = nn.Parameter(torch.rand(3, 4))
        self.linear = nn.Linear(4, 5)

    def forward(self, x, y):
        z = self.linear(x + self.param).clamp(min=0.0, max=1.0)
        w = self.linear(y).clamp(min=0.0, max=1.0)
        return z + w


class Nested(nn.Module):
    """Modules below modules, several results, a default, a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x, scale=2.0):
        first = self.block(x)
        second = torch.add(first, self.offset, alpha=3)
        third = torch.chunk(second, 2, dim=1)
        return {"sum": third[0] + third[1], "all": (first, second * scale), "none": None}


def every(count: int) -> Any:
    """A callback that deals the nodes out in turn."""
    seen: dict[str, int] = {}
    return lambda node: seen.setdefault(node.name, len(seen)) % count


def blocks(size: int) -> Any:
    seen: dict[str, int] = {}
    return lambda node: seen.setdefault(node.name, len(seen)) // size


CASES = [
    (Documented, blocks, 1), (Documented, blocks, 2), (Documented, blocks, 3), (Documented, blocks, 100),
    (Nested, blocks, 1), (Nested, blocks, 2), (Nested, blocks, 4),
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {},
    {"keep_original_order": True},
    {"keep_original_node_name": True},
    {"keep_original_input_name": False},
    {"partition_affix": "pp"},
    {"tuple_return": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("kind", "deal", "number"), CASES)
def test_the_same_as_torch_fx(kind: Any, deal: Any, number: int, options: dict[str, Any]) -> None:
    if "tuple_return" in options and TORCH < (2, 13):
        pytest.skip("torch.fx has this option since 2.13")
    model = kind()
    our_names: dict[str, str] = {}
    their_names: dict[str, str] = {}
    ours = split_module(torchgraft.symbolic_trace(model), model, deal(number), our_names, **options)
    theirs = their_file.split_module(torch.fx.symbolic_trace(model), model, deal(number), their_names, **options)
    assert list(dict(ours.named_children())) == list(dict(theirs.named_children()))
    assert ours.code.strip() == theirs.code.strip()
    for name, part in theirs.named_children():
        assert ours.get_submodule(name).code.strip() == part.code.strip()
    assert our_names == their_names
    assert list(ours.state_dict()) == list(theirs.state_dict())
    if TORCH >= (2, 13):  # torch.fx says it since then
        assert ours.meta["partition_names"] == theirs.meta["partition_names"]


def test_documented_example_with_three_parts_in_turn() -> None:
    """torch.fx's own example deals nodes out in turn; the parts then wait for each other in a way that is no cycle."""
    model = Documented()
    ours = split_module(torchgraft.symbolic_trace(model), model, every(3))
    x, y = torch.rand(3, 4), torch.rand(3, 4)
    torch.testing.assert_close(ours(x, y), model(x, y))


def test_gradients_are_the_same() -> None:
    model = Nested()
    split = split_module(torchgraft.symbolic_trace(model), model, blocks(2))
    x = torch.randn(2, 4)
    for module in (model, split):
        result = module(x)
        (result["sum"].sum() + result["all"][1].sum()).backward()
        if module is model:
            expected = [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
    assert all(torch.equal(a, b.grad) for a, b in zip(expected, model.parameters(), strict=True))
    assert len(list(split.parameters())) == len(list(model.parameters()))


def test_a_cycle_is_named() -> None:
    module = torchgraft.symbolic_trace(lambda x: torch.cos(torch.relu(torch.sin(x))))
    with pytest.raises(torchgraft.GraphError) as error:
        split_module(module, None, lambda node: int(node.name == "relu"))
    assert str(error.value) == (
        "cannot split: cycle exists between partitions! submod_0 waits for submod_1 ('cos' needs the value of 'relu'); "
        "submod_1 waits for submod_0 ('relu' needs the value of 'sin'); "
        "give one of these nodes to another part, or let split() choose the parts"
    )


def test_original_order_where_it_cannot_be_kept() -> None:
    """torch.fx raises KeyError here: part 0 comes first in the program but needs part 1."""

    def program(x: torch.Tensor) -> torch.Tensor:
        a = torch.sin(x)
        b = torch.cos(x)
        return torch.relu(b) + a

    module = torchgraft.symbolic_trace(program)
    labels = {"sin": 0, "cos": 1, "relu": 0, "add": 0}
    split = split_module(module, None, lambda node: labels[node.name], keep_original_order=True)
    assert torch.equal(split(torch.ones(2)), program(torch.ones(2)))
    with pytest.raises(KeyError):
        their_file.split_module(
            torch.fx.symbolic_trace(program), None, lambda node: labels[node.name], keep_original_order=True
        )


def test_a_program_without_calls() -> None:
    module = torchgraft.symbolic_trace(lambda x, y: (y, x))
    split = split_module(module, None, lambda node: 0)
    assert split(1, 2) == (2, 1)
    assert list(split.children()) == []


def test_a_write_is_not_passed() -> None:
    """Without the order of effects, torch.fx calls the part that reads before the one that writes."""

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        return torch.sin(y)

    module = torchgraft.symbolic_trace(program)
    labels = {"mul": 0, "add_": 1, "sin": 2}
    split = split_module(module, None, lambda node: labels[node.name])
    assert torch.equal(split(torch.ones(2)), program(torch.ones(2)))
    assert [node.target for node in split.graph.nodes if node.op == "call_module"] == [
        "submod_0",
        "submod_1",
        "submod_2",
    ]


def test_random_draws_keep_their_order() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        first = torch.rand_like(x)
        second = torch.randn_like(x)
        return torch.sin(second) - first

    module = torchgraft.symbolic_trace(program)
    labels = {"rand_like": 0, "randn_like": 1, "sin": 1, "sub": 2}
    split = split_module(module, None, lambda node: labels[node.name])
    torch.manual_seed(3)
    expected = program(torch.ones(4))
    torch.manual_seed(3)
    assert torch.equal(split(torch.ones(4)), expected)


def test_names_that_meet_when_dots_go() -> None:
    """torch.fx writes both modules to `a_b`, and the second wins."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Module()
            self.a.b = nn.Linear(2, 2)
            self.a_b = nn.Linear(2, 2)
            self.add = nn.Module()
            self.add.module = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.add.module(self.a_b(self.a.b(x)))

    model = Model()
    split = split_module(torchgraft.symbolic_trace(model), model, lambda node: 0)
    x = torch.randn(3, 2)
    torch.testing.assert_close(split(x), model(x))


def test_a_part_takes_the_name_of_an_attribute() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.submod_0 = nn.Parameter(torch.full((2,), 3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.submod_0

    model = Model()
    split = split_module(torchgraft.symbolic_trace(model), model, lambda node: 0)
    assert torch.equal(split(torch.ones(2)), torch.full((2,), 4.0))
    again = split_module(split, split, lambda node: 0)
    assert torch.equal(again(torch.ones(2)), torch.full((2,), 4.0))


def tagged(library: Any, model: nn.Module, tags: dict[str, str]) -> Any:
    module = library.symbolic_trace(model)
    for node in module.graph.nodes:
        if node.name in tags:
            node.tag = tags[node.name]
    return module


class Tagged(nn.Module):
    """The example of torch.fx's documentation of `split_by_tags`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2, self.linear3 = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(4, 2)

    def forward(self, in1, in2):
        return self.linear3(torch.cat([self.linear1(in1), self.linear2(in2)], dim=1))


@pytest.mark.parametrize("return_tuple", [False, True])
def test_tags_as_torch_fx(return_tuple: bool) -> None:
    model = Tagged()
    tags = {"linear1": "ro", "linear2": "main", "cat": "main", "linear3": "main"}
    ours, our_names = split_by_tags(tagged(torchgraft, model, tags), ["ro", "main"], True, return_tuple)
    theirs, their_names = their_tags.split_by_tags(tagged(torch.fx, model, tags), ["ro", "main"], True, return_tuple)
    assert ours.code.strip() == theirs.code.strip()
    assert [ours.get_submodule(name).code.strip() for name in ("ro", "main")] == [
        theirs.get_submodule(name).code.strip() for name in ("ro", "main")
    ]
    assert our_names == their_names
    assert [node.tag for node in ours.ro.graph.nodes if node.op == "call_module"] == ["ro"]
    x, y = torch.randn(1, 2), torch.randn(1, 2)
    torch.testing.assert_close(ours(x, y), model(x, y))


def test_tags_in_an_impossible_order() -> None:
    tags = {"linear1": "ro", "linear2": "main", "cat": "main", "linear3": "main"}
    with pytest.raises(
        torchgraft.GraphError, match="part 'main' stands before part 'ro' .* node 'cat' needs the value"
    ):
        split_by_tags(tagged(torchgraft, Tagged(), tags), ["main", "ro"])
    del tags["cat"]
    with pytest.raises(torchgraft.GraphError, match="node 'cat' has the tag None"):
        split_by_tags(tagged(torchgraft, Tagged(), tags), ["ro", "main"])


def test_a_tag_that_no_node_has() -> None:
    tags = {"linear1": "a", "linear2": "a", "cat": "a", "linear3": "a"}
    model = Tagged()
    split = split_by_tags(tagged(torchgraft, model, tags), ["a", "b"])
    torch.testing.assert_close(split(torch.ones(1, 2), torch.ones(1, 2)), model(torch.ones(1, 2), torch.ones(1, 2)))


def test_copies_pickles_and_moves() -> None:
    model = Nested()
    split = split_module(torchgraft.symbolic_trace(model), model, blocks(2))
    x = torch.randn(2, 4)
    assert torch.equal(copy.deepcopy(split)(x)["sum"], model(x)["sum"])
    assert split.double()(x.double())["sum"].dtype == torch.float64
