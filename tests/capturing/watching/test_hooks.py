"""Hooks of modules in a watched run: what is looked into, and what is one call.
What hooks do in every situation is tried by `tests/traps/hooks.py`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn

from torchgraft import capture

_collector: ContextVar[dict[str, list[torch.Tensor]] | None] = ContextVar("collector", default=None)


def _install(module: nn.Module, key: str) -> None:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        found = _collector.get()
        if found is None or key not in found:
            return
        if key == "states" and not found[key]:
            found[key].append(inputs[0])
        found[key].append(output)

    module.register_forward_hook(hook)


def collecting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator like that of transformers: hooks are installed when somebody first wants what they collect."""

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = {name: [] for name in ("states", "gates") if kwargs.pop(f"with_{name}", False)}
        if wanted and not getattr(self, "_hooks_installed", False):
            for layer in self.layers:
                _install(layer, "states")
                _install(layer.gate, "gates")
            setattr(self, "_hooks_installed", True)  # noqa: B010
        token = _collector.set(wanted)
        try:
            result = forward(self, *args, **kwargs)
        finally:
            _collector.reset(token)
        for key, found in wanted.items():
            setattr(result, key, tuple(found))
        return result

    return wrapper


class Result:
    def __init__(self, last: torch.Tensor) -> None:
        self.last = last


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.linear = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * self.gate(x).sigmoid()


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

    @collecting
    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return Result(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, **options: bool) -> Any:
        result = self.body(x, **options)
        result.scores = self.head(result.last)
        return result


def _hooks(model: nn.Module) -> dict[str, int]:
    return {path: len(module._forward_hooks) for path, module in model.named_modules()}


def _assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(vars(found), vars(expected))


@pytest.mark.parametrize("level", ["module", "function"])
@pytest.mark.parametrize(
    "options", [{"with_states": True}, {"with_gates": True}, {"with_states": True, "with_gates": True}]
)
@pytest.mark.parametrize("has_run", [False, True], ids=["first", "later"])
def test_hooks_that_the_model_installs_when_they_are_wanted(
    level: str, options: dict[str, bool], has_run: bool
) -> None:
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    if has_run:
        model(torch.ones(2, 4), **options)
        twin(torch.ones(2, 4), **options)
    program = capture(model, (torch.ones(2, 4),), options, level=level)
    assert not program.meta["kept_whole"] and len(program.graph.nodes) > 20
    assert hasattr(model.body, "_hooks_installed") == has_run and any(_hooks(model).values()) == has_run
    for rows in (2, 5, 3):
        x = torch.randn(rows, 4)
        _assert_same(program(x, **options), twin(x, **options))
        assert model.body._hooks_installed and _hooks(model) == _hooks(twin)
        _assert_same(model(x, **options), twin(x, **options))
    assert program.verify(model, (torch.ones(2, 4),), options).ok


def test_the_model_may_have_installed_its_hooks_meanwhile() -> None:
    model, x = Model(), torch.randn(3, 4)
    program = capture(model, (x,), {"with_states": True})
    expected = model(x, with_states=True)
    hooks = _hooks(model)
    _assert_same(program(x, with_states=True), expected)
    assert _hooks(model) == hooks


def test_a_copy_of_the_program_leaves_no_hooks_in_the_model() -> None:
    model, x = Model(), torch.randn(3, 4)
    program = copy.deepcopy(capture(model, (x,), {"with_states": True}))
    program(x, with_states=True)
    assert not any(_hooks(model).values()) and not hasattr(model.body, "_hooks_installed")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = Layer(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x))


def _targets(program: Any) -> list[str]:
    return [node.target for node in program.graph.find_nodes(op="call_module")]


def test_a_module_of_our_own_with_hooks_is_looked_into_and_one_of_torch_is_called() -> None:
    model, x = Net(), torch.randn(3, 4)
    model.layer.register_forward_hook(lambda module, inputs, output: output * 2)
    model.layer.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    model.head.register_forward_hook(lambda module, inputs, output: output + 1)
    program = capture(model, (torch.ones(2, 4),))
    assert _targets(program) == ["layer.linear", "layer.gate", "head"]
    torch.testing.assert_close(program(x), model(x))


def test_a_module_whose_hook_keeps_something_is_one_call() -> None:
    model, seen = Net(), []
    model.layer.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[0]))
    program = capture(model, (torch.ones(2, 4),))
    assert _targets(program) == ["layer", "head"] and "layer" in program.meta["kept_whole"]
    seen.clear()
    program(torch.ones(3, 4))
    assert seen == [3]


def test_only_that_module_is_one_call_and_not_its_kind() -> None:
    model = nn.Sequential(Layer(), Layer())
    model[0].register_forward_hook(lambda module, inputs, output: output + output.detach().numpy().sum())
    program = capture(model, (torch.ones(2, 4),))
    assert list(program.meta["kept_whole"]) == ["0"] and _targets(program) == ["0", "1.linear", "1.gate"]


def test_backward_hooks_stay_with_their_module() -> None:
    model = Net()
    model.layer.register_full_backward_hook(lambda module, before, after: (before[0] * 10,))
    assert _targets(capture(model, (torch.ones(2, 4),))) == ["layer", "head"]


@pytest.mark.parametrize("leaf", [None, "layer", "head"])
def test_hooks_for_the_time_of_the_run(leaf: str | None) -> None:
    class Collecting(Net):
        def forward(self, x: torch.Tensor) -> Any:
            found: list[torch.Tensor] = []
            handles = [
                part.register_forward_hook(lambda *details: found.append(details[2])) for part in self.children()
            ]
            try:
                return super().forward(x), found
            finally:
                for handle in handles:
                    handle.remove()

    model, x = Collecting(), torch.randn(3, 4)
    program = capture(model, (torch.ones(2, 4),), leaf=leaf)
    assert list(program.meta["kept_whole"]) == ([""] if leaf == "layer" else [])
    torch.testing.assert_close(program(x), model(x))
    assert not any(_hooks(model).values())
