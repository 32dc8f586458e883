"""Patches: put in place while somebody traces, taken away afterwards, shared by tracers, harmless to everybody else.
Threads at work at the same time are in test_threads.py.
"""

import gc
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

import torchgraft as fx
from tests.capturing.comparison import in_another_thread
from torchgraft.capturing.patching.active import (
    CodePatch,
    NamespacePatch,
    Patch,
    active,
    paused_collection,
    shared_patch,
)


def original():
    return "original"


def replacement():
    return "replacement"


def holders():
    module = types.ModuleType("holder")
    module.name = original
    return [module, {"name": original}]


def read(holder):
    return holder["name"] if isinstance(holder, dict) else holder.name


@pytest.mark.parametrize("holder", holders(), ids=["attribute", "entry"])
class TestPatch:
    def test_it_is_in_place_while_somebody_needs_it(self, holder) -> None:
        patch = Patch(holder, "name", replacement)
        patch.acquire(), patch.acquire()
        assert read(holder) is replacement
        patch.release()
        assert read(holder) is replacement
        patch.release()
        assert read(holder) is original

    def test_somebody_elses_patch_on_top_is_left_alone(self, holder) -> None:
        patch = Patch(holder, "name", replacement)
        patch.acquire()
        other = lambda: None
        entries = holder if isinstance(holder, dict) else vars(holder)
        entries["name"] = other
        patch.release()
        assert read(holder) is other
        entries["name"] = original  # the holder is there for the other tests too

    def test_a_name_that_was_not_there_is_taken_away_again(self, holder) -> None:
        patch = Patch(holder, "missing", replacement)
        patch.acquire()
        patch.release()
        assert "missing" not in (holder if isinstance(holder, dict) else vars(holder))


class TestSharedPatch:
    def test_two_tracers_share_one(self) -> None:
        holder = {"name": original}
        make = lambda function: lambda: function()
        first, second = shared_patch(holder, "name", make), shared_patch(holder, "name", make)
        assert first is second
        first.acquire()
        assert shared_patch(holder, "name", make) is first
        first.release()

    def test_a_new_function_under_the_name_gets_a_new_one(self) -> None:
        holder = {"name": original}
        make = lambda function: lambda: function()
        first = shared_patch(holder, "name", make)
        holder["name"] = replacement
        assert shared_patch(holder, "name", make) is not first

    def test_builtins_are_found_behind_a_namespace(self) -> None:
        holder: dict = {}
        patch = shared_patch(holder, "len", lambda function: lambda value: ("seen", function(value)))
        patch.acquire()
        assert holder["len"]([1]) == ("seen", 1)
        patch.release()
        assert holder == {}

    def test_no_such_name(self) -> None:
        assert shared_patch({}, "no_such_name", lambda function: function) is None


class TestCodePatch:
    def test_the_function_does_something_else_meanwhile(self) -> None:
        patch = CodePatch(original)
        patch.lend(replacement)
        patch.acquire(), patch.acquire()
        assert original() == "replacement"
        assert patch.original() == "original"
        patch.release(), patch.release()
        assert original() == "original"

    def test_codes_that_close_over_other_names_are_refused(self) -> None:
        value = 3

        def closing():
            return value

        with pytest.raises(TypeError, match=r"closing closes over \('value',\)"):
            CodePatch(original).lend(closing)


def test_functions_of_a_whole_module_are_replaced_together() -> None:
    import math

    before = dict(vars(math))
    patch = next(item for item in fx.Tracer()._autowrap.library_patches() if item.holder is vars(math))
    patch.acquire(), patch.acquire()
    try:
        assert math.sqrt is not before["sqrt"]
        assert math.sqrt(4) == 2
        patch.release()
        assert math.sqrt is not before["sqrt"]
    finally:
        patch.release()
    assert dict(vars(math)) == before


class TestPausedCollection:
    def test_it_is_off_until_the_last_one_is_done(self) -> None:
        assert gc.isenabled()
        with paused_collection:
            with paused_collection:
                assert not gc.isenabled()
            assert not gc.isenabled()
        assert gc.isenabled()

    def test_where_it_was_off_it_stays_off(self) -> None:
        gc.disable()
        try:
            with paused_collection:
                pass
            assert not gc.isenabled()
        finally:
            gc.enable()

    def test_a_failed_trace_switches_it_on_again(self) -> None:
        with pytest.raises(fx.TraceError):
            fx.symbolic_trace(lambda x: 1 if x else 2)
        assert gc.isenabled()


WATCHED = [
    lambda: nn.Module.__call__.__code__,
    lambda: nn.Module.__getattr__.__code__,
    lambda: nn.Module.__setattr__.__code__,
    lambda: nn.Module.__delattr__.__code__,
    lambda: "training" in vars(nn.Module),
    lambda: vars(torch.autograd.Function).get("apply"),
    lambda: "__getattribute__" in vars(type(torch.autograd.Function)),
    lambda: "__setattr__" in vars(torch.Tensor),
    lambda: "reshape" in vars(torch.Tensor),
    lambda: torch.zeros,
    lambda: torch.manual_seed,
    lambda: torch.no_grad.__enter__,
    lambda: torch.autocast.__exit__,
    lambda: __import__("random").random,
    lambda: __import__("math").sqrt,
]


class Failing(nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2)), Failing()], ids=["traced", "interrupted"])
def test_everything_is_put_back_after_a_trace(model: nn.Module) -> None:
    before = [look() for look in WATCHED]
    try:
        fx.symbolic_trace(model)
    except KeyboardInterrupt:
        pass
    assert [look() for look in WATCHED] == before
    assert active.tracer is None


def test_a_trace_inside_a_trace_gives_the_outer_one_back() -> None:
    def forward(x):
        inner = fx.symbolic_trace(lambda y: torch.relu(y))
        return inner.forward(x) + 1

    program = fx.symbolic_trace(forward)
    assert program(torch.tensor(-1.0)) == 1
    assert active.tracer is None


def test_other_threads_see_no_tracer() -> None:
    seen = []

    def forward(x):
        in_another_thread(lambda: seen.append((active.tracer, nn.Linear(2, 2)(torch.ones(2)).shape)))
        seen.append(active.tracer is not None)
        return x

    fx.symbolic_trace(forward)
    assert seen == [(None, torch.Size([2])), True]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_patches_of_the_same_names_leave_in_any_order(order) -> None:
    def replacement(number: int):
        fallback = [None]

        def function() -> list[int]:
            return [number, *fallback[0]()]

        function.__torchgraft_fallback__ = fallback
        return function

    def original() -> list[int]:
        return []

    holder = {"both": original, "one": original}
    patches = [
        NamespacePatch(holder, {"both": replacement(0), "one": replacement(0)}),
        NamespacePatch(holder, {"both": replacement(1)}),
    ]
    for _ in range(2):
        for patch in patches:
            patch.acquire()
        assert holder["both"]() == [1, 0] and holder["one"]() == [0]
        patches[order[0]].release()
        assert holder["both"]() == [order[1]] and holder["one"]() == ([0] if order[1] == 0 else [])
        patches[order[1]].release()
        assert holder == {"both": original, "one": original}


def test_a_replacement_that_somebody_puts_back_late_goes_with_the_next_trace() -> None:
    def original() -> int:
        return 1

    scope = {"function": original}
    patch = shared_patch(scope, "function", lambda function: lambda: function() + 1)
    patch.acquire()
    late, scope["function"] = scope["function"], print  # somebody patches on top
    patch.release()
    scope["function"] = late
    again = shared_patch(scope, "function", lambda function: lambda: function() + 1)
    again.acquire()
    assert scope["function"]() == 2
    again.release()
    assert scope["function"] is original


IMPORTED_WHILE_TRACING = """
import sys
import torch, torchgraft

def draws(x):
    return x + torch.nn.functional.gumbel_softmax(torch.zeros(3))

assert "torch._dynamo" not in sys.modules
torchgraft.symbolic_trace(draws)
assert "torch._dynamo" in sys.modules
program = torchgraft.capture(lambda x: x + 1, torch.ones(3), level="core_aten")
print(torch.compile(program, backend="eager", fullgraph=True)(torch.ones(3)))
"""


def test_the_compiler_knows_torchs_functions_if_it_is_imported_in_the_middle_of_a_trace() -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORTED_WHILE_TRACING], capture_output=True, text=True
    )
    assert found.stdout == "tensor([2., 2., 2.])\n", found.stderr
