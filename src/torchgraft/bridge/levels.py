"""`aten_program`: the ATen or core ATen program of a model, through torch.export, as a module that runs like the model.
Forward and backward as one program are in `training.py`; converting a program somebody else exported is `from_export`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.export import Dim, ExportedProgram, export
from torch.utils import _pytree as pytree

from torchgraft.bridge.gradient_cuts import cut_at_marks, mark_cuts
from torchgraft.bridge.model_watch import OutsideWatch, PlainTensors, forward_of, keeps_notes, loses_dropout
from torchgraft.bridge.program_calls import check_calls, signature_of
from torchgraft.bridge.refusals import (
    export_error,
    refuse_attributes,
    refuse_dropout,
    refuse_hidden_parameter,
    refuse_inputs,
    refuse_random,
    title,
)
from torchgraft.bridge.run_watch import Asked, RunWatch
from torchgraft.bridge.self_check import check_on_example
from torchgraft.bridge.torch_export import from_export
from torchgraft.capturing.model_state import ModelState
from torchgraft.capturing.surroundings import Surroundings
from torchgraft.capturing.whole import modules_of, program_name
from torchgraft.codegen.calling import example_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BridgeError, GraftError
from torchgraft.ir.modules import no_model, paths_of_modules
from torchgraft.ir.node import Node, map_arg

# torch.export patches torch while it runs, so two exports in two threads break each other.
EXPORTING = threading.RLock()

Model = torch.nn.Module | Callable[..., Any]
Dynamic = Mapping[str, Any] | str | None


def aten_program(
    model: Model,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    core: bool = False,
    dynamic: Dynamic = None,
) -> GraphModule:
    """The program of `model` in ATen operators, or with `core` in the smaller set called core ATen.

    The result is called like the model and does what it does, gradients and buffers included. Parameters and buffers are
    the model's own, under their own names; each node has the shape and dtype of its value in `meta["val"]`.

    The program holds for inputs of the sizes and dtypes of the example, and for the model in the mode it is in; anything
    else raises GuardError when it is called. Captured while gradients are off, it computes none. `dynamic` names
    dimensions that must stay free: `{"x": [0]}`, or `{"x": {0: "batch"}, "y": {0: "batch"}}` for dimensions that are
    equal; nested inputs take nested containers, as torch.export's `dynamic_shapes` do. With "auto", every dimension stays
    free that the model lets.

    BridgeError says what could not be exported and where: torch.export's own reasons, and what it would lose silently (an
    attribute that the model writes, gradients that are not those of the operators).

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> program = aten_program(model, (torch.ones(4, 2),), core=True, dynamic={"input": [0]})
    >>> [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    ['aten.permute.default', 'aten.addmm.default', 'aten.relu.default']
    >>> torch.equal(program(torch.ones(7, 2)), model(torch.ones(7, 2)))
    True
    """
    values, keywords = example_inputs(args, kwargs)
    module = as_module(model)
    refuse_inputs(module, (values, keywords))
    asked = Asked()
    with EXPORTING:
        exported = _exported(module, values, keywords, dynamic, asked)
        if core:
            exported = _decomposed(module, exported)
        result = from_export(exported, check_inputs=False)
    type(result).__name__ = type(result).__qualname__ = program_name(model)
    _restore_modes(result, module)
    if core:
        if "memory" in asked.facts:  # what is a view and what a copy is decided here, and not when the program runs
            asked.facts.add("stride")
        cut_at_marks(result.graph)
        _keep_old_values(result)
    _drop_own_copies(result)
    complete_values(result)
    check_calls(result, exported, module, asked)
    check_on_example(module, result, values, keywords)
    return result


def as_module(model: Model) -> torch.nn.Module:
    """The model as a module: a function becomes the forward of one, a method of a module the forward of a copy of it."""
    if isinstance(model, torch.nn.Module):
        return model
    if (problem := no_model(model)) is not None:
        raise BridgeError(f"cannot capture {problem}")
    owner = getattr(model, "__self__", None)
    module = copy.copy(owner) if isinstance(owner, torch.nn.Module) else _modules_with(model)
    bound = types.MethodType(model.__func__, module) if isinstance(model, types.MethodType) else model
    vars(module)["forward"] = bound if isinstance(owner, torch.nn.Module) else model
    return module


def _modules_with(function: Callable[..., Any]) -> torch.nn.Module:
    """A module that holds the modules which a function mentions, or those of the object that it belongs to."""
    holder = modules_of(function)
    owner = getattr(function, "__self__", function)
    for name, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, torch.nn.Module) and value not in holder._modules.values() and name not in vars(holder):
            holder._modules[name] = value
    return holder


# ---- exporting ----


def _exported(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: Dynamic, asked: Asked
) -> ExportedProgram:
    hooks = module.graph._hooks if isinstance(module, GraphModule) else None
    watched = copy.copy(module)
    vars(watched)["forward"] = _watched_forward(module, watched, kwargs, asked)
    shapes = _dynamic_shapes(watched, title(module), args, kwargs, dynamic)
    surroundings, plain, outside = Surroundings(()), PlainTensors(module), outside_watch(module)
    asked.recovers = outside.recovers
    state = ModelState(paths_of_modules(module))
    for part in state.paths:
        state.watch(part)
    try:
        exported = export(watched, args, kwargs, dynamic_shapes=shapes, strict=False)
    except GraftError:
        raise
    except Exception as error:  # torch.export raises anything
        raise export_error(module, error) from error
    finally:
        if isinstance(watched, GraphModule):
            watched.graph._remove_owner(watched)
            watched.graph._hooks = hooks
        plain.restore()
        changed = outside.restore()
        changed += [_attribute(state, part, name) for part, name in state.restore() if not keeps_notes(part)]
        drawn = surroundings.restore()
    if drawn:
        refuse_random(module, f"draws {drawn[0][1]}")
    if changed:
        refuse_attributes(module, changed)
    return exported


def _attribute(state: ModelState, part: torch.nn.Module, name: str) -> str:
    return ".".join(filter(None, ["self", state.paths[part], name]))


def outside_watch(module: torch.nn.Module) -> OutsideWatch:
    """What to look at that is outside of the model; refuses what would be lost from the start."""
    watch = OutsideWatch(module, forward_of(module))
    if torch.is_grad_enabled() and watch.hidden_parameter() is not None:
        refuse_hidden_parameter(module)
    return watch


def _decomposed(module: torch.nn.Module, exported: ExportedProgram) -> ExportedProgram:
    for node in exported.graph.nodes:
        if loses_dropout(getattr(node.target, "_opname", ""), node.args):
            refuse_dropout(module, node.target._opname)
    try:
        mark_cuts(exported)
        with warnings.catch_warnings():
            # torch warns about the way it copies its own tree specs, which nobody here can do anything about.
            warnings.filterwarnings("ignore", r".*\bLeafSpec\b.* is deprecated", FutureWarning)
            return exported.run_decompositions()
    except Exception as error:  # decompositions are arbitrary code
        raise export_error(module, error) from error


def _watched_forward(
    module: torch.nn.Module, watched: torch.nn.Module, kwargs: dict[str, Any], asked: Asked
) -> Callable[..., Any]:
    """The forward of the model, called with these keywords, refusing what torch.export would lose; `asked` gets what the model
    asks that no guard of torch.export speaks of."""
    original = vars(module).get("forward") or types.MethodType(type(module).forward, watched)

    def forward(*args: Any, **kwargs: Any) -> Any:
        run = RunWatch([watched], args, kwargs, asked)
        try:
            with run:
                result = original(*args, **kwargs)
        finally:
            # Also where that raised: what was noted is why, or was lost on the way.
            run.refuse_found(module)
        run.refuse_gradients(module, result)
        return result

    functools.update_wrapper(forward, original)
    forward.__signature__ = _signature(original, kwargs)  # type: ignore[attr-defined]
    return forward


def _signature(function: Callable[..., Any], kwargs: dict[str, Any]) -> inspect.Signature:
    """The signature with names for what goes into **kwargs, of whose dimensions torch.export cannot speak otherwise."""
    signature = signature_of(function)
    parameters = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    if len(parameters) < len(signature.parameters):
        known = {item.name for item in parameters}
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters += [inspect.Parameter(name, kind) for name in kwargs if name not in known]
    return signature.replace(parameters=parameters)


def _dynamic_shapes(
    module: torch.nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: Dynamic
) -> Any:
    if dynamic is None:
        return None
    try:
        inputs = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise BridgeError(f"cannot capture {name}: {error}; give the inputs its forward takes") from error
    if isinstance(dynamic, str):
        if dynamic != "auto":
            raise BridgeError(f'dynamic takes "auto" or a dict such as {{"x": [0]}}, not {dynamic!r}')
        return pytree.tree_map(_all_automatic, inputs)
    unknown = [item for item in dynamic if item not in inputs]
    if unknown:
        raise BridgeError(
            f"dynamic names {', '.join(map(repr, unknown))}, but the inputs of {name} are "
            f"{', '.join(map(repr, inputs)) or 'none'}"
        )
    named: dict[str, Any] = {}
    return {item: _dimensions(dynamic.get(item), named) for item in inputs}


def _all_automatic(leaf: Any) -> Any:
    return dict.fromkeys(range(leaf.dim()), Dim.AUTO) if isinstance(leaf, torch.Tensor) else None


def _dimensions(entry: Any, named: dict[str, Any]) -> Any:
    """Positions and names in the words of torch.export; anything else is already in them."""
    if isinstance(entry, int):
        return {entry: Dim.DYNAMIC}
    if isinstance(entry, (list, tuple, set, frozenset)):
        if entry and all(type(item) is int for item in entry):
            return dict.fromkeys(entry, Dim.DYNAMIC)
        items = [_dimensions(item, named) for item in entry]
        return type(entry)(*items) if hasattr(entry, "_fields") else type(entry)(items)
    if isinstance(entry, Mapping):
        return {
            key: _dimension(item, named) if isinstance(key, int) else _dimensions(item, named)
            for key, item in entry.items()
        }
    return entry


def _dimension(entry: Any, named: dict[str, Any]) -> Any:
    """Dimensions with one name are equal."""
    return named.setdefault(entry, Dim(entry)) if isinstance(entry, str) else entry


# ---- the result ----


def _restore_modes(result: GraphModule, module: torch.nn.Module) -> None:
    modes = {path: child.training for path, child in module.named_modules(remove_duplicate=False)}
    for path, child in result.named_modules():
        child.training = modes.get(path, module.training)


def _keep_old_values(result: GraphModule) -> None:
    """Let operators read a copy of a buffer or input that is written at the end.

    In core ATen nothing is written in place, so new values are copied in last. Autograd, which noted the old
    tensor for a backward of batch norm, would then refuse.
    """
    graph = result.graph
    for write in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        written = write.args[0]
        others = [user for user in written.users if user is not write]
        value = written.meta.get("val")
        held = written.op in ("get_attr", "placeholder") and isinstance(value, torch.Tensor)
        if not held or not others or not value.is_floating_point():
            continue
        last = graph.find_nodes(op="placeholder")[-1:] if written.op == "placeholder" else [written]
        with graph.inserting_after(last[0]):
            old = graph.call_function(torch.ops.aten.clone.default, (written,))
        old.meta = {key: entry for key, entry in written.meta.items() if key in ("val", "tensor_meta")}
        for user in others:
            user.replace_input_with(written, old)


def _drop_own_copies(result: GraphModule) -> None:
    """Take out copies of a tensor into itself, which torch.export adds for buffers that were written in place: they change
    nothing, but autograd takes them for changes."""
    for write in result.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        held, value = write.args[:2]
        while isinstance(value, Node) and value is not held and _writes_first(value.target):
            value = value.args[0]
        if value is held and not write.users:
            result.graph.erase_node(write)


def _writes_first(target: Any) -> bool:
    """Whether an operator writes its first argument and returns it."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.arguments or len(schema.returns) != 1:
        return False
    written, returned = schema.arguments[0].alias_info, schema.returns[0].alias_info
    return written is not None and written.is_write and returned is not None and returned.is_write


def complete_values(result: GraphModule) -> None:
    """Note values where the tracer notes none: on writes to buffers and on the output. Drop lines of generated code."""
    for node in result.graph.nodes:
        if "<eval_with_key>" in (node.stack_trace or ""):
            del node.meta["stack_trace"]
        if "val" in node.meta:
            continue
        if node.op == "output":
            node.meta["val"] = map_arg(node.args[0], _value)
        elif node.target is torch.ops.aten.copy_.default and isinstance(node.args[0], Node):
            node.meta["val"] = _value(node.args[0])  # it returns what it writes


def _value(node: Node) -> Any:
    return node.meta.get("val")
