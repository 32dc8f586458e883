"""A call of a model as programs without state see it: its tensors and the tensors among its inputs, in one row, with names.
The plain values among the inputs are part of what a program was captured for, and checked.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.bridge.checked_calls import InputCheck, refuse_mode
from torchgraft.bridge.input_guards import facts_of_tensor
from torchgraft.bridge.model_tensors import ModelTensors
from torchgraft.bridge.program_calls import depends_on_mode, identities, signature_of
from torchgraft.bridge.refusals import title
from torchgraft.bridge.run_watch import Asked
from torchgraft.errors import BridgeError, GuardError
from torchgraft.ir.guards import misfit_of_tensor


class ModelCall:
    """How a model was called when it was captured.

    `names` and `kinds` describe the row of tensors: what the model holds, then the tensors among its inputs.

    >>> call = ModelCall(torch.nn.Linear(2, 3), (torch.ones(4, 2),), {})
    >>> list(zip(call.kinds, call.names))
    [('parameter', 'weight'), ('parameter', 'bias'), ('input', 'input')]
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        more: dict[str, torch.nn.Module] | None = None,
    ) -> None:
        self.tensors = ModelTensors(model, more)
        self._model = title(model)
        self._signature = _bare(signature_of(model.forward))
        try:
            leaves, self._spec = self._leaves(args, kwargs)
        except TypeError as error:
            raise BridgeError(f"cannot capture {self._model}: {error}; give the inputs its forward takes") from error
        self._plain = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)}
        inputs = [name for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)]
        self.names = [held.name for held in self.tensors.held]
        # A parameter may be called like an input, and gradients are looked up by name.
        self.names += [f"input {name}" if name in self.names else name for name in inputs]
        self.kinds = [held.kind for held in self.tensors.held] + ["input"] * len(inputs)
        self._modes = [
            (module, path, module.training) for path, module in model.named_modules() if depends_on_mode(module)
        ]
        self._results: list[Any] = []
        self._results_spec: Any = None
        self._facts = InputCheck([], [])
        self._needed = [True] * len(self.names)

    def check_facts(self, model: torch.nn.Module, row: list[torch.Tensor], asked: Asked) -> None:
        """Have calls to come checked for what the model asked about the inputs of the example, and about torch. That gradients
        are on is taken for granted: they are what is asked for."""
        self._needed = [tensor.requires_grad for tensor in row]
        names = {f"input_{index}": name for index, name in enumerate(self.names) if self.kinds[index] == "input"}
        tensors = row[len(self.tensors.held) :]
        conditions = [
            text
            for name, tensor in zip(names, tensors, strict=True)
            for text in facts_of_tensor(name, tensor, asked.facts)
        ]
        conditions += identities(model, zip(names, tensors, strict=True))
        conditions += [text for text in asked.situation if "is_grad_enabled" not in text]
        self._facts = InputCheck(names, conditions, titles={name: repr(title) for name, title in names.items()})
        self._facts.reasons = asked.situation

    def row(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of the model as they are now, and those among inputs that are like the ones at the capture."""
        for module, path, expected in self._modes:
            if module.training != expected:
                refuse_mode(path, expected)
        try:
            leaves, spec = self._leaves(args, kwargs)
        except TypeError as error:
            raise GuardError(f"the program was captured for another call of {self._model}: {error}") from error
        if spec != self._spec:
            raise GuardError(
                f"the program was captured for inputs of {self._model} with the structure {_text(self._spec)}, and these "
                f"have {_text(spec)}; capture the model again with inputs like these"
            )
        for name, expected in self._plain.items():
            found = leaves[name]
            if type(found) is not type(expected) or not _is_same(found, expected):
                raise GuardError(
                    f"the program was captured for {name} = {expected!r}, and now it is {found!r}; "
                    "capture the model again with inputs like these"
                )
        for name, leaf in leaves.items():
            problem = misfit_of_tensor(leaf, name) if name not in self._plain else None
            if problem is not None:
                raise GuardError(
                    f"the program takes {problem[1]} for {name}, and this is {problem[2]}; capture the model again with inputs "
                    "like these, or at level 'function'"
                )
        inputs = self._input_tensors(leaves)
        if self._facts.names:
            self._facts.inputs(*inputs)
        row = [held.value for held in self.tensors.held] + inputs
        for name, tensor, was_needed in zip(self.names, row, self._needed, strict=True):
            if tensor.requires_grad and not was_needed:
                raise GuardError(
                    f"the program was captured while {name!r} required no gradient, and now it does; capture the model again, or "
                    "give it detached"
                )
        return row

    def _input_tensors(self, leaves: dict[str, Any]) -> list[torch.Tensor]:
        return [leaf for name, leaf in leaves.items() if name not in self._plain]

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        bound = self._signature.bind(*args, **kwargs).arguments
        names = list(bound)
        spec = pytree.tree_structure(list(bound.values()))
        leaves = {}
        for name, value in bound.items():
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                leaves[name + pytree.keystr(path)] = leaf
        return leaves, (tuple(names), spec)

    def with_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with other tensors in them."""
        rest = iter(tensors)
        bound = self._signature.bind(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(list(bound.arguments.values()))
        values = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        bound.arguments.update(zip(bound.arguments, pytree.tree_unflatten(values, spec), strict=True))
        return bound.args, bound.kwargs

    def refuse_sharing(self, row: list[torch.Tensor], updates: list[str]) -> None:
        """Raise if a tensor that is going to be written shares memory with another, which the model would see change."""
        for name, tensor in zip(self.names, row, strict=True):
            if name in updates:
                for other_name, other in zip(self.names, row, strict=True):
                    if other_name != name and torch._C._is_alias_of(tensor, other):  # type: ignore[attr-defined]
                        raise GuardError(
                            f"the program writes {name!r}, which shares memory with {other_name!r} now, and did not when "
                            "the model was captured; give a clone()"
                        )

    def write(
        self, row: list[torch.Tensor], updates: dict[str, torch.Tensor], assigned: dict[str, torch.Tensor]
    ) -> None:
        """Do to the tensors in `row`, and to the model, what a call of the model would have done to them."""
        for name, tensor in zip(self.names, row, strict=True):
            if name in updates:
                tensor.copy_(updates[name])
        for held in self.tensors.held:
            if held.name in assigned:
                for slot in held.slots:
                    slot.table[slot.key] = assigned[held.name]

    # ---- results ----

    def note_results(self, result: Any, name: str) -> dict[str, torch.Tensor]:
        """Remember the structure of what the model returned, and give names to the tensors in it."""
        pairs, self._results_spec = pytree.tree_flatten_with_path(result)
        named = [(name + pytree.keystr(path), leaf) for path, leaf in pairs]
        self._results = [_Tensor(text) if isinstance(leaf, torch.Tensor) else leaf for text, leaf in named]
        return {text: leaf for text, leaf in named if isinstance(leaf, torch.Tensor)}

    def results(self, tensors: dict[str, torch.Tensor]) -> Any:
        """What the model returned, made of the tensors with these names."""
        leaves = [tensors[leaf] if isinstance(leaf, _Tensor) else leaf for leaf in self._results]
        return pytree.tree_unflatten(leaves, self._results_spec)


class _Tensor(str):
    """The place of a tensor among results, by its name."""

    __slots__ = ()


def _bare(signature: inspect.Signature) -> inspect.Signature:
    """Names and kinds alone: annotations and defaults can be anything, also what cannot be pickled."""
    empty = inspect.Parameter.empty
    parameters = [
        parameter.replace(annotation=empty, default=empty if parameter.default is empty else None)
        for parameter in signature.parameters.values()
    ]
    return inspect.Signature(parameters)


def _text(spec: Any) -> str:
    return " ".join(f"({', '.join(spec[0])}): {spec[1]}".split())


def _is_same(found: Any, expected: Any) -> bool:
    return bool(found is expected or found == expected or (found != found and expected != expected))
