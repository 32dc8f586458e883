"""A module whose forward and backward are programs: training programs where a module is wanted, as in DDP, FSDP2 and loops.
How the programs are made is in `training.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.errors import GuardError
from torchgraft.lowering.entries import by_kind

if TYPE_CHECKING:
    from torchgraft.lowering.training import TrainingPrograms


class TrainingModule(torch.nn.Module):
    """The model that training programs were captured of, run by these programs: what is kept for the backward is what they say.

    It has the parameters, buffers and submodules of the model, by their names, so optimizers, checkpoints, DDP and
    `fully_shard` take it. Its forward is one call for autograd; gradients of gradients are not supported.

    >>> from torchgraft import capture_training
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> module = capture_training(model, torch.ones(4, 2)).module()
    >>> module(torch.ones(4, 2)).sum().backward()
    >>> module.get_parameter("0.weight").grad.shape
    torch.Size([3, 2])
    """

    programs: Any

    def __init__(self, programs: TrainingPrograms) -> None:
        super().__init__()
        program = programs.program
        # The very tables: whoever exchanges a parameter here (FSDP, load_state_dict) exchanges it in the program.
        for table in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            vars(self)[table] = vars(program)[table]
        self.training = program.training
        vars(self)["programs"] = programs

    def train(self, mode: bool = True) -> TrainingModule:
        """As for any module; the programs are for one mode, and refuse to run in the other."""
        self.programs.program.train(mode)
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model (or the loss) returns."""
        programs = self.programs
        primals = programs.primals(*args, **kwargs)
        updated = programs.updated
        programs._call.refuse_sharing(primals, updated)
        run = _Run(programs, set(updated))
        found = _Step.apply(run, *primals)
        results = dict(zip(run.result_names, found, strict=True)) | run.plain
        programs._call.write(primals, run.updates)
        return programs._call.result(results)


@dataclass(eq=False)
class _Run:
    """One call, as long as its forward runs."""

    programs: TrainingPrograms
    updated: set[str]
    result_names: list[str] = field(default_factory=list)
    plain: dict[str, Any] = field(default_factory=dict)
    updates: dict[str, torch.Tensor] = field(default_factory=dict)


class _Step(torch.autograd.Function):
    """The two programs as one function of autograd."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        programs = run.programs
        names = programs._call.names
        for name, tensor in zip(names, primals, strict=True):
            if name in run.updated and tensor.requires_grad:
                raise GuardError(
                    f"the program writes '{name}', whose gradient is wanted\n  give a clone(), or use TrainingPrograms.run()"
                )
        # Some kernels keep what the backward needs only while gradients are on; detached inputs need none.
        with torch.enable_grad():
            ahead = by_kind(programs.forward, programs.forward(*[tensor.detach() for tensor in primals]))
        written = {
            tensor.untyped_storage()._cdata for name, tensor in zip(names, primals, strict=True) if name in run.updated
        }
        ctx.saved = []
        tensors: list[torch.Tensor] = []
        for value in ahead["saved"].values():
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.untyped_storage()._cdata in written:
                value = value.clone()  # it will be another when the backward runs
            ctx.saved.append(_Tensor(len(tensors)) if is_tensor else value)
            tensors += [value.detach()] if is_tensor else []
        ctx.save_for_backward(*tensors)
        run.updates = ahead["update"]
        results = {name: value for name, value in ahead["result"].items() if isinstance(value, torch.Tensor)}
        run.plain = {name: value for name, value in ahead["result"].items() if name not in results}
        run.result_names = list(results)
        ctx.programs, ctx.results = programs, [(name, value.stride()) for name, value in results.items()]
        ctx.needed = [tensor.requires_grad for tensor in primals]
        found = tuple([value.detach() for value in results.values()])
        learning = programs.tangent_names
        ctx.mark_non_differentiable(
            *[value for name, value in zip(results, found, strict=True) if name not in learning]
        )
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        programs, tensors = ctx.programs, ctx.saved_tensors
        given = {name: _like(tangent, strides) for (name, strides), tangent in zip(ctx.results, tangents, strict=True)}
        saved = [tensors[value] if isinstance(value, _Tensor) else value for value in ctx.saved]
        with torch.enable_grad():
            found = programs.backward(*saved, *[given[name].detach() for name in programs.tangent_names])
        gradients = apart(by_kind(programs.backward, found)["gradient"])
        pairs = zip(programs._call.names, ctx.needed, strict=True)
        return None, *[gradients.get(name) if needed else None for name, needed in pairs]


class _Tensor(int):
    """The number of a saved tensor, in its place."""


def _like(tangent: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A gradient laid out like the result, as the program was captured with."""
    if tangent.stride() == strides:
        return tangent
    empty = torch.empty_strided(tangent.shape, strides, dtype=tangent.dtype, device=tangent.device)
    return empty.copy_(tangent)


def apart(gradients: dict[str, torch.Tensor | None]) -> dict[str, Any]:
    """Each gradient in a tensor of its own, so that whoever changes one changes no other."""
    seen: set[int] = set()
    result = {}
    for name, value in gradients.items():
        result[name] = value.clone() if value is not None and id(value) in seen else value
        seen.add(id(value))
    return result
