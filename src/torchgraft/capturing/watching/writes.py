"""Writes of a watched run: into tensors that were there before it, and to attributes of modules and tensors.
What is kept so that it can be put back is in `state/`; whether a program can leave what was written, in `state/leftovers.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchgraft.capturing.flowing.dtypes import FlowingDtype
from torchgraft.capturing.watching.flow import Flow
from torchgraft.capturing.watching.reruns import KeepWhole, at_line
from torchgraft.capturing.watching.tensors import tensors_in
from torchgraft.capturing.watching.values import Values

if TYPE_CHECKING:
    from torchgraft.capturing.watching.watcher import Watcher

# Calls that give a tensor another shape in place: sizes read before them have to be computed before them.
_RESHAPING = frozenset(
    {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_", "resize_as_", "set_"}
    | {"as_strided_", "__set__"}
)


class Writes:
    """Sees to it that what a run writes can be put back, or is refused."""

    def __init__(self, watcher: Watcher, values: Values, flow: Flow) -> None:
        self._watcher, self._values, self._flow = watcher, values, flow
        # Modules that wrote attributes of their own, and how; at the end of the run all has to be as it was.
        self.written: dict[torch.nn.Module, str] = {}
        # Tensors made by this run onto which somebody wrote an attribute, by identity.
        self.with_attributes: dict[int, torch.Tensor] = {}

    def before_call(self, name: str, values: Any) -> None:
        """A call is about to write into what it is given."""
        tensors = self._watcher.state.tensors
        for tensor in tensors_in(values):
            if not self._values.is_input(tensor):
                tensors.save_if_known(tensor)
            if name.partition(".")[0] in _RESHAPING:  # an overload of an operator has more in its name
                self._flow.settle(self._values.node_of(tensor))
                tensors.keep_place(tensor)
                if self._values.is_static(tensor) and not (name == "__set__" and _are_of_one_shape(values[0])):
                    raise self._watcher.refusal("it changes the shape of a tensor that it keeps")

    def before_attribute(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """An attribute of a module is about to be written."""
        state = self._watcher.state
        if type(value) is FlowingDtype:  # it may be read where nobody watches
            raise self._flow.plainly("dtypes")
        if module not in self._watcher.paths or not state.is_change(module, name, value):
            return
        reason = f"it writes self.{name}{at_line()}"
        if not self._may_be_put_back(module, name, value):
            raise KeepWhole(module, reason)
        self.written.setdefault(module, reason)
        state.watch(module)

    def _may_be_put_back(self, module: torch.nn.Module, name: str, value: Any) -> bool:
        """Whether an attribute may be written, as a note that is taken away before the run ends: only what is watched reads it.
        Modes, parameters, buffers and modules are also read by what runs as one call."""
        is_state = name == "training" or isinstance(value, (torch.nn.Module, torch.nn.Parameter))
        is_state = is_state or any(name in table for table in (module._parameters, module._buffers, module._modules))
        path = self._watcher.paths[module]
        return not is_state and not (path and self._watcher.modules.is_whole(module, path))

    def before_tensor_attribute(self, tensor: torch.Tensor, name: str) -> None:
        """Somebody writes an attribute onto a tensor, which is lost unless the tensor is. What torch.compile is told in this
        way (a fixed address of a cache) changes nothing that a model computes."""
        if name.startswith("_dynamo_"):
            return
        if not self._values.is_made(tensor):
            raise self._watcher.refusal(f"it writes the attribute {name} of a tensor")
        self.with_attributes[id(tensor)] = tensor


def _are_of_one_shape(values: Any) -> bool:
    return len({value.shape for value in values if isinstance(value, torch.Tensor)}) == 1
