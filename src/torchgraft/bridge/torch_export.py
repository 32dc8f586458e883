"""`from_export` and `load_exported`: an ExportedProgram, in memory or in a file, as a module that is called as the model was.
What it demands of its inputs is worked out in `input_guards.py`.
"""

from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from torchgraft.bridge.input_guards import InputGuards, input_conditions
from torchgraft.bridge.torch_fx import from_fx
from torchgraft.bridge.translation import Translation
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BridgeError
from torchgraft.ir.arguments import immutable_dict, immutable_list
from torchgraft.ir.input_kinds import class_name
from torchgraft.ir.node import Node
from torchgraft.ir.pytree import spec_data, spec_from_data

GUARDS = "_guards_fn"  # the name that ExportedProgram.module() gives them


def from_export(program: ExportedProgram, *, check_inputs: bool = True) -> GraphModule:
    """An exported program as a torchgraft module, called with the user's inputs and returning the user's outputs.

    Parameters and buffers are those of `program.state_dict`, under their own dotted names, fetched by `get_attr` nodes;
    constants are buffers that are not saved; buffers and inputs that the model changes are changed. Nodes keep the names
    and the metadata they have in `program.graph`. `meta` of the module holds `graph_signature`, `range_constraints` and
    `module_call_graph`.

    Inputs of other sizes or structure than the program was exported for, and other constants, raise an error: a node calls
    the submodule `_guards_fn`, which holds the conditions. It also refuses `train()` and `eval()`, as torch.export's own
    module does, because the mode was fixed by the export. `check_inputs=False` leaves it out.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> module = from_export(torch.export.export(model, (torch.ones(1, 2),)))
    >>> [node.name for node in module.graph.nodes]
    ['p_0_weight', 'p_0_bias', 'input_1', '_guards_fn', 'linear', 'relu', 'output']
    >>> torch.equal(module(torch.ones(1, 2)), model(torch.ones(1, 2)))
    True
    """
    if not isinstance(program, ExportedProgram):
        raise BridgeError(
            f"from_export takes a torch.export.ExportedProgram, not a {class_name(type(program))}\n"
            "  make one with torch.export.export()"
        )
    source = program.module(check_guards=False)
    _strip_checks(source)
    result = from_fx(source, nested=True)
    type(result).__name__ = type(result).__qualname__ = _class_name(program)
    _restore_names(result, program)
    _restore_metadata(result, program)
    _register_constants(result, program)
    if check_inputs:
        _add_guards(result, program)
    result.meta.update(
        graph_signature=program.graph_signature,
        range_constraints=dict(program.range_constraints),
        module_call_graph=_ModuleCalls(program.module_call_graph),
    )
    return result


class _ModuleCalls(list[Any]):
    """The calls of modules, which can be copied and saved: torch warns when the leaves of its tree specs are made anew."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _made_calls, (_with_specs(self, spec_data),)


def _made_calls(entries: list[Any]) -> _ModuleCalls:
    return _ModuleCalls(_with_specs(entries, spec_from_data))


def _with_specs(entries: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    result = []
    for entry in entries:
        signature = entry.signature
        if signature is not None:
            specs = {"in_spec": change(signature.in_spec), "out_spec": change(signature.out_spec)}
            entry = dataclasses.replace(entry, signature=dataclasses.replace(signature, **specs))
        result.append(entry)
    return result


def _strip_checks(module: torch.fx.GraphModule) -> None:
    """Take off what torch.export hung on its module; `_guards_fn` does the same in a form that can be seen and pickled."""
    for table in (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ):
        table.clear()
    for name in ("train", "eval", "range_constraints", "validate_inputs"):
        vars(module).pop(name, None)


def _class_name(program: ExportedProgram) -> str:
    """The name of the class that was exported."""
    for node in program.graph.nodes:
        for path, kind in node.meta.get("nn_module_stack", {}).values():
            if path == "":
                name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
                return name if name.isidentifier() else "GraphModule"
            break
    return "GraphModule"


def _restore_names(module: GraphModule, program: ExportedProgram) -> None:
    """Call the fetches of parameters and buffers what the exported program calls these inputs."""
    names = {
        spec.target: spec.arg.name for spec in program.graph_signature.input_specs if spec.kind != InputKind.USER_INPUT
    }
    # Names of inputs that are gone now are free.
    module.graph._graph_namespace._used = {node._name for node in module.graph.nodes}
    for node in module.graph.nodes:
        wish = names.get(node._target) if node._op == "get_attr" else None
        if wish is not None:
            node._rename(wish)
            del names[node._target]


def _restore_metadata(module: GraphModule, program: ExportedProgram) -> None:
    """torch.export overwrites some of the metadata on the way to a module; the program's own is what the user knows."""
    translation = Translation(torch.fx.Node, immutable_list, immutable_dict)
    # An input may have another name here (`input` would hide the builtin), but never another target.
    inputs = {node._target: node for node in module.graph.nodes if node._op == "placeholder"}
    ours = {node._name: node for node in module.graph.nodes}
    for theirs in program.graph.nodes:
        node = inputs.get(theirs.target) if theirs.op == "placeholder" else None
        node = node or ours.get(theirs.name)
        if node is not None and _corresponds(node, theirs):
            translation.nodes[theirs] = node
    for theirs, node in translation.nodes.items():
        node._meta = translation.entries(theirs.meta)


def _corresponds(node: Node, theirs: torch.fx.Node) -> bool:
    if theirs.op == "placeholder":
        return node._op in ("placeholder", "get_attr")
    return node._op == theirs.op and node._target == theirs.target


def _register_constants(module: GraphModule, program: ExportedProgram) -> None:
    """Constants are plain attributes there; as buffers they follow the module to another device."""
    for path, value in program.constants.items():
        if not isinstance(value, torch.Tensor):
            continue
        holder_path, _, name = path.rpartition(".")
        holder: Any = module.get_submodule(holder_path)
        if name in vars(holder):
            value = vars(holder).pop(name)
            holder.register_buffer(name, value, persistent=False)


def _add_guards(module: GraphModule, program: ExportedProgram) -> None:
    graph = module.graph
    inputs = graph.find_nodes(op="placeholder")
    guards = InputGuards([node._name for node in inputs], input_conditions(program, inputs))
    module.add_submodule(GUARDS, guards)
    anchor = inputs[-1] if inputs else None
    with graph.inserting_after(anchor) if anchor is not None else graph.inserting_before():
        graph.create_node("call_module", GUARDS, tuple(inputs), name=GUARDS)


# ---- files ----


def load_exported(path: str | os.PathLike[str]) -> tuple[GraphModule, tuple[Any, ...], dict[str, Any]]:
    """The program in a .pt2 file, and its example inputs by place and by name.

    >>> import tempfile
    >>> exported = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.export.save(exported, f"{folder}/relu.pt2")
    ...     program, args, kwargs = load_exported(f"{folder}/relu.pt2")
    >>> program(torch.tensor([-1.0, 1.0])), [tuple(value.shape) for value in args], kwargs
    (tensor([0., 1.]), [(2,)], {})
    """
    place = os.fspath(path)
    if not os.path.isfile(place):
        raise BridgeError(f"no file '{place}'; give a file that torch.export.save() wrote")
    if not zipfile.is_zipfile(place):
        raise BridgeError(f"cannot read '{place}': it is no file that torch.export.save() wrote")
    try:
        exported = torch.export.load(place)
    except Exception as error:  # a damaged file, or one of another version, makes torch raise nearly anything
        reason = (str(error).splitlines() or [""])[0]
        raise BridgeError(
            f"cannot read '{place}' with torch.export.load(): {type(error).__name__}: {reason}"
        ) from error
    args, kwargs = exported.example_inputs or ((), {})
    return from_export(exported), tuple(args), dict(kwargs)
