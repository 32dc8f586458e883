"""Regions: the two calls that open and close a context (`torch.no_grad`, autocast, …) inside a program.
How a region is recorded is the tracer's business; how it is printed (as a `with` block) is the code generator's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def enter_context(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a context manager, enter it and return it, so that `exit_context` can leave it."""
    context = factory(*args, **kwargs)
    context.__enter__()
    return context


def exit_context(context: Any) -> None:
    """Leave a context that `enter_context` entered."""
    context.__exit__(None, None, None)


# Read by analysis/effects: whatever happens between the two depends on them.
enter_context.__torchgraft_effect__ = True  # type: ignore[attr-defined]
exit_context.__torchgraft_effect__ = True  # type: ignore[attr-defined]
