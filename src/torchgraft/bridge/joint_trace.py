"""Forward and backward of a function of tensors as one torch.fx graph, by AOTAutograd, with the role of every input and output.
The only file that knows AOTAutograd, which is no public interface of torch; what the graph becomes is in `training.py`.

Used, and the same from torch 2.11 to 2.15 (tests/bridge/test_joint_trace.py holds them to it):
- `aot_export_joint_with_descriptors`: runs a module on fake tensors and traces it and its gradients, without side effects;
- `descriptors`: what it says about each input and output of the graph, in `meta["desc"]`;
- `FakeTensorMode`, `detect_fake_mode`: tensors without memory, so that tracing computes nothing;
- `torch.fx.traceback.get_current_meta`: the metadata that new nodes get; `meta["is_gradient_acc"]` marks sums of gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.traceback import get_current_meta
from torch.overrides import TorchFunctionMode

from torchgraft.errors import BridgeError
from torchgraft.ir.origin import is_user_code, stack_trace_text


class Role(NamedTuple):
    """What an input or output of the graph is, and of which input or result of the function, by its number.

    Inputs are "primal" (an input of the function), "tangent" (the gradient of a result) and "update tangent" (the gradient
    of the new value of an input that the function writes). Outputs are "result", "update" (a new value) and "gradient".
    """

    kind: str
    number: int


class JointTrace(NamedTuple):
    """A traced graph; `outputs` has None where there is nothing, as for the gradient of an input that needs none."""

    module: torch.fx.GraphModule
    inputs: list[Role]
    outputs: list[Role | None]


def trace_joint(function: Callable[..., list[torch.Tensor]], tensors: Sequence[torch.Tensor]) -> JointTrace:
    """Trace a function that takes tensors one by one and returns a list of tensors, and its gradients.

    >>> weight = torch.ones(3, requires_grad=True)
    >>> trace = trace_joint(lambda w, x: [w * x], [weight, torch.ones(2, 3)])
    >>> [node.name for node in trace.module.graph.nodes if node.op == "placeholder"]
    ['primals_1', 'primals_2', 'tangents_1']
    >>> trace.inputs[2], trace.outputs[1]
    (Role(kind='tangent', number=0), Role(kind='gradient', number=0))
    """
    # Gradients are what is asked for, whatever the caller has switched off around the capture.
    with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        joint = aot_export_joint_with_descriptors(stack, _Call(function), tuple(_fakes(tensors)))
        module = joint.graph_module
    _copy_lines_to_backward(module.graph)
    _note_constants(module)
    nodes = list(module.graph.nodes)
    inputs = [_input_role(node.meta["desc"]) for node in nodes if node.op == "placeholder"]
    outputs = [_output_role(descriptor) for descriptor in nodes[-1].meta["desc"]]
    return JointTrace(module, inputs, outputs)


class _Call(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def _fakes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors without their values. Tensors that the function finds elsewhere become constants of the graph."""
    mode = detect_fake_mode(list(tensors)) or FakeTensorMode(allow_non_fake_inputs=True)
    result = []
    for tensor in tensors:
        # A new tensor for each input: one that is given twice has two gradients.
        alone = tensor.detach().requires_grad_(tensor.requires_grad)
        result.append(alone if isinstance(tensor, FakeTensor) else mode.from_tensor(alone))
    return result


def _input_role(descriptor: Any) -> Role:
    if isinstance(descriptor, descriptors.PlainAOTInput):
        return Role("primal", descriptor.idx)
    if isinstance(descriptor, descriptors.TangentAOTInput):
        output = descriptor.output
        if isinstance(output, descriptors.PlainAOTOutput):
            return Role("tangent", output.idx)
        if isinstance(output, descriptors.InputMutationAOTOutput):
            return Role("update tangent", _input_role(output.mutated_input).number)
    raise _unknown(descriptor)


def _output_role(descriptor: Any) -> Role | None:
    if descriptor is None:
        return None
    if isinstance(descriptor, descriptors.PlainAOTOutput):
        return Role("result", descriptor.idx)
    if isinstance(descriptor, descriptors.InputMutationAOTOutput):
        return Role("update", _input_role(descriptor.mutated_input).number)
    if isinstance(descriptor, descriptors.GradAOTOutput):
        return Role("gradient", _input_role(descriptor.grad_of).number)
    raise _unknown(descriptor)


def _unknown(descriptor: Any) -> BridgeError:
    return BridgeError(
        "cannot capture forward and backward as one program: AOTAutograd makes an input or output of it that has no "
        f"counterpart in the model ({descriptor.expr()}); it does so for inputs that share memory and are written in place, "
        "and for tensor subclasses: clone the input, or give plain tensors"
    )


def _note_constants(module: torch.fx.GraphModule) -> None:
    """Constants get a value in their metadata, as all other nodes have."""
    known = [value for node in module.graph.nodes if isinstance(value := node.meta.get("val"), FakeTensor)]
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target, None)
        if "val" not in node.meta and isinstance(value, torch.Tensor) and known:
            node.meta["val"] = known[0].fake_mode.from_tensor(value.detach())


# ---- where nodes come from ----


class SourceLines(TorchFunctionMode):
    """While active, gives nodes made by a tracer below the user's line and the path of the module it stands in.

    The lines are looked up on the stack, so that nothing of torch or of the model has to be patched. `refuse` is asked
    first about every call of torch, by the name of the function.
    """

    def __init__(self, model: torch.nn.Module, refuse: Callable[[str, tuple[Any, ...]], None]) -> None:
        super().__init__()
        self._refuse = refuse
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._end = sys._getframe(1).f_code

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # inside torch.cond, where there is no stack to look at
            return func(*args, **(kwargs or {}))
        self._refuse(getattr(func, "__name__", ""), args)
        with _current(self._origin(sys._getframe(1))):
            return func(*args, **(kwargs or {}))

    def _origin(self, frame: FrameType | None) -> dict[str, Any]:
        line: tuple[CodeType, int] | None = None
        modules: list[tuple[str, tuple[str, type]]] = []
        while frame is not None and frame.f_code is not self._end:
            code = frame.f_code
            if line is None and is_user_code(code) and not code.co_filename.startswith("<eval_with_key>"):
                line = code, frame.f_lasti
            if code.co_name == "_call_impl":
                module = frame.f_locals.get("self")
                path = self._paths.get(id(module))
                if path is not None:
                    modules.append((path, (path, type(module))))
            frame = frame.f_back
        trace = stack_trace_text((*line, None)) if line is not None else None
        return {"stack_trace": trace, "nn_module_stack": dict(reversed(modules))}


@contextmanager
def _current(entries: dict[str, Any]) -> Iterator[None]:
    meta = get_current_meta()
    before = {key: meta[key] for key in entries if key in meta}
    meta.update({key: value for key, value in entries.items() if value})
    try:
        yield
    finally:
        for key in entries:
            meta.pop(key, None)
        meta.update(before)


_ORIGIN = ("stack_trace", "nn_module_stack")


def _copy_lines_to_backward(graph: torch.fx.Graph) -> None:
    """Give the nodes of the backward the lines of the operations that they are gradients of.

    Both have the number that autograd gave the operation; of several with one number, the first is the one it numbered. What
    adds up the gradients of a value that is used twice belongs to no operation, and to no module; its number is that of whatever
    ran last in the forward.
    """
    origins: dict[int, torch.fx.Node] = {}
    for node in graph.nodes:
        if node.meta.get("is_gradient_acc"):
            for key in ("seq_nr", *_ORIGIN):
                node.meta.pop(key, None)
            continue
        number = node.meta.get("seq_nr")
        if number is None:
            continue
        if node.meta.get("partitioner_tag") != "is_backward":
            origins.setdefault(number, node)
        elif number in origins:
            for key in _ORIGIN:
                value = origins[number].meta.get(key)
                if value and key not in node.meta:
                    node.meta[key] = value
