"""The backend `onnxruntime`: ONNX Runtime on CPUs, by torch's own exporter to ONNX (with onnxscript).
Compiled for one size at a time.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.backends.arrays import arrays_of
from torchgraft.backends.backend import Backend, Options, missing
from torchgraft.bridge.exporting import Exported, exported
from torchgraft.codegen.graph_module import GraphModule


class OnnxRuntime(Backend):
    """Compiles parts with ONNX Runtime."""

    name = "onnxruntime"
    devices = ("cpu",)
    min_size = 2

    def problem(self) -> str | None:
        """ONNX Runtime and the packages of the exporter are an extra."""
        problems = [missing(package, "onnxruntime") for package in ("onnxruntime", "onnx", "onnxscript")]
        return next((problem for problem in problems if problem), None)

    def compile(self, part: GraphModule, inputs: tuple[Any, ...], options: Options) -> Callable[..., Any]:
        """Convert and make a session."""
        program = exported(part, inputs)
        return _Run(onnx_session(program, options), program.result)


def onnx_session(program: Exported, options: Options) -> Any:
    """A session of ONNX Runtime for an exported program."""
    import onnxruntime

    with _silence():
        converted: Any = torch.onnx.export(program.program, dynamo=True, optimize=True, verbose=False)
    content = io.BytesIO()
    converted.save(content)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.log_severity_level = 3
    return onnxruntime.InferenceSession(content.getvalue(), settings, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def _silence() -> Any:
    """The exporter prints its progress, and warns of packages that are older than it is."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


class _Run:
    """A session as a function from tensors to tensors, without copies; sessions may be run by several threads."""

    def __init__(self, session: Any, result: Callable[..., Any]) -> None:
        self._run, self._result = session.run, result
        self._inputs = [item.name for item in session.get_inputs()]
        self._outputs = [item.name for item in session.get_outputs()]

    def __call__(self, *inputs: Any) -> Any:
        found = self._run(self._outputs, dict(zip(self._inputs, arrays_of(inputs), strict=True)))
        return self._result([torch.from_numpy(array) for array in found])


BACKEND = OnnxRuntime
