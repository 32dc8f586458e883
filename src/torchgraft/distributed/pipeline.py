"""`pipeline`: cut a program into balanced stages that torch.distributed.pipelining runs, one or more in each process.
What one stage is, is in `stage.py`; where a program may be cut is known to `splitting/`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchgraft.analysis.dry_run import DryRun, computing_if_needed
from torchgraft.capturing.program import capture
from torchgraft.codegen.attributes import place_attribute
from torchgraft.codegen.calling import example_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.distributed.running import Run, load_weights
from torchgraft.distributed.stage import Form, Stage, form_of
from torchgraft.errors import GraphError
from torchgraft.ir.arguments import tensors_of
from torchgraft.ir.node import Node, map_arg
from torchgraft.ir.verify import find_attribute
from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table, amount
from torchgraft.schedule.work import Cost, work_of
from torchgraft.splitting.split import Split, split
from torchgraft.splitting.strategies import Stages

_SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}


@dataclass(frozen=True, repr=False)
class Pipeline(Tabular):
    """A program in stages. `stages` are modules; `schedule(...)` makes those of this process into what torch.distributed runs.

    `costs` are the shares of the work, `parameter_bytes` what the weights of each stage take, and `sent_bytes` what each hands on
    for the example.

    >>> layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    >>> plan = pipeline(layers, torch.randn(2, 8), stages=4)
    >>> plan.parameter_bytes, plan.of_rank(1, ranks=2)
    ((288, 288, 288, 288), [1, 3])
    """

    name: str
    stages: tuple[Stage, ...]
    names: tuple[dict[str, str], ...]
    costs: tuple[float, ...]
    parameter_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    program: GraphModule
    constants: frozenset[str]
    can_be_joined: bool
    examples: tuple[tuple[torch.Tensor, ...], ...]
    split: Split

    def rows(self) -> list[dict[str, Any]]:
        """One row for each stage."""
        columns = zip(self.costs, self.parameter_bytes, self.sent_bytes, strict=True)
        return [{"stage": n, "cost": c, "parameter_bytes": p, "sent_bytes": s} for n, (c, p, s) in enumerate(columns)]

    def headline(self) -> str:
        """How many stages there are, and how well they are balanced."""
        mean = sum(self.costs) / len(self.costs) or 1.0
        return (
            f"{self.name} in {len(self.stages)} stages, the heaviest with {max(self.costs) / mean:.2f} times the mean"
        )

    def _table(self) -> Table:
        total = sum(self.costs) or 1.0
        cells = [
            (
                f"{row['stage']}",
                f"{row['cost'] / total:.1%}",
                amount(row["parameter_bytes"], "B"),
                amount(row["sent_bytes"], "B"),
            )
            for row in self.rows()
        ]
        columns = ("stage", "work", "weights", "hands on")
        return Table(self.headline(), columns, cells, frozenset(columns))

    def tied(self) -> dict[str, list[int]]:
        """The parameters that several stages have, by their names in the program, with those stages."""
        found: dict[str, list[int]] = {}
        for number, names in enumerate(self.names):
            parameters = dict(self.stages[number].named_parameters(remove_duplicate=False))
            for path, name in names.items():
                if path in parameters and number not in found.setdefault(name, []):
                    found[name].append(number)
        return {name: stages for name, stages in found.items() if len(stages) > 1}

    def of_rank(self, rank: int, ranks: int) -> list[int]:
        """The stages of one of several processes: stage n lives in process n modulo their number."""
        if len(self.stages) % ranks:
            raise GraphError(
                f"{len(self.stages)} stages cannot be shared by {ranks} processes: ask for a multiple of that number"
            )
        if not 0 <= rank < ranks:
            raise GraphError(f"there is no process {rank} of {ranks}: they are numbered from 0")
        return list(range(rank, len(self.stages), ranks))

    def schedule(
        self,
        kind: str = "1f1b",
        *,
        microbatches: int,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        device: torch.device | str = "cpu",
        group: Any = None,
        scale_gradients: bool = True,
    ) -> Run:
        """Make the stages of this process ready to run with the others by one of torch's schedules: gpipe, 1f1b or interleaved.

        `loss(output, target)` is called in the last stage for every micro-batch; without it only forward is run. Call it in every
        process of `group`, once torch.distributed is initialized.
        """
        from torch.distributed import get_rank, get_world_size, is_initialized, pipelining

        if kind not in _SCHEDULES:
            raise GraphError(f"no schedule is called {kind!r}; use one of {', '.join(_SCHEDULES)}")
        if not is_initialized():
            raise GraphError(
                "torch.distributed is not initialized\n"
                "  call torch.distributed.init_process_group() in every process, or run the script by torchrun"
            )
        if microbatches < 1:
            raise GraphError(f"expected 1 micro-batch or more, got {microbatches}")
        rank, ranks = get_rank(group), get_world_size(group)
        self._check_that_all_have_the_same(ranks, group)
        numbers = self.of_rank(rank, ranks)
        if kind != "interleaved" and len(numbers) != 1:
            raise GraphError(
                f"{kind} has one stage in each process, and here are {len(self.stages)} stages for {ranks}; use 'interleaved'"
            )
        count = len(self.stages)
        if kind == "1f1b" and microbatches < count:
            raise GraphError(
                f"1f1b keeps {count} stages busy with at least {count} micro-batches, and there are {microbatches}; use 'gpipe'"
            )
        for number in numbers:
            self.stages[number].to(device)
            self.stages[number].sends = self.examples[number + 1] if number + 1 < count else ()
        # What travels is said beforehand: torch would find it out by a run on uninitialized memory, which batch norms remember.
        stages = [
            pipelining.PipelineStage(
                self.stages[number],
                *(number, count, torch.device(device)),
                input_args=_in_one_piece(self.examples[number]),
                output_args=_in_one_piece(self.examples[number + 1]),
                group=group,
            )
            for number in numbers
        ]
        wrapped = None if loss is None else lambda result, target: loss(self.result_of(result), target)
        made: Any = getattr(pipelining, _SCHEDULES[kind])
        given = stages if kind == "interleaved" else stages[0]
        runner = made(given, microbatches, loss_fn=wrapped, scale_grads=scale_gradients)
        return Run(self, runner, microbatches, numbers, group, loss is not None)

    def _check_that_all_have_the_same(self, ranks: int, group: Any) -> None:
        from torch.distributed import all_gather_object

        mine = [(part.nodes, str(examples)) for part, examples in zip(self.split.parts, self.examples, strict=False)]
        all_of_them: list[Any] = [None] * ranks
        all_gather_object(all_of_them, mine, group=group)
        if others := [number for number, cuts in enumerate(all_of_them) if cuts != all_of_them[0]]:
            raise GraphError(
                f"process {others[0]} has cut another program than process 0, or has cut it elsewhere\n"
                "  call pipeline() in every process with the same model, options, and inputs of the same shapes"
            )

    def load_weights(
        self, files: Any, stages: Iterable[int] | None = None, others: Mapping[str, torch.Tensor] | None = None
    ) -> int:
        """Fill stages (all of them) from safetensors files or a folder of them; how many tensors were read.

        For a program that was captured on tensors without data: nothing is read but what these stages need. `others` has what is
        in no file, such as buffers that are not saved.
        """
        return load_weights(self, range(len(self.stages)) if stages is None else stages, files, others or {})

    def result_of(self, tensors: Any) -> Any:
        """What the program returns, of the tensors that the last stage gives."""
        flat = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        values: dict[str, Any] = {}
        device = flat[0].device if flat else torch.device("cpu")
        for name, form in self.stages[-1].gives.items():
            values[name], flat = form.unpack(flat[: form.width], device), flat[form.width :]
        graph = self.program.graph
        return graph.process_outputs(map_arg(graph.output_node().args[0], lambda node: values[node.name]))


def pipeline(
    model: Any,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int,
    cost: Cost = "flops",
    memory_limit: int | None = None,
    constants: Iterable[str] = (),
) -> Pipeline:
    """Cut a model, or a program that was captured of it, into stages of about the same work, for torch.distributed.pipelining.

    `args` are those of one micro-batch. `cost` is "flops", "simulated" (on an H200), "measured" (here; where torch.distributed is
    initialized, by the first process for all, so all must call this), or a function of a node.
    `memory_limit` is what the weights of a stage may take, in bytes; the work is balanced within it. `constants` names inputs
    that are no batches, such as masks, and are given whole to every micro-batch; numbers always are. Nothing
    in the model has to be changed: connections that skip stages, weights that several stages use, several inputs and results, and
    guards are taken care of.

    >>> import torch
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    >>> plan = pipeline(model, torch.randn(2, 8), stages=2)
    >>> x = torch.randn(2, 8)
    >>> torch.equal(plan.stages[1](*plan.stages[0](x))[0], model(x))
    True
    """
    if type(stages) is not int:
        raise GraphError(f"expected a whole number of stages, got {stages!r}")
    values, keywords = example_inputs(args, kwargs)
    program = model if isinstance(model, GraphModule) else capture(model, values, keywords)
    work = work_of(program, cost, values, keywords)
    if cost == "measured":
        work = _measured_by_the_first(program, work)
    parts = split(program, Stages(stages, work, memory_limit))
    return _Planner(program, parts, values, keywords, frozenset(constants)).plan()


def _measured_by_the_first(program: GraphModule, work: Callable[[Node], float]) -> Callable[[Node], float]:
    """The work that the first process measured, for all of them to cut at the same places."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return work
    times = [{node.name: work(node) for node in program.graph.nodes}]
    distributed.broadcast_object_list(times)
    return lambda node: times[0].get(node.name, 0.0)


def _in_one_piece(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(
        [
            torch.empty_like(tensor, memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)
            for tensor in tensors
        ]
    )


class _Planner:
    """Makes modules of the parts of a program: what each takes and hands on, and what it has of its own."""

    def __init__(
        self,
        program: GraphModule,
        parts: Split,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        constants: frozenset[str],
    ) -> None:
        self._program, self._split = program, parts
        self._nodes = {node.name: node for node in program.graph.nodes}
        self._examples: dict[str, Any] = {}
        self._own: dict[int, dict[str, str]] = {}
        computing_if_needed(
            lambda compute: DryRun(program, args, kwargs, node_done=self._note, compute=compute).forward()
        )
        inputs = [name for name, node in self._nodes.items() if node.op == "placeholder"]
        if unknown := constants.difference(inputs):
            raise GraphError(
                f"the program has no input {', '.join(map(repr, sorted(unknown)))}; it has {', '.join(inputs)}"
            )
        self._constants = constants | {name for name in inputs if not self._is_divided(name)}

    def _is_divided(self, name: str) -> bool:
        """Whether an input has batches in it; raises where that cannot be divided into micro-batches."""
        dimensions = [tensor.dim() for tensor in tensors_of(self._examples[name])]
        if any(dimensions) and not all(dimensions):
            raise GraphError(
                f"'{name}' has tensors of one number beside batches, and cannot be divided into micro-batches\n"
                "  give these numbers as inputs of their own, or as plain numbers"
            )
        return any(dimensions)

    def _note(self, node: Node, value: Any) -> None:
        self._examples[node.name] = value

    def plan(self) -> Pipeline:
        results = [node.name for node in self._program.graph.output_node().all_input_nodes]
        crossing = self._crossing(results)
        modules = []
        for number, part in enumerate(self._split.parts):
            is_last = number == len(self._split.parts) - 1
            needed = dict.fromkeys([*part.inputs, *(results if is_last else ())])
            takes, gives = self._forms(crossing[number]), self._forms(results if is_last else crossing[number + 1])
            if number == 0:
                takes = {name: form for name, form in takes.items() if name not in self._constants}
            stage = Stage(part.module, part.inputs, part.outputs, takes, gives, len(part.outputs) == 1)
            stage.training = self._program.training
            for name in needed:
                if self._nodes[name].op == "get_attr":
                    stage.own[name] = self._adopted(stage, self._nodes[name].target)
            modules.append(stage)
        weights = tuple(_bytes(stage.parameters()) for stage in modules)
        sent = tuple(sum(_bytes(tensors_of(self._examples[name])) for name in stage.gives) for stage in modules)
        results_as_sent = self._sent(modules[-1].gives)
        return Pipeline(
            name=self._program._get_name(),
            stages=tuple(modules),
            names=tuple(self._names(part.name, stage) for part, stage in zip(self._split.parts, modules, strict=True)),
            costs=tuple(part.cost or 0.0 for part in self._split.parts),
            parameter_bytes=weights,
            sent_bytes=sent,
            program=self._program,
            constants=self._constants,
            split=self._split,
            examples=(
                # Numbers beside batches, in one input, come once for each micro-batch.
                tuple([tensor if tensor.dim() else tensor.reshape(1) for tensor in self._sent(modules[0].takes)]),
                *[self._sent(stage.takes) for stage in modules[1:]],
                results_as_sent,
            ),
            can_be_joined=all(tensor.dim() for tensor in results_as_sent),
        )

    def _crossing(self, results: list[str]) -> list[list[str]]:
        """For each stage the values that come in: made before, needed in it or later. Inputs of the program come in at first."""
        inputs = [name for name, node in self._nodes.items() if node.op == "placeholder"]
        made = dict.fromkeys(inputs, 0)
        needed = {name: len(self._split.parts) - 1 for name in results}
        for number, part in enumerate(self._split.parts):
            made.update(dict.fromkeys(part.outputs, number + 1))
            for name in part.inputs:
                needed[name] = max(needed.get(name, 0), number)
        return [
            [name for name, begin in made.items() if begin <= number <= needed.get(name, -1)]
            for number in range(len(self._split.parts))
        ]

    def _forms(self, names: list[str]) -> dict[str, Form]:
        return {name: form_of(self._examples[name], name) for name in names}

    def _sent(self, forms: dict[str, Form]) -> tuple[torch.Tensor, ...]:
        """Tensors without data like those that travel."""
        packed = [tensor for name, form in forms.items() for tensor in form.pack(self._examples[name], name)]
        return tuple(
            torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
            )
            for tensor in packed
        )

    def _adopted(self, stage: Stage, path: str) -> str:
        """The name under which a stage has what the program has at `path`."""
        value, problem = find_attribute(self._program, path)
        if problem is not None:
            raise GraphError(f"cannot make stages: the program refers to '{path}', but {problem}")
        if path == "training":
            return path
        name = path.replace(".", "_")
        container, _, last = path.rpartition(".")
        if last == "training" and isinstance(owner := find_attribute(self._program, container)[0], torch.nn.Module):
            # What switches the stage switches this too, as it would the submodule of the program.
            mode = torch.nn.Module()
            mode.training = owner.training
            stage.add_module(name, mode)
            return f"{name}.training"
        place_attribute(stage, name, value, persistent=True)
        self._own.setdefault(id(stage), {})[name] = path
        return name

    def _names(self, part: str, stage: Stage) -> dict[str, str]:
        """The name in the program of every parameter and buffer of a stage."""
        moved = {new.partition(".")[2]: old for new, old in self._split.names.items() if new.partition(".")[0] == part}
        names = dict(self._own.get(id(stage), {}))
        for path, _ in [*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False)]:
            if path not in names:
                first, _, rest = path.removeprefix("part.").partition(".")
                names[path] = ".".join(filter(None, [moved.get(first, first), rest]))
        return {path: self._first_names.get(name, name) for path, name in names.items()}

    @functools.cached_property
    def _first_names(self) -> dict[str, str]:
        """The first name of every tensor of the program that has several, by each of them."""
        first: dict[int, str] = {}
        named = [
            *self._program.named_parameters(remove_duplicate=False),
            *self._program.named_buffers(remove_duplicate=False),
        ]
        return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
