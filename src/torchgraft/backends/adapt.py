"""`adapt`: a module that captures a model on its first call, and follows every path that the model takes after that.
How programs are kept and found is in `variants.py`; the same with a backend is `lower.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.backends.calls import call_text
from torchgraft.backends.late_guards import draws_before_check, late_guard, lift_guards, without_checks_of_sizes
from torchgraft.backends.sizes import size_key
from torchgraft.backends.variants import Variant, VariantModule, links_of, program_or_error
from torchgraft.capturing.program import capture
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GuardError
from torchgraft.ir.modules import no_model


class Adapted(VariantModule):
    """What `adapt` makes: a module with the model's signature, parameters and state dict, that runs captured programs."""

    def __init__(self, model: Any, on_guard: str, max_variants: int, level: str) -> None:
        super().__init__(model, on_guard, max_variants)
        self.level = level

    def _make(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        found = program_or_error(lambda: capture(self._model, args, kwargs, level=self.level))
        if not isinstance(found, GraphModule):
            return self._eager(why, args, kwargs, found)
        lift_guards(found)
        run: Callable[..., Any] = found
        if late_guard(found) is not None:
            sized, reason = without_checks_of_sizes(found, args, kwargs)
            if sized is None:
                return self._eager(why, args, kwargs, reason)
            found, run = sized, _for_sizes(sized, size_key(args, kwargs), call_text(args, kwargs))
        links = links_of(self._model, found)
        made = Variant(self._number(), why, call_text(args, kwargs), run, found, links=links)
        made.puts_back_draws = draws_before_check(found)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapted:
        """An adapted copy of the model; it captures anew."""
        result = Adapted(copy.deepcopy(self._model, memo), self.on_guard, self.max_variants, self.level)
        memo[id(self)] = result
        return result

    def __reduce__(self) -> Any:
        return Adapted, (self._model, self.on_guard, self.max_variants, self.level)


def _for_sizes(program: GraphModule, key: Any, inputs: str) -> Callable[..., Any]:
    """A program that is tried on calls of the sizes it was made for alone."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if size_key(args, kwargs) != key:
            raise GuardError(f"the program was made for the sizes of {inputs}")
        return program(*args, **kwargs)

    return run


def adapt(
    model: torch.nn.Module | Callable[..., Any],
    *,
    on_guard: str = "recapture",
    max_variants: int = 8,
    level: str = "module",
) -> Adapted:
    """A module that captures `model` on its first call, and again whenever a call does not fit what was captured.

    Sizes that are free just run. Where a guard says no (another branch, another rank, an optional argument), `on_guard` decides:
    "recapture" captures this path too, "raise" raises the GuardError, "eager" runs the model's own Python. At most
    `max_variants` programs are kept, and the one that was used least recently goes; `.variants()` shows them. Each capture is one
    line of the logger `torchgraft.backends`. Several threads may call it at once.

    A program with a check that comes after an effect (a batch norm that trains, a draw from a generator that is given) could not
    be left without a trace when the check fails, so such a path runs the model's own Python; so does everything while the
    model is compiled or traced by others. Torch's own random numbers are put back.

    >>> module = adapt(lambda x: x + 1 if x.sum() > 0 else x - 1)
    >>> module(torch.ones(2)), module(-torch.ones(2)), module(torch.ones(7))
    (tensor([2., 2.]), tensor([-2., -2.]), tensor([2., 2., 2., 2., 2., 2., 2.]))
    >>> module.variants()
    <Variants: <lambda> has 2 variants>
    """
    if (problem := no_model(model)) is not None:
        raise TypeError(f"cannot adapt {problem}")
    return Adapted(model, on_guard, max_variants, level)
