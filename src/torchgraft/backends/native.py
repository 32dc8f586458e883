"""The backend `native`: the program itself, made ready for inference with what torch ships. Batch norms are folded, constants
computed, weights packed, and modules are direct calls with bound parameters. It takes everything, and sizes stay free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.analysis.dry_run import DryRun, computing_if_needed
from torchgraft.analysis.shapes import TensorMetadata, tensor_metadata
from torchgraft.backends.backend import Backend, Options
from torchgraft.backends.freezing import keep_outputs_contiguous, ranks_follow, spell_directly
from torchgraft.backends.packed_linears import multiply_matrices, pack_linears
from torchgraft.backends.prepacking import Packer, prepack
from torchgraft.codegen.bound import BoundCodeGen
from torchgraft.codegen.calling import copied_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.interpreter import Interpreter
from torchgraft.ir.node import Node
from torchgraft.passes.fuse_activations import FuseActivations
from torchgraft.passes.layer_calls import is_layer
from torchgraft.passes.merge_linears import MergeLinears
from torchgraft.passes.remove_dead_code import RemoveDeadCode
from torchgraft.passes.views import has_written_views, reshape_instead, views_nobody_writes


class Native(Backend):
    """Runs programs with torch's own kernels."""

    name = "native"
    sizes_are_free = True
    takes_all = True

    def compile(self, part: GraphModule, inputs: tuple[Any, ...], options: Options) -> Callable[..., Any]:
        """Edits the program, which is this backend's own."""
        make_direct(part, inputs, options)
        return part.forward


def make_direct(part: GraphModule, inputs: tuple[Any, ...], options: Options) -> None:
    """Choose kernels for a frozen program and bind what it refers to."""
    if any(is_layer(node, part) or node._target is torch.addmm for node in part.graph.nodes):
        if any(isinstance(item, torch.Tensor) and item.is_cuda for item in inputs):
            MergeLinears().run(part)
        known = _shapes(part, inputs)
        types_follow = ranks_follow(part)  # for the same reasons
        if types_follow:
            _drop_casts(part, known)
        can_be_turned = not has_written_views(part)
        views = views_nobody_writes(part)  # before there are calls of ours, of which nobody knows what they write
        packer = Packer(part, known)
        if types_follow:
            pack_linears(packer)
        if options.layout != "contiguous" and can_be_turned and prepack(packer):
            for node in views:
                reshape_instead(node)
            keep_outputs_contiguous(part, known)
        if types_follow:
            multiply_matrices(part, known)
    FuseActivations().run(part)
    spell_directly(part)
    RemoveDeadCode().run(part)
    part.graph.set_codegen(BoundCodeGen())


def _drop_casts(part: GraphModule, known: Any) -> None:
    """What `x += y` has become casts the sum to the type of `x`, which it has; an activation could not be fused with the sum."""
    for node in list(part.graph.nodes):
        if node._op != "call_method" or node._target != "type_as" or len(node._args) != 2 or len(node._inputs) != 2:
            continue
        types = [getattr(known.get(source._name), "dtype", None) for source in node._inputs]
        if types[0] is not None and types[0] is types[1]:
            node.replace_all_uses_with(node._args[0])
            part.graph.erase_node(node)


class _Noting(Interpreter):
    """Runs a program and notes what its values look like."""

    def __init__(self, program: GraphModule) -> None:
        super().__init__(program)
        self.found: dict[str, TensorMetadata] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.note(n, value)
        return value

    def note(self, node: Node, value: Any) -> None:
        """Write down what a value looks like."""
        if type(value) is torch.Tensor:
            self.found[node._name] = tensor_metadata(value)


def _shapes(part: GraphModule, inputs: tuple[Any, ...]) -> Any:
    """What values look like. A program that writes nothing is run, which is quicker than torch's fake tensors are imported."""
    if Aliases(part.graph).has_writes:
        return computing_if_needed(lambda compute: _dry_shapes(part, inputs, compute), after_any_error=True)
    noting = _Noting(part)
    for node, value in zip(part.graph.find_nodes(op="placeholder"), inputs, strict=True):
        noting.note(node, value)
    with torch.no_grad():
        noting.boxed_run(list(inputs))  # by placeholder, because what a program takes by `*args` is one of them
    return noting.found


def _dry_shapes(part: GraphModule, inputs: tuple[Any, ...], compute: bool) -> dict[str, TensorMetadata]:
    found: dict[str, TensorMetadata] = {}

    def note(node: Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[node._name] = tensor_metadata(value)

    # Copies, because a program may write into objects that it is given (a cache). By placeholder, because what a program takes by
    # `**kwargs` cannot be given by position.
    inputs, _ = copied_inputs(inputs, {})
    placeholders = [node for node in part.graph.nodes if node._op == "placeholder"]
    DryRun(part, dict(zip(placeholders, inputs, strict=True)), node_done=note, compute=compute).forward()
    return found


BACKEND = Native
