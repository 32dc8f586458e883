"""The API reference: every public name is on one of its pages, once, and its docstring has an example.
That the examples are right is tested where they stand: they are doctests.
"""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torchgraft

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
# Rooms, of which the reference shows what is inside, and what is no object of ours.
ROOMS = {"distributed", "passes", "quantize", "schedule", "subgraph_rewriter", "zoo", "__version__"}
WITH_NAMES_OF_THEIR_OWN = ("distributed", "passes", "quantize", "schedule")


def shown() -> list[str]:
    pages = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))]
    return [name for page in pages for name in re.findall(r"^::: torchgraft\.(\S+)$", page, re.MULTILINE)]


def public() -> set[str]:
    names = {f"{room}.{name}" for room in WITH_NAMES_OF_THEIR_OWN for name in getattr(torchgraft, room).__all__}
    models = {f"zoo.{name}" for name in ("create", "names", "example_inputs")}
    return (set(torchgraft.__all__) - ROOMS) | names | models


def object_called(name: str) -> Any:
    found: Any = torchgraft
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_every_public_name_is_on_one_page() -> None:
    assert sorted(shown()) == sorted(public())


@pytest.mark.parametrize("name", sorted(public()))
def test_every_public_name_has_an_example(name: str) -> None:
    found = object_called(name)
    assert not isinstance(found, ModuleType)
    own = found if isinstance(found, type) or hasattr(found, "__name__") else type(found)
    assert ">>> " in (vars(own).get("__doc__") if isinstance(own, type) else own.__doc__), f"{name} has no example"
