"""`prepare`: a program of its own with observers at the values that shall become integers, and batch norms folded away.
What goes where is decided in `plan.py`; what becomes of it then, in `converting.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from os import PathLike
from typing import Any

import torch

from torchgraft.capturing.program import capture
from torchgraft.codegen.calling import example_inputs
from torchgraft.codegen.graph_module import GraphModule, with_own_graph
from torchgraft.errors import QuantizeError
from torchgraft.ir.copying import inherit_origin
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.passes.fold_constants import fold_values
from torchgraft.passes.functionalize import Functionalize
from torchgraft.passes.fuse_conv_norm import FuseConvNorm
from torchgraft.passes.layer_calls import bound, is_layer, layer_arguments
from torchgraft.passes.remove_dead_code import RemoveDeadCode
from torchgraft.passes.remove_no_ops import RemoveNoOps
from torchgraft.quantize.config import Config, as_config
from torchgraft.quantize.observers import Observer, observer
from torchgraft.quantize.plan import KEY, Plan, make_plan
from torchgraft.quantize.products import NameLayers

Model = torch.nn.Module | Callable[..., Any]
ConfigLike = Config | str | PathLike[str] | None


def prepare(
    model: Model,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    config: ConfigLike = None,
    backend: str = "native",
) -> GraphModule:
    """A program that computes what the model does and watches the values that shall become integers.

    A model is captured with the example inputs; a program, at whatever level, is taken as it is and needs none. Neither is
    changed.

    >>> import torchgraft
    >>> prepared = prepare(torchgraft.symbolic_trace(torchgraft.zoo.create("mlp").eval()))
    >>> [node.name for node in prepared.graph.nodes]
    ['x', 'observer_x', 'fc1', 'relu', 'observer_relu', 'fc2', 'output']
    """
    settings = as_config(config, backend)
    program = own_program(model, args, kwargs)
    _check_mode(model)
    compute_weights(program)
    clean(program)
    if settings.equalize:
        from torchgraft.quantize.equalizing import EqualizeLayers

        EqualizeLayers()(program)
    plan = make_plan(program, settings, backend)
    check_anything(plan, program)
    insert_observers(program, plan)
    program.meta[KEY] = plan
    return program


def own_program(model: Model, args: Any, kwargs: dict[str, Any] | None) -> GraphModule:
    """A program that may be edited, over the parameters of the model."""
    if not isinstance(model, GraphModule):
        values, keywords = example_inputs(args, kwargs)
        check_structure(model, values, keywords)
        return capture(model, values, keywords, level="function")
    if any(isinstance(module, Observer) for module in model.children()):
        raise QuantizeError(
            f"{type(model).__name__} has been prepared before, and has observers\n"
            "calibrate() and convert() it, or prepare the model that it was made from"
        )
    program = with_own_graph(model)
    program.meta.pop(KEY, None)
    return program


def check_structure(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse inputs that a model has no places for."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise QuantizeError(
            f"the first batch does not fit {getattr(model, '__name__', type(model).__name__)}{signature}: {error}\n"
            "a batch is a tensor, a tuple of inputs or a dict of keyword inputs, as in model(*batch)"
        ) from None


def compute_weights(program: GraphModule) -> None:
    """Compute the weights of layers once where the program computes them of parameters (weight norm, standardized weights): it
    is rounded as they are now."""
    computed = [
        part
        for node in program.graph.nodes
        if node.op == "call_function" and is_layer(node, program)
        for name, part in bound(node, layer_arguments(node)).items()
        if name in ("weight", "bias") and isinstance(part, Node) and part.op != "get_attr"
    ]
    if computed:
        fold_values(program, computed)
        RemoveDeadCode().run(program)


def clean(program: GraphModule) -> None:
    """Have a program write nothing in place, fold its batch norms and drop what does nothing in evaluation mode."""
    Functionalize().run(program)
    NameLayers().run(program)
    FuseConvNorm().run(program)
    RemoveNoOps(inference=True).run(program)
    RemoveDeadCode().run(program)
    program.graph.lint()


def _check_mode(model: Any) -> None:
    if getattr(model, "training", False) is True:
        raise QuantizeError(
            f"{type(model).__name__} is in training mode, and is quantized for evaluation\n"
            "call .eval() on the model and capture it again, or use prepare_qat() to train it"
        )


def check_anything(plan: Plan, program: GraphModule) -> None:
    """Refuse a program in which no layer changes."""
    if any(layer.reason is None for layer in plan.layers.values()):
        return
    if plan.layers:
        first = next(iter(plan.layers.values()))
        more = f"'{first.name}' stays: {first.reason}"
    else:
        more = "it has no convolution or linear layer with weights of its own"
        whole = program.meta.get("kept_whole", {}).get("")
        more += f"; it is one call, because {whole}" if whole else ""
        more += "".join([f"\n'{name}': {reason}" for name, reason in list(plan.others.items())[:3]])
    raise QuantizeError(f"nothing in {type(program).__name__} can be quantized\n{more}")


def insert_observers(program: GraphModule, plan: Plan) -> None:
    """Put an observer after each value of the plan, in the way of those who take it as integers."""
    nodes = {node.name: node for node in program.graph.nodes}
    for name, group in plan.groups.items():
        value = nodes[name]
        if not hasattr(program, group):
            where = ", ".join(filter(None, [f"'{name}'", str(source_of(value) or "")]))
            program.add_module(group, observer(plan.observers[group], plan.numbers[group], where))
        observe(program, group, value, [nodes[user] for user in plan.consumers[name]])


def observe(program: GraphModule, group: str, value: Node, users: list[Node]) -> None:
    """Put the observer of a group between a value and these users."""
    graph = program.graph
    # Inputs are checked before they are used, and before they are quantized, too.
    with graph.inserting_before(min(users)) if value.op == "placeholder" else graph.inserting_after(value):
        watching = graph.call_module(group, (value,))
    inherit(watching, value)
    for user in users:
        user.replace_input_with(value, watching)


def drop_unused(program: GraphModule) -> None:
    """Take out what no node of a program refers to any more."""
    used = {node.target for node in program.graph.nodes if node.op in ("get_attr", "call_module")}
    for table in (program._buffers, program._parameters):
        for name in [name for name in table if name not in used]:
            del table[name]
    program.delete_all_unused_submodules()


def inherit(node: Node, source: Node, drawn_as: str | None = None) -> None:
    """Give a node that a rewrite made the source line and module of the one it was made for, and perhaps a colour."""
    inherit_origin(node, source)
    if drawn_as is not None:
        node.meta["drawn_as"] = drawn_as
