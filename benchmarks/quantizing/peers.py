"""The same model quantized by others: torch.ao's FX flow, onnxruntime, and OpenVINO with NNCF, each with its own defaults.
One that is not installed, or that fails, says so in the place of its figures.
"""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchgraft.quantize import calibrate, convert, join_layers, prepare
from torchgraft.quantize.exchange import to_fake_quantize
from torchgraft.quantize.native import to_native

Run = Callable[[torch.Tensor], torch.Tensor]


class Made(NamedTuple):
    """A quantized program and the seconds that its making took."""

    run: Run
    seconds: float


def ours(model: torch.nn.Module, data: list[torch.Tensor]) -> Made:
    started = time.perf_counter()
    prepared = prepare(model, data[0])
    calibrate(prepared, data)
    program = to_native(convert(prepared))
    return Made(program, time.perf_counter() - started)


def ours_joined(model: torch.nn.Module, data: list[torch.Tensor]) -> Made:
    started = time.perf_counter()
    prepared = prepare(model, data[0])
    calibrate(prepared, data)
    program = join_layers(to_native(convert(prepared)))
    return Made(program, time.perf_counter() - started)


def ours_in_openvino(model: torch.nn.Module, data: list[torch.Tensor]) -> Made:
    started = time.perf_counter()
    prepared = prepare(model, data[0], backend="openvino")
    calibrate(prepared, data)
    program = to_fake_quantize(convert(prepared))
    converted = _openvino_model(program, data[0])
    return Made(_openvino_run(converted), time.perf_counter() - started)


def torch_ao(model: torch.nn.Module, data: list[torch.Tensor]) -> Made:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    started = time.perf_counter()
    prepared = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), (data[0],))
    for batch in data:
        prepared(batch)
    program = convert_fx(prepared)
    return Made(program, time.perf_counter() - started)


def onnxruntime(model: torch.nn.Module, data: list[torch.Tensor]) -> Made:
    import onnxruntime as ort
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = iter(data)

        def get_next(self) -> Any:
            batch = next(self.batches, None)
            return None if batch is None else {"x": batch.numpy()}

    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp())
    batch = torch.export.Dim("batch", min=1, max=4096)
    example = data[0]
    torch.onnx.export(
        model, (example,), str(folder / "float.onnx"), input_names=["x"], dynamo=True, verbose=False,
        dynamic_shapes=({0: batch},), external_data=False,
    )  # fmt: skip
    quant_pre_process(str(folder / "float.onnx"), str(folder / "clean.onnx"), skip_symbolic_shape=True)
    quantize_static(
        str(folder / "clean.onnx"), str(folder / "int8.onnx"), Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(str(folder / "int8.onnx"), options, providers=["CPUExecutionProvider"])
    seconds = time.perf_counter() - started
    return Made(lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), seconds)


def openvino_nncf(model: torch.nn.Module, data: list[torch.Tensor]) -> Made:
    import nncf

    started = time.perf_counter()
    converted = _openvino_model(model, data[0])
    quantized = nncf.quantize(converted, nncf.Dataset([batch.numpy() for batch in data]), subset_size=len(data))
    return Made(_openvino_run(quantized), time.perf_counter() - started)


def _openvino_model(model: torch.nn.Module, example: torch.Tensor) -> Any:
    import openvino

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return openvino.convert_model(model, example_input=example, input=[[-1, *example.shape[1:]]])


def _openvino_run(model: Any) -> Run:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()
    return lambda x: torch.from_numpy(next(iter(request.infer([x.numpy()], share_inputs=True).values())))


PEERS: dict[str, Callable[[torch.nn.Module, list[torch.Tensor]], Made]] = {
    "ours": ours,
    "ours, joined": ours_joined,
    "torch.ao FX": torch_ao,
    "onnxruntime": onnxruntime,
    "OpenVINO + NNCF": openvino_nncf,
    "ours in OpenVINO": ours_in_openvino,
}
