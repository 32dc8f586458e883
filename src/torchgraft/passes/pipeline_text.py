"""The text form of a pipeline, `"remove-dead-code, fold-constants{max_bytes=4096}"`: from text to passes.
Back from passes to text goes `Pass.__str__`; running them is in `pipeline.py`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from torchgraft.errors import PassError
from torchgraft.passes.definition import Pass
from torchgraft.passes.registry import find

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
