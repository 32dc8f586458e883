"""torch.fx's experimental.meta_tracer: a symbolic trace in which values know their shape, from tensors on the meta device.
A capture on example inputs, in which sizes stay open, is `torchgraft.capture`.

What is asked of a shape or a dtype is a number in the trace, so the program checks that its inputs have those it was traced for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchgraft.capturing.patching.active import active
from torchgraft.capturing.symbolic.proxy import Attribute, Proxy
from torchgraft.capturing.symbolic.tracer import Tracer
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import TraceError
from torchgraft.ir.arguments import map_aggregate
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import check_value
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute

__all__ = ["MetaAttribute", "MetaDeviceAttribute", "MetaProxy", "MetaTracer", "proxys_to_metas", "symbolic_trace"]


class MetaProxy(Proxy):
    """A traced value that answers for its shape and dtype where these are known."""

    def install_tensor_meta(self, tensor_meta: Any) -> None:
        """Let this value look like `tensor_meta`."""
        self.__dict__["_tensor_meta"] = tensor_meta

    def _known(self) -> Any:
        found = self.__dict__.get("_tensor_meta")
        if found is not None:
            vars(self.tracer)["_has_answered"] = True
        return found

    def size(self, dim: int | None = None) -> Any:
        """The size, as plain numbers if it is known."""
        wanted = () if dim is None else (dim,)
        found = self._known()
        if found is not None:
            return found.size(*wanted)
        return self.tracer.create_proxy("call_method", "size", (self, *wanted), {})

    def dim(self) -> Any:
        """The number of dimensions, if it is known."""
        found = self._known()
        return self.tracer.create_proxy("call_method", "dim", (self,), {}) if found is None else found.dim()

    @property
    def shape(self) -> Any:
        """The shape, if it is known."""
        found = self._known()
        return self.tracer.create_proxy("call_function", getattr, (self, "shape"), {}) if found is None else found.shape

    @property
    def dtype(self) -> Any:
        """The dtype, if it is known."""
        found = self._known()
        return self.tracer.create_proxy("call_function", getattr, (self, "dtype"), {}) if found is None else found.dtype

    @property
    def device(self) -> Any:
        """Never that of the meta tensor: it is asked when the program runs."""
        return MetaDeviceAttribute(self, "device")

    def __getattr__(self, k: str) -> Any:
        return MetaAttribute(self, k)


class MetaAttribute(Attribute, MetaProxy):
    """An attribute of such a value, which becomes a node when it is not called."""


class MetaDeviceAttribute(MetaAttribute):
    """The device of such a value."""


def proxys_to_metas(v: Any) -> Any:
    """What stands for a value while shapes are worked out: its meta tensor, "meta" for a device."""
    if isinstance(v, MetaDeviceAttribute):
        return "meta"
    if isinstance(v, Proxy):
        found = v.__dict__.get("_tensor_meta")
        if found is None:
            raise TraceError(
                f"MetaProxy does not have an associated meta\n  of the value '{v.node.name}' no shape is known"
            )
        return found
    return v.to("meta") if isinstance(v, torch.Tensor) else v


class MetaTracer(Tracer):
    """Traces with `meta_args`, tensors on the meta device by the names of inputs; works out the shapes of what follows."""

    allow_insert_stateless_mods: bool = True
    meta_args: dict[str, torch.Tensor]
    _has_answered = False

    def proxy(self, node: Node) -> MetaProxy:
        """A value that knows its shape."""
        return MetaProxy(node, self)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Callable[[Node], Proxy] | None = None,
    ) -> Any:
        """The new value, with what is known of it."""
        value = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        if kind == "placeholder":
            found = self.meta_args.get(target)
        else:
            found = self._shape_of(kind, target, args, kwargs)
        if isinstance(found, torch.Tensor) and isinstance(value, MetaProxy):
            value.install_tensor_meta(found)
        return value

    def _shape_of(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        """What a call returns on meta tensors, where it runs on them; it is none of the model's calls, so nobody is tracing."""
        before, active.tracer = active.tracer, None
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                return self._on_meta(kind, target, *map_aggregate((args, kwargs), proxys_to_metas))
        except Exception:  # any call may be made, on anything
            return None
        finally:
            active.tracer = before

    def _on_meta(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        if kind == "call_function":
            return target(*args, **({**kwargs, "device": "meta"} if "device" in kwargs else kwargs))
        if kind == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if kind == "get_attr":
            return find_attribute(self.root, target)[0].to("meta")
        if kind == "call_module":
            module = self.root.get_submodule(target)
            state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            on_meta = {name: tensor.to("meta") for name, tensor in state.items()}
            return torch.func.functional_call(module, on_meta, args, kwargs)
        return None

    def path_of_module(self, mod: torch.nn.Module) -> str:
        """The path of a module; one without state that forward made is put into the model."""
        try:
            return super().path_of_module(mod)
        except NameError:
            if not self.allow_insert_stateless_mods or [*mod.parameters(), *mod.buffers()]:
                raise
        number, name = 0, type(mod).__name__.lower()
        while hasattr(self.root, f"{name}_{number}"):
            number += 1
        self.root.add_module(f"{name}_{number}", mod)
        return f"{name}_{number}"

    def trace(self, root: Any, meta_args: dict[str, torch.Tensor], concrete_args: Any = None) -> Graph:  # type: ignore[override]
        """The graph of `root` for inputs that look like `meta_args`."""
        if not isinstance(meta_args, dict):
            raise TypeError(f"Expected dict for meta_args, got {type(meta_args)}")
        self.meta_args = meta_args
        self._has_answered = False
        graph = super().trace(root, concrete_args)
        if self._has_answered:
            self._check_inputs(graph)
        graph._tracer_extras = {"meta_args": meta_args}
        return graph

    def _check_inputs(self, graph: Graph) -> None:
        """Have the program check what the trace was told of its inputs."""
        inputs = graph.find_nodes(op="placeholder")
        with graph.inserting_before(inputs[-1].next):
            for node in inputs:
                for attribute in ("shape", "dtype") if node.target in self.meta_args else ():
                    expected = getattr(self.meta_args[node.target], attribute)
                    found = graph.call_function(getattr, (node, attribute))
                    plain = tuple(expected) if attribute == "shape" else expected
                    where = "the inputs of the trace"
                    graph.call_function(check_value, (found, plain, f"{node.name}.{attribute}", where))


def symbolic_trace(
    root: Any, meta_args: dict[str, torch.Tensor] | None = None, concrete_args: dict[str, Any] | None = None
) -> GraphModule:
    """A program traced for inputs that look like `meta_args`.

    >>> def function(x):
    ...     return x.view(x.size(0), -1) if x.dim() > 2 else x
    >>> program = symbolic_trace(function, {"x": torch.ones(2, 3, 4, device="meta")})
    >>> program(torch.ones(2, 3, 4)).shape
    torch.Size([2, 12])
    """
    tracer = MetaTracer()
    graph = tracer.trace(root, meta_args or {}, concrete_args)
    name = type(root).__name__ if isinstance(root, torch.nn.Module) else getattr(root, "__name__", "function")
    return GraphModule(tracer.root, graph, name)
