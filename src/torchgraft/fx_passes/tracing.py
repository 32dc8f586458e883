"""torch.fx's tools of tracing (`_Patcher` and the like), for tracers whose `trace` is written with them.
Nothing of torchgraft's own tracing is here: they are names over `capturing/`, reached as `torchgraft._symbolic_trace`.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchgraft.capturing.patching.active import Patch
from torchgraft.capturing.patching.fx_tracing import is_tracing as is_fx_tracing  # noqa: F401
from torchgraft.capturing.patching.wrapping import leaf_functions, recorded_leaf, recorded_method
from torchgraft.capturing.symbolic.inputs import _with_plain_parameters
from torchgraft.capturing.symbolic.proxy import Proxy, find_proxy
from torchgraft.ir.leaf_functions import wrapped_methods

module_call = torch.nn.Module.__call__
module_getattr = torch.nn.Module.__getattr__


class Patcher:
    """Replaces functions until its `with` block ends.

    >>> scope = {"double": lambda x: 2 * x}
    >>> with Patcher() as patcher:
    ...     patcher.patch(scope, "double", lambda x: x + x + 1)
    ...     scope["double"](3)
    7
    >>> scope["double"](3)
    6
    """

    def __init__(self) -> None:
        self.patches_made: list[Patch] = []
        self.visited: set[int] = set()

    def patch(
        self, frame_dict: dict[str, Any], name: str, new_fn: Callable[..., Any], deduplicate: bool = True
    ) -> None:
        """Let `frame_dict[name]` be `new_fn`, unless it was replaced before."""
        self._put(frame_dict, name, frame_dict.get(name), new_fn, deduplicate)

    def patch_method(self, cls: type, name: str, new_fn: Callable[..., Any], deduplicate: bool = True) -> None:
        """Let the method `name` of a class be `new_fn`, unless it was replaced before."""
        self._put(cls, name, getattr(cls, name), new_fn, deduplicate)

    def _put(self, holder: Any, name: str, found: Any, new: Any, deduplicate: bool) -> None:
        new.__torchgraft_patched__ = deduplicate
        if not getattr(found, "__torchgraft_patched__", False):
            patch = Patch(holder, name, new)
            patch.acquire()
            self.patches_made.append(patch)

    def visit_once(self, thing: Any) -> bool:
        """Whether this is the first time that `thing` is mentioned."""
        is_first = id(thing) not in self.visited
        self.visited.add(id(thing))
        return is_first

    def __enter__(self) -> Patcher:
        return self

    def __exit__(self, *details: object) -> None:
        while self.patches_made:
            self.patches_made.pop().release()
        self.visited.clear()


def autowrap_check(patcher: Patcher, frame_dict: dict[str, Any], function_ids: Iterable[int]) -> None:
    """Have a patcher record calls of the functions in a namespace whose ids are given."""
    if patcher.visit_once(frame_dict):
        for name, value in list(frame_dict.items()):
            if not name.startswith("_") and callable(value) and id(value) in function_ids:
                patcher.patch(frame_dict, name, recorded_leaf(value))


def patch_wrapped_functions(patcher: Patcher) -> None:
    """Have a patcher record calls of all that `wrap` was called on."""
    for scope, name in leaf_functions():
        function = scope.get(name, getattr(builtins, name, None))
        if function is not None:
            patcher.patch(scope, name, recorded_leaf(function))
    for cls, name in wrapped_methods:
        patcher.patch_method(cls, name, recorded_method(getattr(cls, name)))


def patch_function(fn: Any, nargs: int) -> Any:
    """A function that takes its `*args` and `**kwargs` as one value each."""
    return _with_plain_parameters(fn)


def find_proxy_in(*objects_to_search: Any) -> Proxy | None:
    """A proxy in a tree of containers, or None."""
    return find_proxy(objects_to_search)
