"""The backend `openvino`: OpenVINO on CPUs, by its own converter of programs that torch.export has made.
Compiled for one size at a time, which is what OpenVINO is quickest with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchgraft.backends.arrays import arrays_of
from torchgraft.backends.backend import Backend, Options, missing
from torchgraft.bridge.exporting import Exported, exported
from torchgraft.codegen.graph_module import GraphModule

_PRECISIONS = {"fp32": "f32", "tf32": "f32", "bf16": "bf16", "fp16": "f16"}


class OpenVino(Backend):
    """Compiles parts with OpenVINO."""

    name = "openvino"
    devices = ("cpu",)
    min_size = 2

    def problem(self) -> str | None:
        """OpenVINO is an extra."""
        return missing("openvino", "openvino")

    def compile(self, part: GraphModule, inputs: tuple[Any, ...], options: Options) -> Callable[..., Any]:
        """Convert and compile for the sizes of the example."""
        tensors = [*part.parameters(), *part.buffers(), *[item for item in inputs if isinstance(item, torch.Tensor)]]
        if any(tensor.dtype is torch.float64 for tensor in tensors):
            raise ValueError("it would compute float64 in 32 bits")
        program = exported(part, inputs)
        return _Run(openvino_model(program, options), program)


def openvino_model(program: Exported, options: Options) -> Any:
    """An exported program as OpenVINO has compiled it, for the sizes of its inputs."""
    import openvino

    with _without_reports():
        converted = openvino.convert_model(program.program)
    tensors = list(program.tensors().values())
    places = _places(converted, program)
    converted.reshape(
        {given: list(tensors[place].shape) for given, place in zip(converted.inputs, places, strict=True)}
    )
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": _PRECISIONS[options.precision]}
    hints["INFERENCE_NUM_THREADS"] = str(torch.get_num_threads())
    return openvino.compile_model(converted, "CPU", hints)


@contextlib.contextmanager
def _without_reports() -> Iterator[None]:
    """The converter reports to its makers from a forked process; a fork beside threads that work may never return."""
    try:
        from openvino.tools.ovc.telemetry_utils import init_ovc_telemetry
    except ImportError:  # another version of OpenVINO, which may not report
        yield
        return
    reports = init_ovc_telemetry()
    consent = getattr(reports, "consent", False)
    reports.consent = False
    try:
        yield
    finally:
        reports.consent = consent


def _places(model: Any, program: Exported) -> list[int]:
    """Which of the tensors of a program the inputs of a model of OpenVINO are, which may leave some out."""
    names = list(program.tensors())
    if len(model.inputs) == len(names):
        return list(range(len(names)))
    return [next(names.index(name) for name in given.get_names() if name in names) for given in model.inputs]


class _Run:
    """A compiled model as a function from tensors to tensors. Requests are not shared, so several threads may call it.

    Giving the inputs to `infer` itself would be the same and twice as slow for a small model; with `start_async` this thread
    would wait, and not take part."""

    def __init__(self, compiled: Any, program: Exported) -> None:
        from openvino import Tensor

        self._compiled, self._result, self._tensor = compiled, program.result, Tensor
        self._count = len(compiled.outputs)
        self._places = _places(compiled, program)
        self._requests: list[Any] = [compiled.create_infer_request()]

    def __call__(self, *inputs: Any) -> Any:
        try:
            request = self._requests.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        arrays = arrays_of(inputs)  # held here, because the request does not hold them
        for number, place in enumerate(self._places):
            request.set_input_tensor(number, self._tensor(arrays[place], shared_memory=True))
        request.infer(share_outputs=True)
        # Copies, because the next call writes into the same memory.
        found = [torch.from_numpy(request.get_output_tensor(number).data.copy()) for number in range(self._count)]
        self._requests.append(request)
        return self._result(found)


BACKEND = OpenVino
