"""Calls on fakes that are remembered: the same looks as torch works out, and memory of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp as TheirFakeTensorProp
from torch.utils.flop_counter import FlopCounterMode

import torchgraft
from torchgraft.analysis.fake import fake_module
from torchgraft.analysis.fake_calls import FakeCalls
from torchgraft.passes.fake_tensor_prop import FakeTensorProp
from torchgraft.passes.shape_prop import ShapeProp


def mode_and_fake(*shape: int, **options: Any) -> tuple[FakeTensorMode, torch.Tensor]:
    mode = FakeTensorMode()
    return mode, mode.from_tensor(torch.ones(shape, **options))


def looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


CALLS: list[Any] = [
    (torch.relu, {}),
    (torch.add, {"other": 1}),
    (torch.add, {"other": 1.5}),
    (torch.add, {"other": True}),
    (torch.sum, {"dim": 0, "keepdim": True}),
    (torch.sum, {"dim": (0, 1)}),
    (torch.softmax, {"dim": 1}),
    (torch.argmax, {"dim": -1}),
    (torch.transpose, {"dim0": 0, "dim1": 1}),
    (torch.ops.aten.relu.default, {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize(("function", "options"), CALLS)
def test_a_remembered_call_looks_like_one_that_is_worked_out(function: Any, options: Any, dtype: torch.dtype) -> None:
    mode, x = mode_and_fake(3, 4, dtype=dtype)
    for value in (
        x,
        mode.from_tensor(torch.ones(4, 3, dtype=dtype)).t(),
        mode.from_tensor(torch.ones(3, 1, dtype=dtype)),
    ):
        calls = FakeCalls(mode)
        try:
            expected = function(value, **options)
        except (RuntimeError, NotImplementedError):
            continue
        for _ in range(3):
            assert looks(calls.function(function, (value,), options)) == looks(expected)


def test_numbers_of_other_types_are_other_calls() -> None:
    mode, x = mode_and_fake(2, dtype=torch.int64)
    calls = FakeCalls(mode)
    found = [calls.function(torch.add, (x, number), {}).dtype for number in (1, 1.0, True, 1, 1.0, 1j)]
    assert found == [torch.int64, torch.float32, torch.int64, torch.int64, torch.float32, torch.complex64]


def test_results_have_memory_of_their_own_and_views_are_not_remembered() -> None:
    mode, x = mode_and_fake(2, 3)
    calls = FakeCalls(mode)
    made = [calls.function(torch.relu, (x,), {}) for _ in range(4)]
    assert len({value.untyped_storage()._cdata for value in [x, *made]}) == 5
    views = [calls.method("view", (x, -1), {}) for _ in range(3)]
    assert {value.untyped_storage()._cdata for value in views} == {x.untyped_storage()._cdata}
    same = [calls.method("contiguous", (x,), {}) for _ in range(2)]
    assert same[0] is x and same[1] is x


def test_a_snapshot_shares_memory_and_keeps_its_shape() -> None:
    mode, x = mode_and_fake(2, 3)
    calls = FakeCalls(mode)
    for _ in range(2):  # worked out, then remembered
        value = calls.function(torch.relu, (x,), {})
        noted = calls.snapshot(value)
        assert noted.untyped_storage()._cdata == value.untyped_storage()._cdata
        value.unsqueeze_(0)
        assert tuple(noted.shape) == (2, 3) and tuple(value.shape) == (1, 2, 3)


def test_a_snapshot_of_a_remembered_result_that_got_another_shape() -> None:
    mode, x = mode_and_fake(2, 3)
    calls = FakeCalls(mode)
    for _ in range(2):
        value = calls.function(torch.relu, (x,), {})
        calls.method("unsqueeze_", (value, 0), {})
        assert tuple(calls.snapshot(value).shape) == (1, 2, 3)


def test_the_settings_of_torch_are_a_part_of_a_call() -> None:
    mode, x = mode_and_fake(2, 2, dtype=torch.int64)
    calls = FakeCalls(mode)
    assert calls.function(torch.add, (x, 0.5), {}).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert calls.function(torch.add, (x, 0.5), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    floats = mode.from_tensor(torch.ones(2, 2))
    assert calls.function(torch.mm, (floats, floats), {}).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert calls.function(torch.mm, (floats, floats), {}).dtype == torch.bfloat16
    assert calls.function(torch.mm, (floats, floats), {}).dtype == torch.float32


def test_history_is_kept() -> None:
    mode, x = mode_and_fake(2, requires_grad=True)
    calls = FakeCalls(mode)
    for _ in range(2):
        assert calls.function(torch.sin, (x,), {}).grad_fn is not None
        with torch.no_grad():
            assert not calls.function(torch.sin, (x,), {}).requires_grad


def test_gradients_go_through_remembered_results() -> None:
    mode, x = mode_and_fake(2, 3, requires_grad=True)
    weight = mode.from_tensor(torch.ones(3, 4, requires_grad=True))
    calls = FakeCalls(mode)
    for _ in range(2):
        result = calls.function(torch.mm, (x, weight), {})
        with mode:
            gradients = torch.autograd.grad(result.sum(), [x, weight])
        assert [tuple(gradient.shape) for gradient in gradients] == [(2, 3), (3, 4)]
    assert type(result.grad_fn).__name__ == "_RememberedBackward"


# ---- modules ----

MODULES: list[Any] = [
    nn.Linear(4, 4),
    nn.Conv2d(4, 8, 3, padding=1, bias=False),
    nn.BatchNorm2d(4),
    nn.BatchNorm2d(4, affine=False, track_running_stats=False),
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.Dropout(0.5),
    nn.LayerNorm([4, 4]),
    nn.AdaptiveAvgPool2d(1),
    nn.Identity(),
    nn.Flatten(),
    nn.LSTM(4, 4),
]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module)[:40])
def test_a_remembered_module_looks_like_one_that_is_worked_out(
    module: nn.Module, training: bool, requires_grad: bool
) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    calls, copy = FakeCalls(mode), fake_module(module, mode).train(training)
    shape = (2, 4, 4) if isinstance(module, nn.LSTM) else (2, 4, 4, 4)
    leaf = mode.from_tensor(torch.ones(shape, requires_grad=requires_grad))
    for _ in range(3):
        with mode:
            first, second = leaf * 2, leaf * 2  # leaves cannot be written in place
            expected = copy(first)
        found = calls.module(copy, (second,), {})
        if isinstance(module, nn.LSTM):
            found, expected = found[0], expected[0]
        assert looks(found) == looks(expected)
        assert (found is second) == (expected is first)
        shared = found.untyped_storage()._cdata == second.untyped_storage()._cdata
        assert shared == (expected.untyped_storage()._cdata == first.untyped_storage()._cdata)


def test_a_module_is_remembered_with_all_its_settings() -> None:
    mode, x = mode_and_fake(2, 4, 8, 8)
    calls = FakeCalls(mode)
    modules = [fake_module(nn.Conv2d(4, out, 3, stride=stride), mode) for out in (4, 6) for stride in (1, 2)]
    for _ in range(2):
        shapes = [tuple(calls.module(module, (x,), {}).shape) for module in modules]
        assert shapes == [(2, 4, 6, 6), (2, 4, 3, 3), (2, 6, 6, 6), (2, 6, 3, 3)]
    assert len(calls) == 4
    with pytest.raises(RuntimeError, match="type"):
        calls.module(fake_module(nn.Conv2d(4, 4, 3).double(), mode), (x,), {})


def test_what_a_module_does_besides_is_done_each_time() -> None:
    class Own(nn.ReLU):
        pass

    mode, x = mode_and_fake(2, 3)
    calls, seen = FakeCalls(mode), []
    hooked, patched, own = nn.ReLU(), nn.ReLU(), Own()
    hooked.register_forward_hook(lambda module, args, result: seen.append("hook"))
    patched.forward = lambda value: seen.append("patch") or value  # type: ignore[method-assign, func-returns-value]
    for module in (hooked, patched, own):
        for _ in range(2):
            calls.module(module, (x,), {})
    assert seen == ["hook", "hook", "patch", "patch"] and len(calls) == 0
    calls.module(nn.ReLU(), (x,), {})
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, result: seen.append("everywhere"))
    try:
        calls.module(nn.ReLU(), (x,), {})
    finally:
        handle.remove()
    assert seen[-1] == "everywhere"


def test_a_leaf_with_gradients_is_never_written_in_place() -> None:
    mode, leaf = mode_and_fake(2, 3, requires_grad=True)
    calls, module = FakeCalls(mode), nn.ReLU(inplace=True)
    with mode:
        value = leaf * 2
    assert calls.module(module, (value,), {}) is value
    with pytest.raises(RuntimeError, match="in-place"):
        calls.module(module, (leaf,), {})


def test_whoever_watches_the_calls_sees_them_all() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = torch.mm(x, x)
        return x

    program, example = torchgraft.symbolic_trace(function), torch.ones(4, 4)
    for propagate in (FakeTensorProp(program).propagate, ShapeProp(program, FakeTensorMode()).propagate):
        with FlopCounterMode(display=False) as counter:
            propagate(example)
        assert counter.get_total_flops() == 5 * 2 * 4**3


def test_notes_are_those_of_torch_fx() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        for _ in range(3):
            x = torch.relu(x + y) * 2
            y = y.t().t() - x.mean(0, keepdim=True)
        z = x.clone()
        z.unsqueeze_(0)
        values, indices = torch.max(x, 1)
        return x, y.reshape(-1), z, values, indices, x.shape[0]

    args = torch.ones(3, 4), torch.ones(3, 4, dtype=torch.float64)
    ours, theirs = torchgraft.symbolic_trace(function), torch.fx.symbolic_trace(function)
    FakeTensorProp(ours).propagate(*args)
    TheirFakeTensorProp(theirs).propagate(*args)
    for left, right in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
        first, second = left.meta.get("val"), right.meta.get("val")
        leaves = torch.utils._pytree.tree_leaves(first), torch.utils._pytree.tree_leaves(second)
        # torch.fx notes numbers since 2.12.
        found, expected = [[looks(v) for v in side if isinstance(v, torch.Tensor)] for side in leaves]
        assert found == expected, left.name
