"""Packages whose public names are imported when they are first used, so that whoever needs one file of a package loads that one.
Which names there are is said in the `__init__.py` of each, by imports that only type checkers run.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def homes_of(file: str) -> dict[str, str]:
    """The module of every name that is imported in the block `if TYPE_CHECKING:` of a file."""
    block = next(part for part in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(part, ast.If))
    imports = [statement for statement in block.body if isinstance(statement, ast.ImportFrom)]
    return {alias.name: str(statement.module) for statement in imports for alias in statement.names}


def on_first_use(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package with such a block.

    >>> import torchgraft.passes
    >>> torchgraft.passes.RemoveDeadCode
    <class 'torchgraft.passes.remove_dead_code.RemoveDeadCode'>
    """
    homes = homes_of(file)

    def get(name: str) -> Any:
        if name not in homes:
            # Code written for torch.fx says `fx.passes.shape_prop.ShapeProp` without importing the file.
            if name[0] != "_" and importlib.util.find_spec(f"{package}.{name}") is not None:
                return importlib.import_module(f"{package}.{name}")
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        value = getattr(importlib.import_module(homes[name]), name)
        vars(sys.modules[package])[name] = value
        return value

    return sorted(homes), get, lambda: sorted(homes)
