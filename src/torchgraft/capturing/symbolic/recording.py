"""Calls on real tensors while a model is traced symbolically: buffers, constants, factories and random draws.
A torch function mode sees every such call. What depends on the model's state or on chance becomes a node and is not run;
what is constant is run as well as recorded, because Python may go on to read its value.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from torchgraft.capturing.patching.active import active
from torchgraft.capturing.refusals import LEAF, in_lines
from torchgraft.capturing.symbolic.proxy import Proxy, find_proxy, record_torch_call
from torchgraft.capturing.watching.tensors import has_tensor, tensors_in, version_of
from torchgraft.errors import TraceError
from torchgraft.ir.guards import check_value
from torchgraft.ir.node import Node
from torchgraft.ir.origin import current_source_line

if TYPE_CHECKING:
    from torchgraft.capturing.symbolic.tracer import Tracer


class RecordingMode(TorchFunctionMode):
    """Sees every torch call of the traced program that is not made on a proxy alone."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.values = RealValues(tracer)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tracer = self.tracer
        if tracer._switching or active.tracer is not tracer:
            return function(*args, **kwargs)  # our own doing, or that of a trace within this one
        if Proxy in types:
            return self._on_proxies(function, args, kwargs)
        if find_proxy((args, kwargs)) is not None:
            return self._on_proxies(function, args, kwargs)
        if getattr(function, "__name__", "") == "_set_grad_enabled":
            tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)
        return self.values.call(function, args, kwargs)

    def _on_proxies(self, function: Any, args: Any, kwargs: Any) -> Any:
        proxy: Any = args[0] if args and type(args[0]) is Proxy else find_proxy((args, kwargs))
        if type(args[0]) is not Proxy if args else True:
            self.values.written(function, args, kwargs)
        return record_torch_call(proxy.tracer, function, args, kwargs)


class RealValues:
    """The real tensors a trace has met, and the nodes that make them.

    A tensor made in the trace from constants alone is *constant*: its values may be read. Every other one (buffers,
    tensors from outside, and constants that a traced value was written into) is *state*: reading its values would bake
    them in, so that is refused, and calls on it only make nodes.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._made: dict[int, tuple[torch.Tensor, Node]] = {}
        self._written_storages: set[int] = set()
        self._recorded: list[Node] = []
        self._guarded: dict[int, torch.Tensor] = {}
        self._writes: set[Node] = set()

    def node_of(self, tensor: torch.Tensor) -> Node | None:
        """The node that makes a tensor of this trace."""
        entry = self._made.get(id(tensor))
        return None if entry is None else entry[1]

    def readable_nodes(self) -> list[Node]:
        """Every node recorded for a constant that only returns a value, oldest first."""
        return [node for node in self._recorded if node not in self._writes]

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A call in which no argument is a proxy."""
        if getattr(function, "__name__", "") == "__get__" and function.__self__ is _GRADIENT:
            self._refuse(function, "reads the gradient of")
        is_constant = all(self._is_constant(tensor) for tensor in tensors_in((args, kwargs)))
        if is_constant and is_random(function):
            self.written(function, args, kwargs)
            return record_torch_call(self.tracer, function, args, kwargs)
        if is_constant and not may_draw(function):
            return self._run_and_record(function, args, kwargs)
        return self._call_on_state(function, args, kwargs)

    def written(self, function: Any, args: Any, kwargs: Any) -> None:
        """A traced value may have been written into a constant, whose content is then unknown."""
        if _writes_by_name(function, kwargs):
            for tensor in tensors_in((args, kwargs)):
                if id(tensor) in self._made:
                    self._written_storages.add(tensor.untyped_storage()._cdata)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        if id(tensor) in self.tracer._handed_out:
            return True  # an overridden Tracer.getattr wants this one to be real
        return id(tensor) in self._made and tensor.untyped_storage()._cdata not in self._written_storages

    def _run_and_record(self, function: Any, args: Any, kwargs: Any) -> Any:
        given = [(tensor, version_of(tensor)) for tensor in tensors_in((args, kwargs))]
        result = function(*args, **kwargs)
        produced = has_tensor(result)
        writes = any(
            _writes_by_name(function, kwargs) if tensor.is_inference() else tensor._version != version
            for tensor, version in given
        )
        if not produced and not writes:
            return result
        try:
            if getattr(function, "__name__", "") == "__get__":
                proxy = self.tracer.create_proxy("call_function", getattr, (args[0], function.__self__.__name__), {})
            else:
                proxy = record_torch_call(self.tracer, function, args, kwargs)
        except NotImplementedError:
            # Of an argument that cannot be written down (a numpy array, say). The program keeps the tensor; see renew_constants.
            return result
        self._recorded.append(proxy.node)
        if writes:
            self._writes.add(proxy.node)
        if isinstance(result, torch.Tensor):
            self._made[id(result)] = (result, proxy.node)
        elif isinstance(result, (tuple, list)):
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    part = proxy[index].node
                    self._recorded.append(part)
                    self._made[id(item)] = (item, part)
        return result

    def _call_on_state(self, function: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__get__":
            result = function(*args, **kwargs)  # properties neither compute nor write
            if not isinstance(result, torch.Tensor):
                if isinstance(result, torch.dtype):
                    self._guard_dtype(args[0], result)
                return result
            return self.tracer.create_proxy("call_function", getattr, (args[0], function.__self__.__name__), {})
        if name == "__set__":
            self._refuse(function, "assigns an attribute of")
        if name in ("untyped_storage", "storage", "numpy", "data_ptr"):
            self._refuse(function, "reaches the memory of")
        structure, writes = self._structure(function, args, kwargs)
        if not has_tensor(structure) and not writes:
            return structure
        self.written(function, args, kwargs)
        proxy = record_torch_call(self.tracer, function, args, kwargs)
        if isinstance(structure, (tuple, list)) and not hasattr(structure, "_fields"):
            return type(structure)([proxy[index] for index in range(len(structure))])
        return proxy if structure is not None else None

    def _guard_dtype(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """The model read the type of a buffer, and may act by it; after `.double()` the program would act wrongly."""
        if id(tensor) in self._guarded or self.tracer._path_of_tensor(tensor) is None:
            return
        self._guarded[id(tensor)] = tensor
        create, where = self.tracer.create_node, str(current_source_line() or "an unknown line")
        node = self.tracer.create_arg(tensor)
        found = create("call_function", getattr, (node, "dtype"), {})
        create("call_function", check_value, (found, dtype, f"dtype of '{node.target}'", where), {})

    def _structure(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """What a call returns and whether it writes, found out on tensors without data: nothing of the model is touched."""
        copies: dict[int, torch.Tensor] = {}

        def copied(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) not in copies:
                    copies[id(value)] = torch.empty_like(value, device="meta")
                return copies[id(value)]
            if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
                return type(value)([copied(item) for item in value])
            if isinstance(value, dict):
                return {key: copied(item) for key, item in value.items()}
            if isinstance(value, slice):
                return slice(copied(value.start), copied(value.stop), copied(value.step))
            if isinstance(value, torch.device):
                return torch.device("meta")
            return value

        before, self.tracer._switching = (
            self.tracer._switching,
            True,
        )  # what happens to the copies is no part of the program
        try:
            with torch.inference_mode(False), torch.no_grad():  # in inference mode nobody counts writes
                real_args, real_kwargs = copied(args), copied(kwargs)
                versions = {key: tensor._version for key, tensor in copies.items()}
                shapes = [tensor.shape for tensor in copies.values()]
                result = function(*real_args, **real_kwargs)
                is_reshaped = shapes != [tensor.shape for tensor in copies.values()]
                writes = any(tensor._version != versions[key] for key, tensor in copies.items())
        except Exception as error:  # any operator may refuse tensors without data, each with an error of its own
            if getattr(function, "__name__", "") in ("to", "cpu", "cuda"):
                return torch.empty(0, device="meta"), False
            if is_random(function) or getattr(function, "__name__", "").startswith(
                ("masked_select", "nonzero", "unique")
            ):
                return torch.empty(0, device="meta"), True
            self._refuse(function, "reads values of", error)
        finally:
            self.tracer._switching = before
        if is_reshaped:
            self._refuse(function, "changes the shape of")
        return result, writes

    def _refuse(self, function: Any, action: str, cause: Exception | None = None) -> NoReturn:
        text = in_lines(
            f"cannot trace through {getattr(function, '__name__', str(function))}()",
            current_source_line(),
            f"it {action} a tensor of the model, or of outside the traced function; the program would always use what it found",
            f"use tensor operations, make the value a Python attribute before tracing, {LEAF}, or use "
            "torchgraft.capture(model, args)",
        )
        raise self.tracer._remembered(TraceError(text)) from cause


_GRADIENT: Any = torch.Tensor.grad


def _writes_by_name(function: Any, kwargs: Any) -> bool:
    """Whether a call of torch writes into an argument, as its name says."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or "out" in kwargs or name.startswith("__i")


@functools.cache
def is_random(function: Any) -> bool:
    """Whether a torch function draws random numbers, by the tags of the operators it is named after."""
    return _operators_draw(getattr(function, "__name__", ""))


@functools.cache
def may_draw(function: Any, depth: int = 3) -> bool:
    """Whether a function of torch written in Python mentions an operator that draws, itself or in what it calls."""
    if not isinstance(function, FunctionType):
        return is_random(function)
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if _operators_draw(name) or (isinstance(called, FunctionType) and depth and may_draw(called, depth - 1)):
            return True
    return False


@functools.cache
def _operators_draw(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None) if name and not name.startswith("__") else None
    if packet is None or not hasattr(packet, "overloads"):
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
