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
        return run_with_onnxruntime(exported(part, inputs), options)


def run_with_onnxruntime(program: Exported, options: Options) -> Callable[..., Any]:
    """A function of tensors that runs an exported program."""
    import onnxruntime

    with _silence():
        converted: Any = torch.onnx.export(program.program, dynamo=True, optimize=True, verbose=False)
    content = io.BytesIO()
    converted.save(content)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(content.getvalue(), settings, providers=["CPUExecutionProvider"])
    return _Run(session, program.is_one)


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
    """A session as a function from tensors to tensors; sessions may be run by several threads."""

    def __init__(self, session: Any, is_one: bool) -> None:
        self._session, self._is_one = session, is_one
        self._names = [item.name for item in session.get_inputs()]

    def __call__(self, *inputs: Any) -> Any:
        tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
        arrays = [tensor.detach().contiguous().numpy() for tensor in tensors]
        results = [
            torch.from_numpy(item) for item in self._session.run(None, dict(zip(self._names, arrays, strict=True)))
        ]
        return results[0] if self._is_one else tuple(results)


BACKEND = OnnxRuntime
