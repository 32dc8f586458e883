"""Every exception class of torchgraft, so that a caller can catch one root or the one thing that went wrong.
Message texts live where the error is raised; nothing here imports torch.
"""

from __future__ import annotations


class GraftError(Exception):
    """The root of every error raised on purpose by torchgraft."""


class TraceError(GraftError, ValueError, RuntimeError):
    """A program cannot be captured symbolically.

    torch.fx raises ValueError for some of these and RuntimeError for others; code that catches either keeps working.
    """


class GraphError(GraftError, RuntimeError, AssertionError):
    """A graph edit is not allowed, or a graph is not well formed.

    torch.fx raises RuntimeError for some of these and AssertionError for others; code that catches either keeps working.
    """


class GraphAttributeError(GraphError, AttributeError):
    """A node refers to a module or attribute that the owning module does not have."""


class UnknownArgumentError(GraphError, IndexError):
    """A node has no argument at that index (torch.fx raises IndexError)."""


class BridgeError(GraftError):
    """A program cannot be carried over to or from torch.fx or torch.export without losing something."""


class UnknownModuleError(TraceError, NameError):
    """A module was called that is not part of the model being traced (torch.fx raises NameError)."""


class GuardError(GraftError, RuntimeError):
    """A captured program was asked to run in a situation it was not captured for."""


class StructureError(GuardError, ValueError):
    """A program was called with containers of another structure than it was captured with (torch.fx raises ValueError)."""


class RunError(GraftError, RuntimeError):
    """A model or program raised while it was being watched; `partial` is what was written down until then."""

    def __init__(self, message: str, partial: object = None) -> None:
        super().__init__(message)
        self.partial = partial
        if partial is not None:  # beside the message, because on a command line there is no error to ask
            self.add_note("what was written down until then is this error's `partial`")


class InputError(GraftError, TypeError):
    """Inputs were given in another way than `f(model, args, kwargs)`, or a program does not take them."""


class UnknownNodeError(GraftError, LookupError):
    """A program has no node of that name, or its value was not recorded."""


class WriteError(GraftError, OSError):
    """A file cannot be written where it was asked for."""


class PassError(GraftError, RuntimeError):
    """A pass cannot be found or run, or it left a program that is not well formed or computes something else."""


class ShapeError(GraftError, TypeError):
    """Two shapes in a program cannot agree."""


def one_line(error: BaseException) -> str:
    """The class of an error and the first line of its message.

    >>> one_line(ValueError("bad\\nreally"))
    'ValueError: bad'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
