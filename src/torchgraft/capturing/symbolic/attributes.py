"""What becomes of tensors, modules and other objects of a model that a traced call takes: fetches of attributes, and constants.
Plain values and containers are the business of `tracer_base.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.capturing.refusals import in_lines
from torchgraft.capturing.symbolic.proxy import Proxy, _proxyable_classes
from torchgraft.capturing.tracer_base import TracerBase
from torchgraft.errors import TraceError, UnknownModuleError
from torchgraft.ir.arguments import immutable_dict, immutable_list
from torchgraft.ir.node import Argument, Node
from torchgraft.ir.origin import current_source_line
from torchgraft.ir.structures import Template, put_together, take_apart

if TYPE_CHECKING:
    from torchgraft.capturing.symbolic.recording import RecordingMode

# What the base class makes an argument of, without losing what they are.
_KNOWN_CONTAINERS = frozenset({
    dict, OrderedDict, defaultdict, immutable_dict, list, immutable_list, tuple, torch.Size,
})  # fmt: skip


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            yield cell.cell_contents


class ModelAttributes(TracerBase):
    """Knows what belongs to the traced model, and where."""

    root: torch.nn.Module
    submodule_paths: dict[torch.nn.Module, str] | None
    _mode: RecordingMode | None
    _function: Any

    def _functions(self) -> list[FunctionType]:
        raise NotImplementedError

    def _forget_attributes(self) -> None:
        self._constant_names: dict[int, str] = {}
        self._qualname_counter: dict[str, int] = defaultdict(int)
        for name in ("_parameter_paths", "_buffer_paths", "tensor_attrs"):
            self.__dict__.pop(name, None)

    def get_fresh_qualname(self, prefix: str) -> str:
        """A name for a constant that neither the model nor the trace uses."""
        while True:
            name = f"{prefix}{self._qualname_counter[prefix]}"
            self._qualname_counter[prefix] += 1
            if not hasattr(self.root, name) and name not in self.graph._constants:
                return name

    def _create_unusual_arg(self, a: Any) -> Argument:
        """Tensors and modules become fetches of attributes."""
        cls = type(a)
        if isinstance(a, torch.Tensor):
            return self._tensor_argument(a)
        if isinstance(a, torch.nn.Module):
            path = (self.submodule_paths or {}).get(a)
            if path is None:
                return self._constant("_module_constant", a)
            return self.create_node("get_attr", path, (), {})
        if isinstance(a, torch.Generator):
            return self._generator(a)
        if isinstance(a, torch.ScriptObject):
            return self._constant("_torchbind_obj", a)
        if cls in _proxyable_classes:
            return self._constant(f"_{cls.__name__}_constant_", a)
        if isinstance(a, tuple) and hasattr(a, "_fields"):
            return self.create_node("call_function", cls, tuple([self.create_arg(item) for item in a]), {})
        if isinstance(a, (dict, list, tuple)) and cls not in _KNOWN_CONTAINERS:
            template, parts = take_apart(
                a, lambda part: isinstance(part, torch.Tensor) or issubclass(type(part), Proxy)
            )
            if parts or isinstance(a, dict):
                arguments = (
                    self._constant("_template", Template(template)),
                    *[self.create_arg(part) for part in parts],
                )
                return self.create_node("call_function", put_together, arguments, {})
        return super()._create_unusual_arg(a)

    def _path_of_tensor(self, tensor: torch.Tensor) -> str | None:
        """The dotted path of a tensor that belongs to the model."""
        key = id(tensor)
        return self._parameter_paths.get(key) or self._buffer_paths.get(key) or self.tensor_attrs.get(tensor)

    def _generator(self, generator: torch.Generator) -> Node:
        for prefix, module in self.root.named_modules():
            for name, value in vars(module).items():
                if value is generator:
                    return self.create_node("get_attr", f"{prefix}.{name}" if prefix else name, (), {})
        if any(item is generator for item in self._kept_outside()):
            return self._constant("_generator", generator)
        raise TraceError(
            in_lines(
                "cannot trace a draw with a torch.Generator that is no attribute of the model",
                current_source_line(),
                "whether it is made anew in every run is not known",
                "keep it as an attribute of the model",
            )
        )

    def _kept_outside(self) -> Iterator[Any]:
        """What was there before the trace, as far as it can be found: attributes of the model, and variables around the traced
        functions, and what is in those. The rest was made by the trace."""
        pending: list[Any] = [value for module in self.root.modules() for value in vars(module).values()]
        of_model = set(map(id, pending))
        pending += [value for cls in map(type, self.root.modules()) for value in vars(cls).values()]
        for function in self._functions():
            pending += function.__globals__.values()
            pending += _closed_over(function)
        seen: set[int] = set()
        while pending:
            value = pending.pop()
            yield value
            if isinstance(value, (dict, list, tuple)) and id(value) not in seen:
                seen.add(id(value))
                pending += list(value.values() if isinstance(value, dict) else value)
            elif (
                id(value) in of_model and hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, type))
            ):
                pending.append(vars(value))  # an object that the model keeps

    def _ids_of_tensors_outside(self) -> frozenset[int]:
        return frozenset([id(value) for value in self._kept_outside() if isinstance(value, torch.Tensor)])

    def _tensor_argument(self, tensor: torch.Tensor) -> Node:
        made = self._mode.values.node_of(tensor) if self._mode is not None else None
        if made is not None:
            return made
        path = self._path_of_tensor(tensor)
        if path is not None:
            return self.create_node("get_attr", path, (), {})
        if isinstance(tensor, torch.nn.Parameter):
            what = "parameter is not a member of this module: a Parameter that the traced model does not own was used"
            fix = "assign it to an attribute of the model before tracing"
            raise UnknownModuleError(in_lines(what, current_source_line(), fix))
        return self._constant("_tensor_constant", tensor)

    def _constant(self, prefix: str, value: Any) -> Node:
        name = self._constant_names.get(id(value))
        if name is None:
            name = self._constant_names[id(value)] = self.get_fresh_qualname(prefix)
            self.graph._constants[name] = value
        return self.create_node("get_attr", name, (), {})

    @functools.cached_property
    def _parameter_paths(self) -> dict[int, str]:
        return {id(value): name for name, value in reversed(list(self.root.named_parameters(remove_duplicate=False)))}

    @functools.cached_property
    def _buffer_paths(self) -> dict[int, str]:
        return {id(value): name for name, value in reversed(list(self.root.named_buffers(remove_duplicate=False)))}

    @functools.cached_property
    def tensor_attrs(self) -> dict[Any, str]:
        """Tensors and script objects that are plain attributes of the model's modules, with their paths."""
        result = {}
        for prefix, module in self.root.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, (torch.Tensor, torch.ScriptObject)):
                    result[value] = f"{prefix}.{name}" if prefix else name
        return result
