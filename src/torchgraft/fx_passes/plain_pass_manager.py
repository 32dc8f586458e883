"""torch.fx's first pass manager (`torch.fx.passes.pass_manager`): passes are functions that return what they were given, changed.
The one whose passes say whether they changed something is in `pass_manager.py`.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from torchgraft.fx_passes import pass_manager
from torchgraft.fx_passes.pass_manager import this_before_that_pass_constraint

__all__ = [
    *("PassManager", "inplace_wrapper", "log_hook", "loop_pass"),
    *("these_before_those_pass_constraint", "this_before_that_pass_constraint"),
]

logger = logging.getLogger(__name__)
Function = Callable[..., Any]


class PassManager(pass_manager.PassManager):
    """Runs functions one after the other, in the order in which they stand; constraints say which orders are right.

    >>> PassManager([lambda x: x + 1, inplace_wrapper(print)])(3)
    4
    4
    """

    def __init__(self, passes: list[Function] | None = None, constraints: list[Function] | None = None) -> None:
        super().__init__(passes, constraints)

    @classmethod
    def build_from_passlist(cls, passes: list[Function]) -> PassManager:
        return cls(passes)

    def remove_pass(self, _passes: list[str]) -> None:
        self.passes = [each for each in self.passes if each.__name__ not in (_passes or ())]
        self._validated = False

    def replace_pass(self, _target: Function, _replacement: Function) -> None:
        self.passes = [_replacement if each.__name__ == _target.__name__ else each for each in self.passes]
        self._validated = False

    def validate(self) -> None:
        if not self._validated:
            self.validate_constraints()

    def __call__(self, source: Any) -> Any:
        self.validate()
        return functools.reduce(lambda result, each: each(result), self.passes, source)


def inplace_wrapper(fn: Function) -> Function:
    """A pass out of a function that changes its first argument and returns something else."""

    @functools.wraps(fn)
    def changed(gm: Any, *args: Any, **kwargs: Any) -> Any:
        fn(gm, *args, **kwargs)
        return gm

    return changed


def log_hook(fn: Function, level: int = logging.INFO) -> Function:
    """A function that also logs what it returns."""

    @functools.wraps(fn)
    def logged(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        logger.log(level, "Ran pass %s\t Return value: %s", fn, result)
        return result

    return logged


def loop_pass(base_pass: Function, n_iter: int | None = None, predicate: Function | None = None) -> Function:
    """A pass that runs another one `n_iter` times, or as long as `predicate` holds for what it returned."""
    if (n_iter is None) is (predicate is None):
        raise AssertionError("Exactly one of `n_iter`or `predicate` must be specified.")

    @functools.wraps(base_pass)
    def repeated(source: Any) -> Any:
        count = 0
        while predicate(source) if predicate is not None else count < (n_iter or 0):
            source, count = base_pass(source), count + 1
        return source

    return repeated


def these_before_those_pass_constraint(these: Function, those: Function) -> Callable[[Function, Function], bool]:
    """`these` come before `those`, whatever they are wrapped in."""
    rule = this_before_that_pass_constraint(these, those)
    return lambda a, b: rule(inspect.unwrap(a), inspect.unwrap(b))
