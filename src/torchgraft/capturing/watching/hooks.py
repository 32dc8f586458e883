"""Hooks of modules in a watched run: they run while it is watched, so that what they do is written down like the rest.
A module with hooks that may keep something is one call, so that its hooks run. Hooks of tensors are in `regions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch

from torchgraft.capturing.watching.parts import closed_over
from torchgraft.capturing.watching.reruns import KeepWhole, at_line
from torchgraft.ir.leftovers import is_plain
from torchgraft.ir.modules import is_from_torch

# What torch calls around a forward. The others are called while gradients are computed, where nobody watches.
FORWARD_TABLES = ("_forward_hooks", "_forward_pre_hooks")
OPTION_TABLES = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
BACKWARD_TABLES = ("_backward_hooks", "_backward_pre_hooks")


class RunHooks:
    """Which modules with hooks are looked into in one run.

    `closed` are those that are to be one call. `opened` are modules of torch which got their hooks from a run: whether they have
    them when the program runs is not certain, and a call of the module would run them or not.
    """

    def __init__(
        self, closed: Iterable[torch.nn.Module] = frozenset(), opened: Iterable[torch.nn.Module] = frozenset()
    ) -> None:
        self.looked_into: set[torch.nn.Module] = set()
        self.opened = set(opened)
        self._closed = closed
        # Hooks by identity, and themselves, so that the identity stays their own, that came while a module ran as one call.
        self._set_within: dict[int, Any] = {}

    def make_whole(self, state: Any, module: torch.nn.Module, is_leaf: bool) -> bool:
        """Whether a module with hooks is one call."""
        old = state.ids_in_tables()
        own = [hook for hook in _hooks_of(module) if id(hook) in old]
        is_closed = module in self._closed or any(module.__dict__.get(name) for name in BACKWARD_TABLES)
        if is_closed or (is_leaf and (own or not is_from_torch(module)) and module not in self.opened):
            self._refuse_set(state, [module])
            return True
        if is_leaf:
            self.opened.add(module)
        self.looked_into.add(module)
        if not all(map(_keeps_nothing, own)):
            raise KeepWhole(module, "it has a hook that may keep something")
        return False

    # ---- modules that are one call ----

    def around(self, state: Any, module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a module that is one call; the hooks that it sets itself, every run sets."""
        self._refuse_set(state, module.modules())

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            finally:
                self._set_within |= {id(hook): hook for inner in module.modules() for hook in _hooks_of(inner)}

        return run

    def _refuse_set(self, state: Any, modules: Iterable[torch.nn.Module]) -> None:
        """Refuse hooks that were set from outside: a call would run them only where another run had left them."""
        old = state.ids_in_tables()
        for module in modules:
            if any(id(hook) not in old and id(hook) not in self._set_within for hook in _hooks_of(module)):
                raise _set_from_outside(module)

    def refuse_left(self, left: Iterable[Any]) -> None:
        """The same at the end of the run, for what was left in modules that were, or are in, what was one call."""
        for module, name, entry in left:
            if name in FORWARD_TABLES and id(entry.after) not in self._set_within:
                raise _set_from_outside(module)


def _hooks_of(module: torch.nn.Module) -> Iterator[Any]:
    for name in FORWARD_TABLES:
        yield from module.__dict__.get(name, {}).values()


def _keeps_nothing(hook: Any) -> bool:
    """Whether a hook has nothing with it that it could write into: a plain function with plain variables around it."""
    if type(hook) is not FunctionType:
        return False
    return all(map(is_plain, (*closed_over(hook).values(), *(hook.__defaults__ or ()))))


def _set_from_outside(module: torch.nn.Module) -> KeepWhole:
    # By whom, nobody knows.
    return KeepWhole(None, f"it sets or removes hooks of a {type(module).__name__}, which is one call{at_line()}")
