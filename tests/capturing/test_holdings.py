"""What objects and functions keep, as it is pictured before a run.
What becomes of models that change such things is in `tests/traps/outside.py`.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch

import torchgraft
from torchgraft.capturing.outside_state import OutsideState
from torchgraft.capturing.pictures import holdings, is_users_class


class Slotted:
    __slots__ = ("count", "later")

    def __init__(self) -> None:
        self.count = 0


def test_slots_are_put_back() -> None:
    value = Slotted()
    _, (picture,), _ = holdings(value)
    value.count, value.later = 3, 4
    assert picture() and value.count == 0 and not hasattr(value, "later")
    assert not picture()


def test_variables_of_a_closure_are_put_back() -> None:
    count, kept = 0, [1]

    def function() -> None:
        nonlocal count
        count += 1
        kept.append(count)

    state = OutsideState(lambda value: False)
    state.watch_function(function)
    function()
    assert state.restore() is not None
    assert count == 0 and kept == [1]
    assert state.restore() is None


def test_whose_classes_are_looked_into() -> None:
    assert is_users_class(Slotted) and is_users_class(SimpleNamespace)
    assert not is_users_class(functools.partial) and not is_users_class(torch.Tensor)


def test_callables_that_are_returned_are_made_anew() -> None:
    class Later:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

        def __call__(self) -> torch.Tensor:
            return self.value + 1

    makers = [
        lambda x: lambda: x * 2 + 1,
        lambda x: functools.partial(torch.add, x * 2, 1),
        lambda x: Later(x * 2),
        lambda x: Later(x * 2).__call__,
        lambda x: SimpleNamespace(call=lambda: x * 2 + 1).call,
    ]
    for make in makers:
        program = torchgraft.capture(make, (torch.zeros(2),))
        assert torch.equal(program(torch.full((2,), 5.0))(), torch.full((2,), 11.0))


def test_a_parameter_without_a_default_after_one_with() -> None:
    def function(x: torch.Tensor, scale: float = 2.0, *, shift: float) -> torch.Tensor:
        return x * scale + shift

    program = torchgraft.capture(function, (torch.ones(2),), {"shift": 1.0})
    assert torch.equal(program(torch.ones(2), shift=3.0), torch.full((2,), 5.0))
    traced = torchgraft.symbolic_trace(function)
    assert torch.equal(traced(torch.ones(2), 4.0, shift=3.0), torch.full((2,), 7.0))


def test_sizes_go_through_mathematics() -> None:
    import math

    program = torchgraft.capture(lambda x: x * math.sqrt(x.shape[0]) + math.gcd(x.shape[0], 4), (torch.ones(2, 3),))
    assert torch.allclose(program(torch.ones(9, 1)), torch.full((9, 1), 4.0)) and len(program.guards) == 0
    assert math.sqrt(4) == 2.0 and type(math.sqrt).__name__ == "builtin_function_or_method"
