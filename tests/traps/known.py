"""Traps that go wrong today, with the reason: each is a strict expected failure, to be taken out when it is fixed.
What a trap does wrong in detail is shown by `python -m tests.traps NAME`.
"""

from __future__ import annotations

# By reason: the traps, and the ways of capturing (s: symbolic, m: module, f: function, a: aten) in which they go wrong.
_WRONG: dict[str, dict[str, str]] = {
    "device, grad_fn and is_leaf decide without a guard": {
        "tensors on the model's device": "s",
    },
    "a proxy answers isinstance, hasattr and `is` for itself, not for its value": {
        "a dataclass in": "s",
    },
    "what torch or Python says about a proxy is no TraceError": {
        "a hooked module that fills a list": "s",
        "features collected by hooks inside": "s",
        "nested tensors": "s",
        "decorated forward with keywords": "s",
    },
    "torch has no derivative for randint_like as an operator": {
        "draws of every kind": "a",
    },
}
_WAYS = {"s": "symbolic", "m": "module", "f": "function", "a": "aten"}

KNOWN: dict[tuple[str, str], str] = {
    (name, _WAYS[letter]): reason
    for reason, traps in _WRONG.items()
    for name, letters in traps.items()
    for letter in letters
}

# What is reached at least, by group; the watched ways are to stay above 0.9 where state is not hidden.
LEAST_SHARE_OF_RIGHT = {
    "asked": {"symbolic": 0.565, "module": 0.9, "function": 0.9, "aten": 0.9},
    "hostile": {"symbolic": 0.43, "module": 0.93, "function": 0.925, "aten": 0.925},
    "afterwards": {"symbolic": 0.27, "module": 0.98, "function": 0.98, "aten": 0.98},
    "exported": {"symbolic": 0.54, "module": 0.92, "function": 0.92, "aten": 0.92},
    "hidden": {"symbolic": 0.32, "module": 0.79, "function": 0.79, "aten": 0.79},
}
