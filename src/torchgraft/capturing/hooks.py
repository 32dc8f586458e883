"""Hooks of modules in a watched run: they run while it is watched, so that what they do is written down like the rest.
Where that does not work, the module with its hooks is one call; `program.py` sees to that. Hooks of tensors are in `regions.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch

from torchgraft.capturing.outside_state import OutsideState
from torchgraft.capturing.reads import KeepWhole

# What torch calls around a forward. The others are called while gradients are computed, where nobody watches.
FORWARD_TABLES = ("_forward_hooks", "_forward_pre_hooks")
OPTION_TABLES = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
BACKWARD_TABLES = ("_backward_hooks", "_backward_pre_hooks")


class RunHooks:
    """Which modules with hooks are looked into.

    `closed` are those that are to be one call. `opened` are modules of torch which got their hooks from a run: whether they have
    them when the program runs is not certain, and a call of the module would run them or not.
    """

    def __init__(
        self, closed: Iterable[torch.nn.Module] = frozenset(), opened: Iterable[torch.nn.Module] = frozenset()
    ) -> None:
        self.looked_into: set[torch.nn.Module] = set()
        self.opened = set(opened)
        self._closed = closed
        # Hooks that are looked after, by identity: what is in the tables of the model stays there until the run has ended.
        self._seen: dict[int, Any] = {}
        self._old: frozenset[int] = frozenset()
        self._young: frozenset[int] = frozenset()

    def make_whole(self, watcher: Any, module: torch.nn.Module, is_leaf: bool) -> bool:
        """Whether a module with hooks is one call."""
        if module in self._closed or any(module.__dict__.get(name) for name in BACKWARD_TABLES):
            return True
        hooks = [hook for name in FORWARD_TABLES for hook in module.__dict__[name].values()]
        if not self._old:
            self._old = watcher.state.ids_in_tables()
        if is_leaf and module not in self.opened:
            if not _is_of_torch(module) or any(id(hook) in self._old for hook in hooks):
                return True
            self.opened.add(module)
        self.looked_into.add(module)
        for hook in hooks:
            if id(hook) not in self._seen:
                self._seen[id(hook)] = hook
                self._watch(watcher, module, hook)
        return False

    def _watch(self, watcher: Any, module: torch.nn.Module, hook: Any) -> None:
        """Watch what a hook keeps and mentions, unless the run made it: then it keeps what the run made, or what the function
        that made it mentions."""
        if type(hook) is FunctionType and id(hook) not in self._old and self._is_young(watcher, hook):
            return
        watcher.outside.watch_function(hook)
        kept = OutsideState(lambda value: False)  # by this one alone
        kept.watch_function(hook)
        for other in kept.modules:
            if other not in watcher.paths:  # nobody would see what it writes there
                raise KeepWhole(module, f"it has a hook that keeps a {type(other).__name__}, which is no part of the model")

    def _is_young(self, watcher: Any, hook: Any) -> bool:
        """Whether the run made a hook. Mostly it makes them all at once, and looking through all objects takes its time."""
        if id(hook) not in self._young and watcher.beginning is not None:
            self._young = watcher.beginning.ids_since()
        return id(hook) in self._young


def _is_of_torch(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")
