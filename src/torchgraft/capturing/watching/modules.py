"""The modules of a watched run: which are one call and which are looked into, and what their modes decide.
Hooks have a say in that, and are in `hooks.py`; the patches of nn.Module that ask here are in `patching/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import parametrize

from torchgraft.capturing.patching.active import active
from torchgraft.capturing.patching.module_patches import ModuleForward, call_module
from torchgraft.capturing.watching.hooks import RunHooks
from torchgraft.capturing.watching.parts import concrete
from torchgraft.capturing.watching.reruns import KeepWhole, at_line
from torchgraft.capturing.watching.values import MARK
from torchgraft.ir.modules import has_hooks, hooks_for_all, is_from_torch
from torchgraft.ir.node import Node

if TYPE_CHECKING:
    from torchgraft.capturing.watching.watcher import Watcher

# Why a small module stays a call: at a level where its mode is given, it need not.
OTHER_MODE = "it does something else in the other mode"


class Modules:
    """Runs the modules of a model, as one call or by what they do."""

    def __init__(
        self, watcher: Watcher, is_leaf: Callable[[torch.nn.Module, str], bool], hooks: RunHooks | None
    ) -> None:
        self._watcher = watcher
        self.hooks = hooks or RunHooks()
        # The modules that run and are looked into, innermost last.
        self.stack: list[torch.nn.Module] = [watcher.root]
        self._is_leaf = is_leaf
        self._whole: dict[torch.nn.Module, bool] = {}
        # Modules that ran as one call; what they change of themselves, each run of the program changes.
        self.ran_whole: set[torch.nn.Module] = set()

    def call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module; a leaf is written down as one call, any other by what it does."""
        watcher = self._watcher
        path = watcher.paths.get(module)
        if path is None or watcher._switching:
            return self._call_other(module, path, args, kwargs)
        outer = watcher._scope_chain
        watcher._scope_chain = (outer, path, path, type(module))
        try:
            if path and self.is_whole(module, path) and not self._has_other_tensors(module):
                return self._call_whole(module, path, args, kwargs)
            self.stack.append(module)
            try:
                watcher.state.watch(module)
                return call_module(module, *args, **kwargs)
            finally:
                self.stack.pop()
        finally:
            watcher._scope_chain = outer

    def _call_other(self, module: torch.nn.Module, path: str | None, args: Any, kwargs: Any) -> Any:
        """Run a module that is not the model's, or one inside a call that is written down."""
        if path is None and not self._watcher._switching and self._has_other_tensors(module):
            raise self._watcher.refusal(f"{type(module).__name__} is called, and is no submodule of the model")
        self._watcher.state.watch(module)
        return call_module(module, *args, **kwargs)

    def is_whole(self, module: torch.nn.Module, path: str) -> bool:
        """Whether a module is one call."""
        known = self._whole.get(module)
        if known is None:
            known = self._is_leaf(module, path) or isinstance(module, torch.jit.ScriptModule)
            self._whole[module] = known
        return self.hooks.make_whole(self._watcher.state, module, known) if has_hooks(module) else known

    def _has_other_tensors(self, module: torch.nn.Module) -> bool:
        """Whether a module has parameters that are not the model's: torch.func.functional_call has put them there, or it is no
        part of the model. (`self.layers[1:]` makes one around modules of the model.)"""
        known = self._watcher.values.names
        for inner in module.modules() if module._modules else (module,):
            for value in inner._parameters.values():
                if value is not None and id(value) not in known:
                    return True
        return False

    def _call_whole(self, m: torch.nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        watcher, arguments = self._watcher, self._watcher.arguments
        if hooks_for_all():
            raise watcher.refusal("there are hooks for all modules")
        if parametrize._cache_enabled:  # what is computed once for all calls, a program would compute for each
            raise watcher.refusal("it keeps the results of parametrisations")
        self.ran_whole.add(m)
        is_of_torch = is_from_torch(m)
        if not is_of_torch or m.__dict__.get("max_norm") is not None:
            watcher.unwatched(self._keep_all, m)
        with torch._C.DisableTorchFunction():  # else each question about a tensor would come to us
            lowered, given = arguments.simple(args, kwargs)
            if lowered is not None and is_of_torch and _is_plain_leaf(m):  # nobody would look at the calls inside
                return self._run_plain_leaf(m, watcher.create_call("call_module", path, *lowered), args, kwargs, given)
        forward: Callable[..., Any] = ModuleForward(m, watcher)
        if not is_of_torch:
            forward = self.hooks.around(watcher.state, m, forward)
        run = watcher.calls.run_whole
        if lowered is not None:
            node = watcher.create_call("call_module", path, *lowered)
            return watcher.unwatched(run, forward, node, args, kwargs, given, is_of_torch)
        node = watcher.create_call("call_module", path, *arguments.lowered(args, kwargs))
        return watcher.unwatched(run, forward, node, concrete(args), concrete(kwargs), None, is_of_torch)

    def _run_plain_leaf(
        self, module: torch.nn.Module, node: Node, args: Any, kwargs: Any, given: dict[int, int]
    ) -> Any:
        """The same as `Calls.run_whole` for a module of torch's that is given tensors and plain values."""
        watcher, values = self._watcher, self._watcher.values
        watcher.state.watch(module)
        active.tracer, watcher._switching = None, True
        try:
            result = call_module(module, *args, **kwargs)
        except Exception as error:
            watcher.calls.note_failure(error)
            raise
        finally:
            active.tracer, watcher._switching = watcher, False
        if type(result) is not torch.Tensor:
            return watcher.unwatched(values.register_anything, result, node, given, str(node._target))
        if type(module) is torch.nn.BatchNorm1d:
            # The one norm whose channels are not told by its kind: see FuseConvNorm.
            node.meta["dimensions"] = result.ndim
        if id(result) in given or id(result) in values.outside:
            return watcher.unwatched(values.register, result, node, given)
        result.__dict__[MARK] = (values, node)
        return result

    def _keep_all(self, module: torch.nn.Module) -> None:
        for inner in module.modules():
            self._watcher.state.watch(inner)
        self._watcher.state.tensors.save_all(module)


class Modes:
    """What `self.training` is in the program: a node where it flows on, a guard where it decides."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._nodes: dict[torch.nn.Module, Node] = {}
        # Modules that are no part of the model and were asked for their modes, and the module that asked.
        self.asked_outside: list[tuple[torch.nn.Module, torch.nn.Module]] = []

    def decides(self, module: torch.nn.Module) -> bool:
        """The mode of a module, by which something is decided."""
        watcher, value = self._watcher, module.__dict__["training"]
        if watcher.is_plain:
            return value
        if watcher.modules.stack[-1] is module and self._is_small(module):
            raise KeepWhole(module, f"{OTHER_MODE}{at_line()}")
        if module not in watcher.paths:
            self.asked_outside.append((module, watcher.modules.stack[-1]))
        elif not watcher.guards.is_asked(module, "training"):
            watcher.guards.mode(module, self.node(module), value)
        return value

    def _is_small(self, module: torch.nn.Module) -> bool:
        """Whether a module inside the model is one that a program may as well call, as it calls a dropout: without modules of its
        own, and torch's or without tensors."""
        is_one = not module._modules and (is_from_torch(module) or not (module._parameters or module._buffers))
        return is_one and bool(self._watcher.paths.get(module))

    def node(self, module: torch.nn.Module) -> Node | bool:
        """The node of the mode of a module."""
        path, mode = self._watcher.paths.get(module), bool(module.__dict__["training"])
        if path is None:  # made by the run, which then makes another one the next time
            self.asked_outside.append((module, self._watcher.modules.stack[-1]))
            return mode
        known = self._nodes.get(module)
        if known is None:  # the same in all of a run: whoever sets a mode in between is kept whole
            target = f"{path}.training" if path else "training"
            known = self._nodes[module] = self._watcher.create_node("get_attr", target, (), {})
            self._watcher.flow.plain[known] = mode
        return known


def _is_plain_leaf(module: torch.nn.Module) -> bool:
    """Whether a module has plain parameters and no modules inside, and no other mode than ours is at work."""
    return (
        not module._modules
        and all(value is None or type(value) is torch.nn.Parameter for value in module._parameters.values())
        and torch._C._len_torch_function_stack() == 1
    )
