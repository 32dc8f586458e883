"""`record`: runs a program node by node and keeps the values of the nodes asked for, in memory, as statistics or in a file.
Which nodes must run is found in `selection.py`, what is kept of a tensor in `snapshots.py`, `statistics.py` and
`tensor_file.py`; what a recording can be asked is in `recorded.py`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchgraft.analysis.comparison import named_tensors_in, tensors_in
from torchgraft.capturing.program import capture
from torchgraft.codegen.calling import example_inputs, placeholder_values
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError, RunError, one_line
from torchgraft.interpreter import Interpreter
from torchgraft.ir.arguments import immutable_dict, immutable_list
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.node import Node
from torchgraft.ir.origin import at, source_of
from torchgraft.ir.structures import take_apart
from torchgraft.recording.call_watch import brief
from torchgraft.recording.recorded import Entry, Recording, Stored
from torchgraft.recording.selection import Choice, chosen_nodes, required_nodes
from torchgraft.recording.snapshots import Slot, Snapshots
from torchgraft.recording.statistics import Reduction, reducer
from torchgraft.recording.tensor_file import tensor_file
from torchgraft.results.progress import stage
from torchgraft.results.shown import plain
from torchgraft.results.tables import count


def record(
    program: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nodes: Choice = None,
    reduce: Reduction = None,
    to: str | PathLike[str] | None = None,
    gradients: bool | Callable[[Any], torch.Tensor] = False,
    level: str = "module",
) -> Recording:
    """Run a program once on `args` and `kwargs`, and keep the value of every node, or of those asked for.

    `program` is a GraphModule; a model is captured first at `level`, an exported program at level "aten". `nodes` takes names,
    patterns (`"layer1_*"`), nodes, or a predicate of a node; then only what these need is run, up to the last of them. `reduce`
    keeps statistics instead of tensors: True, names out of min, max, mean, std (of the whole population), norm, zeros, nan, inf
    and histogram, or a function of a tensor. `to` writes the tensors to a safetensors file as they come, so that none is held.

    `gradients` also keeps the gradient that arrives at each node: True is that of the sum of everything returned, a function gets
    the result and returns the loss. The `.grad` of parameters is left alone.

    The run has the effects that any run has (running statistics, random numbers). If the program raises, RunError is raised, with
    the values until then as `partial`.

    >>> from torchgraft import symbolic_trace
    >>> program = symbolic_trace(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()))
    >>> recording = record(program, torch.ones(2, 3))
    >>> list(recording), bool((recording["_1"] == recording["_0"].relu()).all())
    (['input_1', '_0', '_1', 'output'], True)
    >>> record(program, torch.ones(2, 3), nodes="_0", reduce=["zeros"])["_0"]["zeros"]
    0
    """
    values, keywords = example_inputs(args, kwargs)
    program = as_program(program, values, keywords, level)
    if reducer(reduce) is not None and to is not None:
        raise ValueError("give reduce or to, not both: statistics are written with recording.to_json(path)")
    return recording_of(program, values, keywords, nodes, reduce, to, gradients)


def recording_of(
    program: GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nodes: Choice = None,
    reduce: Reduction = None,
    to: str | PathLike[str] | None = None,
    gradients: bool | Callable[[Any], torch.Tensor] = False,
) -> Recording:
    """What `record` gives for a program, with the inputs apart from the options."""
    wanted = chosen_nodes(program.graph, nodes)
    everything = list(program.graph.nodes)
    # Gradients come from the result, so that has to be computed.
    running = everything if nodes is None or gradients else required_nodes(everything, wanted)
    recording = Recording(program, wanted, None if to is None else Path(to))
    measure = reducer(reduce)
    inputs = placeholder_values(program, args, kwargs)
    if to is None:
        keeper = _memory(program) if measure is None else _Keeper(lambda node, key, tensor: measure(tensor.detach()))
        _run(recording, keeper, inputs, running, gradients)
        return recording
    path = Path(to)
    with tensor_file(path, len(wanted) * (2 if gradients else 1)) as writer:
        keeper = _Keeper(lambda node, key, tensor: Stored(path, key, writer.write(key, tensor)))
        _run(recording, keeper, inputs, running, gradients)
        writer.finish(_file_metadata(recording))
    return recording


def as_program(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], level: str) -> GraphModule:
    """The program itself, or what a capture of the model gives."""
    if isinstance(model, GraphModule):
        return model
    if hasattr(model, "graph_signature") and callable(getattr(model, "module", None)):
        from torchgraft.bridge import from_export

        return from_export(model)
    if not callable(model):
        raise TypeError(f"there is nothing to run in a {type(model).__name__}\ngive a program, a model or a function")
    return capture(model, args, kwargs, level=level)


class _Keeper(NamedTuple):
    """What is kept of each tensor, given its node (None: it is a gradient) and its key; and what to do before a node runs."""

    keep: Callable[[Node | None, str, torch.Tensor], Any]
    before: Callable[[Node, dict[Node, Any]], None] | None = None


def _memory(program: GraphModule) -> _Keeper:
    """The tensors themselves are kept, as they were."""
    snapshots = Snapshots(program)

    def keep(node: Node | None, key: str, tensor: torch.Tensor) -> Slot:
        return Slot(tensor.detach().clone()) if node is None else snapshots.keep(node, tensor)

    return _Keeper(keep, snapshots.before)


# ---- the run ----


def _run(
    recording: Recording,
    keeper: _Keeper,
    inputs: dict[Node, Any],
    running: list[Node],
    gradients: bool | Callable[[Any], torch.Tensor],
) -> None:
    run = _RecordingRun(recording, keeper, Gradients(recording.gradients.entries, keeper.keep) if gradients else None)
    mode = torch.enable_grad() if gradients else contextlib.nullcontext()
    try:
        with mode:
            with stage(f"recording {count(len(running), 'node')}"):
                recording.complete, recording.result = run.through(running, inputs)
            if run.gradients is not None:
                with stage("recording gradients"):
                    run.gradients.compute(recording.result, None if gradients is True else gradients)  # type: ignore[arg-type]
    except GraftError:
        raise
    except Exception as error:
        if run.at is None:  # it was not the program
            raise
        raise RunError(_failure(run.at, error, recording), recording if recording.path is None else None) from error


class _RecordingRun(Interpreter):
    """Runs some of a program's nodes and hands over their values."""

    def __init__(self, recording: Recording, keeper: _Keeper, gradients: Gradients | None) -> None:
        super().__init__(recording.program)
        self.at: Node | None = None
        self.gradients = gradients
        self._recording = recording
        self._keeper = keeper

    def through(self, running: list[Node], inputs: dict[Node, Any]) -> tuple[bool, Any]:
        """Run the nodes in order; says whether the end was reached, and what the program returned."""
        env = self.env = {}
        wanted, before = self._recording.nodes, self._keeper.before
        frees = _last_uses(running)
        contexts: list[Any] = []
        try:
            for node in running:
                if before is not None:
                    before(node, env)
                self.at = node
                value = inputs[node] if node in inputs else self.run_node(node)
                env[node] = value = _returned(value) if node._op == "output" else value
                self.at = None
                if node._target is enter_context:
                    contexts.append(value)
                elif node._target is exit_context:
                    contexts.pop()
                if node._name in wanted:
                    self._keep(node, value)
                for used in frees[node]:
                    del env[used]
                if node._op == "output":
                    return True, self.graph.process_outputs(value)
        finally:
            # Regions are still open where the program raised or was stopped.
            for context in reversed(contexts):
                context.__exit__(*sys.exc_info())
        return False, None

    def _keep(self, node: Node, value: Any) -> None:
        name, keep = node._name, self._keeper.keep
        if isinstance(value, torch.Tensor):
            template, tensors, keys = _ONE_TENSOR, [value], [name]
        else:
            template, tensors = take_apart(value, _is_tensor)
            keys = _keys(name, value, tensors)
        parts = [keep(node, key, tensor) for key, tensor in zip(keys, tensors, strict=True)]
        self._recording.entries[name] = Entry(template, parts, keys, [brief(tensor) for tensor in tensors])
        if self.gradients is not None:
            self.gradients.expect(node, template, keys, tensors)


def _returned(value: Any) -> Any:
    """What generated code returns: the containers in the arguments of a node are immutable, those of a result are not."""
    if type(value) is tuple:
        return tuple([_returned(item) for item in value])
    if type(value) is immutable_list:
        return [_returned(item) for item in value]
    return {key: _returned(item) for key, item in value.items()} if type(value) is immutable_dict else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


_ONE_TENSOR = take_apart(torch.empty(0), _is_tensor)[0]


def _keys(name: str, value: Any, tensors: list[torch.Tensor]) -> list[str]:
    """What to call the tensors of a container: the node's name, and the way to each."""
    named = named_tensors_in(value, name)
    if [id(tensor) for _, tensor in named] == [id(tensor) for tensor in tensors]:
        return [path for path, _ in named]
    return [f"{name}[{number}]" for number in range(len(tensors))]


def _last_uses(running: list[Node]) -> dict[Node, list[Node]]:
    """For each node the values that nobody needs after it."""
    last: dict[Node, Node] = {}
    for node in running:
        last[node] = node
        for source in node.all_input_nodes:
            last[source] = node
    frees: dict[Node, list[Node]] = {node: [] for node in running}
    for value, user in last.items():
        frees[user].append(value)
    return frees


def _failure(node: Node, error: Exception, recording: Recording) -> str:
    return (
        f"the program raised {one_line(error)} in node '{node.name}'{at(source_of(node))}, after "
        f"{len(recording)} recorded nodes{'; no file was written' if recording.path else ''}"
    )


def _file_metadata(recording: Recording) -> dict[str, str]:
    """What the file says besides tensors: values that are none, and what is different about some tensors."""
    others = {name: plain(entry.template) for name, entry in recording.entries.items() if not entry.parts}
    entries = [*recording.entries.values(), *recording.gradients.entries.values()]
    notes = {part.key: part.note for entry in entries for part in entry.parts if part.note}
    return {"format": "pt", "values": json.dumps(others), "notes": json.dumps(notes)}


# ---- gradients ----


class Gradients:
    """Waits for the gradients of the values it is told of, and keeps of them what is to be kept."""

    def __init__(self, entries: dict[str, Entry], keep: Callable[[None, str, torch.Tensor], Any]) -> None:
        self._entries = entries
        self._keep = keep

    def expect(self, node: Node, template: Any, keys: list[str], tensors: list[torch.Tensor]) -> None:
        """Catch the gradient of each tensor of a node's value as it is now: a later write makes another value of it."""
        entry = Entry(template, [None] * len(tensors), keys, [brief(tensor) for tensor in tensors])
        for index, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(self._catcher(node.name, entry, index))

    def _catcher(self, name: str, entry: Entry, index: int) -> Callable[[torch.Tensor], None]:
        def catch(gradient: torch.Tensor) -> None:
            entry.parts[index] = self._keep(None, f"gradient of {entry.keys[index]}", gradient)
            self._entries[name] = entry

        return catch

    def compute(self, result: Any, loss: Callable[[Any], torch.Tensor] | None) -> None:
        """Run the backward of the loss, or of the sum of everything returned."""
        given = [loss(result)] if loss is not None else tensors_in(result)
        outputs = [item for item in given if isinstance(item, torch.Tensor) and item.requires_grad]
        if not outputs:
            raise GraftError(
                "there are no gradients: nothing that the program returns depends on a tensor that requires grad\n"
                "call requires_grad_() on an input or on the parameters, and return what depends on them"
            )
        if loss is not None and outputs[0].numel() != 1:
            raise GraftError(
                f"the loss must be one number, not a tensor of shape {tuple(outputs[0].shape)}\ntake its sum or mean"
            )
        leaves = _leaves(outputs)
        # With the leaves named, nothing is added to their `.grad`.
        torch.autograd.grad(outputs, leaves, [torch.ones_like(item) for item in outputs], allow_unused=True)


def _leaves(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every tensor at the beginning of the autograd graph behind the outputs."""
    found: dict[int, torch.Tensor] = {id(item): item for item in outputs if item.grad_fn is None}
    seen: set[Any] = set()
    pending: list[Any] = [item.grad_fn for item in outputs if item.grad_fn is not None]
    while pending:
        step = pending.pop()
        if step in seen:
            continue
        seen.add(step)
        if hasattr(step, "variable"):
            found[id(step.variable)] = step.variable
        pending += [following for following, _ in step.next_functions if following is not None]
    return list(found.values())
