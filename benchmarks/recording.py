"""The measures of recording: all values of ResNet-50 beside a plain run of torch.fx's Interpreter, and logs beside bare modes.
Recording costs more than not recording, so the ratios here are below 1; what is required is how far below.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.core import always
from benchmarks.measure import Arm, Experiment, Fresh, Row, Run
from benchmarks.models import traced_zoo_model

CALLS = 300
# At most 1.2 times the time of a run that records nothing.
REQUIRED = 0.834


def experiments(theirs: ModuleType, ours: ModuleType) -> list[Experiment]:
    """Every experiment, in the order of the table."""
    return [*recordings(theirs, ours), *logs(ours)]


# Recordings


def recordings(theirs: ModuleType, ours: ModuleType) -> Iterator[Experiment]:
    plain = Arm("torch.fx", partial(interpret, theirs))
    for title, options, required in (
        ("record all nodes of ResNet-50", {}, REQUIRED),
        ("record statistics of all nodes of ResNet-50", {"reduce": True}, None),
    ):
        arms = (plain, Arm("ours", partial(record, ours, options)))
        # The two sides are close to what is allowed, so more rounds than usual where something is required.
        yield Experiment(title, arms, (Row(title, required),), rounds=11 if required else None)
    name = "record all nodes of ResNet-50 to a file"
    yield Experiment(name, (plain, Arm("ours", partial(record_to_file, ours))), (Row(name),))
    name = "most memory of living tensors, recording ResNet-50 to a file"
    yield Experiment(
        name,
        (plain, Arm("ours", partial(record_to_file, ours))),
        (Row(name, 1.0),),
        meter="bytes",
        rounds=3,
        own_meter=most_tensor_bytes,
    )


def resnet_program(library: ModuleType) -> tuple[Any, torch.Tensor]:
    program = traced_zoo_model("resnet50", library).eval()
    return program, torch.ones(1, 3, 224, 224)


def interpret(library: ModuleType) -> Fresh:
    program, value = resnet_program(library)
    return always(without_gradients(lambda: library.Interpreter(program).run(value)))


def record(library: ModuleType, options: dict[str, Any]) -> Fresh:
    program, value = resnet_program(library)
    return always(without_gradients(lambda: library.record(program, value, **options)))


def record_to_file(library: ModuleType) -> Fresh:
    program, value = resnet_program(library)
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "values.safetensors"

    def run() -> Any:
        return folder and library.record(program, value, to=path)  # the folder lives as long as what is run

    return always(without_gradients(run))


def without_gradients(run: Run) -> Run:
    def inner() -> Any:
        with torch.no_grad():
            return run()

    return inner


class LivingTensors(TorchDispatchMode):
    """Adds up the memory of every tensor that was computed and is still referred to, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            item.untyped_storage()._cdata for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                if reference.cdata not in given:  # views of inputs and parameters are no memory of their own
                    self._living[reference.cdata] = reference, tensor.untyped_storage().nbytes()
        self._living = {key: entry for key, entry in self._living.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._living.values()))
        return result


def most_tensor_bytes(run: Run) -> tuple[float, Any]:
    """The most memory that living tensors had at one time."""
    with LivingTensors() as mode:
        result = run()
    return float(mode.most), result


# Logs


class FunctionLog(TorchFunctionMode):
    """The bare mode that people write by hand; it keeps the names it would print."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(resolve_name(func))
        return func(*args, **(kwargs or {}))


class DispatchLog(TorchDispatchMode):
    """The same one level below."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def logs(ours: ModuleType) -> Iterator[Experiment]:
    for level, mode in (("function", FunctionLog), ("dispatch", DispatchLog)):
        name = f"log of calls, per call, level {level}"
        arms = (
            Arm("bare", partial(bare_log, mode), CALLS, len),
            Arm("ours", partial(full_log, ours, level), CALLS, len),
            Arm("eager", lambda: always(without_gradients(chain)), CALLS),
        )
        yield Experiment(name, arms, (Row(f"{name}, against a bare mode", None, "bare"), Row(name, None, "eager")))


def chain() -> torch.Tensor:
    value = torch.ones(2)
    for _ in range(CALLS - 1):
        value = torch.relu(value)
    return value


def bare_log(mode: Callable[[], Any]) -> Fresh:
    def run() -> list[Any]:
        with mode() as log:
            chain()
        return log.names

    return always(without_gradients(run))


def full_log(library: ModuleType, level: str) -> Fresh:
    return always(without_gradients(lambda: library.log_calls(chain, level=level)))
