"""One capture of forward and backward: the model is called with traced tensors, and the trace becomes a torchgraft program.
The public functions around it are in `training.py`; tracing itself is in `joint_trace.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from torchgraft.bridge.input_guards import facts_of_tensor
from torchgraft.bridge.joint_check import check_joint
from torchgraft.bridge.joint_trace import JointTrace, Role, SourceLines, trace_joint
from torchgraft.bridge.levels import EXPORTING, Model, as_module, outside_watch
from torchgraft.bridge.model_call import ModelCall
from torchgraft.bridge.model_watch import PlainTensors, loses_dropout
from torchgraft.bridge.partition import OutputEntry, finish_program
from torchgraft.bridge.refusals import (
    export_error,
    refuse_attributes,
    refuse_dropout,
    refuse_inputs,
    refuse_random,
    title,
)
from torchgraft.bridge.run_watch import Asked, RunWatch
from torchgraft.bridge.torch_fx import from_fx
from torchgraft.capturing.surroundings import Surroundings
from torchgraft.capturing.whole import program_name
from torchgraft.codegen.calling import example_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BridgeError, GraftError

Loss = Callable[[Any], torch.Tensor] | None
# Metadata of traced nodes that says something to people; the rest is AOTAutograd's own.
_KEPT = ("val", "tensor_meta", "stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag")


class JointCapture:
    """Captures a joint program: `joint` is the program, `call` says how inputs and results of the model map to its own."""

    def __init__(self, model: Model, args: Any, kwargs: Mapping[str, Any] | None, loss: Loss) -> None:
        self._module = as_module(model)
        self._loss = loss
        self._args, self._kwargs = example_inputs(args, kwargs)
        refuse_inputs(self._module, (self._args, self._kwargs))
        more = {"loss": loss} if isinstance(loss, torch.nn.Module) else {}
        self._modules = [self._module, *more.values()]
        self.call = ModelCall(self._module, self._args, self._kwargs, more)
        self._result_names: list[str] = []
        self._differentiable: set[int] = set()
        self._assigned: list[str] = []
        self._asked = Asked()
        self._row = self.call.row(self._args, self._kwargs)
        with EXPORTING:
            self.joint = self._program(self._trace(), f"{program_name(model)}Joint")
        if "memory" in self._asked.facts:  # what is a view and what a copy is decided
            self._asked.facts.add("stride")
        self.call.check_facts(self._module, self._row, self._asked)
        check_joint(self.joint, self.call, self._modules, (self._args, self._kwargs), self._eager)

    def _eager(self, *args: Any, **kwargs: Any) -> Any:
        result = self._module(*args, **kwargs)
        return result if self._loss is None else self._loss(result)

    # ---- tracing ----

    def _trace(self) -> JointTrace:
        plain = [PlainTensors(module) for module in self._modules]
        outside = outside_watch(self._module)
        surroundings = Surroundings(())
        try:
            trace = trace_joint(self._traced_call(frozenset()), self._row)
            without = self._differentiable - {role.number for role in trace.inputs if role.kind == "tangent"}
            if without:
                # A result that is a view of an input or of another result gets no tangent; a copy of it does.
                trace = trace_joint(self._traced_call(frozenset(without)), self._row)
        except GraftError:
            raise
        except Exception as error:  # the model may raise anything
            raise export_error(self._module, error) from error
        finally:
            for tensors in plain:
                tensors.restore()
            changed = outside.restore()
            drawn = surroundings.restore()
        if drawn:
            refuse_random(self._module, f"draws {drawn[0][1]}")
        if changed:
            refuse_attributes(self._module, changed)
        if not any(role.kind == "tangent" for role in trace.inputs):
            raise BridgeError(
                f"cannot capture the backward of {title(self._module)}: no result depends on a parameter or input "
                "that requires a gradient; switch it on with requires_grad_()"
            )
        return trace

    def _traced_call(self, copied: frozenset[int]) -> Callable[..., list[torch.Tensor]]:
        """The model as a function of all its tensors; new tensors that it puts in their places are further results."""
        tensors = self.call.tensors

        def function(*row: torch.Tensor) -> list[torch.Tensor]:
            held, inputs = row[: len(tensors.held)], row[len(tensors.held) :]
            args, kwargs = self.call.with_inputs(self._args, self._kwargs, list(inputs))
            with tensors.replaced(held):
                run = RunWatch(self._modules, args, kwargs, self._asked)
                try:
                    with SourceLines(self._module, self._refuse_call), run:
                        result = self._module(*args, **kwargs)
                        result = result if self._loss is None else self._scalar(self._loss(result))
                finally:
                    assigned = tensors.take_assigned(held)
                    # Also where that raised: what was noted is why, or was lost on the way.
                    run.refuse_found(self._module)
            results = self._note_results(result)
            results = [value.clone() if index in copied else value for index, value in enumerate(results)]
            return [*results, *self._new_values(assigned, held)]

        return function

    def _refuse_call(self, name: str, args: tuple[Any, ...]) -> None:
        if loses_dropout(name, args):
            refuse_dropout(self._module, name)

    def _scalar(self, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return value
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise BridgeError(f"loss must give a tensor with one element, not {found}; reduce it with .mean() or .sum()")

    def _note_results(self, result: Any) -> list[torch.Tensor]:
        named = self.call.note_results(result, "result" if self._loss is None else "loss")
        if not named:
            raise BridgeError(
                f"cannot capture the backward of {title(self._module)}: it returns {type(result).__name__}, in which "
                "there are no tensors that torch.utils._pytree finds; return tensors in a tuple, list or dict"
            )
        self._result_names = list(named)
        self._differentiable = {index for index, value in enumerate(named.values()) if value.requires_grad}
        return list(named.values())

    def _new_values(self, assigned: dict[int, Any], held: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        for index, value in assigned.items():
            like = held[index]
            fits = isinstance(value, torch.Tensor) and value.shape == like.shape and value.dtype == like.dtype
            if self.call.kinds[index] == "parameter" or not fits:
                refuse_attributes(self._module, [f"self.{self.call.names[index]}"])
        self._assigned = [self.call.names[index] for index in assigned]
        return [value.detach() for value in assigned.values()]

    # ---- the program ----

    def _program(self, trace: JointTrace, name: str) -> GraphModule:
        result = from_fx(trace.module, nested=True)
        type(result).__name__ = type(result).__qualname__ = name
        self._refuse_hidden_parameters(result)
        graph = result.graph
        for node in graph.nodes:
            node.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
        for node, role in zip(graph.find_nodes(op="placeholder"), trace.inputs, strict=True):
            node.meta["origin_kind"] = self.call.kinds[role.number] if role.kind == "primal" else "tangent"
            node.meta["origin_name"] = self._input_name(role)
            if node.meta["origin_kind"] == "input":
                facts = self._asked.facts & {"stride", "device"}
                node.meta["conditions"] = facts_of_tensor(node.name, self._row[role.number], facts)
        output = graph.output_node()
        values = output.args[0]
        graph.erase_node(output)
        outputs = sorted(self._outputs(trace.outputs, values), key=lambda item: item[0])
        finish_program(graph, tuple(value for *_, value in outputs), [entry for _, entry, _ in outputs])
        return result

    def _input_name(self, role: Role) -> str:
        if role.kind == "primal":
            return self.call.names[role.number]
        return self._result_names[role.number] if role.kind == "tangent" else f"new {self.call.names[role.number]}"

    def _outputs(self, roles: list[Role | None], values: Any) -> Iterable[tuple[Any, OutputEntry, Any]]:
        """(place, entry, value) of every output: results, then updates and assignments, then gradients."""
        count = len(self._result_names)
        for role, value in zip(roles, values, strict=True):
            if role is None:
                continue
            if role.kind == "gradient":
                yield (3, role.number), OutputEntry("gradient", self.call.names[role.number]), value
            elif role.kind == "update":
                yield (1, role.number), OutputEntry("update", self.call.names[role.number]), value
            elif role.number < count:
                yield (0, role.number), OutputEntry("result", self._result_names[role.number]), value
            else:
                yield (2, role.number), OutputEntry("assignment", self._assigned[role.number - count]), value

    def _refuse_hidden_parameters(self, module: GraphModule) -> None:
        for node in module.graph.find_nodes(op="get_attr"):
            value = getattr(module, node.target, None)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise BridgeError(
                    f"cannot capture the backward of {title(self._module)}: it uses a tensor of shape "
                    f"{tuple(value.shape)} that requires a gradient and is neither held by the model nor an input, so its "
                    "gradient would be lost; register it as a parameter, or detach() it"
                )
