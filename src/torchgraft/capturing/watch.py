"""The watched run: a model runs once on example inputs, for real, and every torch call it makes is written down.
Numbers that Python reads out of tensors either flow on symbolically (`sizes.py`) or become guards. What starts a run, and what is
done with its graph, is in `program.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchgraft.capturing.active import active
from torchgraft.capturing.model_state import ModelState
from torchgraft.capturing.module_patches import ModuleForward, TrainingFlag, read_attribute
from torchgraft.capturing.sizes import SymbolicNumber, unwrapped, wrapped
from torchgraft.capturing.tensors import has_tensor, tensors_in
from torchgraft.capturing.tracer_base import TracerBase
from torchgraft.errors import TraceError
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import check_training, check_value
from torchgraft.ir.node import Argument, Node
from torchgraft.ir.origin import current_source_line

_MARK = "_torchgraft_value"
# Properties that say nothing about what a program computes.
_UNGUARDED = frozenset(
    {"device", "grad_fn", "grad", "_version", "_backward_hooks", "names", "_base", "output_nr", "is_leaf"}
)
# Calls whose result is for people to read.
_FOR_PEOPLE = frozenset(
    {"__repr__", "__str__", "__format__", "data_ptr", "__hash__", "register_hook", "untyped_storage"}
)
_TO_NUMBER = frozenset({"__bool__", "__int__", "__float__", "__index__", "__complex__"})
_LEAVES_TORCH = frozenset(
    {"numpy", "__array__", "__array_wrap__", "storage", "__dlpack__", "share_memory_", "pin_memory"}
)


class KeepWhole(Exception):
    """A module does something that cannot be written down; capture is tried again with it as one call."""

    def __init__(self, module: torch.nn.Module | None, reason: str) -> None:
        super().__init__(reason)
        self.module = module
        self.reason = reason


class WatchingMode(TorchFunctionMode):
    """Hands every torch call to the watcher."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.watcher._switching or active.tracer is not self.watcher:
            return function(*args, **(kwargs or {}))
        return self.watcher.call(function, args, kwargs or {})


class Watcher(TracerBase):
    """Writes down one run of a model."""

    _runs_for_real = True

    def __init__(
        self, root: torch.nn.Module, is_leaf: Callable[[torch.nn.Module, str], bool], sizes_are_symbolic: bool = True
    ) -> None:
        self.graph = Graph()
        self.root = root
        self.paths = {module: path for path, module in root.named_modules()}
        self.state = ModelState(self.paths)
        self.sizes_are_symbolic = sizes_are_symbolic
        self._is_leaf = is_leaf
        self._switching = False
        self._open_contexts: list[Any] = []
        self._modules: list[torch.nn.Module] = [root]
        # Tensors from outside the run, by identity: the tensor itself (so that the identity stays its own) and its node.
        self._outside: dict[int, tuple[torch.Tensor, Node]] = {}
        self._names = {id(value): name for name, value in root.named_parameters(remove_duplicate=False)}
        self._names.update({id(value): name for name, value in root.named_buffers(remove_duplicate=False)})
        self._numbers: dict[tuple[Node, Any], SymbolicNumber] = {}
        self._guarded: set[Any] = set()
        self._devices: dict[int, tuple[torch.device, torch.Tensor]] = {}
        self._constants: dict[int, tuple[Any, Node]] = {}

    # ---- tensors and nodes ----

    def node_of(self, tensor: torch.Tensor) -> Node:
        """The node whose value a tensor is."""
        mark = tensor.__dict__.get(_MARK) if hasattr(tensor, "__dict__") else None
        if mark is not None and mark[0] is self:
            if not isinstance(mark[1], Node):
                mark = (self, mark[1]())
                tensor.__dict__[_MARK] = mark
            return mark[1]
        known = self._outside.get(id(tensor))
        if known is None:
            known = self._outside[id(tensor)] = (tensor, self._fetch(tensor))
        return known[1]

    def _fetch(self, tensor: torch.Tensor) -> Node:
        name = self._names.get(id(tensor))
        if name is not None:
            return self.create_node("get_attr", name, (), {})
        if tensor.grad_fn is not None or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise KeepWhole(self._modules[-1], f"a tensor was made in a way that cannot be watched{_at()}")
        return self._constant("_tensor_constant", tensor)

    def _constant(self, prefix: str, value: Any) -> Node:
        known = self._constants.get(id(value))
        if known is None:
            number = len(self.graph._constants)
            while hasattr(self.root, f"{prefix}{number}"):
                number += 1
            self.graph._constants[f"{prefix}{number}"] = value
            known = self._constants[id(value)] = (value, self.create_node("get_attr", f"{prefix}{number}", (), {}))
        return known[1]

    def add_input(self, tensor: torch.Tensor, node: Node) -> None:
        """Say that an input of the model is the value of a placeholder."""
        self._outside[id(tensor)] = (tensor, node)

    def _is_static(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the same size in every run: parameters, buffers and constants."""
        mark = tensor.__dict__.get(_MARK)
        if mark is not None and mark[0] is self:
            return False
        known = self._outside.get(id(tensor))
        return known is None or known[1]._op != "placeholder"

    def register(self, result: Any, node: Node | Callable[[], Node], given: dict[int, int]) -> Any:
        """Note that a result is the value of a node; containers are taken apart when a part is used.

        `given` has the version of every tensor the call received. A call that hands one of them through unchanged is not
        the same as no call (dropout in evaluation mode), so its result gets an identity of its own.
        """
        if isinstance(result, torch.Tensor):
            if id(result) in given and given[id(result)] == result._version:
                result = result.view_as(result)
            if id(result) in self._outside:
                self._outside[id(result)] = (result, node if isinstance(node, Node) else node())
            else:
                result.__dict__[_MARK] = (self, node)
            return result
        if isinstance(result, (tuple, list)):
            items = [self.register(item, self._part(node, index), given) for index, item in enumerate(result)]
            if all(new is old for new, old in zip(items, result, strict=True)):
                return result
            return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
        if isinstance(result, dict):
            for key, item in result.items():
                new = self.register(item, self._part(node, key), given)
                if new is not item:
                    result[key] = new
        return result

    def _part(self, node: Node | Callable[[], Node], key: Any) -> Callable[[], Node]:
        made: list[Node] = []

        def make() -> Node:
            if not made:
                whole = node if isinstance(node, Node) else node()
                made.append(self.create_node("call_function", operator.getitem, (whole, key), {}))
            return made[0]

        return make

    # ---- calls ----

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch call and write it down."""
        name = getattr(function, "__name__", "")
        if name == "__get__":
            return self._read(args[0], function.__self__.__name__)
        if args and isinstance(args[0], torch.Tensor):
            special = _SPECIAL.get(name)
            if special is not None:
                return special(self, function, args, kwargs)
        real_args, real_kwargs = concrete(args), concrete(kwargs)
        if name in _LEAVES_TORCH:
            raise KeepWhole(self._modules[-1], f"{name}() takes a tensor out of torch{_at()}")
        if name == "_set_grad_enabled":
            self.create_node("call_function", function, real_args, real_kwargs)
            return function(*real_args, **real_kwargs)
        given = _versions((real_args, real_kwargs))
        result = function(*real_args, **real_kwargs)
        if name in _FOR_PEOPLE:
            return result
        return self._write_down(function, name, args, kwargs, given, result)

    def _write_down(self, function: Any, name: str, args: Any, kwargs: Any, given: dict[int, int], result: Any) -> Any:
        if has_tensor(result):
            return self.register(result, self._record(function, args, kwargs), given)
        if given:
            node = self._record(function, args, kwargs)
            if result is not None:
                self._guard(node, result, f"{name}() of a tensor")
        return result

    def _record(self, function: Any, args: Any, kwargs: Any) -> Node:
        lowered = self.create_arg(tuple(args)), self.create_arg(dict(kwargs)) if kwargs else {}
        plain = _OPERATORS.get(function.__name__) if not kwargs else None
        if plain is not None and len(args) == plain[1] and isinstance(args[0], torch.Tensor):
            return self.create_node("call_function", plain[0], *lowered)
        if torch.overrides.is_tensor_method_or_property(function):
            return self.create_node("call_method", function.__name__, *lowered)
        return self.create_node("call_function", function, *lowered)

    def _read(self, tensor: Any, name: str) -> Any:
        """A property of a tensor."""
        if name == "shape":
            return self._size(tensor)
        result = getattr(tensor, name)
        if isinstance(result, torch.Tensor):
            node = self.create_node("call_function", getattr, (self.node_of(tensor), name), {})
            return self.register(result, node, {})
        if name == "device":
            self._devices[id(result)] = (result, tensor)
        elif name not in _UNGUARDED:
            self._guard_fact(tensor, name, result)
        return result

    def _guard_fact(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        node = self.node_of(tensor)
        if (node, name) not in self._guarded:
            self._guarded.add((node, name))
            fact = self.create_node("call_function", getattr, (node, name), {})
            self._guard(fact, value, f"{name} of '{node.name}'")

    def _guard(self, node: Any, expected: Any, condition: str) -> None:
        where = str(current_source_line() or "an unknown line")
        self.create_node("call_function", check_value, (node, self.create_arg(expected), condition, where), {})

    def call_leaf(
        self, target: Any, function: Callable[..., Any], args: Any, kwargs: Any, name: str | None = None
    ) -> Any:
        """Run a function without looking inside, and write it down as one call."""
        if self._switching or not has_tensor((args, kwargs)):
            return function(*args, **kwargs)
        lowered = self.create_arg(tuple(args)), self.create_arg(dict(kwargs)) if kwargs else {}
        node = self.create_node("call_function", target, *lowered, name)
        return self.unwatched(self._run_leaf, function, node, concrete(args), concrete(kwargs))

    def call_random(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of Python's random numbers or of torch's random state, which gives something else each time."""
        if self._switching:
            return function(*args, **kwargs)
        result = self.unwatched(function, *concrete(args), **concrete(kwargs))
        node = self.create_node("call_function", function, self.create_arg(tuple(args)), self.create_arg(dict(kwargs)))
        if isinstance(result, torch.Tensor):
            return self.unwatched(self.register, result, node, {})
        if isinstance(result, (int, float)):
            return wrapped(SymbolicNumber(self, result, lambda: node, f"{function.__name__}()"))
        return result

    # ---- numbers ----

    def number(self, node: Node, key: Any, value: Any, make: Callable[[], Node], description: str) -> Any:
        """A number read out of a tensor, as the model sees it."""
        if not self.sizes_are_symbolic:
            symbol = SymbolicNumber(self, value, make, description)
            self.guard_number(symbol)
            return value
        known = self._numbers.get((node, key))
        if known is None:
            known = self._numbers[node, key] = SymbolicNumber(self, value, make, description)
        return wrapped(known)

    def guard_number(self, number: SymbolicNumber) -> None:
        """Python asked for the plain value: from here on the program is right only for this one."""
        node = number.argument()
        if isinstance(node, Node) and (node, "value") not in self._guarded:
            self._guarded.add((node, "value"))
            self._guard(node, number.value, str(number))

    def _size(self, tensor: torch.Tensor) -> torch.Size:
        if self._is_static(tensor):
            return tensor.size()
        return torch.Size([self._dimension(tensor, index) for index in range(tensor.dim())])

    def _dimension(self, tensor: torch.Tensor, index: int) -> Any:
        node = self.node_of(tensor)
        return self.number(
            node,
            index,
            tensor.size(index),
            lambda: self.create_node("call_method", "size", (node, index), {}),
            f"{node.name}.size({index})",
        )

    def _call_size(self, function: Any, args: Any, kwargs: Any) -> Any:
        sizes = self._size(args[0])
        dimension = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return sizes if dimension is None else sizes[int(dimension)]

    def _call_len(self, function: Any, args: Any, kwargs: Any) -> int:
        return int(self._size(args[0])[0])

    def _call_numel(self, function: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if self._is_static(tensor):
            return tensor.numel()
        node = self.node_of(tensor)
        make = lambda: self.create_node("call_method", "numel", (node,), {})  # noqa: E731
        return self.number(node, "numel", tensor.numel(), make, f"{node.name}.numel()")

    def _call_dim(self, function: Any, args: Any, kwargs: Any) -> int:
        tensor = args[0]
        if not self._is_static(tensor):
            self._guard_fact(tensor, "ndim", tensor.dim())
        return tensor.dim()

    def _call_item(self, function: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        value = tensor.item()
        if tensor.device.type == "meta":
            raise KeepWhole(self._modules[-1], f"the value of a tensor without data was read{_at()}")
        node = self.node_of(tensor)
        make = lambda: self.create_node("call_method", "item", (node,), {})  # noqa: E731
        if isinstance(value, complex):
            self._guard(make(), value, f"{node.name}.item()")
            return value
        return self.number(node, ("item", tensor._version), value, make, f"{node.name}.item()")

    def _call_number(self, function: Any, args: Any, kwargs: Any) -> Any:
        number = self._call_item(function, args, kwargs)
        symbol = unwrapped(number)
        return function(args[0]) if symbol is None else function(torch.tensor(symbol._decide()))

    # ---- arguments ----

    def create_arg(self, a: Any) -> Argument:
        """Turn a value of the run into an argument."""
        if isinstance(a, torch.Tensor):
            return self.node_of(a)
        number = unwrapped(a)
        if number is not None:
            return number.argument()
        if isinstance(a, torch.device) and id(a) in self._devices:
            node = self.node_of(self._devices[id(a)][1])
            return self.create_node("call_function", getattr, (node, "device"), {})
        if isinstance(a, torch.nn.Module) and a in self.paths:
            return self.create_node("get_attr", self.paths[a], (), {})
        try:
            return super().create_arg(a)
        except NotImplementedError:
            return self._constant("_object_constant", a)

    # ---- modules; the patches of nn.Module ask here ----

    def _call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return self.call_module(module, ModuleForward(module, self), args, kwargs)

    def call_module(self, m: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module; a leaf is written down as one call, any other by what it does."""
        path = self.paths.get(m)
        if path is None or self._switching:
            return forward(*args, **kwargs)
        outer = self._scope_chain
        self._scope_chain = (outer, path, path, type(m))
        self._modules.append(m)
        try:
            if not self._is_leaf(m, path) and not _has_hooks(m) and not isinstance(m, torch.jit.ScriptModule):
                return forward(*args, **kwargs)
            node_arguments = self.create_arg(tuple(args)), self.create_arg(dict(kwargs)) if kwargs else {}
            node = self.create_node("call_module", path, *node_arguments)
            return self.unwatched(self._run_leaf, forward, node, concrete(args), concrete(kwargs))
        finally:
            self._modules.pop()
            self._scope_chain = outer

    def _run_leaf(self, forward: Callable[..., Any], node: Node, args: Any, kwargs: Any) -> Any:
        given = _versions((args, kwargs))
        return self.register(forward(*args, **kwargs), node, given)

    def unwatched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run something without writing it down."""
        previous = active.tracer, self._switching
        active.tracer, self._switching = None, True
        try:
            return function(*args, **kwargs)
        finally:
            active.tracer, self._switching = previous

    def _enter_module(self, module: torch.nn.Module) -> None:
        self.state.watch(module)

    def _read_attribute(self, module: torch.nn.Module, name: str) -> Any:
        return read_attribute(module, name)

    def _is_written_in_place(self, module: torch.nn.Module, name: str, value: Any) -> bool:
        return False  # the value is the buffer itself, and that is no change

    def _before_write(self, module: torch.nn.Module, name: str, value: Any) -> None:
        if self._switching:
            return
        try:
            self.state.before_write(module, name, value, self)
        except TraceError as error:
            raise KeepWhole(module, str(error)) from error

    def _training_decides(self, module: torch.nn.Module) -> bool:
        value = module.__dict__["training"]
        if module in self.paths and (module, "training") not in self._guarded:
            self._guarded.add((module, "training"))
            where = str(current_source_line() or type(module).__name__)
            self.create_node("call_function", check_training, (self._training_node(module), value, where), {})
        return value

    def _training_node(self, module: torch.nn.Module) -> Node:
        path = self.paths[module]
        return self.create_node("get_attr", f"{path}.training" if path else "training", (), {})


# How torch names the methods behind Python's operators, which read better in a program; with the number of operands.
_OPERATORS: dict[str, tuple[Callable[..., Any], int]] = {
    **{
        name: (getattr(operator, name), 2)
        for name in ("add", "sub", "mul", "matmul", "pow", "eq", "ne", "lt", "le", "gt", "ge")
    },
    **{f"__{name}__": (getattr(operator, name), 2) for name in ("eq", "ne", "lt", "le", "gt", "ge", "getitem", "xor")},
    "div": (operator.truediv, 2),
    "neg": (operator.neg, 1),
    "bitwise_not": (operator.invert, 1),
    "__and__": (operator.and_, 2),
    "__or__": (operator.or_, 2),
    "__setitem__": (operator.setitem, 3),
}

_SPECIAL: dict[str, Any] = {
    "size": Watcher._call_size,
    "__len__": Watcher._call_len,
    "numel": Watcher._call_numel,
    "nelement": Watcher._call_numel,
    "dim": Watcher._call_dim,
    "ndimension": Watcher._call_dim,
    "item": Watcher._call_item,
    **dict.fromkeys(_TO_NUMBER, Watcher._call_number),
}


def _at() -> str:
    line = current_source_line()
    return f" at {line}" if line else ""


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def concrete(value: Any) -> Any:
    """The same value with plain numbers in the place of symbolic ones."""
    cls = type(value)
    if cls is torch.Tensor or cls is int or cls is str or cls is bool or value is None:
        return value
    number = unwrapped(value)
    if number is not None:
        return number.value
    if isinstance(value, TrainingFlag):
        return value._module.__dict__["training"]
    if isinstance(value, torch.Size):
        return torch.Size([concrete(item) for item in value])
    if cls is tuple or cls is list:
        return cls([concrete(item) for item in value])
    if cls is dict:
        return {key: concrete(item) for key, item in value.items()}
    if cls is slice:
        return slice(concrete(value.start), concrete(value.stop), concrete(value.step))
    return value


def _versions(value: Any) -> dict[int, int]:
    return {id(tensor): 0 if tensor.is_inference() else tensor._version for tensor in tensors_in(value)}
