"""Calls that stay one call in a program of forward and backward: the forward runs them with autograd on, the backward asks it
for their gradients. Which calls these are is decided in `joint.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchgraft.capturing.state.model_state import ModelState
from torchgraft.errors import BridgeError, GuardError
from torchgraft.ir.arguments import leaves, map_plain
from torchgraft.ir.modules import paths_of_modules
from torchgraft.ir.node import Node
from torchgraft.ir.structures import parts_of, put_together, take_apart
from torchgraft.lowering.operators import part_of
from torchgraft.lowering.recorder import Recorder, without_data
from torchgraft.lowering.tensors import TracedTensor
from torchgraft.lowering.values import concrete, traced_in


class KeptRun(NamedTuple):
    """One run of a call: the tensors in its result, the same with their history, and those that gradients are wanted for."""

    results: list[torch.Tensor]
    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]


def run_kept(
    function: Callable[..., Any], state: dict[str, Any], args: Any, kwargs: Any, needed: Sequence[int], expected: str
) -> KeptRun:
    """Call a function, or a module with these parameters, so that `gradients_of` can be asked for.

    `needed` are the places among all tensors of those that gradients are wanted for; `expected` says what is returned.

    >>> run = run_kept(torch.sin, {}, (torch.zeros(2),), {}, (0,), "tensor")
    >>> run.results, gradients_of(run, (torch.ones(2),), (0,))
    ([tensor([0., 0.])], (tensor([1., 1.]),))
    """
    run, result = _run(function, (state, args, kwargs), needed)
    if outline(result) != expected:
        raise GuardError(
            f"the program was captured for a call of {_name(function)} that returns {expected}, and now it returns "
            f"{outline(result)}\n  capture the model again with inputs, and in a mode, like these"
        )
    return run


def _run(function: Callable[..., Any], tree: Any, needed: Sequence[int]) -> tuple[KeptRun, Any]:
    seen = 0
    inputs: list[torch.Tensor] = []

    def begin(leaf: Any) -> Any:
        nonlocal seen
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        if seen in needed:
            inputs.append(leaf.requires_grad_())
        seen += 1
        return leaf

    state, args, kwargs = map_plain(tree, begin)
    with torch.enable_grad():
        result = (
            torch.func.functional_call(function, state, args, kwargs)
            if isinstance(function, torch.nn.Module)
            else function(*args, **kwargs)
        )
    outputs = take_apart(result, lambda item: isinstance(item, torch.Tensor))[1]
    given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if _depends_on_others(outputs, inputs, given):
        raise GuardError(
            f"the result of {_name(function)} depends on a tensor that requires a gradient and is not given to it\n"
            "  it may be left from an earlier run, in a cache: switch that off, or train the program at level 'function'"
        )
    return KeptRun([tensor.detach() for tensor in outputs], outputs, inputs), result


def _depends_on_others(outputs: list[torch.Tensor], inputs: list[torch.Tensor], given: list[torch.Tensor]) -> bool:
    """Whether there is a history beside that of `inputs`. A view of what is given that the call itself asks gradients for, as
    models do that compute parts of themselves again in the backward, has none."""
    known, seen = set(map(id, inputs)), set()
    memory = {tensor.untyped_storage()._cdata for tensor in given}
    pending: list[Any] = [output.grad_fn for output in outputs]
    while pending:
        function = pending.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        leaf = getattr(function, "variable", None)
        if leaf is not None and id(leaf) not in known and leaf.untyped_storage()._cdata not in memory:
            return True
        pending += [item for item, _ in function.next_functions]
    return False


def gradients_of(
    run: KeptRun, tangents: Sequence[torch.Tensor | None], used: Sequence[int]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients for what a call was given, from those of its results. `used` are the places of those that something
    depended on when the program was captured; others have none."""
    found = _gradients(run, tangents)
    for place, value in enumerate(found):
        if value is not None and place not in used:
            raise GuardError(
                f"the program was captured for a call of which nothing depends on input {place}, and now something does\n"
                "  capture the model again with inputs, and in a mode, like these"
            )
    return tuple(
        [
            torch.zeros_like(run.inputs[place]) if place in used and value is None else value
            for place, value in enumerate(found)
        ]
    )


def _gradients(run: KeptRun, tangents: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    given = [(output, item) for output, item in zip(run.outputs, tangents, strict=True) if item is not None]
    given = [(output, item) for output, item in given if output.requires_grad]
    outputs, gradients = zip(*given, strict=True)
    return torch.autograd.grad(outputs, run.inputs, gradients, allow_unused=True)


def outline(value: Any) -> str:
    """What a value is made of, in words: tensors only as such, everything else as it is.

    >>> outline((torch.ones(2), None, {"a": 3}))
    '(tensor, None, {a: 3})'
    """
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {outline(item)}' for name, item in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(outline, value))})"
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    return f"{type(value).__name__}{outline(parts_of(value) or {})}"


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


# ---- writing such a call down ----


def refuse_own_learning(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """Raise if a module writes its own parameters, puts them elsewhere, or gives its tensors other memory: with the parameters of
    a training program in their places, it would do something else. It is run once for that, and put back."""
    state = ModelState(paths_of_modules(module))
    for inner in state.paths:
        state.watch(inner)
    state.tensors.save_all(module)
    values, tensors = [item.detach().clone() for item in module.parameters()], [*module.parameters(), *module.buffers()]
    for tensor in tensors:
        state.tensors.keep_place(tensor)
    before = _places(module, tensors)
    args, kwargs = map_plain((concrete(args), concrete(kwargs)), _copied)
    try:
        with torch.enable_grad():
            module(*args, **kwargs)
        is_changed = before != _places(module, tensors) or not all(map(_is_same, values, module.parameters()))
    except Exception:  # the run that is written down says it better
        return
    finally:
        state.restore_all()
    if is_changed:
        raise BridgeError(
            f"cannot write forward and backward as one program: {_name(module)} is one call, and writes or moves its own "
            "parameters, or gives its tensors other memory\n"
            "  train the program at level 'function', whose gradients autograd computes"
        )


def _places(module: torch.nn.Module, tensors: list[torch.Tensor]) -> Any:
    """Which parameters a module has by which names, and where its tensors are."""
    named = {name: id(value) for name, value in module.named_parameters(remove_duplicate=False)}
    return named, [(tensor.data_ptr(), tensor.shape) for tensor in tensors]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        torch.equal(one.view(torch.uint8), other.detach().view(torch.uint8))
        if one.dim()
        else one.item() == other.item()
    )


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


class _WithGradient(torch.autograd.Function):
    """Lets autograd know of a call of which only the run and its gradients are written down."""

    @staticmethod
    def forward(ctx: Any, call: _KeptCall, *inputs: TracedTensor) -> tuple[TracedTensor, ...]:
        ctx.call, outputs = call, call.outputs()
        ctx.set_materialize_grads(False)
        pairs = zip(outputs, call.run.outputs, strict=True)
        ctx.mark_non_differentiable(*[traced for traced, output in pairs if not output.requires_grad])
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: TracedTensor | None) -> Any:
        return None, *ctx.call.gradients(tangents)


class _KeptCall:
    """One call while it is written down."""

    def __init__(self, recorder: Recorder, run: KeptRun, node: Node, inputs: list[TracedTensor]) -> None:
        self.recorder, self.run, self.node, self.inputs = recorder, run, node, inputs

    def outputs(self) -> tuple[TracedTensor, ...]:
        """The tensors in the result."""
        whole = part_of(self.recorder, self.node, 0)()
        self.recorder.note_value(whole, self.run.results)
        items = enumerate(self.run.results)
        return tuple([self.recorder.traced(item, part_of(self.recorder, whole, index)) for index, item in items])

    def gradients(self, tangents: tuple[TracedTensor | None, ...]) -> list[TracedTensor | None]:
        """What the backward computes for the inputs."""
        with torch._C._DisableTorchDispatch():  # the recorder listens, and autograd computes this on its own
            values = _gradients(self.run, concrete(tangents))
            notes = without_data(values)
        used = tuple([place for place, value in enumerate(values) if value is not None])
        arguments = self.node, self.recorder.argument(tangents), used
        node = self.recorder.create_node("call_function", gradients_of, arguments, {})
        node.meta["val"] = notes
        found: list[TracedTensor | None] = []
        for index, (value, tensor) in enumerate(zip(values, self.inputs, strict=True)):
            if value is None:
                found.append(None)
                continue
            gradient = self.recorder.traced(value, part_of(self.recorder, node, index), is_static=tensor.is_static)
            gradient.sizes = None if tensor.is_static else list(tensor.symbolic_sizes())
            found.append(gradient)
        return found


def record_kept(
    recorder: Recorder, function: Callable[..., Any], spelled: Any, state: dict[str, Any], args: Any, kwargs: Any
) -> Any:
    """Write a call down as one run, whose gradients are asked of autograd; its result, with traced tensors."""
    tree = state, args, kwargs
    traced = {id(tensor.actual): tensor for tensor in traced_in(tree)}
    tensors = [leaf for leaf in leaves(concrete(tree)) if isinstance(leaf, torch.Tensor)]
    needed = [index for index, leaf in enumerate(tensors) if id(leaf) in traced and traced[id(leaf)].requires_grad]
    versions = [tensor._version for tensor in tensors]
    run, result = _run(function, concrete(tree), needed)
    if versions != [tensor._version for tensor in tensors]:
        raise BridgeError(
            f"cannot write forward and backward as one program: {_name(function)} is one call, and writes its arguments\n"
            "  give it copies, or train the program at level 'function', whose gradients autograd computes"
        )
    arguments = (spelled, *map(recorder.argument, tree), tuple(needed), outline(result))
    node = recorder.create_node("call_function", run_kept, arguments, {})
    inputs = [traced[id(tensors[index])] for index in needed]
    call = _KeptCall(recorder, run, node, inputs)
    outputs = _WithGradient.apply(call, *inputs) if inputs else call.outputs()
    template, _ = take_apart(result, lambda item: isinstance(item, torch.Tensor))
    return put_together(template, *outputs)
