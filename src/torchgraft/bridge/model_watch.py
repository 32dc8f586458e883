"""What torch's own tracers lose without a word: attributes that a forward writes, gradients of functions with a backward of their
own, and reads of the mode. Found by looking at the model before and after its run; what it does meanwhile is in `run_watch.py`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.capturing.outside_state import OutsideState
from torchgraft.capturing.pictures import is_equal

_CONTAINERS = (list, dict, set)
# The tables that every module has: hooks, parameters, buffers, submodules. Tracers look after those themselves.
_TABLES = frozenset(vars(torch.nn.Module())) - {"training"}


class AttributeWatch:
    """The Python attributes of a model, one level deep into lists, dicts and sets, to be compared and put back.

    >>> model = torch.nn.Module()
    >>> model.count = 0
    >>> watch = AttributeWatch(model)
    >>> model.count += 1
    >>> watch.restore(), model.count
    (['self.count'], 0)
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._attributes = [(path, module, dict(vars(module))) for path, module in model.named_modules()]
        self._contents = [
            (_dotted(path, name), value, value.copy())
            for path, module, before in self._attributes
            for name, value in before.items()
            if type(value) in _CONTAINERS and name not in _TABLES and not keeps_notes(module)
        ]
        self._children = [(path, module._modules, dict(module._modules)) for path, module in model.named_modules()]

    def restore(self) -> list[str]:
        """Put every attribute back and name those that had changed.

        The modules of torch keep notes of their own (an LSTM its weights as a list), which mean nothing to the model.
        """
        changed = []
        for path, module, before in self._attributes:
            now = vars(module)
            own = keeps_notes(module)
            for name in (now.keys() | before.keys()) - _TABLES:
                if name not in now or name not in before or not is_equal(now[name], before[name]):
                    if not own or (isinstance(now.get(name), _SETTINGS) and name != "training"):
                        changed.append(_dotted(path, name))
                    if name in before:
                        now[name] = before[name]
                    else:
                        del now[name]
        for name, container, content in self._contents:
            if not _same_content(container, content):
                changed.append(name)
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
        for path, table, children in self._children:
            if list(table) != list(children) or not all(table[name] is child for name, child in children.items()):
                changed.append(_dotted(path, "_modules"))
                table.clear()
                table.update(children)
        return sorted(set(changed))


class OutsideWatch:
    """What a model keeps outside of its own attributes, and objects among those: to be compared and put back.

    >>> calls = []
    >>> watch = OutsideWatch(torch.nn.Module(), lambda x: calls.append(x))
    >>> calls.append(1)
    >>> len(watch.restore()), calls
    (1, [])
    """

    def __init__(self, model: torch.nn.Module, function: Callable[..., Any]) -> None:
        self._outside = OutsideState(lambda value: False)
        self._outside.watch_function(function)
        self._outside.watch_function(inspect.unwrap(function))
        known = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        for module in model.modules():
            self._outside.watch_class(type(module))
            if not keeps_notes(module):
                own = {name: value for name, value in vars(module).items() if name not in _TABLES and name != "forward"}
                known |= {id(tensor) for tensor in _tensors(own)}
                for name, value in own.items():
                    self._outside.watch_object(f"self.{name}", value)
        hidden = [tensor for module in self._outside.modules for tensor in module.parameters()]
        self._tensors = [tensor for tensor in (*self._outside.tensors, *hidden) if id(tensor) not in known]
        self._copies = [(tensor, tensor._version, tensor.detach().clone()) for tensor in self._tensors]
        self._memos = [(function, function.cache_info().misses) for function in self._outside.memos]

    @property
    def recovers(self) -> bool:
        """Whether the model goes on after some error of torch's."""
        return self._outside.recovers

    def hidden_parameter(self) -> torch.Tensor | None:
        """A tensor that wants a gradient and is none of the model's parameters: it would be a constant."""
        return next((tensor for tensor in self._tensors if tensor.requires_grad), None)

    def restore(self) -> list[str]:
        """Put everything back and name what had changed."""
        for function, misses in self._memos:
            if function.cache_info().misses != misses:
                function.cache_clear()  # what was remembered may be a tensor of the tracer's
        changed = self._outside.restore()
        names = [] if changed is None else [changed[0]]
        for tensor, version, saved in self._copies:
            if tensor._version != version:
                names.append("a tensor outside of the model")
                with torch.no_grad():
                    tensor.copy_(saved)
        return names


def forward_of(model: torch.nn.Module) -> Callable[..., Any]:
    """The function that a call of a model runs: one of its own, or that of its class."""
    return vars(model).get("forward") or type(model).forward


_SETTINGS = (int, float, bool, str)


def keeps_notes(module: torch.nn.Module) -> bool:
    """Whether a module is torch's own, whose attributes mean nothing to the model."""
    return type(module).__module__.startswith("torch.nn.") and type(module) is not torch.nn.Module


def _dotted(path: str, name: str) -> str:
    return ".".join(filter(None, ["self", path, name]))


def _same_content(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if isinstance(container, set):
        return container == content
    if isinstance(container, list):
        return all(map(is_equal, container, content))
    return all(key in content and is_equal(value, content[key]) for key, value in container.items())


class PlainTensors:
    """The tensors of a model that are no parameters and no buffers: torch.export runs writes to them for real."""

    def __init__(self, model: torch.nn.Module) -> None:
        known = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self._copies = [
            (tensor, tensor._version, tensor.detach().clone())
            for module in model.modules()
            for tensor in _tensors(vars(module))
            if id(tensor) not in known
        ]

    def restore(self) -> None:
        """Undo writes."""
        for tensor, version, saved in self._copies:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(saved)


def _tensors(attributes: dict[str, Any]) -> Iterator[torch.Tensor]:
    for name, value in attributes.items():
        if name in _TABLES:
            continue
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        yield from [item for item in values if isinstance(item, torch.Tensor)]


# ---- gradients ----


def custom_gradient(result: Any) -> str | None:
    """The name of a torch.autograd.Function (or of a module's backward hook) that the gradient of `result` goes through.

    >>> class Scale(torch.autograd.Function):
    ...     forward = staticmethod(lambda ctx, x: x.clone())
    ...     backward = staticmethod(lambda ctx, gradient: gradient * 3)
    >>> x = torch.ones(2, requires_grad=True)
    >>> custom_gradient({"y": Scale.apply(x) + 1}), custom_gradient(x + 1)
    ('Scale', None)
    """
    for function in _history(result):
        if isinstance(function, torch.autograd.function.BackwardCFunction) and not _is_operator(function):
            return type(function).__name__.removesuffix("Backward")
    return None


def unknown_leaf(result: Any, known: list[torch.Tensor]) -> bool:
    """Whether the gradient of `result` goes to a tensor that is none of those known: one that the model made on its way.

    >>> x, made = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> unknown_leaf([x * 2], [x]), unknown_leaf([x * made], [x])
    (False, True)
    """
    places = {id(tensor) for tensor in known}
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    targets = [function.variable for function in _history(result) if hasattr(function, "variable")]
    made = [leaf for leaf in leaves if leaf.requires_grad and leaf.is_leaf]
    return any(id(tensor) not in places for tensor in (*targets, *made))


def _history(result: Any) -> Iterator[Any]:
    """The functions that the gradient of `result` goes through."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    waiting: list[Any] = [leaf.grad_fn for leaf in leaves]
    seen: set[Any] = set()
    while waiting:
        function = waiting.pop()
        if function is not None and function not in seen:
            seen.add(function)
            yield function
            waiting += [source for source, _ in function.next_functions]


def _is_operator(function: Any) -> bool:
    """Whether this is how torch gives gradients to one of its own operators, such as torch.cond."""
    return type(function)._forward_cls.__module__.startswith("torch._higher_order_ops.")


# ---- random numbers ----


def loses_dropout(name: str, args: tuple[Any, ...]) -> bool:
    """Whether this is a call of a recurrent layer with dropout: torch 2.11 to 2.15 lose the dropout when they decompose it.

    >>> loses_dropout("gru", ("x", "h", ["w"], True, 2, 0.5, True, False, False))
    True
    """
    if name not in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return False
    flags = [index for index, value in enumerate(args) if type(value) is bool]
    # has_biases, num_layers, dropout, train
    return bool(flags) and len(args) > flags[0] + 3 and bool(args[flags[0] + 2]) and bool(args[flags[0] + 3])


# ---- reads of the mode ----


def reads_training(module: torch.nn.Module) -> bool:
    """Whether a module may behave differently in training and evaluation mode.

    Told from the code of its class, of its hooks and of the functions they call: does any of them mention `training`?

    >>> reads_training(torch.nn.Dropout()), reads_training(torch.nn.Linear(1, 1))
    (True, False)
    """
    hooks = [hook for table in (module._forward_pre_hooks, module._forward_hooks) for hook in table.values()]
    own = [value for value in vars(module).values() if isinstance(value, (types.FunctionType, types.MethodType))]
    seen: set[Any] = set()
    return _class_mentions(type(module), seen) or any(_mentions(_code_owner(item), seen) for item in [*hooks, *own])


def _class_mentions(cls: type, seen: set[Any]) -> bool:
    classes = [base for base in cls.__mro__ if base not in (torch.nn.Module, object)]
    values = [
        value for base in classes for name, value in vars(base).items() if name not in ("__init__", "train", "eval")
    ]
    return any(_mentions(_code_owner(value), seen) for value in values)


def _code_owner(value: Any) -> Callable[..., Any] | None:
    """The Python function behind a method, property, partial or callable object."""
    for attribute in ("__func__", "fget", "func"):
        value = getattr(value, attribute, None) or value
    if isinstance(value, types.FunctionType):
        return value
    call = None if isinstance(value, type) else inspect.getattr_static(type(value), "__call__", None)
    return call if isinstance(call, types.FunctionType) else None


def _mentions(function: Callable[..., Any] | None, seen: set[Any]) -> bool:
    if not isinstance(function, types.FunctionType) or function in seen:
        return False
    seen.add(function)
    names = list(_names(function.__code__))
    if "training" in names:
        return True
    if function.__module__ is not None and function.__module__.partition(".")[0] == "torch":
        return False  # functions of torch are given the mode; none asks a module for it
    called = [function.__globals__.get(name) for name in names]
    return any(_mentions(value, seen) for value in called)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
        elif constant == "training":  # getattr(self, "training")
            yield constant
