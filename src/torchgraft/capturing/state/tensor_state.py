"""The numbers inside a model's tensors and the states of random numbers, as they were before a run; they are put back after it.
Attributes are kept in `model_state.py`, which holds one of these.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# The methods themselves: the functions of the module are patched during a run.
_python_state, _set_python_state = random._inst.getstate, random._inst.setstate
_share_memory: Any = torch.Tensor.set_
# From the memory of a tensor: the tensor that showed the way to it, all of it, a copy, and how often it was written.
_Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


class TorchRandomStates:
    """The states of torch's random numbers when this was made."""

    def __init__(self) -> None:
        self._host = torch.get_rng_state()
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def put_back(self) -> None:
        """Have the same numbers drawn again."""
        torch.set_rng_state(self._host)
        if self._devices is not None:
            torch.cuda.set_rng_state_all(self._devices)


@contextlib.contextmanager
def kept_draws() -> Iterator[None]:
    """Whoever draws after the block draws what they would have drawn without it."""
    states = TorchRandomStates()
    try:
        yield
    finally:
        states.put_back()


class TensorState:
    """Copies of a model's buffers, of other tensors once they are about to be written, and of the states of random numbers."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._saved: dict[int, _Saved] = {}
        # Tensors that were given another shape or other memory, by identity, and views of how they were.
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._torch = TorchRandomStates()
        self._python, self._numpy = _python_state(), _numpy_state()
        self._modules = modules
        self._known: set[int] | None = None
        for module in modules:
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.save(buffer)
        parameters = [item for module in modules for item in module._parameters.values() if item is not None]
        self._gradients = [(item, item.grad) for item in parameters]

    def save(self, tensor: torch.Tensor) -> None:
        """Keep a copy of everything in the memory of a tensor."""
        address = _address(tensor)
        if address and address not in self._saved:
            version = 0 if tensor.is_inference() else tensor._version
            memory = _bytes(tensor)
            self._saved[address] = (tensor, memory, memory.clone(), version)

    def save_all(self, module: torch.nn.Module) -> None:
        """Keep a copy of all parameters and buffers in a module."""
        for inner in module.modules():
            for value in (*inner._parameters.values(), *inner._buffers.values()):
                if value is not None:
                    self.save(value)

    def keep_place(self, tensor: torch.Tensor) -> None:
        """Keep where the memory of a tensor is and how it lies there, if the tensor was there before the run."""
        if id(tensor) not in self._places and _address(tensor) in self._known_addresses():
            self._places[id(tensor)] = (tensor, tensor.data)

    def know(self, tensor: torch.Tensor) -> None:
        """Say that a tensor, neither parameter nor buffer, was there before the run."""
        self._known_addresses().add(_address(tensor))

    def save_if_known(self, tensor: torch.Tensor) -> bool:
        """Keep a copy of a tensor that shares its memory with one that was there before the run, before it is written."""
        is_known = _address(tensor) in self._known_addresses()
        if is_known:
            self.save(tensor)
        return is_known

    def _known_addresses(self) -> set[int]:
        if self._known is None:
            parameters = [value for module in self._modules for value in module._parameters.values()]
            buffers = [value for module in self._modules for value in module._buffers.values()]
            self._known = {_address(value) for value in (*parameters, *buffers) if value is not None} - {0}
        return self._known

    def is_saved(self, tensor: torch.Tensor) -> bool:
        """Whether there is a copy of the memory of a tensor."""
        return _address(tensor) in self._saved

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor of which there was a copy is not what it was, or another one."""
        saved = self._saved.get(_address(tensor))
        return saved is None or not torch.equal(saved[1], saved[2])

    def restore(self) -> None:
        """Put everything back, except for the random numbers of other libraries."""
        for item, gradient in self._gradients:
            if item.grad is not gradient:  # a model that differentiates itself
                item.grad = gradient
        for tensor, place in self._places.values():
            tensor.data = place
        for tensor, memory, saved, version in self._saved.values():
            if not torch.equal(memory, saved):
                memory.copy_(saved)
            if not tensor.is_inference() and tensor._version != version:
                # Else a gradient that is still to be computed would be refused; there is no public way to say this.
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        self._torch.put_back()

    def restore_libraries(self) -> None:
        """Put the random numbers of Python and numpy back."""
        _set_python_state(self._python)
        if self._numpy is not None:
            _numpy_source().set_state(self._numpy)


def _numpy_source() -> Any:
    numpy = sys.modules.get("numpy")
    return getattr(getattr(getattr(numpy, "random", None), "mtrand", None), "_rand", None)


def _numpy_state() -> Any:
    source = _numpy_source()
    return None if source is None else source.get_state(legacy=False)


_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def _address(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor is; 0 if it has none of the usual kind."""
    if tensor.device.type == "meta" or type(tensor) not in _PLAIN_TENSORS or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return _share_memory(torch.empty(0, dtype=torch.uint8, device=storage.device), storage)
