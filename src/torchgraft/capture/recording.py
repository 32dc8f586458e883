"""Calls on real tensors while a model is traced symbolically: buffers, constants, factories and random draws.
A torch function mode sees every such call. What depends on the model's state or on chance becomes a node and is not run;
what is constant is run as well as recorded, because Python may go on to read its value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from torchgraft.capture.proxy import Proxy, find_proxy, record_torch_call
from torchgraft.errors import TraceError
from torchgraft.ir.node import Node
from torchgraft.ir.origin import current_source_line

if TYPE_CHECKING:
    from torchgraft.capture.tracer import Tracer

_random_functions: dict[Any, bool] = {}


class RecordingMode(TorchFunctionMode):
    """Sees every torch call of the traced program that is not made on a proxy alone."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.values = RealValues(tracer)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tracer = self.tracer
        if tracer._switching:
            return function(*args, **kwargs)
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
        if self.values.any_made:
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

    @property
    def any_made(self) -> bool:
        """Whether the trace has made constants that could be written into."""
        return bool(self._made)

    def node_of(self, tensor: torch.Tensor) -> Node | None:
        """The node that makes a tensor of this trace."""
        entry = self._made.get(id(tensor))
        return None if entry is None else entry[1]

    def constant_nodes(self) -> list[Node]:
        """Every node recorded for a constant, oldest first."""
        return [node for _, node in self._made.values()]

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A call in which no argument is a proxy."""
        tensors = list(_tensors((args, kwargs)))
        if not tensors:
            return self._call_without_tensors(function, args, kwargs)
        if all(self._is_constant(tensor) for tensor in tensors):
            if is_random(function):
                self.written(function, args, kwargs)
                return record_torch_call(self.tracer, function, args, kwargs)
            return self._run_and_record(function, args, kwargs)
        return self._call_on_state(function, args, kwargs)

    def written(self, function: Any, args: Any, kwargs: Any) -> None:
        """A traced value may have been written into a constant, whose content is then unknown."""
        name = getattr(function, "__name__", "")
        if name.endswith("_") or name == "__setitem__" or "out" in kwargs or name.startswith("__i"):
            for tensor in _tensors((args, kwargs)):
                if id(tensor) in self._made:
                    self._written_storages.add(tensor.untyped_storage()._cdata)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        if id(tensor) in self.tracer._handed_out:
            return True  # an overridden Tracer.getattr wants this one to be real
        return id(tensor) in self._made and tensor.untyped_storage()._cdata not in self._written_storages

    def _call_without_tensors(self, function: Any, args: Any, kwargs: Any) -> Any:
        if is_random(function):
            return record_torch_call(self.tracer, function, args, kwargs)
        return self._run_and_record(function, args, kwargs)

    def _run_and_record(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        produced = list(_tensors(result))
        if not produced:
            return result
        known = {id(tensor): tensor for tensor in _tensors((args, kwargs))}
        try:
            proxy = record_torch_call(self.tracer, function, args, kwargs)
        except NotImplementedError:
            return result  # an argument that cannot be written down (a numpy array, say): the result is a tensor from outside
        if isinstance(result, torch.Tensor):
            self._made[id(result)] = (result, proxy.node)
        else:
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor) and id(item) not in known:
                    self._made[id(item)] = (item, proxy[index].node)
        return result

    def _call_on_state(self, function: Any, args: Any, kwargs: Any) -> Any:
        if getattr(function, "__name__", "") == "__get__":
            result = function(*args, **kwargs)  # properties neither compute nor write
            if not isinstance(result, torch.Tensor):
                return result
            proxy = self.tracer.create_proxy("call_function", getattr, (args[0], function.__self__.__name__), {})
            return proxy
        if getattr(function, "__name__", "") == "__set__":
            self._refuse(function, "assigns an attribute of")
        structure = self._structure(function, args, kwargs)
        if not list(_tensors(structure)):
            return structure
        self.written(function, args, kwargs)
        proxy = record_torch_call(self.tracer, function, args, kwargs)
        if isinstance(structure, (tuple, list)) and not hasattr(structure, "_fields"):
            return type(structure)([proxy[index] for index in range(len(structure))])
        return proxy

    def _structure(self, function: Any, args: Any, kwargs: Any) -> Any:
        """What a call returns, found out on tensors without data, so that nothing of the model is written or read."""
        stand_ins: dict[int, torch.Tensor] = {}

        def stand_in(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) not in stand_ins:
                    stand_ins[id(value)] = torch.empty_like(value, device="meta")
                return stand_ins[id(value)]
            if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
                return type(value)([stand_in(item) for item in value])
            if isinstance(value, dict):
                return {key: stand_in(item) for key, item in value.items()}
            if isinstance(value, slice):
                return slice(stand_in(value.start), stand_in(value.stop), stand_in(value.step))
            if isinstance(value, torch.device):
                return torch.device("meta")
            return value

        self.tracer._switching = True  # what happens to the stand-ins is no part of the program
        try:
            with torch.no_grad():
                return function(*stand_in(args), **stand_in(kwargs))
        except Exception as error:  # any operator may refuse tensors without data, each with an error of its own
            if is_random(function) or getattr(function, "__name__", "").startswith(
                ("masked_select", "nonzero", "unique")
            ):
                return torch.empty(0, device="meta")
            self._refuse(function, "reads values of", error)
        finally:
            self.tracer._switching = False

    def _refuse(self, function: Any, action: str, cause: Exception | None = None) -> Any:
        name = getattr(function, "__name__", str(function))
        line = current_source_line()
        raise TraceError(
            f"cannot trace through {name}(){f' at {line}' if line else ''}: it {action} a tensor that belongs to the model or "
            "comes from outside the traced function, and what it found would be baked into the program; "
            "use tensor operations, make the value a Python attribute before tracing, "
            "or keep the surrounding module or function as a leaf (Tracer.is_leaf_module, torchgraft.wrap)"
        ) from cause


def is_random(function: Any) -> bool:
    """Whether a torch function draws random numbers, by the tags of the operators it is named after."""
    result = _random_functions.get(function)
    if result is None:
        result = _random_functions[function] = _operators_draw(getattr(function, "__name__", ""))
    return result


def _operators_draw(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None) if name and not name.startswith("__") else None
    if packet is None or not hasattr(packet, "overloads"):
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, slice):
        yield from _tensors((value.start, value.stop, value.step))
