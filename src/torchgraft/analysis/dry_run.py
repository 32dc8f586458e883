"""Running a program without computing: node by node on fake tensors, forward and backward, telling a watcher every operator.
What is counted is the watcher's business (`cost/`, `memory/`); what fake tensors are is in `fake.py`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchgraft.analysis.fake import (
    NeedsValues,
    copied_module,
    fake_inputs,
    fake_mode_of,
    fake_module,
    is_fake,
    without_log,
)
from torchgraft.analysis.fake_calls import FakeCalls, FakeInterpreter
from torchgraft.capturing.program import capture
from torchgraft.codegen.calling import copied_inputs, placeholder_values
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError
from torchgraft.ir.answers import ANSWER, made_anew
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import is_guard
from torchgraft.ir.modules import has_hooks
from torchgraft.ir.node import Node
from torchgraft.ir.origin import at, line_of_error, source_of
from torchgraft.ir.structures import in_dtype

OperatorWatch = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
_SKIPPED: Any = object()


@dataclass
class Place:
    """Where a dry run is: which node, and whether its own work or its gradient is at hand."""

    node: Node | None = None
    backward: bool = False


class _WithoutValues(FakeInterpreter):
    """Takes guards that would need values, or look at torch's modes, to hold, and leaves out what nothing but these looks at.

    In which mode it runs is chosen by whoever estimates: without gradients where none are asked for.
    """

    computes = False

    def __init__(self, module: torch.nn.Module, graph: Graph) -> None:
        super().__init__(module, graph=graph)
        self._for_guards = _only_for_guards(graph)

    def run_node(self, n: Node) -> Any:
        if any(self.env.get(source) is _SKIPPED for source in n._inputs):
            return None if is_guard(n._target) else _SKIPPED
        if not self.computes and _checks_modes(n):
            return None
        try:
            return super().run_node(n)
        except NeedsValues:
            if n in self._for_guards:
                return _SKIPPED
            raise

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a submodule; a program in it is run in the same way."""
        module = self.fetch_attr(target)
        if self.computes or not isinstance(module, GraphModule) or has_hooks(module):
            return super().call_module(target, args, kwargs)
        inner = _WithoutValues(module, module.graph)
        inner.calls = self.calls
        result = inner.run(initial_env=placeholder_values(module, args, kwargs), enable_io_processing=False)
        return module.graph.process_outputs(result)


class DryRun(_WithoutValues):
    """Runs a program on fake tensors. Its inputs are those of a call, or given for each placeholder.

    Whom `tell` names is told each operator after it ran, while `place` says for which node. `backward` runs the gradients of
    everything that the program returned. Guards that would need values are taken to hold: the program was captured for that.
    Calls of other processes are not made: their results look as they did when the program was captured. With `compute`
    it is no dry run after all: copies of the real tensors are worked on, for programs whose shapes depend on values. With `dtype`
    what is of floating point is taken to be of that type, with `device` what is on the meta device to be there.

    >>> import torchgraft
    >>> run = DryRun(torchgraft.symbolic_trace(torch.nn.Linear(3, 4)), (torch.ones(2, 3),))
    >>> run.forward().shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        program: GraphModule,
        args: tuple[Any, ...] | dict[Node, Any],
        kwargs: dict[str, Any] | None = None,
        node_done: Callable[[Node, Any], None] | None = None,
        compute: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        given = args if isinstance(args, dict) else placeholder_values(program, args, kwargs)
        self.computes = compute
        self.mode: Any = contextlib.nullcontext()
        module = contents_of(program)
        if compute:
            values, _ = copied_inputs(tuple(given.values()), {})
            module, self.inputs = copied_module(module), dict(zip(given, values, strict=True))
        else:
            self.mode = fake_mode_of(given, program)
            self.inputs = fake_inputs(given, program, self.mode, dtype, device)
            module = fake_module(module, self.mode, dtype, device)
            self.calls = FakeCalls(self.mode)
        super().__init__(module, program.graph)
        self.program = program
        self.place = Place()
        self.operators: Any = contextlib.nullcontext()
        self._is_watched = False
        self.node_done = node_done
        self.result: Any = None
        self._key = f"torchgraft.dry_run.{id(self)}"

    def tell(self, watch: OperatorWatch) -> None:
        """Have somebody told of every operator, also of a call that was made before."""
        self.calls, self.operators, self._is_watched = None, WatchedOperators(watch), True

    def forward(self) -> Any:
        """Run the program."""
        for node, value in self.inputs.items():
            if self.node_done is not None:
                self.node_done(node, value)
        with torch.random.fork_rng(devices=[]), without_log(), self.mode, self.operators:
            result = self.run(initial_env=dict(self.inputs), enable_io_processing=False)
            self.result = self.graph.process_outputs(result)
        self.place.node = None
        return self.result

    def backward(self, accumulate: bool = False) -> bool:
        """Run the gradients of all results with respect to parameters and inputs; False where there are none to run.

        With `accumulate` they are put into `.grad` of the fakes, as a training step does.
        """
        results = [leaf for leaf in pytree.tree_leaves(self.result) if _has_gradient(leaf)]
        sources = [*self.module.parameters(), *pytree.tree_leaves(self.inputs)]
        sources = [tensor for tensor in sources if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
        if not results or not sources:
            return False
        self.place.backward = True
        with self.mode, torch.autograd.set_multithreading_enabled(False):
            try:
                if accumulate:
                    with self.operators:
                        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
                else:
                    gradients = [torch.ones_like(result) for result in results]
                    with self.operators:
                        torch.autograd.grad(results, sources, gradients, allow_unused=True)
            except Exception as error:
                node = self.place.node
                of = "the gradients" if node is None else f"the gradient of node '{node.name}' at {where(node)}"
                error.add_note(f"this was {of}; cost(..., backward=False) and memory(..., training=False) go without")
                raise
        self.place.backward, self.place.node = False, None
        return True

    # ---- one node ----

    def run_node(self, n: Node) -> Any:
        self.place.node = n
        try:
            answered = not self.computes and n._meta is not None and ANSWER in n._meta
            result = made_anew(n._meta[ANSWER]) if answered else super().run_node(n)  # type: ignore[index]
        except (*NeedsValues, UnsupportedOperatorException) as error:
            reason = f"its result depends on the values of a tensor ({type(error).__name__}: {error})"
            if isinstance(error, UnsupportedOperatorException):
                reason = f"torch cannot say what {error} returns without running it"
            place = where(n) if source_of(n) else line_of_error(error) or where(n)
            raise GraftError(
                f"cannot run node '{n.name}' without computing: {reason}; at {place}; give compute=True to run on real tensors"
            ) from error
        except Exception as error:
            if not self.computes:
                error.add_note("this was on tensors without data; if the program runs on real ones, give compute=True")
            raise
        if result is _SKIPPED:
            return result
        if self._is_watched and torch.is_grad_enabled():
            self._mark_history(n, result)
        if self.node_done is not None:
            self.node_done(n, result)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_guard(target):
            # Asking a symbolic truth value is what makes it a condition; comparing it is not.
            args = tuple([bool(value) if isinstance(value, torch.SymBool) else value for value in args])
        return super().call_function(target, args, kwargs)

    def _mark_history(self, node: Node, result: Any) -> None:
        """Let every gradient that belongs to `node` say so when it runs.

        The mark is kept by autograd itself: holding its objects here would keep alive what they saved.
        """
        place, key = self.place, self._key

        def enter(gradients: Any) -> None:
            place.node = node

        values = [self.env.get(source) for source in node._inputs]
        pending = [leaf.grad_fn for leaf in pytree.tree_leaves([result, values]) if _has_gradient(leaf)]
        while pending:
            function = pending.pop()
            if function is None or key in function.metadata:
                continue
            function.metadata[key] = True
            function.register_prehook(enter)
            pending += [following for following, _ in function.next_functions]


class WatchedOperators(TorchDispatchMode):
    """Tells every operator to a watcher, taken apart where torch defines it by others; one on programs (`cond`) stays whole."""

    supports_higher_order_operators = True

    def __init__(self, watch: OperatorWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") == "prim":
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload) and _is_composite(func):
            # Inference mode leaves them whole.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        self.watch(func, args, kwargs, result)
        return result


def _is_composite(func: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None


def _only_for_guards(graph: Graph) -> set[Node]:
    """The nodes whose value nothing but guards looks at."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if is_guard(node._target) or (node._users and all(user in found for user in node._users)):
            found.add(node)
    return found


def computing_if_needed(run: Callable[[bool], Any], after_any_error: bool = False) -> Any:
    """What `run(False)` gives; where sizes depend on values, so that nothing can be said without computing, `run(True)`.

    With `after_any_error` it is tried in any case: on fakes a program may fail in any way (experts chosen by tokens, an operator
    without a fake kernel), and if it is at fault itself, it fails again on real tensors.

    >>> computing_if_needed(lambda compute: compute)
    False
    """
    try:
        return run(False)
    except Exception as error:
        if not after_any_error and not (isinstance(error, GraftError) and isinstance(error.__cause__, NeedsValues)):
            raise
    return run(True)


def _checks_modes(node: Node) -> bool:
    """Whether a guard looks only at what torch answers to a question without arguments, such as whether gradients are on."""
    return is_guard(node._target) and all(one._op == "call_function" and not one._inputs for one in node._inputs)


# ---- programs and their inputs ----


def program_of(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    compute: bool = False,
    level: str = "module",
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> GraphModule:
    """A program as it is; anything else captured, on fakes where that is possible, so that nothing is computed.

    With `dtype` what is of floating point is taken to be of that type, with `device` what is on the meta device to be there.

    >>> program_of(torch.nn.Linear(3, 4), (torch.ones(2, 3),)).graph.output_node().op
    'output'
    """
    if isinstance(model, GraphModule):
        return model
    if compute:
        return capture(model, args, kwargs, level=level)
    has_bare_inputs = any(_is_bare(leaf) for leaf in pytree.tree_leaves((args, kwargs)))
    mode = fake_mode_of(args, kwargs, *([model] if isinstance(model, torch.nn.Module) else []))
    try:
        subject = fake_module(model, mode, dtype, device) if isinstance(model, torch.nn.Module) else model
        values, keywords = [fake_inputs(tree, model, mode, dtype, device) for tree in (args, kwargs)]
        with mode, without_log():
            program = capture(subject, values, keywords, level=level)
        # What was kept whole because it cannot be watched on fakes hides its parts; a real run may show them.
        if not program.meta.get("kept_whole") or has_bare_inputs:
            return program
    except NeedsValues as error:
        if has_bare_inputs:
            raise GraftError(
                f"the model reads values of a tensor, and its inputs hold none ({type(error).__name__}: {error})"
                f"{at(line_of_error(error))}\ngive inputs and weights that are not on the meta device"
            ) from error
    except Exception:
        if has_bare_inputs:
            raise
    # Python reads values, or an operator has no fake kernel: only a real run can tell which way the model goes.
    if dtype is not None:
        with contextlib.suppress(Exception):  # what the CPU cannot do in that type is captured in its own
            subject = copy.deepcopy(model).to(dtype) if isinstance(model, torch.nn.Module) else model
            values, keywords = [in_dtype(tree, dtype) for tree in (args, kwargs)]
            return capture(subject, values, keywords, level=level)
    return capture(model, args, kwargs, level=level)


def has_values(model: Any, *trees: Any) -> bool:
    """Whether a model and its inputs can be run for real: nothing is on the meta device, or a fake.

    >>> has_values(torch.nn.Linear(3, 4), torch.ones(2, 3)), has_values(torch.sin, torch.ones(2, device="meta"))
    (True, False)
    """
    state = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
    return not any(map(_is_bare, [*state, *pytree.tree_leaves(trees)]))


def _is_bare(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.device.type == "meta" or is_fake(leaf))


def contents_of(program: torch.nn.Module) -> torch.nn.Module:
    """A plain module with the parameters, submodules and constants of a program, so that its graph need not be copied.

    >>> import torchgraft
    >>> contents_of(torchgraft.symbolic_trace(torch.nn.Linear(3, 4))).get_parameter("weight").shape
    torch.Size([4, 3])
    """
    holder = torch.nn.Module()
    own = ("_graph", "_edit_hooks", "_deepcopy_hooks", "_edits", "meta")
    holder.__dict__.update({name: value for name, value in program.__dict__.items() if name not in own})
    return holder


def where(node: Node) -> str:
    """The user's line that made a node, as errors say it."""
    return str(source_of(node) or f"node '{node.name}' (no source line is known)")
