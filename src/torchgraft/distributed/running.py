"""A pipeline in one of its processes: a step of all stages together, weights that several have, checkpoints, shards of weights.
How a program is cut into stages is in `pipeline.py`; torch.distributed.pipelining sends and schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.codegen.calling import placeholder_values
from torchgraft.distributed.stage import Stage, looks
from torchgraft.errors import GraphError
from torchgraft.ir.verify import find_attribute
from torchgraft.results.tables import listed

if TYPE_CHECKING:
    from torchgraft.distributed.pipeline import Pipeline


class Run:
    """A pipeline in this process. Every process calls `step`; the first stage takes the inputs, the last the targets.

    >>> from torch import distributed
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # torchrun does it for more
    >>> from torchgraft.distributed import pipeline
    >>> run = pipeline(torch.nn.Linear(8, 3), torch.randn(2, 8), stages=1).schedule("gpipe", microbatches=4)
    >>> run.step(torch.randn(8, 8))[0].shape
    torch.Size([8, 3])
    >>> distributed.destroy_process_group()
    """

    def __init__(
        self, plan: Pipeline, runner: Any, microbatches: int, numbers: list[int], group: Any, has_loss: bool
    ) -> None:
        self.pipeline, self.runner, self.microbatches, self.numbers = plan, runner, microbatches, numbers
        self.is_first, self.is_last, self._group = 0 in numbers, len(plan.stages) - 1 in numbers, group
        self._has_loss = has_loss
        self._tied = self._shared_parameters() if has_loss else []

    @property
    def stages(self) -> list[Stage]:
        """The stages that live here; their parameters are what an optimizer here takes."""
        return [self.pipeline.stages[number] for number in self.numbers]

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that live here, each once."""
        return list(dict.fromkeys(parameter for stage in self.stages for parameter in stage.parameters()))

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
        """Run one batch, forward and (where there is a loss) backward: (what the program returns, the losses), in the last stage.

        Gradients of weights that several stages have are summed over them. What the program returns is None where results of
        micro-batches cannot be joined to one, because they are no tensors with a dimension for the batch.
        """
        losses: list[torch.Tensor] = []
        given = self._inputs(args, kwargs) if self.is_first else []
        options: dict[str, Any] = {"target": target, "losses": losses} if self.is_last and self._has_loss else {}
        if options and target is None:
            raise GraphError("the last stage needs the target of the loss: call step(..., target=...) in its process")
        try:
            result = self.runner.step(*given, **options, return_outputs=self.pipeline.can_be_joined)
        except Exception as raised:
            # What a stage raises comes wrapped by torch.
            is_wrapped = type(raised) is RuntimeError and isinstance(raised.__cause__, Exception)
            error: Any = raised.__cause__ if is_wrapped else raised
            here = ", ".join(map(str, self.numbers))
            error.add_note(
                f"this was a step of stage {here} of {len(self.pipeline.stages)}\n"
                "if another process is gone, the others cannot go on: start all of them again, from a checkpoint"
            )
            raise error from error.__cause__
        self._sum_tied_gradients()
        if not self.is_last or result is None:
            return None, losses
        return self.pipeline.result_of(result), losses

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that are divided into micro-batches; what is the same for all of them is left with the first stage."""
        stage, plan = self.pipeline.stages[0], self.pipeline
        given = {node.name: value for node, value in placeholder_values(plan.program, args, kwargs).items()}
        stage.constants = {name: given[name] for name in plan.constants}
        named = [(name, tensor) for name, form in stage.takes.items() for tensor in form.pack(given[name], name)]
        tensors = [tensor if tensor.dim() else tensor.expand(self.microbatches) for _, tensor in named]
        for (name, _), tensor, example in zip(named, tensors, plan.examples[0], strict=True):
            wanted = (example.shape[0] * self.microbatches, *example.shape[1:])
            if tuple(tensor.shape) != wanted or tensor.dtype is not example.dtype:
                raise GraphError(
                    f"expected {looks(example.dtype, wanted)} for '{name}', {self.microbatches} micro-batches, "
                    f"got {looks(tensor.dtype, tensor.shape)}\n"
                    "  plan the pipeline with micro-batches like those that it is given, or name the input in `constants`"
                )
        return tensors

    def _shared_parameters(self) -> list[tuple[Any, list[torch.nn.Parameter]]]:
        """The processes that share each parameter, as groups made everywhere in the same order, and what of it is here."""
        from torch.distributed import get_process_group_ranks, get_world_size, new_group

        ranks = get_world_size(self._group)
        found = []
        for name, stages in sorted(self.pipeline.tied().items()):
            members = sorted({number % ranks for number in stages})
            world = [get_process_group_ranks(self._group)[member] for member in members] if self._group else members
            group = new_group(world) if len(world) > 1 else None
            here = [number for number in stages if number in self.numbers]
            parameters = []
            for number in here:
                paths = [path for path, original in self.pipeline.names[number].items() if original == name]
                parameters.append(dict(self.pipeline.stages[number].named_parameters(remove_duplicate=False))[paths[0]])
            if here:
                found.append((group, list(dict.fromkeys(parameters))))
        return found

    def _sum_tied_gradients(self) -> None:
        from torch.distributed import all_reduce

        for group, parameters in self._tied:
            first = parameters[0]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            total = (
                torch.stack(gradients).sum(0)
                if len(gradients) > 1
                else gradients[0].clone()
                if gradients
                else torch.zeros_like(first)
            )
            if group is not None:
                all_reduce(total, group=group)
            for parameter in parameters:
                parameter.grad = total

    # ---- checkpoints ----

    def _named(self) -> list[tuple[str, Stage, str]]:
        """Every parameter and buffer that lives here: its name in the program, its stage and its path there."""
        found: dict[str, tuple[str, Stage, str]] = {}
        for number, stage in zip(self.numbers, self.stages, strict=True):
            for path, name in self.pipeline.names[number].items():
                found.setdefault(name, (name, stage, path))
        return list(found.values())

    def state_dict(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """The weights and buffers that live here, and the state of the optimizer where one is given, by names in the program.

        That is what `torch.distributed.checkpoint.save` and `load` take, in every process; another number of stages can load it.
        """
        tensors = {name: find_attribute(stage, path)[0] for name, stage, path in self._named()}
        state: dict[str, Any] = {"model": {name: tensor.detach() for name, tensor in tensors.items()}}
        if optimizer is not None:
            _fill_state(optimizer)
            known = {id(parameter): values for parameter, values in optimizer.state.items()}
            state["optimizer"] = {
                name: dict(known[id(tensor)]) for name, tensor in tensors.items() if id(tensor) in known
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Take over what `state_dict` gave, here or in a pipeline of another number of stages."""
        with torch.no_grad():
            for name, stage, path in self._named():
                if name not in state["model"]:
                    raise GraphError(f"the checkpoint has no '{name}', which stage needs at '{path}'")
                tensor = find_attribute(stage, path)[0]
                tensor.copy_(state["model"][name])
                if optimizer is not None and name in state.get("optimizer", {}):
                    optimizer.state[tensor].update(state["optimizer"][name])


def load_weights(plan: Pipeline, numbers: Iterable[int], files: Any, others: Mapping[str, torch.Tensor]) -> int:
    """See `Pipeline.load_weights`."""
    wanted: dict[str, list[tuple[Stage, str]]] = {}
    for number in numbers:
        for path, name in plan.names[number].items():
            wanted.setdefault(name, []).append((plan.stages[number], path))
    count = 0
    for name, tensor in _chosen_tensors(files, wanted.keys()):
        for stage, path in wanted[name]:
            _put(stage, path, tensor)
        count += 1
    for name, tensor in others.items():
        for stage, path in wanted.get(name, ()):
            _put(stage, path, tensor)
    missing = [name for name, places in wanted.items() if any(find_attribute(*place)[0].is_meta for place in places)]
    if missing:
        raise GraphError(
            f"the files have no values for {listed(missing, 4)}\n"
            "  give tensors that are not in the files as others={name: tensor}"
        )
    return count


def _chosen_tensors(files: Any, names: Iterable[str]) -> Iterable[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    paths: list[Any] = [files] if isinstance(files, str | PathLike) else list(files)
    if len(paths) == 1 and Path(paths[0]).is_dir():
        paths = sorted(Path(paths[0]).glob("*.safetensors"))
    if not paths:
        raise GraphError(f"there are no safetensors files in {files}\n  give the files, or a folder of them")
    chosen = set(names)
    for path in paths:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in chosen:
                    yield name, file.get_tensor(name)


def _put(stage: Stage, path: str, tensor: torch.Tensor) -> None:
    old = find_attribute(stage, path)[0]
    if old.shape != tensor.shape:
        raise GraphError(f"'{path}' is {tuple(tensor.shape)} in the file and {tuple(old.shape)} in the program")
    container, _, leaf = path.rpartition(".")
    holder = stage.get_submodule(container)
    value = tensor.to(old.dtype)
    if leaf in holder._parameters:
        holder._parameters[leaf] = torch.nn.Parameter(value, requires_grad=old.requires_grad)
    else:
        holder._buffers[leaf] = value


def _fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer make its state before its first step: by a step that changes nothing."""
    if optimizer.state:
        return
    before = [[parameter.grad for parameter in group["params"]] for group in optimizer.param_groups]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate, gradients in zip(optimizer.param_groups, rates, before, strict=True):
        group["lr"] = rate
        for parameter, gradient in zip(group["params"], gradients, strict=True):
            parameter.grad = gradient
