"""What a watched run may change although it is no attribute of the model: the numbers inside tensors, and the states of
random numbers. All of it is put back afterwards; attributes are the business of `model_state.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchgraft.capturing.number_states import numpy_numbers, python_numbers, same_numpy, write_numpy, write_python


class Surroundings:
    """The numbers in a model's buffers and the states of random numbers, as they were before a run."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        # Storages by their address: the tensor that showed the way to it, all of it, a copy, and how often it was written.
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]] = {}
        # Tensors that were given another shape or other memory, by identity, and views of how they were.
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._torch = torch.get_rng_state()
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._python = self._explained = python_numbers.now()
        self._drew_unseen = False
        self._numpy = numpy_numbers.now()
        self._modules = modules
        self._known: set[int] | None = None
        for module in modules:
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.save(buffer)

    def save(self, tensor: torch.Tensor) -> None:
        """Keep a copy of everything in the memory of a tensor."""
        address = _address(tensor)
        if address and address not in self._saved:
            version = 0 if tensor.is_inference() else tensor._version
            memory = _bytes(tensor)
            self._saved[address] = (tensor, memory, memory.clone(), version)

    def keep_place(self, tensor: torch.Tensor) -> None:
        """Keep where the memory of a tensor is and how it lies there, if the tensor was there before the run."""
        if id(tensor) not in self._places and _address(tensor) in self._known_addresses():
            self._places[id(tensor)] = (tensor, tensor.data)

    def know(self, tensor: torch.Tensor) -> None:
        """Say that a tensor, neither parameter nor buffer, was there before the run."""
        self._known_addresses().add(_address(tensor))

    def save_if_known(self, tensor: torch.Tensor) -> None:
        """Keep a copy of a tensor that shares its memory with one that was there before the run, before it is written."""
        if _address(tensor) in self._known_addresses():
            self.save(tensor)

    def _known_addresses(self) -> set[int]:
        if self._known is None:
            parameters = [value for module in self._modules for value in module._parameters.values()]
            buffers = [value for module in self._modules for value in module._buffers.values()]
            self._known = {_address(value) for value in (*parameters, *buffers) if value is not None} - {0}
        return self._known

    def before_python_draw(self) -> None:
        """Say that a call that is written down is about to draw Python's random numbers: so far, nothing else may have."""
        self._drew_unseen = self._drew_unseen or python_numbers.now() != self._explained

    def explain_python_draw(self) -> None:
        """Say that Python's random numbers were drawn by a call that is written down."""
        self._explained = python_numbers.now()

    def restore(self) -> list[tuple[torch.nn.Module | None, str]]:
        """Put everything back, and return what changed without being written down: the module that has it, and its name."""
        unseen: list[tuple[torch.nn.Module | None, str]] = []
        for tensor, place in self._places.values():
            tensor.data = place
        for tensor, memory, saved, version in self._saved.values():
            if not torch.equal(memory, saved):
                memory.copy_(saved)
            if not tensor.is_inference() and tensor._version != version:
                # Else a gradient that is still to be computed would be refused; there is no public way to say this.
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        torch.set_rng_state(self._torch)
        if self._devices is not None:
            torch.cuda.set_rng_state_all(self._devices)
        state = python_numbers.now()
        if self._drew_unseen or state != self._explained:
            unseen.append((None, "Python's random numbers"))
        if state != self._python:
            write_python(self._python)
        if self._numpy is not None and not same_numpy(self._numpy, numpy_numbers.now()):
            write_numpy(self._numpy)
            unseen.append((None, "numpy's random numbers"))
        return unseen


_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def _address(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor is; 0 if it has none of the usual kind."""
    if tensor.device.type == "meta" or type(tensor) not in _PLAIN_TENSORS or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
