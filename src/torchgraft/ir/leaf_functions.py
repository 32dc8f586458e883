"""Leaf functions: the marks that `wrap` leaves on functions whose calls are recorded whole.
Reading the marks and acting on them while tracing is the business of `capturing/patching/wrapping.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torchgraft.errors import TraceError

# A name in the globals of generated code, by which it is known. (Not __name__: torch.compile would try to import that.)
GENERATED = "__torchgraft_generated__"

_MARKS = "__torchgraft_wrapped__"
# The globals of the modules that called wrap, by their ids and the name: looked up when a trace begins, because wrap may
# precede the definition. Both tables are reached by torch.fx's names for them, and may be added to.
wrapped_functions: dict[tuple[int, str], dict[str, Any]] = {}
wrapped_methods: list[tuple[type, str]] = []
# Functions of libraries that only calculate, and ask by themselves whether they are being compiled, because torch's
# compilers do not know the operator they use otherwise (products of groups are known for bfloat16 alone). A program calls
# them, so that they are asked when it runs; what the capture was told would stand in it for ever.
_CHOOSES_WHEN_COMPILED = (("transformers.integrations.moe", "_grouped_mm"),)


def wrap(fn_or_name: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Record calls of a function as one node instead of tracing through it.

    Call it at the top level of a module, with a name (`wrap("len")`) or a function defined there (also as a decorator).

    >>> import math, torchgraft
    >>> @torchgraft.wrap
    ... def rounded(x):
    ...     return math.floor(x)  # asks for a number, which a traced value is not
    >>> [node.name for node in torchgraft.symbolic_trace(lambda x: rounded(x) + 1).graph.nodes]
    ['x', 'rounded', 'add', 'output']
    """
    if isinstance(fn_or_name, str):
        name = fn_or_name
    elif not callable(fn_or_name):
        raise TraceError(
            "Unsupported type for global function! Must be either a callable or string name\n"
            f"  wrap was given {type(fn_or_name).__name__}"
        )
    elif not hasattr(fn_or_name, "__code__"):
        raise TraceError(f"cannot wrap {fn_or_name!r}: it is no plain function; give its name as a string instead")
    else:
        name = fn_or_name.__code__.co_name
    frame = sys._getframe(1)
    if frame.f_code.co_name != "<module>":
        raise NotImplementedError("wrap must be called at the top level of a module")
    _mark(frame.f_globals, name)
    return fn_or_name


def _mark(scope: dict[str, Any], name: str) -> None:
    if GENERATED in scope:
        # Generated code comes and goes; its marks live and die with its namespace.
        scope.setdefault(_MARKS, []).append(name)
    else:
        wrapped_functions[id(scope), name] = scope


def marked_functions() -> list[tuple[dict[str, Any], str]]:
    """Every marked function outside generated code, as (namespace, name)."""
    return [(scope, key[1]) for key, scope in list(wrapped_functions.items())]


def marks_in(scope: dict[str, Any]) -> list[str]:
    """The functions that generated code marked in its own namespace."""
    return scope.get(_MARKS, [])


def functions_that_choose() -> list[tuple[dict[str, Any], str]]:
    """Functions that calculate in another way where they are compiled, of the libraries that are loaded, as (namespace, name)."""
    found = [(vars(sys.modules[module]), name) for module, name in _CHOOSES_WHEN_COMPILED if module in sys.modules]
    return [(scope, name) for scope, name in found if name in scope]


def chooses_when_compiled(target: Any) -> bool:
    """Whether `target` is one of `functions_that_choose`."""
    return (getattr(target, "__module__", None), getattr(target, "__name__", None)) in _CHOOSES_WHEN_COMPILED
