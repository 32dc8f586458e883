"""`joint_program` and `capture_training`: forward and backward of a model as programs that anyone can read, change and run.
How they are traced is in `joint_trace.py`, how they are cut in two in `partition.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torchgraft.bridge.joint_capture import JointCapture, Loss
from torchgraft.bridge.levels import Model
from torchgraft.bridge.model_call import ModelCall
from torchgraft.bridge.partition import KINDS, partition
from torchgraft.codegen.calling import example_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GuardError


def joint_program(
    model: Model, args: Any = (), kwargs: Mapping[str, Any] | None = None, *, loss: Loss = None
) -> GraphModule:
    """Forward and backward of `model` as one program in ATen operators.

    The program holds no state. Its inputs are `primals_1`, `primals_2`, ...: parameters, buffers, then the tensors among the
    inputs of the model; and `tangents_1`, ...: the gradients of the results, one for each result that has a gradient. In
    the metadata of an input, `origin_kind` says "parameter", "buffer", "constant", "input" or "tangent", and
    `origin_name` which one. It returns one tuple; `entries` in the metadata of the output says of each entry whether it is
    a "result", an "update" (the new value of a buffer or input that the model writes), an "assignment" (a tensor that the
    model puts in the place of a buffer) or a "gradient", and of what.

    `loss` is a function of what the model returns, and gives a scalar; then that is the only result. Every node has the
    shape and dtype of its value in `meta["val"]`; the program holds for these sizes and raises GuardError for others.

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
    return JointCapture(model, args, kwargs, loss).joint


class TrainingStep(NamedTuple):
    """What the model (or the loss) returned, and the gradients by the names of parameters and inputs.

    A parameter that the results do not depend on, or that needs no gradient, has None, as `parameter.grad` would.
    """

    results: Any
    gradients: dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class TrainingPrograms:
    """The programs of one training step; made by `capture_training`.

    `joint` computes everything at once, see `joint_program`. `forward` takes the primals and returns results, updates and
    saved values; `backward` takes the saved values and the tangents and returns the gradients. Call them with detached
    tensors; `run` does it for you.
    """

    joint: GraphModule
    forward: GraphModule
    backward: GraphModule
    _call: ModelCall = field(repr=False)

    def primals(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """What `joint` and `forward` take for these inputs of the model: its tensors as they are now, then the inputs."""
        return self._call.row(args, kwargs)

    def run(self, *args: Any, tangents: Sequence[torch.Tensor] | None = None, **kwargs: Any) -> TrainingStep:
        """Run forward and backward on inputs of the model, and write the buffers that it writes.

        `tangents` are the gradients of the results, in the order of the inputs `tangents_*`; without them they are ones, as
        if the sum of all results was to be minimised. Gradients are returned; `.grad` of the parameters stays as it is.
        """
        primals = self.primals(*args, **kwargs)
        updated = [entry.name for entry in self.forward.graph.output_node().meta["entries"] if entry.kind == "update"]
        self._call.refuse_sharing(primals, updated)
        # Some kernels (LSTM on a CPU) keep what the backward needs only while gradients are on; detached inputs need none.
        with torch.inference_mode(False), torch.enable_grad():
            ahead = _by_kind(self.forward, self.forward(*[tensor.detach() for tensor in primals]))
            saved = list(ahead["saved"].values())
            back = _by_kind(self.backward, self.backward(*saved, *self._tangents(ahead["result"], tangents)))
        with torch.no_grad():
            # Last, because saved values may be the very tensors that are written here.
            self._call.write(primals, ahead["update"], ahead["assignment"])
        parameters = [held.name for held in self._call.tensors.held if held.kind == "parameter"]
        gradients: dict[str, torch.Tensor | None] = dict.fromkeys(parameters)
        gradients.update(_apart(back["gradient"]))
        return TrainingStep(self._call.results(ahead["result"]), gradients)

    def _tangents(
        self, results: dict[str, torch.Tensor], given: Sequence[torch.Tensor] | None
    ) -> Iterable[torch.Tensor]:
        nodes = [n for n in self.backward.graph.find_nodes(op="placeholder") if n.meta["origin_kind"] == "tangent"]
        wanted = [node for node in nodes if node.meta["origin_name"] in results]
        if given is not None and len(given) != len(wanted):
            raise GuardError(
                f"run() got {len(given)} tangents, and the program takes {len(wanted)}: "
                f"{', '.join(str(node.meta['origin_name']) for node in wanted)}"
            )
        values = dict(zip(wanted, given, strict=True)) if given is not None else {}
        for node in nodes:
            example = node.meta["val"]
            if node in values:
                yield _laid_out(values[node], example)
            elif node in wanted:
                yield _laid_out(torch.ones_like(results[node.meta["origin_name"]]), example)
            else:  # nothing is asked about the new value of an input that the model writes
                device = next(iter(results.values())).device
                yield torch.zeros(example.shape, dtype=example.dtype, device=device)


def capture_training(
    model: Model, args: Any = (), kwargs: Mapping[str, Any] | None = None, *, loss: Loss = None
) -> TrainingPrograms:
    """The programs of one training step of `model`: joint, forward and backward, and a way to run them together.

    They hold for the sizes and dtypes of the example inputs, in the mode that the model is in now.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> programs = capture_training(model, (torch.ones(4, 2),), loss=lambda y: y.pow(2).mean())
    >>> value, gradients = programs.run(torch.ones(4, 2))
    >>> model(torch.ones(4, 2)).pow(2).mean().backward()
    >>> torch.allclose(gradients["0.weight"], model[0].weight.grad)
    True
    """
    capture = JointCapture(model, *example_inputs(args, kwargs), loss)
    forward, backward = partition(capture.joint)
    return TrainingPrograms(capture.joint, forward, backward, capture.call)


def _by_kind(program: GraphModule, values: Sequence[Any]) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for entry, value in zip(program.graph.output_node().meta["entries"], values, strict=True):
        result[entry.kind][entry.name] = value
    return result


def _apart(gradients: dict[str, torch.Tensor | None]) -> dict[str, Any]:
    """Each gradient in a tensor of its own, so that whoever changes one changes no other."""
    seen: set[int] = set()
    result = {}
    for name, value in gradients.items():
        result[name] = value.clone() if value is not None and id(value) in seen else value
        seen.add(id(value))
    return result


def _laid_out(value: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """A tangent in the layout of its result, which is what the backward was traced for."""
    if value.shape != example.shape or value.stride() == example.stride():
        return value
    return torch.empty_strided(example.shape, example.stride(), dtype=value.dtype, device=value.device).copy_(value)
