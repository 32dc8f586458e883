"""What users of torch do with a model: each use takes a module and its inputs, and gives what can be compared.
Which modules they are tried on is in `test_what_users_do_next.py`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.utils import _pytree as pytree

import torchgraft
from tests.compatibility.small_models import Given

Use = Callable[[nn.Module, Callable[[int], Given]], Any]
USES: dict[str, Use] = {}
# Uses that only programs are promised for, so that the model itself is called as the control.
OF_PROGRAMS: set[str] = set()
# Uses that take a second rather than milliseconds.
SLOW: set[str] = set()


def use(name: str, of_programs: bool = False, slow: bool = False) -> Callable[[Use], Use]:
    """Add a use under a name."""

    def add(function: Use) -> Use:
        USES[name] = function
        if of_programs:
            OF_PROGRAMS.add(name)
        if slow:
            SLOW.add(name)
        return function

    return add


def called(module: Any, given: Given) -> Any:
    """What a call gives, random numbers being the same each time."""
    torch.manual_seed(0)
    return module(*given.args, **given.kwargs)


def loss_of(result: Any) -> torch.Tensor:
    """A number to take the gradient of."""
    tensors = [
        leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()


class Holder(nn.Module):
    """A model that has another one inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(lambda leaf: leaf * 2, self.inner(*args, **kwargs))


# ---- calls and copies ----

use("call")(lambda module, inputs: called(module, inputs(2)))
use("other batch")(lambda module, inputs: called(module, inputs(3)))
use("deepcopy")(lambda module, inputs: called(copy.deepcopy(module), inputs(2)))
use("pickle")(lambda module, inputs: called(pickle.loads(pickle.dumps(module)), inputs(2)))
use("double")(lambda module, inputs: called(module.double(), _double(inputs(2))))


def _double(given: Given) -> Given:
    return Given(*pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tuple(given)))


@use("torch.save")
def save(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """Saved whole and loaded."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return called(torch.load(file, weights_only=False), inputs(2))


@use("checkpoint")
def checkpoint(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """The state, and a call after half of it was loaded again."""
    state = {name: value / 2 if value.is_floating_point() else value for name, value in module.state_dict().items()}
    module.load_state_dict(state)
    return called(module, inputs(2)), dict(module.state_dict())


@use("thread")
def in_thread(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """A call in a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(called(module, inputs(2))))
    thread.start()
    thread.join()
    return results[0]


# ---- modes ----


@use("autocast")
def autocast(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """A call under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return called(module, inputs(2))


@use("inference mode")
def inference(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """A call without autograd."""
    with torch.inference_mode():
        return pytree.tree_map(torch.clone, called(module, inputs(2)))


@use("other mode")
def other_mode(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """A call in training mode, and one in evaluation mode after it."""
    return called(module.train(), inputs(2)), called(module.eval(), inputs(2))


# ---- training ----


@use("optimizer")
def optimizer(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """Two steps of an optimizer."""
    steps = torch.optim.AdamW(module.parameters(), lr=0.001)
    losses = []
    for _ in range(2):
        steps.zero_grad()
        losses.append(loss_of(called(module, inputs(2))))
        losses[-1].backward()
        steps.step()
    return losses, dict(module.state_dict())


@use("hooks")
def hooks(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """Hooks before and after forward, and on the gradient of a parameter."""
    seen: list[Any] = []
    module.register_forward_pre_hook(lambda module, args: seen.append(args))
    module.register_forward_hook(lambda module, args, result: pytree.tree_map(lambda leaf: leaf * 2, result))
    next(module.parameters()).register_hook(lambda gradient: seen.append(gradient.clone()))
    result = called(module, inputs(2))
    loss_of(result).backward()
    return result, seen


@use("functional_call")
def functional_call(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """Other parameters for one call."""
    parameters = {name: value.detach() / 2 for name, value in module.named_parameters()}
    given = inputs(2)
    torch.manual_seed(0)
    return torch.func.functional_call(module, parameters, given.args, given.kwargs)


@use("grad")
def grad(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """torch.func.grad of a loss by the parameters."""
    given = inputs(2)
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    torch.manual_seed(0)
    return torch.func.grad(
        lambda values: loss_of(torch.func.functional_call(module, values, given.args, given.kwargs))
    )(parameters)


@use("vmap")
def vmap(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """The model mapped over a dimension more than it takes."""
    given = pytree.tree_map(lambda leaf: torch.stack([leaf, leaf]), tuple(inputs(2)))
    torch.manual_seed(0)
    return torch.func.vmap(lambda args, kwargs: module(*args, **kwargs), randomness="same")(*given)


@use("DistributedDataParallel", slow=True)
def distributed(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """One process of one, and the gradients it leaves."""
    gc.freeze()  # what is there before need not be looked through
    with _process_group():
        parallel = nn.parallel.DistributedDataParallel(module)
        result = called(parallel, inputs(2))
        loss_of(result).backward()
        # The last to let go of the group waits for its threads, and DDP would do so while it keeps Python from running them.
        del parallel
        gc.collect()
    gc.unfreeze()
    return result, [parameter.grad for parameter in module.parameters()]


@contextlib.contextmanager
def _process_group() -> Any:
    import torch.distributed

    # In this process alone: a port that was free a moment ago may be somebody else's, and then nobody answers.
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# ---- compilers and exporters ----


@use("torch.compile", slow=True)
def compiled(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """Compiled before it has ever run, and called with two sizes."""
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager")
    return called(compiled, inputs(2)), called(compiled, inputs(3))


@use("torch.compile, fullgraph", slow=True)
def compiled_fully(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """As one graph, from the first call on."""
    torch._dynamo.reset()
    return called(torch.compile(module, backend="eager", fullgraph=True), inputs(2))


@use("torch.compile around it", slow=True)
def compiled_around(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """As a part of a model that is compiled as one graph."""
    torch._dynamo.reset()
    return called(torch.compile(Holder(module), backend="eager", fullgraph=True), inputs(2))


@use("torch.export", slow=True)
def exported(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """Exported without Dynamo."""
    given = inputs(2)
    return called(torch.export.export(module, given.args, given.kwargs, strict=False).module(), given)


@use("torch.export, strict", slow=True)
def exported_strictly(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """Exported through Dynamo."""
    torch._dynamo.reset()
    given = inputs(2)
    return called(torch.export.export(module, given.args, given.kwargs, strict=True).module(), given)


@use("torch.jit.trace", slow=True)
def scripted(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """Traced to TorchScript, where sizes are tensors."""
    given = inputs(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if given.kwargs:
            traced = torch.jit.trace(module, example_kwarg_inputs={"x": given.args[0], **given.kwargs}, strict=False)
            return traced(x=given.args[0], **given.kwargs)
        return called(torch.jit.trace(module, given.args, strict=False), given)


@use("torch.onnx.export", slow=True)
def onnx(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
    """The operators of the exported model."""
    import pytest

    pytest.importorskip("onnxscript")
    given = inputs(2)
    model = torch.onnx.export(module, given.args, kwargs=given.kwargs, dynamo=True, verbose=False)
    return torch.tensor([len(list(model.model.graph.inputs)), len(list(model.model.graph.outputs))])  # type: ignore[union-attr]


# ---- further captures; torch's models need not survive them, programs must ----


class Around(nn.Module):
    """A model that calls another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class AroundKeywords(Around):
    """The same for a model that takes more."""

    def forward(self, x: Any, bias: Any, shift: Any) -> Any:
        return self.inner(x, bias=bias, shift=shift)


class FxTracer(torch.fx.Tracer):
    """Looks into programs, and makes nodes of buffers: else an index that is traced could not be used on one."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
        return not isinstance(m, torchgraft.GraphModule | Around) and super().is_leaf_module(m, qualified_name)


def further(name: str, change: Callable[[Any, Given], Any]) -> None:
    """Add a use of programs that makes another module of one; the model itself is called for comparison."""

    def changed(module: nn.Module, inputs: Callable[[int], Given]) -> Any:
        given = inputs(2)
        program = change(module, given) if isinstance(module, torchgraft.GraphModule) else module
        if isinstance(program, torchgraft.GraphModule):
            program.graph.lint()
        return called(program, given)

    use(name, of_programs=True)(changed)


def around(module: nn.Module, given: Given) -> Around:
    """A model around another one that takes these inputs."""
    return AroundKeywords(module) if given.kwargs else Around(module)


def fx_traced(module: nn.Module) -> torch.fx.GraphModule:
    """What torch.fx traces, without what it takes for dead."""
    traced = torch.fx.GraphModule(module, FxTracer().trace(module))
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


further("to_fx", lambda program, given: torchgraft.to_fx(program))
further("to_fx and back", lambda program, given: torchgraft.from_fx(torchgraft.to_fx(program)))
further("symbolic_trace", lambda program, given: torchgraft.symbolic_trace(program))
further("symbolic_trace around it", lambda program, given: torchgraft.symbolic_trace(around(program, given)))
further("torch.fx.symbolic_trace", lambda program, given: fx_traced(program))
further("torch.fx.symbolic_trace around it", lambda program, given: fx_traced(around(program, given)))
further("capture", lambda program, given: torchgraft.capture(program, given.args, given.kwargs))
further(
    "capture around it", lambda program, given: torchgraft.capture(around(program, given), given.args, given.kwargs)
)
further("Transformer", lambda program, given: torchgraft.Transformer(program).transform())
further("Interpreter", lambda program, given: lambda *args, **kwargs: _interpreted(program, args, kwargs))


def _interpreted(program: torchgraft.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = [*args, *([kwargs] if kwargs else [])]
    return torchgraft.Interpreter(program).run(*values)
