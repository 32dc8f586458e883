"""Passes by their text names: those of this folder, those registered in this process and those of installed packages; and
pipelines as text. What a pass is, is said in `definition.py`; several of them are run by `pipeline.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import re
from typing import Any, TypeVar

from torchgraft.errors import PassError, suggestion
from torchgraft.passes.definition import Pass, text_name

GROUP = "torchgraft.passes"

BUILT_IN = (
    *("remove-dead-code", "merge-common", "fold-constants", "normalize-arguments", "remove-no-ops", "functionalize"),
    *("propagate-shapes", "fuse-conv-norm", "fuse-activations", "merge-linears", "replace-module"),
    *("reorder-for-memory", "recompute", "overlap-remote-calls", "prefetch-copies"),
)
# Those that live in another room.
_HOMES = dict.fromkeys(("overlap-remote-calls", "prefetch-copies"), "torchgraft.schedule")

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
        module = importlib.import_module(f"{_HOMES.get(name, 'torchgraft.passes')}.{name.replace('-', '_')}")
        return getattr(module, name.replace("-", " ").title().replace(" ", ""))
    if name in _registered:
        return _registered[name]
    for entry in _entry_points():
        if entry.name == name:
            return _loaded(entry)
    raise PassError(f"no pass is called {name!r}; {suggestion(name, names())}")


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


# ---- text ----


_STEP = re.compile(
    r"\s*(?P<name>[A-Za-z][\w-]*)\s*(?:\{(?P<options>(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*)\})?\s*(?P<end>,|$)"
)
_OPTION = re.compile(r"\s*(?P<key>[A-Za-z_]\w*)\s*=\s*(?P<value>\"(?:[^\"\\]|\\.)*\"|[^,\"\s]+)\s*(?P<end>,|$)")
_CONSTANTS = {"true": True, "false": False, "none": None}


def parse_passes(text: str) -> tuple[Pass, ...]:
    """The passes that a text names.

    >>> [str(step) for step in parse_passes("remove-dead-code, fold-constants{max_bytes=4096}")]
    ['remove-dead-code', 'fold-constants{max_bytes=4096}']
    """
    passes = []
    position = 0
    end = ""
    while position < len(text.rstrip()) or end == ",":
        match = _STEP.match(text, position)
        if match is None:
            raise PassError(
                f"cannot read the pipeline {text!r} at {text[position:].strip() or 'its end'!r}; "
                'write names and commas, with options in braces: "remove-dead-code, fold-constants{max_bytes=4096}"'
            )
        passes.append(_pass(match["name"], match["options"] or ""))
        position, end = match.end(), match["end"]
    return tuple(passes)


def _pass(name: str, options: str) -> Pass:
    cls = find(name)
    known = {field.name: field for field in dataclasses.fields(cls)}
    given: dict[str, Any] = {}
    position = 0
    while position < len(options.rstrip()):
        match = _OPTION.match(options, position)
        if match is None:
            raise PassError(f"cannot read the options of {name} at {options[position:].strip()!r}; write option=value")
        key = match["key"]
        if key not in known:
            have = f"its options are {', '.join(known)}" if known else "it has none"
            raise PassError(f"{name} has no option {key!r}; {have}")
        given[key] = _value(match["value"], known[key].default, f"the option {key} of {name}")
        position = match.end()
    return cls(**given)


def _value(text: str, default: Any, what: str) -> Any:
    if text.startswith('"'):
        value = json.loads(text)
    elif text.lower() in _CONSTANTS:
        value = _CONSTANTS[text.lower()]
    else:
        value = _number(text)
    if isinstance(default, str) and not isinstance(value, str):
        return text
    if type(default) in (bool, int, float) and value is not None:
        fits = type(value) is type(default) or (type(default) is float and type(value) is int)
        if not fits:
            raise PassError(f"{what} must be of type {type(default).__name__}, not {text!r}")
    return value


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
