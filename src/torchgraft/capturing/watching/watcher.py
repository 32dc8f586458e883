"""The watcher: the tracer of a model that runs for real, which shares the work out. Calls, modules, writes, reads and the nodes
of values have a file each; what starts a run is in `run.py`, and what becomes of its graph in `program.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchgraft.capturing.flowing.sizes import unwrapped
from torchgraft.capturing.patching.active import active
from torchgraft.capturing.patching.module_patches import read_attribute
from torchgraft.capturing.refusals import UnsupportedArgument
from torchgraft.capturing.state.model_state import ModelState
from torchgraft.capturing.tracer_base import UNCHANGED_TYPES, TracerBase
from torchgraft.capturing.watching.arguments import Arguments
from torchgraft.capturing.watching.calls import Calls
from torchgraft.capturing.watching.flow import Flow
from torchgraft.capturing.watching.guards import Guards
from torchgraft.capturing.watching.hooks import RunHooks
from torchgraft.capturing.watching.modules import Modes, Modules
from torchgraft.capturing.watching.reads import Reads
from torchgraft.capturing.watching.reruns import KeepWhole, at_line
from torchgraft.capturing.watching.values import Values
from torchgraft.capturing.watching.writes import Writes
from torchgraft.errors import TraceError
from torchgraft.ir.arguments import EMPTY_DICT
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.graph import Graph
from torchgraft.ir.names import wish_of
from torchgraft.ir.node import Argument, Node
from torchgraft.ir.origin import user_instruction


class WatchingMode(TorchFunctionMode):
    """Hands every torch call to the watcher."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watcher = self.watcher
        if watcher._switching or active.tracer is not watcher:
            return function(*args, **(kwargs or {}))
        watcher._instruction = user_instruction(2)
        try:
            return watcher.calls.call(function, args, kwargs or EMPTY_DICT)
        finally:
            watcher._instruction = None


class Watcher(TracerBase):
    """Writes down one run of a model."""

    _runs_for_real = True

    def __init__(
        self,
        root: torch.nn.Module,
        state: ModelState,
        is_leaf: Callable[[torch.nn.Module, str], bool],
        sizes_are_symbolic: bool = True,
        flags_are_plain: bool = False,
        hooks: RunHooks | None = None,
    ) -> None:
        self.graph = Graph()
        self.root, self.state, self.paths = root, state, state.paths
        self.flags_are_plain = flags_are_plain
        # Whether something runs that is not to be written down.
        self._switching = False
        # The user's instruction that is running, while that is known: looking for it takes longer than making a node.
        self._instruction: tuple[CodeType | None, int] | None = None
        self._open_contexts: list[Any] = []
        self.guards = Guards(self)
        self.flow = Flow(self, self.guards, sizes_are_symbolic)
        self.values = Values(self, self.flow)
        self.arguments = Arguments(self, self.values)
        reads = Reads(self, self.values, self.flow)
        self.writes = Writes(self, self.values, self.flow)
        self.calls = Calls(self, self.values, self.arguments, reads, self.writes)
        self.modules = Modules(self, is_leaf, hooks)
        self.modes = Modes(self)

    def be_plain(self, first: Watcher) -> None:
        """Hand out plain numbers, dtypes and modes, and check nothing: this run is only compared with the first."""
        self.flags_are_plain = True
        self.flow.be_plain()
        self.calls.replayed = list(first.calls.draws)

    @property
    def is_plain(self) -> bool:
        """Whether this run is only compared with another."""
        return self.guards.is_plain

    def end(self) -> None:
        """Forget the run; what belongs to it refers to one another, which is not left to the garbage collector."""
        flow = self.flow
        for part in (self.guards, self.values, self.arguments, self.writes, self.calls, self.modules, self.modes, self):
            vars(part).clear()
        flow.end()

    def unwatched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run something without writing it down."""
        previous = active.tracer, self._switching
        active.tracer, self._switching = None, True
        try:
            return function(*args, **kwargs)
        finally:
            active.tracer, self._switching = previous

    def refusal(self, reason: str) -> KeepWhole:
        """What to raise where the innermost module does what cannot be written down."""
        return KeepWhole(self.modules.stack[-1], f"{reason}{at_line()}")

    # ---- nodes and arguments ----

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> Node:
        """Put a node in the graph."""
        node = self.graph._make_node(kind, target, args, kwargs, name or wish_of(target), type_expr)
        node._origin = (*(self._instruction or user_instruction(2)), self._scope_chain)
        if target is enter_context or target is exit_context:
            self.calls.nodes.append(node)
        return node

    def create_call(self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None) -> Node:
        """Put the node of a call in the graph, which every run of the model has to make."""
        node = self.create_node(kind, target, args, kwargs, name)
        self.calls.nodes.append(node)
        return node

    def create_arg(self, a: Any) -> Argument:
        """Turn a value of the run into an argument."""
        cls = type(a)
        if cls is torch.Tensor or cls is torch.nn.Parameter or isinstance(a, torch.Tensor):
            return self.values.node_of(a)
        if cls in UNCHANGED_TYPES:
            known = self.flow.device_node(a) if cls is torch.device else None
            return a if known is None else known
        number = unwrapped(a)
        if number is not None:
            return number.argument()
        if cls is not tuple:
            known = self.values.outside_node(a)
            if known is not None:
                if a in self.values.objects and self.values.objects.changed():
                    # The program writes into objects at its end, and this call would see them as they were.
                    raise KeepWhole(None, f"it changes a {cls.__name__} and hands it on{at_line()}")
                return known
        if isinstance(a, tuple) and "__new__" in vars(cls) and "_fields" not in vars(cls) and hasattr(a, "_fields"):
            return self.arguments.opaque(a)  # a named tuple with a constructor of its own, which may want tensors
        if isinstance(a, torch.nn.Module) and self.paths.get(a):
            return self.create_node("get_attr", self.paths[a], (), {})
        try:
            return super().create_arg(a)
        except NotImplementedError:
            return self.arguments.opaque(a)

    # ---- what the patches ask of every tracer ----

    def _call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return self.modules.call(module, args, kwargs)

    def _enter_module(self, module: torch.nn.Module) -> None:
        self.state.watch(module)

    def _read_attribute(self, module: torch.nn.Module, name: str) -> Any:
        return read_attribute(module, name)  # asked only where another thread traces symbolically meanwhile

    def _is_written_in_place(self, module: torch.nn.Module, name: str, value: Any) -> bool:
        return False  # the value is the buffer itself, and that is no change

    def _before_write(self, module: torch.nn.Module, name: str, value: Any) -> None:
        if not self._switching:
            self.writes.before_attribute(module, name, value)

    def _before_tensor_write(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        self.writes.before_tensor_attribute(tensor, name)

    def _training_decides(self, module: torch.nn.Module) -> bool:
        return self.modes.decides(module)

    def _training_node(self, module: torch.nn.Module) -> Node | bool:
        return self.modes.node(module)

    def _remembered(self, error: TraceError) -> Any:
        """What a symbolic trace would refuse, a watched run keeps whole; an odd argument may be kept as an object."""
        return error if isinstance(error, UnsupportedArgument) else KeepWhole(self.modules.stack[-1], str(error))
