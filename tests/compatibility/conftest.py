"""The two libraries under examination, given to each test in turn.

Fixtures only: what the libraries must do is said in the test files.
"""

import importlib
import importlib.util
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

LIBRARIES = ("torch.fx", "torchgraft")

_module_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=LIBRARIES)
def fx(request: pytest.FixtureRequest) -> ModuleType:
    """The library under examination, as a program would import it: ``import <library> as fx``."""
    return importlib.import_module(request.param)


@pytest.fixture
def graft() -> ModuleType:
    """torchgraft alone, for what torch.fx gets wrong."""
    return importlib.import_module("torchgraft")


def import_source(text: str, folder: Path, library: str) -> ModuleType:
    """Import ``text``, written for torch.fx, after changing nothing but the library it imports."""
    name = f"ported_{next(_module_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(text).replace("torch.fx", library))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def port(fx: ModuleType, tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Write a program for torch.fx; get it back as a module that imports the library under examination instead."""
    made: list[str] = []

    def import_with_changed_import(text: str) -> ModuleType:
        module = import_source(text, tmp_path, fx.__name__)
        made.append(module.__name__)
        return module

    yield import_with_changed_import
    for name in made:
        sys.modules.pop(name, None)
