"""Modules, parameters, buffers and constants that a replacement names and the program it is put into does not have:
they are copied over, under the same name where that is free. Nodes are made in `replace.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from torchgraft.analysis.comparison import same_tensor
from torchgraft.codegen.attributes import assign_attribute, is_persistent_buffer
from torchgraft.errors import GraphAttributeError
from torchgraft.rewriting.pattern import MISSING, Program


class Adoption:
    """Brings the attributes of replacements to one module; copies made for several names keep what they share."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._module: Any = program.module
        self._memo: dict[int, Any] = {}
        self._constant_names: dict[int, str] = {}
        self._kept_alive: list[Any] = []

    def keep(self, module: torch.nn.Module) -> None:
        """Bring this module over itself, where others are copied."""
        self._memo[id(module)] = module
        self._kept_alive.append(module)

    def check(self, replacement: Program) -> None:
        """Raise where a target is found neither here nor in the replacement."""
        for node, target in replacement.attribute_targets():
            if self._program.attribute(target) is MISSING and replacement.attribute(target) is MISSING:
                raise GraphAttributeError(
                    f"cannot put the replacement in: its {node.op} node '{node.name}' names '{target}', which neither "
                    "the program nor the replacement has; give the replacement as a module that has it, or add it to "
                    "the program"
                )

    def adopt(self, replacement: Program) -> dict[str, str]:
        """Copy what is missing; return the targets that go by another name in the program.

        A name that the user chose and that both have means the program's own attribute, as in torch.fx. A name that
        tracing chose means nothing to anybody, so the value decides.
        """
        renamed: dict[str, str] = {}
        # Shorter paths first: a module brings everything below it along.
        for target in sorted({target for _, target in replacement.attribute_targets()}, key=len):
            value = replacement.attribute(target)
            existing = self._program.attribute(target)
            if value is not MISSING and replacement.is_constant(target):
                renamed[target] = self._adopt_constant(target, value, existing)
            elif existing is MISSING:
                self._install(target, self._copy(value), replacement)
        return {target: name for target, name in renamed.items() if target != name}

    def _copy(self, value: Any) -> Any:
        return copy.deepcopy(value, self._memo)

    def _adopt_constant(self, target: str, value: Any, existing: Any) -> str:
        known = self._constant_names.get(id(value))
        if known is not None:
            return known
        name = target
        if not _is_same_constant(existing, value):
            number = 0
            while self._program.attribute(name) is not MISSING:
                name, number = f"{target.rstrip('0123456789')}{number}", number + 1
            self._install(name, self._copy(value), None)
            self._program.graph._constants[name] = self._program.attribute(name)
        self._constant_names[id(value)] = name
        self._kept_alive.append(value)
        return name

    def _install(self, target: str, value: Any, replacement: Program | None) -> None:
        path, _, name = target.rpartition(".")
        model = None if replacement is None else replacement.module
        # Constants and plain tensor attributes are in no state_dict.
        is_saved = model is not None and is_persistent_buffer(model.get_submodule(path), name)
        assign_attribute(self._module, target, value, is_saved)


def _is_same_constant(existing: Any, value: Any) -> bool:
    if existing is value:
        return True
    if not isinstance(existing, torch.Tensor) or type(existing) is not type(value):
        return False
    return not (existing.requires_grad or value.requires_grad) and same_tensor(existing, value)
