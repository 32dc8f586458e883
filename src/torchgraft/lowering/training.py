"""`joint_program` and `capture_training`: forward and backward of a model as programs that anyone can read, change and run.
How they are written down is in `joint.py`, how they are cut in two in `partition.py`.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from torchgraft.capturing.program import capture
from torchgraft.codegen.calling import example_inputs, placeholder_values
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BridgeError, GuardError
from torchgraft.ir.structures import put_together, take_apart
from torchgraft.ir.verify import find_attribute
from torchgraft.lowering.entries import Joint, Name, by_kind
from torchgraft.lowering.input_checks import input_checks
from torchgraft.lowering.joint import lower_to_joint
from torchgraft.lowering.partition import partition
from torchgraft.lowering.recompute import recompute_within, saved_bytes
from torchgraft.lowering.training_module import TrainingModule, apart
from torchgraft.results.progress import stage

Model = torch.nn.Module | Callable[..., Any]
Loss = Callable[[Any], torch.Tensor] | None


def joint_program(
    model: Model, args: Any = (), kwargs: Mapping[str, Any] | None = None, *, loss: Loss = None
) -> GraphModule:
    """Forward and backward of a model or a captured program as one program in ATen operators.

    The program holds no state. Its inputs are `primals_1`, `primals_2`, ...: parameters, buffers, then the tensors among the
    inputs of the model; and `tangents_1`, ...: the gradients of the results, one for each result that has a gradient. In
    the metadata of an input, `origin_kind` says "parameter", "buffer", "constant", "input" or "tangent", and
    `origin_name` which one. It returns one tuple; `entries` in the metadata of the output says of each entry whether it is
    a "result", an "update" (the new value of a buffer or input that the model writes) or a "gradient", and of what.

    `loss` is a function of what the model returns, and gives a scalar; then that is the only result.

    >>> model = torch.nn.Linear(2, 3)
    >>> program = joint_program(model, (torch.ones(4, 2),))
    >>> [(node.name, node.meta["origin_name"]) for node in program.graph.find_nodes(op="placeholder")]
    [('primals_1', 'weight'), ('primals_2', 'bias'), ('primals_3', 'input'), ('tangents_1', 'result')]
    >>> [tuple(entry) for entry in program.graph.output_node().meta["entries"]]
    [('result', 'result'), ('gradient', 'weight'), ('gradient', 'bias')]
    >>> result, weight, bias = program(model.weight, model.bias, torch.ones(4, 2), torch.ones(4, 3))
    >>> bias
    tensor([4., 4., 4.])
    """
    return _joint(model, args, kwargs, loss)[1].program


def _joint(
    model: Model, args: Any, kwargs: Mapping[str, Any] | None, loss: Loss
) -> tuple[GraphModule, Joint, tuple[tuple[Any, ...], dict[str, Any]]]:
    values, keywords = example_inputs(args, kwargs)
    with torch.inference_mode(False), torch.enable_grad():
        if isinstance(model, GraphModule) and loss is None and _is_at_level_function(model):
            program = model
        else:
            program = capture(_with_loss(model, loss), values, keywords, level="function")
    with stage("lowering forward and backward"):
        result = lower_to_joint(program, values, keywords, "result" if loss is None else "loss")
    return program, result, (values, keywords)


def _is_at_level_function(program: GraphModule) -> bool:
    """Whether a program was captured, and calls no modules but those that could not be taken apart."""
    kept = program.meta.get("kept_whole")
    calls = program.graph.find_nodes(op="call_module")
    return kept is not None and ("" in kept or all(str(node.target) in kept for node in calls))


def _with_loss(model: Model, loss: Loss) -> Model:
    """The model with a loss behind it; its parameters keep their names."""
    if loss is None:
        return model
    if not callable(loss):
        raise TypeError(f"loss must be a function of what the model returns, not {loss!r}")
    original = model.forward if isinstance(model, torch.nn.Module) else model

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _scalar(loss(original(*args, **kwargs)))

    functools.update_wrapper(forward, original)
    if not isinstance(model, torch.nn.Module):
        return forward
    step = copy.copy(model)
    vars(step)["_modules"] = dict(model._modules)
    if isinstance(loss, torch.nn.Module):
        step._modules["loss"] = loss
    original = types.MethodType(type(model).forward, step) if "forward" not in vars(model) else original
    vars(step)["forward"] = forward
    return step


def _scalar(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value
    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise BridgeError(f"loss must give a tensor with one element, not {found}\n  reduce it with .mean() or .sum()")


class TrainingStep(NamedTuple):
    """What the model (or the loss) returned, and the gradients by the names of parameters and inputs.

    A parameter that the results do not depend on, or that needs no gradient, has None, as `parameter.grad` would.

    >>> import torch
    >>> step = capture_training(torch.nn.Linear(2, 3), torch.ones(4, 2)).run(torch.ones(4, 2))
    >>> step.results.shape, step.gradients["bias"]
    (torch.Size([4, 3]), tensor([4., 4., 4.]))
    """

    results: Any
    gradients: dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class TrainingPrograms:
    """The programs of one training step; made by `capture_training`.

    `joint` computes everything at once, see `joint_program`. `forward` takes the primals and returns results, updates and
    saved values; `backward` takes the saved values and the tangents and returns the gradients. Call them with detached
    tensors; `run` does it for you. `program` is the captured program that they come from.

    >>> import torch
    >>> programs = capture_training(torch.nn.Linear(2, 3), torch.ones(4, 2))
    >>> programs.tangent_names, programs.updated
    (['result'], [])
    """

    joint: GraphModule
    forward: GraphModule
    backward: GraphModule
    program: GraphModule
    _call: _Call = field(repr=False)

    @property
    def tangent_names(self) -> list[str]:
        """The results that have gradients, in the order in which `backward` takes these."""
        nodes = self.backward.graph.find_nodes(op="placeholder")
        return [str(node.meta["origin_name"]) for node in nodes if node.meta["origin_kind"] == "tangent"]

    @property
    def updated(self) -> list[str]:
        """The buffers and inputs that are written."""
        entries = self.forward.graph.output_node().meta["entries"]
        return [entry.name for entry in entries if entry.kind == "update"]

    @property
    def saved_bytes(self) -> int:
        """How many bytes `forward` keeps for `backward` besides its inputs, on the example inputs."""
        return saved_bytes(self.joint)

    def module(self) -> TrainingModule:
        """A module with the parameters of the model that runs these programs; see `TrainingModule`."""
        return TrainingModule(self)

    def primals(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """What `joint` and `forward` take for these inputs of the model: its tensors as they are now, then the inputs."""
        return self._call.row(self.program, args, kwargs)

    def run(self, *args: Any, tangents: Sequence[torch.Tensor] | None = None, **kwargs: Any) -> TrainingStep:
        """Run forward and backward on inputs of the model, and write the buffers that it writes.

        `tangents` are the gradients of the results, in the order of the inputs `tangents_*`; without them they are ones, as
        if the sum of all results was to be minimised. Gradients are returned; `.grad` of the parameters stays as it is.
        """
        primals = self.primals(*args, **kwargs)
        self._call.refuse_sharing(primals, self.updated)
        # Some kernels (LSTM on a CPU) keep what the backward needs only while gradients are on; detached inputs need none.
        with torch.inference_mode(False), torch.enable_grad():
            ahead = by_kind(self.forward, self.forward(*[tensor.detach() for tensor in primals]))
            saved = list(ahead["saved"].values())
            back = by_kind(self.backward, self.backward(*saved, *self._tangents(ahead["result"], tangents)))
        self._call.write(
            primals, ahead["update"]
        )  # last, because saved values may be the very tensors that are written
        gradients: dict[str, torch.Tensor | None] = dict.fromkeys(name for name, _ in self.program.named_parameters())
        gradients.update(apart(back["gradient"]))
        return TrainingStep(self._call.result(ahead["result"]), gradients)

    def _tangents(self, results: dict[str, torch.Tensor], given: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        names = self.tangent_names
        if given is not None and len(given) != len(names):
            raise GuardError(f"run() got {len(given)} tangents, and the program takes {len(names)}: {', '.join(names)}")
        return [torch.ones_like(results[name]) for name in names] if given is None else list(given)


class _Call:
    """How inputs and results of the model map to those of the joint program."""

    def __init__(self, program: GraphModule, joint: Joint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.names = [primal.name for primal in joint.primals]
        self.kinds = [primal.kind for primal in joint.primals]
        self._needed = [primal.value.requires_grad for primal in joint.primals]
        self._results, self._structure, self._attributes = joint.results, joint.structure, joint.attributes
        self._checks = input_checks(program)
        leaves, self._spec = _leaves(program, args, kwargs)
        self._plain = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Call:
        made = memo[id(self)] = copy.copy(self)  # nothing here changes; torch warns where structures are copied
        made._checks = copy.deepcopy(self._checks, memo)
        return made

    def row(self, program: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of the program as they are now, and those among inputs that are like the ones at the capture."""
        leaves, spec = _leaves(program, args, kwargs)
        self._checks(*args, **kwargs)
        for target, expected in self._attributes.items():
            found, _ = find_attribute(program, target)
            if found != expected:
                raise GuardError(
                    f"the programs were captured for {target} = {expected!r}, and now it is {found!r}\n"
                    "  switch it back, or call capture_training again with the model as it is now"
                )
        plain = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if (
            spec != self._spec
            or [type(item) for item in plain] != [type(item) for item in self._plain]
            or plain != self._plain
        ):
            raise GuardError(
                "the programs were captured for inputs of another structure, or with other plain values\n"
                "  capture the model again with inputs like these"
            )
        held = [
            find_attribute(program, name)[0]
            for name, kind in zip(self.names, self.kinds, strict=True)
            if kind != "input"
        ]
        row = [*held, *[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]]
        for name, tensor, was_needed in zip(self.names, row, self._needed, strict=True):
            if tensor.requires_grad and not was_needed:
                raise GuardError(
                    f"the programs were captured while '{name}' required no gradient, and now it does\n"
                    "  capture the model again, or give it detached"
                )
        return row

    def refuse_sharing(self, row: list[torch.Tensor], updates: list[str]) -> None:
        """Raise if a tensor that is going to be written shares memory with another, which the model would see change."""
        for name, tensor in zip(self.names, row, strict=True):
            for other_name, other in zip(self.names, row, strict=True) if name in updates else ():
                if other_name != name and torch._C._is_alias_of(tensor, other):  # type: ignore[attr-defined]
                    raise GuardError(
                        f"the programs write '{name}', which shares memory with '{other_name}' now and did not before\n"
                        "  give a clone()"
                    )

    def write(self, row: list[torch.Tensor], updates: dict[str, torch.Tensor]) -> None:
        """Give the buffers and inputs that are written their new values."""
        with torch.no_grad():
            for name, tensor in zip(self.names, row, strict=True):
                if name in updates:
                    tensor.copy_(updates[name])

    def result(self, tensors: dict[str, Any]) -> Any:
        """What the model returned, made of the tensors with these names."""
        apart = [take_apart(leaf, lambda item: isinstance(item, Name)) for leaf in self._results]
        leaves = [put_together(template, *[tensors[name] for name in names]) for template, names in apart]
        return pytree.tree_unflatten(leaves, self._structure)


def _leaves(program: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    try:
        values = placeholder_values(program, args, kwargs)
    except TypeError as error:
        raise GuardError(f"the programs were captured for another call: {error}") from error
    return pytree.tree_flatten(list(values.values()))


def capture_training(
    model: Model,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss = None,
    memory_budget: int | None = None,
) -> TrainingPrograms:
    """The programs of one training step of a model or a captured program: joint, forward and backward, and a way to run them.

    `memory_budget` is how many bytes the forward may keep for the backward, on inputs like these; the rest is computed again
    (the pass `recompute`).

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> programs = capture_training(model, (torch.ones(4, 2),), loss=lambda y: y.pow(2).mean())
    >>> value, gradients = programs.run(torch.ones(4, 2))
    >>> model(torch.ones(4, 2)).pow(2).mean().backward()
    >>> torch.allclose(gradients["0.weight"], model[0].weight.grad)
    True
    """
    program, joint, (values, keywords) = _joint(model, args, kwargs, loss)
    if memory_budget is not None:
        recompute_within(joint.program, memory_budget)
    forward, backward = partition(joint.program)
    return TrainingPrograms(joint.program, forward, backward, program, _Call(program, joint, values, keywords))
