"""Every exception class of torchgraft, so that a caller can catch one root or the one thing that went wrong.
Message texts live where the error is raised; nothing here imports torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GraftError(Exception):
    """The root of every error raised on purpose by torchgraft.

    >>> import torchgraft
    >>> try:
    ...     torchgraft.symbolic_trace(lambda x: len(x))
    ... except torchgraft.GraftError as error:
    ...     print(type(error).__name__)
    TraceError
    """


class TraceError(GraftError, ValueError, RuntimeError):
    """A program cannot be captured symbolically.

    torch.fx raises ValueError for some of these and RuntimeError for others; code that catches either keeps working.

    >>> import torchgraft
    >>> try:
    ...     torchgraft.symbolic_trace(lambda x: x if x > 0 else -x)
    ... except ValueError as error:
    ...     print(str(error).splitlines()[0])
    cannot branch on a traced value: node 'gt'
    """


class GraphError(GraftError, RuntimeError, AssertionError):
    """A graph edit is not allowed, or a graph is not well formed.

    torch.fx raises RuntimeError for some of these and AssertionError for others; code that catches either keeps working.

    >>> import torchgraft
    >>> graph = torchgraft.Graph()
    >>> x = graph.placeholder("x")
    >>> try:
    ...     _ = graph.output(x), graph.erase_node(x)
    ... except RuntimeError as error:
    ...     print(str(error).partition(";")[0])
    Tried to erase Node x but it still had 1 users in the graph: 'output'
    """


class GraphAttributeError(GraphError, AttributeError):
    """A node refers to a module or attribute that the owning module does not have."""


class TargetError(GraphError, ValueError):
    """The target of a node is of the wrong kind for its opcode."""


class UnknownArgumentError(GraphError, IndexError):
    """A node has no argument at that index (torch.fx raises IndexError)."""


class BridgeError(GraftError):
    """A program cannot be carried over to or from torch.fx or torch.export without losing something.

    >>> import torch, torchgraft
    >>> try:
    ...     torchgraft.capture(torch.nn.ReLU(), torch.ones(2), level="joint")
    ... except torchgraft.BridgeError as error:
    ...     print(str(error).splitlines()[0])
    cannot write the backward of ReLU: no result depends on a parameter or input that requires a gradient
    """


class UnknownMethodError(TraceError, AssertionError):
    """The model does not have the method that is to be traced."""


class UnknownModuleError(TraceError, NameError):
    """A module was called that is not part of the model being traced (torch.fx raises NameError)."""


class GuardError(GraftError, RuntimeError):
    """A captured program was asked to run in a situation it was not captured for.

    >>> import torch, torchgraft
    >>> program = torchgraft.capture(lambda x: x if x.sum() > 0 else -x, torch.ones(2))
    >>> try:
    ...     program(-torch.ones(2))
    ... except torchgraft.GuardError as error:
    ...     print(str(error).splitlines()[0])
    the program was captured for gt.item() = True, and now it is False
    """


class StructureError(GuardError, ValueError):
    """A program was called with containers of another structure than it was captured with (torch.fx raises ValueError)."""


class RunError(GraftError, RuntimeError):
    """A model or program raised while it was being watched; `partial` is what was written down until then.

    >>> import torch, torchgraft
    >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(3, 3))
    >>> try:
    ...     torchgraft.log_calls(model, torch.ones(2, 2))
    ... except torchgraft.RunError as error:
    ...     print(error.partial.names)
    ['torch.nn.functional.relu', 'torch.nn.functional.linear']
    """

    def __init__(self, message: str, partial: object = None) -> None:
        super().__init__(message)
        self.partial = partial
        if partial is not None:  # beside the message, because on a command line there is no error to ask
            self.add_note("what was written down until then is this error's `partial`")


class InputError(GraftError, TypeError):
    """Inputs were given in another way than `f(model, args, kwargs)`, or a program does not take them.

    >>> import torch, torchgraft
    >>> try:
    ...     torchgraft.capture(torch.nn.ReLU(), [torch.ones(2)])
    ... except torchgraft.InputError as error:
    ...     print(str(error).splitlines()[0])
    expected a tuple of inputs or one tensor for args, got a list of Tensor
    """


class UnknownNodeError(GraftError, LookupError):
    """A program has no node of that name, or its value was not recorded."""


class WriteError(GraftError, OSError):
    """A file cannot be written where it was asked for."""


class PassError(GraftError, RuntimeError):
    """A pass cannot be found or run, or it left a program that is not well formed or computes something else.

    >>> import torchgraft
    >>> try:
    ...     torchgraft.passes.Pipeline("remove-dead-cod")
    ... except torchgraft.PassError as error:
    ...     print(str(error).splitlines()[0])
    no pass is called 'remove-dead-cod'; did you mean 'remove-dead-code'?
    """


class BackendError(GraftError, RuntimeError):
    """A program cannot be lowered: the backend is not there, fails, takes too long, or computes something else.

    >>> import torch, torchgraft
    >>> try:
    ...     torchgraft.lower(torch.nn.ReLU(), torch.ones(2), backend="openvyno")
    ... except torchgraft.BackendError as error:
    ...     print(error)
    no backend is called 'openvyno'; did you mean 'openvino'?
    """


class QuantizeError(GraftError, ValueError):
    """A model cannot be quantized as asked: the data, the scheme, the configuration or the mode does not fit.

    >>> import torch, torchgraft
    >>> try:
    ...     torchgraft.quantize.quantize(torch.nn.Linear(2, 2).eval(), [])
    ... except torchgraft.QuantizeError as error:
    ...     print(str(error).splitlines()[0])
    there is no calibration data
    """


class ShapeError(GraftError, TypeError):
    """Two shapes in a program cannot agree.

    >>> import torch, torchgraft
    >>> program = torchgraft.symbolic_trace(torch.nn.Linear(3, 3))
    >>> try:
    ...     torchgraft.check_types(program, {"input": torchgraft.TensorType((2, 4))})
    ... except torchgraft.ShapeError as error:
    ...     print(str(error).partition(":")[0])
    shapes cannot agree
    """


def suggestion(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """What may be meant by a name that nobody knows: those like it, else `otherwise`, or all that are known.

    >>> suggestion("rele", ["relu", "tanh"]), suggestion("x", ["relu", "tanh"])
    ("did you mean 'relu'?", 'known: relu, tanh')
    """
    known = list(known)
    close = difflib.get_close_matches(str(name), known)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else otherwise or f"known: {', '.join(known)}"


def one_line(error: BaseException) -> str:
    """The class of an error and the first line of its message, with the next one where that one only announces it.

    >>> one_line(ValueError("bad\\nreally")), one_line(ValueError("bad:\\nreally"))
    ('ValueError: bad', 'ValueError: bad: really')
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
