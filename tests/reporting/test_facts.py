"""Facts about a model: what is not known is not said."""

from types import SimpleNamespace
from typing import Any

from torchgraft.reporting.facts import _arithmetic
from torchgraft.view.module_facts import ModelFacts, ModuleFacts


def seen(*flops: int | None) -> Any:
    """A model with a module for each number but the first, which is that of the whole."""
    rows = [ModuleFacts("", "Net", "Net", 0, 100, 100, 400, flops=flops[0])]
    rows += [
        ModuleFacts(f"m{i}", f"m{i}", "Linear", 1, 50, 50, 200, flops=number) for i, number in enumerate(flops[1:])
    ]
    return SimpleNamespace(summary=SimpleNamespace(facts=ModelFacts(rows)))


def test_work_of_modules_that_is_not_known_is_not_taken_for_none() -> None:
    assert list(_arithmetic(seen(1000, None, None, None))) == []
    assert list(_arithmetic(seen(None, None))) == []


def test_modules_that_hold_much_and_do_little() -> None:
    arithmetic, heavy = _arithmetic(seen(1000, 990, 10, 0))
    assert arithmetic.text == "3 Linear do 100.0% of the 1 kFLOPs of one run; it has 100 parameters."
    assert heavy.text == "'m2' (Linear) holds 50.0% of the parameters and does 0.00% of the arithmetic."
