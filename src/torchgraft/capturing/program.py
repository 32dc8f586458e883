"""`capture`: from a model and example inputs to a GraphModule, by a watched run.
What is written down during the run is decided in `watch.py`; capture without inputs is `symbolic_trace` in `tracer.py`.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.capturing.active import Patch, active, paused_collection
from torchgraft.capturing.module_patches import MODULE_PATCHES
from torchgraft.capturing.sizes import combine, unwrapped, wrapped
from torchgraft.capturing.watch import KeepWhole, Watcher, WatchingMode
from torchgraft.capturing.wrapping import Autowrap, wrapped_patches
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.codegen.source import PyTreeCodeGen
from torchgraft.errors import TraceError
from torchgraft.ir.node import Node
from torchgraft.ir.pytree import children_of
from torchgraft.ir.structures import put_together, take_apart

LeafRule = Callable[[torch.nn.Module, str], bool] | Iterable[Any] | type | str | None


def capture(
    model: torch.nn.Module | Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    level: str = "module",
    leaf: LeafRule = None,
    dynamic: dict[str, Iterable[int]] | None = None,
) -> GraphModule:
    """Run `model` once on the example inputs and return what it did as a program.

    `level` is "module" (the modules of torch.nn stay calls), "function" (torch functions; parameters are fetched), "aten",
    "core_aten" (torch's operators, see `bridge/levels.py`) or "joint" (forward and backward, see `bridge/training.py`). `leaf`
    names modules to keep whole: types, dotted paths, or a predicate of module and path. `dynamic` names dimensions of inputs
    that must stay free (`{"x": [0]}`): capture raises if the model fixed one.

    >>> program = capture(lambda x: x.view(x.shape[0], -1) * 2, (torch.ones(2, 3, 4),))
    >>> program(torch.ones(5, 3, 4)).shape
    torch.Size([5, 12])
    """
    if level in ("aten", "core_aten", "joint"):
        return _operator_program(model, args, kwargs, level, leaf, dynamic)
    if level not in ("module", "function"):
        raise ValueError(f'level must be "module", "function", "aten", "core_aten" or "joint", not {level!r}')
    values = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    root, function = _root_and_function(model)
    rule = _leaf_rule(level, leaf)
    kept: dict[torch.nn.Module, str] = {}
    symbolic = True
    while True:
        watcher = Watcher(root, lambda module, path: module in kept or rule(module, path), symbolic)
        try:
            program = _watched_run(watcher, function, values, dict(kwargs or {}), type(model).__name__)
            _check_dynamic(program, dynamic or {})
            return program
        except KeepWhole as request:
            module = request.module
            if module is None or module is root or module in kept:
                raise TraceError(f"cannot capture {type(model).__name__}: {request.reason}") from request
            kept[module] = request.reason
        except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError):
            # Symbolic numbers are no plain integers, and a model may insist on those. Then every size it reads is fixed.
            if not symbolic:
                raise
            symbolic = False


def _operator_program(model: Any, args: Any, kwargs: Any, level: str, leaf: LeafRule, dynamic: Any) -> GraphModule:
    """The levels below torch's functions, which come through the bridge."""
    if leaf is not None:
        raise ValueError(f'leaf keeps modules whole, and level "{level}" has none; use level "module" or "function"')
    if level == "joint":
        from torchgraft.bridge.training import joint_program

        if dynamic:
            raise ValueError('level "joint" holds for the sizes of the example: dynamic cannot be given')
        return joint_program(model, args, kwargs)
    from torchgraft.bridge.levels import aten_program

    return aten_program(model, args, kwargs, core=level == "core_aten", dynamic=dynamic)


_AUTOWRAP = Autowrap((), ())


def _symbolic_choice(original: Callable[..., Any]) -> Callable[..., Any]:
    """`min` or `max` that does not force its arguments to be plain numbers when two of them are given."""

    def choice(*args: Any, **kwargs: Any) -> Any:
        if active.tracer is not None and len(args) == 2 and not kwargs:
            numbers = [unwrapped(value) for value in args]
            known = numbers[0] or numbers[1]
            if known is not None and all(isinstance(v, (int, float, torch.SymInt, torch.SymFloat)) for v in args):
                pair = [number or known.wrap_int(value) for number, value in zip(numbers, args, strict=True)]
                return wrapped(combine(original, original.__name__, *pair))
        return original(*args, **kwargs)

    return choice


_MIN_MAX = [Patch(builtins, "min", _symbolic_choice(min)), Patch(builtins, "max", _symbolic_choice(max))]


def _root_and_function(model: Any) -> tuple[torch.nn.Module, Callable[..., Any]]:
    if isinstance(model, torch.nn.Module):
        return model, model
    owner = getattr(model, "__self__", None)
    return (owner if isinstance(owner, torch.nn.Module) else torch.nn.Module()), model


def _check_dynamic(program: GraphModule, dynamic: dict[str, Iterable[int]]) -> None:
    """Refuse a program in which a dimension that must stay free was fixed to a number."""
    inputs = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for name, dimensions in dynamic.items():
        if name not in inputs:
            raise ValueError(f"dynamic names '{name}', but the inputs are {', '.join(map(repr, inputs))}")
        for dimension in dimensions:
            for guard in program.guards:
                size = guard.node.args[0]
                is_size = isinstance(size, Node) and size.target == "size" and size.args == (inputs[name], dimension)
                if is_size and type(guard.expected) is int:
                    raise TraceError(
                        f"dimension {dimension} of '{name}' was to stay free, but the model fixed it to {guard.expected} at "
                        f"{guard.where}; rewrite that line so that the size only flows into other calls"
                    )


def _leaf_rule(level: str, leaf: LeafRule) -> Callable[[torch.nn.Module, str], bool]:
    def chosen(module: torch.nn.Module, path: str) -> bool:
        if leaf is None:
            return False
        if isinstance(leaf, type):
            return isinstance(module, leaf)
        if isinstance(leaf, str):
            return path == leaf
        if callable(leaf):
            return bool(leaf(module, path))
        return any(isinstance(module, item) if isinstance(item, type) else path == item for item in leaf)

    def rule(module: torch.nn.Module, path: str) -> bool:
        if chosen(module, path):
            return True
        home = type(module).__module__
        is_torch = home.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, torch.nn.Sequential)
        return level == "module" and is_torch

    return rule


def _watched_run(
    watcher: Watcher, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> GraphModule:
    call, args, kwargs = _inputs(watcher, function, args, kwargs)
    with _unchanged(watcher.root), paused_collection:
        patches: list[Any] = [*MODULE_PATCHES, *wrapped_patches(), *_AUTOWRAP.library_patches(), *_MIN_MAX]
        for patch in patches:
            patch.acquire()
        previous, active.tracer = active.tracer, watcher
        try:
            with WatchingMode(watcher):
                result = call(*args, **kwargs)
                _output(watcher, result)
        finally:
            active.tracer = previous
            for patch in reversed(patches):
                patch.release()
            changed = watcher.state.restore()
    if changed:
        raise KeepWhole(changed[0][0], f"it changes {type(changed[0][0]).__name__}.{changed[0][1]}")
    _tidy(watcher)
    return GraphModule(watcher.root, watcher.graph, name)


def _inputs(
    watcher: Watcher, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Placeholders for the leaves of the inputs, and copies of the inputs that the run may write into."""
    signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    bound = signature.bind(*args, **kwargs)
    copies: dict[int, torch.Tensor] = {}
    for name, value in bound.arguments.items():
        leaves, spec = pytree.tree_flatten(value)
        stars = _STARS.get(signature.parameters[name].kind, "")
        wishes = [name] if spec.is_leaf() and not stars else [f"{name}_{number + 1}" for number in range(len(leaves))]
        nodes = [watcher.graph.placeholder(wish) for wish in wishes]
        values = [_input_value(watcher, leaf, node, copies) for leaf, node in zip(leaves, nodes, strict=True)]
        bound.arguments[name] = pytree.tree_unflatten(values, spec)
    spec = pytree.tree_structure(list(bound.arguments.values()))
    if not all(child.is_leaf() for child in children_of(spec)):
        names = [_STARS.get(signature.parameters[name].kind, "") + name for name in bound.arguments]
        watcher.graph._codegen = PyTreeCodeGen(names, spec)
    return function, bound.args, bound.kwargs


_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def _input_value(watcher: Watcher, leaf: Any, node: Node, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(leaf, torch.Tensor):
        copied = copies.get(id(leaf))
        if copied is None:
            copied = copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            watcher.add_input(copied, node)
        return copied
    # A plain value is part of what the program was captured for.
    watcher._guard(node, leaf, f"the argument '{node.name}'")
    return leaf


def _output(watcher: Watcher, result: Any) -> None:
    codegen = watcher.graph._codegen
    if _is_plain(result) and not isinstance(codegen, PyTreeCodeGen):
        watcher.create_node("output", "output", (_result(watcher, result),), {})
        return
    if not isinstance(codegen, PyTreeCodeGen):
        inputs = [node for node in watcher.graph.nodes if node.op == "placeholder"]
        names = [node.name for node in inputs]
        codegen = watcher.graph._codegen = PyTreeCodeGen(names, pytree.tree_structure([0] * len(names)))
    leaves, codegen.out_spec = pytree.tree_flatten(result)
    watcher.create_node("output", "output", ([_result(watcher, leaf) for leaf in leaves],), {})


def _result(watcher: Watcher, value: Any) -> Any:
    """A part of the result; objects of their own kind are put together anew by every run."""
    if type(value) in (tuple, list):
        return type(value)([_result(watcher, item) for item in value])
    if type(value) is dict:
        return {key: _result(watcher, item) for key, item in value.items()}
    if (
        hasattr(value, "__dict__")
        and not isinstance(value, (torch.Tensor, torch.nn.Module))
        and unwrapped(value) is None
    ):
        template, parts = take_apart(value, _is_part)
        if parts:
            arguments = (watcher._constant("_template", template), *[watcher.create_arg(part) for part in parts])
            return watcher.create_node("call_function", put_together, arguments, {})
    return watcher.create_arg(value)


def _is_part(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or unwrapped(value) is not None


def _is_plain(value: Any) -> bool:
    """Whether a result is made of what can be written in code: other containers are put together by their tree spec."""
    if type(value) in (tuple, list):
        return all(_is_plain(item) for item in value)
    if type(value) is dict:
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return pytree.tree_structure(value).is_leaf()


class _unchanged:  # noqa: N801 (reads as a phrase in a with statement)
    """Puts buffers and the random state back after a run."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in root.buffers()]
        self._state = torch.get_rng_state()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *details: object) -> None:
        torch.set_rng_state(self._state)
        for buffer, version, copied in self._buffers:
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(copied)


def _tidy(watcher: Watcher) -> None:
    """Drop reads and numbers that nothing uses."""
    for node in reversed(watcher.graph.nodes):
        is_read = node._op == "get_attr" or node._target in (getattr, "size", "numel", "item")
        if is_read and not node.users:
            watcher.graph.erase_node(node)
