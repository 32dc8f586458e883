"""Details of tracing that clients of torch.fx rely on: concrete arguments of all kinds, annotations, inference mode, names."""

from __future__ import annotations

import copy
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn


def with_options(x: Any, **options: Any) -> Any:
    return x + options["a"]


@pytest.mark.parametrize("name", ["options"])
def test_concrete_kwargs_stay_an_input(fx: ModuleType, name: str) -> None:
    program = fx.symbolic_trace(with_options, concrete_args={name: {"a": 1}})
    assert [node.target for node in program.graph.nodes if node.op == "placeholder"] == ["x", "**options"]
    assert program(torch.ones(1), a=1).item() == 2
    assert program(torch.ones(1), a=5).item() == 6


@pytest.mark.parametrize("name", ["options", "**options"])
def test_empty_kwargs_are_no_input(graft: ModuleType, name: str) -> None:
    def function(x: Any, **options: Any) -> Any:
        return x + 1 if not options else x - 1

    program = graft.symbolic_trace(function, concrete_args={name: {}})
    assert program(torch.ones(1)).item() == 2
    with pytest.raises(TypeError):
        program(torch.ones(1), a=1)


def test_empty_args_are_no_input(graft: ModuleType) -> None:
    def function(x: Any, *rest: Any) -> Any:
        return x + len(rest)

    program = graft.symbolic_trace(function, concrete_args={"rest": ()})
    assert program(torch.ones(1)).item() == 1
    with pytest.raises(TypeError):
        program(torch.ones(1), 2)


def test_an_unknown_name_is_ignored(fx: ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = fx.symbolic_trace(lambda x, flag: x + flag, concrete_args={"nothing": 3})
    assert [node.name for node in program.graph.nodes] == ["x", "flag", "add", "output"]


def test_an_unknown_name_is_said(graft: ModuleType) -> None:
    with pytest.warns(UserWarning, match="names 'flags', which is ignored: the parameters are 'x', 'flag'"):
        graft.symbolic_trace(lambda x, flag: x, concrete_args={"flags": True})


def test_create_args_for_root_keeps_annotations(fx: ModuleType) -> None:
    seen: list[Any] = []

    class Tracer(fx.Tracer):  # type: ignore[misc, name-defined]
        def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
            found, args = super().create_args_for_root(root_fn, is_module, concrete_args)
            seen.append(found.__annotations__)
            return found, args

    def function(x: torch.Tensor, y: int = 2) -> torch.Tensor:
        return x + y

    Tracer().trace(function)
    Tracer().trace(function, {"y": 2})
    assert seen == [function.__annotations__] * 2


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + torch.ones(2) + self.shift


def test_tracing_under_inference_mode(fx: ModuleType) -> None:
    model = Small()
    with torch.inference_mode():
        program = fx.symbolic_trace(model)
        inside = program(torch.ones(1, 2))
    outside = program(torch.ones(1, 2))
    assert inside.is_inference() and not outside.is_inference() and outside.requires_grad
    outside.sum().backward()
    assert model.layer.weight.grad is not None
    torch.testing.assert_close(outside, model(torch.ones(1, 2)))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: copy.deepcopy(copy.deepcopy(module))])
def test_deepcopies_keep_edit_hooks(fx: ModuleType, again: Any) -> None:
    told: list[str] = []
    program = fx.symbolic_trace(Small())
    program._register_create_node_hook(lambda node: told.append(f"create {node.name}"))
    program._register_erase_node_hook(lambda node: told.append(f"erase {node.name}"))
    program._register_replace_node_hook(lambda old, new, user: told.append(f"replace {old}"))
    copied = again(program)
    told.clear()
    layer = next(node for node in copied.graph.nodes if node.name == "layer")
    with copied.graph.inserting_after(layer):
        new = copied.graph.call_function(torch.relu, (layer.args[0],))
    layer.replace_all_uses_with(new)
    copied.graph.erase_node(layer)
    assert told == ["create relu", "replace layer", "erase layer"]


WISHES = ["cat-3", "1a", "for", "a b", "print", "x.y", "def", "a.b:c", "self"]


@pytest.mark.parametrize("wish", WISHES)
def test_a_name_that_is_no_identifier(fx: ModuleType, wish: str) -> None:
    program = fx.symbolic_trace(lambda x: x * 2 + 1)
    add = next(node for node in program.graph.nodes if node.name == "add")
    add.name = wish
    program.recompile()
    assert program(torch.ones(1)).item() == 3
    made = program.graph.call_function(torch.relu, (add,))
    made_with_name = program.graph.create_node("call_function", torch.relu, (made,), name=wish)
    assert made_with_name.name.isidentifier()


def test_a_name_that_became_free_may_be_taken(fx: ModuleType) -> None:
    program = fx.symbolic_trace(lambda x: x * 2 + 1)
    _, mul, add, _ = program.graph.nodes
    mul.name = "product"
    add.name = "mul"
    program.recompile()
    assert [node.name for node in program.graph.nodes] == ["x", "product", "mul", "output"]
    assert program(torch.ones(1)).item() == 3
