"""A program cut by what a backend takes: its parts are compiled and checked one by one, and the rest stays in Python.
How a program is cut is in `splitting/`; what a backend is, in `backend.py`.

A part that a backend cannot compile, or computes wrongly, is halved until the calls at fault are known; those stay in Python,
too, so that one operator never fails the whole.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.analysis.comparison import Difference, FrozenTensor, Tolerance, compare, frozen_leaves
from torchgraft.backends.backend import PRECISIONS, Backend, Options
from torchgraft.backends.late_guards import written_outside
from torchgraft.codegen.bound import BoundCodeGen
from torchgraft.codegen.calling import copied_inputs, placeholder_values
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BackendError, GraftError, one_line
from torchgraft.ir.guards import is_guard
from torchgraft.ir.modules import is_from_torch
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute
from torchgraft.splitting.split import Part, Split, split
from torchgraft.splitting.strategies import Size, Supported

# How far results may lie apart, as a multiple of what the dtype they are compared in allows (of the largest element: 1e-5 in
# float32, 2e-3 in float16, 1.6e-2 in bfloat16).
_FACTORS = {"fp32": 50.0, "tf32": 2000.0, "fp16": 10.0, "bf16": 5.0}
_NAME = "lowered_from"
_UNPACKS = "it takes an input apart"


def differences(expected: dict[str, Any], found: dict[str, Any], precision: str, second: str) -> tuple[Difference, ...]:
    """Where two results lie further apart than computing in a precision explains; what is lowered gives no gradients."""
    dtype = PRECISIONS[precision]
    expected, found = _without_gradients(expected), _without_gradients(found)
    if dtype is not torch.float32:
        both = [path for path in expected if _is_wider(expected[path]) and _is_wider(found.get(path))]
        expected, found = (
            {**leaves, **{path: _as(leaves[path], dtype) for path in both}} for leaves in (expected, found)
        )
    return compare(expected, found, Tolerance(factor=_FACTORS[precision]), sides=("model", second)).differences


def _without_gradients(found: dict[str, Any]) -> dict[str, Any]:
    return {
        path: leaf._replace(requires_grad=False) if isinstance(leaf, FrozenTensor) else leaf
        for path, leaf in found.items()
    }


def _is_wider(leaf: Any) -> bool:
    return isinstance(leaf, FrozenTensor) and leaf.values.dtype in (torch.float32, torch.float64)


def _as(leaf: FrozenTensor, dtype: torch.dtype) -> FrozenTensor:
    return leaf._replace(values=leaf.values.to(dtype))


@dataclass
class Compiled:
    """A program that was lowered: how to run it, how much of it the backend took, and why the rest stays in Python."""

    run: Callable[..., Any]
    inputs: str
    calls: int
    taken: int
    parts: int
    stays: dict[str, str] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    module: GraphModule | None = None
    # The program before it was cut, whose nodes `stays` speaks of.
    whole: GraphModule | None = None

    def text(self, name: str, backend: str) -> str:
        """What was taken and what was not, with source lines."""
        count = f"{self.taken} of {self.calls} calls, in {self.parts} part{'' if self.parts == 1 else 's'}"
        lines = [f"{name} for {self.inputs} on {backend}: {count}"]
        if self.stays:
            lines.append(f"{len(self.stays)} call{' stays' if len(self.stays) == 1 else 's stay'} in Python:")
            lines += [f"  {node}: {reason}{self.lines.get(node, '')}" for node, reason in self.stays.items()]
        return "\n".join(lines)


class CompiledPart(torch.nn.Module):
    """Stands in the place of a part of a program."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__torchgraft_function__ = function

    def forward(self, *inputs: Any) -> Any:
        """Run what the backend has made."""
        return self.__torchgraft_function__(*inputs)


def compile_parts(
    backend: Backend,
    body: GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    inputs: str,
    refused: dict[str, str],
) -> Compiled:
    """Cut a program by what a backend takes, and compile the parts. `refused` are the calls that it fails on, by name, with the
    reason; those that are found are added, so that they need not be found again for another size."""
    for node in body.graph.nodes:
        node.meta[_NAME] = node.name
    unpacking = _unpacking(body, args, kwargs)
    memory = Aliases(body.graph)
    # Exporters leave out what has no result, so checks stay in Python; a check goes where the value is made that it checks.
    checks = [node for node in body.graph.nodes if node._op == "call_function" and _is_check(node._target)]
    shared = _shared_results(body, memory)
    checked = {source for node in checks for source in (node, *node._inputs)}

    def supports(node: Node) -> bool | str:
        if node in unpacking:
            return _UNPACKS
        return (
            refused.get(node.meta[_NAME])
            or _reason_to_stay(node, body, memory, backend.takes_writes)
            or ("its value is checked" if node in checked else None)
            or ("its result shares memory with an input" if node in shared else None)
            or backend.supports(node)
        )

    while True:
        found = split(body, Supported(supports, backend.min_size))
        if not backend.takes_writes and (writes := _writes_into_inputs(found)):
            refused.update(dict.fromkeys(writes, "it writes memory that another part has made"))
            continue
        values = _values_of_parts(found.module, args, kwargs)
        compiled: dict[str, Callable[..., Any]] = {}
        blamed: dict[str, str] = {}
        for part in found.parts:
            if part.supported:
                result = _compiled(backend, part.module, *values[part.name], options)
                if isinstance(result, str):
                    blamed |= _blame(backend, part.module, values[part.name][0], options, result)
                else:
                    compiled[part.name] = result
        if not blamed:
            assembled = _assembled(found, compiled, inputs)
            assembled.whole = body
            return assembled
        refused.update(blamed)


def _writes_into_inputs(found: Split) -> list[str]:
    """The calls that write what their part is given: the part would have to hand it on to all that read it."""
    names: list[str] = []
    for part in found.parts:
        if part.supported:
            memory = Aliases(part.module.graph)
            written = [node for node, effects in memory.effects.items() if written_outside(effects, memory)]
            names += [node.meta[_NAME] for node in written]
    return names


def _shared_results(body: GraphModule, memory: Aliases) -> set[Node]:
    """The calls between inputs or the model's state and those results that may be views of them: backends return copies."""
    found: set[Node] = set()
    pending = [node for node in body.graph.output_node()._inputs if memory.is_input_or_state(node)]
    while pending:
        node = pending.pop()
        # What a call makes anew is no view, also where an object holds it together with an input.
        if node._op.startswith("call_") and node not in found and not memory.is_fresh(node):
            found.add(node)
            pending += [item for item in memory.shares(node) if isinstance(item, Node)]
    return found


def _is_check(target: Any) -> bool:
    return is_guard(target) or target is torch._assert


def _reason_to_stay(node: Node, body: GraphModule, memory: Aliases, writes: bool) -> str | None:
    """Why a call is nothing for any backend."""
    if node._op == "call_module" and not is_from_torch(find_attribute(body, node._target)[0]):
        return "it is kept whole and runs the model's Python"
    effects = memory.effects.get(node)
    if effects is None or not effects:
        return None
    if effects.unknown:
        return "it may do anything"
    if effects.random:
        return "it draws random numbers"
    return "it writes memory that others see" if not writes and written_outside(effects, memory) else None


def _unpacking(body: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[Node]:
    """The nodes that fetch tensors out of inputs which are containers: backends are given tensors. They come first now."""
    held = {node: value for node, value in placeholder_values(body, args, kwargs).items() if is_container(value)}
    found: set[Node] = set()
    last = next((node for node in reversed(body.graph.nodes) if node._op == "placeholder"), None)
    for node in list(body.graph.nodes):
        if node._target in (operator.getitem, getattr) and len(node._args) == 2 and node._args[0] in held:
            if isinstance(node._args[1], Node):
                continue
            value = node._target(held[node._args[0]], node._args[1])
            found.add(node)
            assert last is not None
            last.append(node)
            last = node
            if is_container(value):
                held[node] = value
    return found


def is_container(value: Any) -> bool:
    """Whether an input holds others."""
    return value is not None and not isinstance(value, (torch.Tensor, int, float, str, torch.dtype, torch.device))


def _values_of_parts(module: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The inputs and the result of each part on the example."""
    found: dict[str, tuple[Any, Any]] = {}
    handles = []
    for name, child in module.named_children():

        def before(_: Any, given: Any, name: str = name) -> None:  # the part may write them
            found[name] = (copied_inputs(given, {})[0], None)

        def after(_: Any, given: Any, result: Any, name: str = name) -> None:
            found[name] = (found[name][0], frozen_leaves(result, "output"))

        handles += [child.register_forward_pre_hook(before), child.register_forward_hook(after)]
    try:
        values, keywords = copied_inputs(args, kwargs)
        with torch.no_grad():
            module(*values, **keywords)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _compiled(
    backend: Backend, part: GraphModule, given: tuple[Any, ...], expected: Any, options: Options
) -> Callable[..., Any] | str:
    """What runs a part, after a look at its numbers; or why there is nothing."""
    try:
        with torch.no_grad():
            function = within(options.time_limit, lambda: backend.compile(part, given, options))
            result = within(options.time_limit, lambda: function(*copied_inputs(given, {})[0]))
    except Exception as error:
        while error.__cause__ is not None:  # converters say last what they began with
            error = error.__cause__  # type: ignore[assignment]
        return f"the backend fails: {one_line(error)}"
    wrong = differences(expected, frozen_leaves(result, "output"), options.precision, "backend")
    if wrong:
        return f"the backend computes something else: {wrong[0]}"
    return function


def _blame(
    backend: Backend, part: GraphModule, given: tuple[Any, ...], options: Options, reason: str
) -> dict[str, str]:
    """The calls of a part that a backend fails on, found by halving it; all of them, where the halves alone are fine."""
    calls = [node for node in part.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    names = {node.meta[_NAME]: reason for node in calls if _NAME in node.meta}
    if len(calls) <= 1:
        return names
    try:
        halves = split(part, Size((len(calls) + 1) // 2))
        values = _values_of_parts(halves.module, given, {})
    except GraftError:
        return names
    if len(halves.parts) < 2:
        return names
    found: dict[str, str] = {}
    for half in halves.parts:
        result = _compiled(backend, half.module, *values[half.name], options)
        if isinstance(result, str):
            found |= _blame(backend, half.module, values[half.name][0], options, result)
    return found or names


def _assembled(found: Split, compiled: dict[str, Callable[..., Any]], inputs: str) -> Compiled:
    module = found.module
    taken: list[Part] = [part for part in found.parts if part.name in compiled]
    lines = dict(found._lines)
    stays: dict[str, str] = {}
    for part in found.parts:
        if part.name in compiled:
            module._modules[part.name] = CompiledPart(compiled[part.name])
        else:
            part.module.graph.set_codegen(BoundCodeGen())
            reasons = {node: _stays_because(found.reasons[node]) for node in part.nodes}
            stays |= {node: reason for node, reason in reasons.items() if reason != _UNPACKS}
    module.graph.set_codegen(BoundCodeGen())
    calls = sum(_UNPACKS not in found.reasons[node] for part in found.parts for node in part.nodes)
    count = sum(len(part.nodes) for part in taken)
    return Compiled(module.forward, inputs, calls, count, len(taken), stays, lines, module)


def _stays_because(reason: str) -> str:
    return reason.removeprefix("not supported: ").partition("; needs the value")[0].partition("; must run after")[0]


# ---- time limits ----


_left_behind: list[threading.Thread] = []


def is_work_left_behind() -> bool:
    """Whether something that took too long is still at work: Python could not end in peace, because it cannot end threads."""
    return any(thread.is_alive() for thread in _left_behind)


def within(seconds: float | None, work: Callable[[], Any]) -> Any:
    """What `work` returns, unless it takes too long. A thread that hangs in foreign code cannot be ended; it is left behind."""
    if seconds is None:
        return work()
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            with torch.set_grad_enabled(enabled):
                result.append(work())
        except BaseException as error:
            failure.append(error)

    enabled = torch.is_grad_enabled()
    thread = threading.Thread(target=run, daemon=True, name="torchgraft time limit")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        _left_behind.append(thread)
        raise BackendError(f"it took longer than the time limit of {seconds:g} s")
    if failure:
        raise failure[0]
    return result[0]
