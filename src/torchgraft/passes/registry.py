"""Passes by their text names: those of this folder, those registered in this process and those of installed packages.
What a pass is, is said in `definition.py`; the text form of several passes is read in `pipeline_text.py`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
from typing import Any, TypeVar

from torchgraft.errors import PassError
from torchgraft.passes.definition import Pass, text_name

GROUP = "torchgraft.passes"

BUILT_IN = (
    "remove-dead-code",
    "merge-common",
    "fold-constants",
    "normalize-arguments",
    "remove-no-ops",
    "functionalize",
    "propagate-shapes",
    "fuse-conv-norm",
    "fuse-activations",
    "replace-module",
    "reorder-for-memory",
)

_registered: dict[str, type[Pass]] = {}

PassClass = TypeVar("PassClass", bound=type[Pass])


def register(cls: PassClass) -> PassClass:
    """Make a pass of your own known by its text name in this process; a decorator.

    An installed package does the same for everybody with an entry point in the group `torchgraft.passes`.

    >>> from dataclasses import dataclass
    >>> from torchgraft.passes import Pass, names
    >>> @register
    ... @dataclass(frozen=True)
    ... class DoNothing(Pass):
    ...     def run(self, module):
    ...         return 0
    >>> "do-nothing" in names()
    True
    """
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        raise PassError(f"cannot register {cls!r}: it is no subclass of torchgraft.passes.Pass")
    name = text_name(cls)
    if name in BUILT_IN:
        raise PassError(f"cannot register {cls.__name__}: torchgraft has a pass '{name}' already; choose another name")
    _registered[name] = cls
    return cls


def names() -> list[str]:
    """Every name that `find` knows.

    >>> names()[:2]
    ['remove-dead-code', 'merge-common']
    """
    return list(dict.fromkeys([*BUILT_IN, *_registered, *[entry.name for entry in _entry_points()]]))


def find(name: str) -> type[Pass]:
    """The class of the pass with this text name.

    >>> find("fold-constants").__name__
    'FoldConstants'
    """
    if name in BUILT_IN:
        module = importlib.import_module(f"torchgraft.passes.{name.replace('-', '_')}")
        return getattr(module, name.replace("-", " ").title().replace(" ", ""))
    if name in _registered:
        return _registered[name]
    for entry in _entry_points():
        if entry.name == name:
            return _loaded(entry)
    close = difflib.get_close_matches(name, names(), n=2, cutoff=0.5)
    advice = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(names())}"
    raise PassError(f"no pass is called {name!r}; {advice}")


def _entry_points() -> list[Any]:
    return list(importlib.metadata.entry_points(group=GROUP))


def _loaded(entry: Any) -> type[Pass]:
    try:
        cls = entry.load()
    except Exception as error:  # the code of another package, which may raise anything
        raise PassError(f"cannot load the pass '{entry.name}' from {entry.value}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        raise PassError(
            f"the entry point '{entry.name}' names {entry.value}, which is no subclass of Pass; fix it there"
        )
    return cls
