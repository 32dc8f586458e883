"""Conditions that a program checks on every call, before its first operation: they belong to how it is called, not to it.
So the operations of the program stay exactly those of the level it was captured at; what to check is decided elsewhere.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from torchgraft.bridge.calling import CallTreeCodeGen
from torchgraft.bridge.conditions import compiled
from torchgraft.codegen.source import CodeGen
from torchgraft.errors import GuardError, StructureError

CHECK = "_check_inputs"
LOOSE = "_loose_keywords"
LEAVES = "_exact_leaves"


class InputCheck:
    """Raises GuardError unless every condition holds; a condition is a Python expression over the names of the inputs.

    `modes` says of submodules, by their paths, whether they were in training mode ("" is the program itself); `titles`
    say what inputs are, for messages, where their names do not.

    >>> check = InputCheck(["x"], ["x.size()[1] == 4"])
    >>> check.inputs(torch.ones(2, 4))
    >>> check.inputs(torch.ones(2, 5))  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    torchgraft.errors.GuardError: the program was captured for x.size()[1] == 4, and now x.size()[1] is 5; ...
    """

    def __init__(
        self,
        names: Iterable[str],
        conditions: Iterable[str],
        modes: Mapping[str, bool] | None = None,
        titles: Mapping[str, str] | None = None,
    ) -> None:
        self.names = list(names)
        self.conditions = list(conditions)
        self.modes = dict(modes or {})
        self.titles = dict(titles or {})
        # Where the model asks about torch, by condition; whether gradients were on; how inputs lay in memory, by name; and
        # whether the model goes on after errors.
        self.reasons: dict[str, str] = {}
        self.gradients = True
        self.layouts: dict[str, tuple[int, ...] | None] = {}
        self.recovers = False
        self._function = compiled(self.names, self.conditions, self._refuse)

    def __call__(self, program: torch.nn.Module, *values: Any) -> None:
        """Check the modes of a program and the values of its inputs, in the order of `names`."""
        if not self.gradients and torch.is_grad_enabled():
            _refuse_gradients([*values, *program.parameters()])
        for path, expected in self.modes.items():
            found = program.get_submodule(path).training
            if found != expected:
                refuse_mode(path, expected)
        self._function(*values)

    def inputs(self, *values: Any) -> None:
        """Check the values alone; for interpreters, which have no module to ask for its mode."""
        self._function(*values)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_function"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._function = compiled(self.names, self.conditions, self._refuse)

    def __repr__(self) -> str:
        return f"InputCheck({', '.join(self.names)}: {'; '.join(self.conditions)})"

    def _refuse(self, condition: str, left: str, found: Any) -> NoReturn:
        titles = [f"{name} is {title}" for name, title in self.titles.items() if re.search(rf"\b{name}\b", condition)]
        advice = "" if self.titles else ", or name the dimensions that must stay free (dynamic=)"
        advice = "in this situation" if condition.startswith("torch.") else f"with inputs like these{advice}"
        reason = self.reasons.get(condition, "")
        raise GuardError(
            f"the program was captured for {condition}, and now {left} is {_short(found)}"
            f"{' (' + ', '.join(titles) + ')' if titles else ''}{reason and f': the model asks for it{reason}'}; "
            f"capture the model again {advice}"
        )

    def error_of_run(self, error: Exception, values: Iterable[Any]) -> GuardError | None:
        """The error to raise for one of an operator, where the model itself might have gone on."""
        if self.recovers:
            return GuardError(
                f"the program was captured where nothing failed, and now it raises {type(error).__name__}: {error}; the model "
                "goes on after errors (try, except), which an ATen program does not do: capture the model at level 'function'"
            )
        for name, value in zip(self.names, values, strict=False):
            expected = self.layouts.get(name)
            if expected is not None and isinstance(value, torch.Tensor) and value.stride() != expected:
                return GuardError(
                    f"the program was captured for {name}.stride() == {expected}, and now it is {value.stride()}, with which it "
                    f"raises {type(error).__name__}: {error}; give {name}.contiguous(), or capture the model again with inputs "
                    "like these"
                )
        return None


def _refuse_gradients(values: list[Any]) -> None:
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
        raise GuardError(
            "the program was captured while gradients were off and computes none, and now they are on and its inputs or "
            "parameters require them; run it under torch.no_grad(), or capture the model again with gradients on"
        )


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"another tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def refuse_mode(path: str, expected: bool) -> None:
    """Raise because a program, or one of its submodules, is no longer in the mode that it was captured in."""
    modes = {True: "training mode", False: "evaluation mode"}
    raise GuardError(
        f"the program was captured in {modes[expected]}, and {f'its submodule {path!r}' if path else 'it'} is now in "
        f"{modes[not expected]}, but the model does different things in the two (dropout, batch norm, if self.training); "
        f"capture the model again in {modes[not expected]}, or switch back with .{'train' if expected else 'eval'}()"
    )


def tensor_conditions(name: str, value: torch.Tensor) -> list[str]:
    """That a tensor has the rank, sizes and dtype of an example.

    >>> tensor_conditions("x", torch.ones(2, 3))
    ['x.dtype == torch.float32', 'tuple(x.shape) == (2, 3)']
    """
    return [f"{name}.dtype == {value.dtype}", f"tuple({name}.shape) == {tuple(map(int, value.shape))}"]


class _Checked(CodeGen):
    """Adds one line to the head of the generated function."""

    check: InputCheck

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str) -> str:
        """The head of the function, then the check."""
        leaves = [text.split("=")[0].split(":")[0].strip().lstrip("*") for text in free_vars]
        head = super().gen_fn_def(free_vars, maybe_return_annotation)
        return f"{head}\n    {CHECK}({', '.join(['self', *leaves])})"

    def process_inputs(self, *args: Any) -> Any:
        """The leaves of the arguments, checked."""
        leaves = super().process_inputs(*args)
        self.check.inputs(*leaves)
        return leaves

    def additional_globals(self) -> list[tuple[str, Any]]:
        """The check, under the name the head calls it by."""
        return [*super().additional_globals(), (CHECK, self.check)]

    def error_of_call(
        self, error: Exception, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Exception | None:
        """A GuardError, where the program fails because it is called in another way than the model was."""
        if isinstance(error, GuardError):
            return None
        try:
            inspect.signature(module.forward).bind(*args, **kwargs)
        except TypeError as problem:
            names = self.parameters if isinstance(self, CallTreeCodeGen) else self.check.names
            return GuardError(
                f"the program was captured for a call with {_listed(names)}, and not for this one: {problem}; capture the model "
                "again with a call like this"
            )
        return self.check.error_of_run(error, pytree.tree_leaves((args, kwargs)))


class CheckedCodeGen(_Checked):
    """For programs that take their inputs one by one."""

    def __init__(self, check: InputCheck) -> None:
        super().__init__()
        self.check = check


class CheckedCallCodeGen(_Checked, CallTreeCodeGen):
    """For programs that take their inputs in the containers of the model.

    With `keyword_only`, keywords are not taken by position; those in `loose`, which the model takes in its `**rest`, must come
    in the order of the capture.
    """

    def __init__(self, parameters: list[str], in_spec: Any, out_spec: Any, check: InputCheck) -> None:
        CallTreeCodeGen.__init__(self, parameters, in_spec, out_spec)
        self.check = check
        self.keyword_only = False
        self._flatten = LEAVES
        self.loose: list[str] = []
        self.rest = ""

    def _heading(self, annotation: str) -> str:
        names = [name for name in self.parameters if name not in self.loose]
        count = len(self.parameters) - len(self._keywords or ())
        star = ["*"] if self.keyword_only and len(names) > count else []
        rest = [f"**{self.rest}"] if self.loose else []
        head = CodeGen.gen_fn_def(self, [*names[:count], *star, *names[count:], *rest], annotation)
        if not self.loose:
            return head
        return f"{head}\n    {', '.join(self.loose)}, = {LOOSE}({self.rest}, {self.loose!r})"

    def additional_globals(self) -> list[tuple[str, Any]]:
        """Also what takes the arguments apart."""
        own = [(LEAVES, exact_leaves), *([(LOOSE, loose_keywords)] if self.loose else [])]
        return [*super().additional_globals(), *own]


def exact_leaves(values: list[Any], spec: Any) -> list[Any]:
    """The leaves of arguments in exactly the containers of the capture: their classes and the order in dicts may tell."""
    leaves, found = pytree.tree_flatten(tuple(values))
    if found != spec:
        raise StructureError(
            f"the program was captured for arguments with the structure {_in_line(spec)}, and these have {_in_line(found)}; "
            "capture the model again with arguments like these"
        )
    return leaves


def _in_line(spec: Any) -> str:
    return " ".join(str(spec).split())


def loose_keywords(given: dict[str, Any], names: list[str]) -> list[Any]:
    """The values of the keywords that a model takes in its `**rest`; their order tells, if the model walks over them."""
    if list(given) != names:
        raise GuardError(
            f"the program was captured for the further keywords {_listed(names)}, in this order, and now they are "
            f"{_listed(list(given))}; capture the model again with a call like this"
        )
    return list(given.values())


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
