"""`calibrate`: run a prepared program on data, so that its observers see what values there are.
Batches are taken as everywhere: a tensor, a tuple of inputs, or a dict of keyword inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from torchgraft.capturing.state.tensor_state import TensorState
from torchgraft.codegen.calling import example_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import InputError, QuantizeError, StructureError
from torchgraft.ir.modules import inner_modules
from torchgraft.quantize.corrections import Collector
from torchgraft.quantize.observers import Observer
from torchgraft.quantize.plan import plan_of

Progress = Callable[[int, int | None], None]


def calibrate(program: GraphModule, data: Iterable[Any], progress: Progress | None = None) -> int:
    """Run the program on every batch of `data` and return how many there were. What runs change of the model is put back.

    `progress` is called after each batch with the number of batches done and, where it is known, the number of all.

    >>> import torchgraft
    >>> prepared = torchgraft.quantize.prepare(torchgraft.symbolic_trace(torchgraft.zoo.create("mlp").eval()))
    >>> calibrate(prepared, [torch.randn(4, 16), torch.randn(8, 16)])
    2
    """
    plan = plan_of(program)
    plan.refuse_converted(program)
    run: Callable[..., Any] = program
    if plan.config.correct_bias or plan.config.learn_rounding:
        run = Collector(program, plan).collect
    done = 0
    total = number_of(data)
    watching = inner_modules(module for module in program.modules() if isinstance(module, Observer))
    state = TensorState([module for module in program.modules() if module not in watching])
    with torch.no_grad(), contextlib.ExitStack() as stack:
        stack.callback(state.restore_libraries)
        stack.callback(state.restore)
        for batch in batches(data):
            args, kwargs = inputs_of(batch)
            try:
                run(*args, **kwargs)
            except (TypeError, StructureError, InputError) as error:
                raise QuantizeError(
                    f"batch {done} of the calibration data does not fit the program: {str(error).splitlines()[0]}\n"
                    f"{_advice(batch)}"
                ) from error
            except RuntimeError as error:
                raise QuantizeError(
                    f"batch {done} of the calibration data cannot be run: {str(error).splitlines()[0]}\n"
                    "give data like what the model will see"
                ) from error
            done += 1
            if progress is not None:
                progress(done, total)
    if plan.needs_data and not done:
        raise QuantizeError(
            "there is no calibration data\ngive an iterable of batches such as [x1, x2] or a DataLoader"
        )
    return done


def batches(data: Any) -> Iterable[Any]:
    """The batches of calibration data; refuses one batch that was meant as all of them."""
    if data is None:
        return ()
    if isinstance(data, (torch.Tensor, Mapping, str)) or not isinstance(data, Iterable):
        kind = "one tensor" if isinstance(data, torch.Tensor) else f"a {type(data).__name__}"
        raise QuantizeError(f"expected an iterable of batches for data, got {kind}\nfor one batch write [batch]")
    return data


def number_of(data: Any) -> int | None:
    """How many batches there are, where that can be asked."""
    try:
        return len(data)
    except TypeError:
        return None


def inputs_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs that a batch holds."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    try:
        return example_inputs(batch)
    except InputError as error:
        raise QuantizeError(f"cannot take a batch that is a {type(batch).__name__}\n{_advice(batch)}") from error


def check_observed(program: GraphModule) -> None:
    """Refuse to go on where an observer has seen nothing, or nothing but zeros from the very start."""
    plan = plan_of(program)
    placeholders = {node.name for node in program.graph.nodes if node.op == "placeholder"}
    inputs = {group for name, group in plan.groups.items() if name in placeholders}
    for group in dict.fromkeys(plan.groups.values()):
        watching = getattr(program, group, None)
        if not isinstance(watching, Observer) or (watching.dtype is not None and not watching.dtype.is_floating_point):
            continue
        if not watching.has_seen:
            raise QuantizeError(
                f"there is no calibration data for {watching.where}\n"
                "call calibrate() with data first, or use a scheme that needs none: dynamic-int8, weight-int8"
            )
        if bool((watching.lowest == 0) & (watching.highest == 0)):
            if group in inputs:
                raise QuantizeError(
                    f"the calibration data has a range of zero: every value of {watching.where} is 0\n"
                    "give data like what the model will see"
                )
            plan.notes.append(f"{watching.where} was 0 throughout the calibration data, so its scale means nothing")


def _advice(batch: Any) -> str:
    if isinstance(batch, list):
        return "for inputs and labels write [(inputs,) for inputs, labels in loader]; for several inputs tuple(batch)"
    return "a batch is a tensor, a tuple of inputs or a dict of keyword inputs, as in model(*batch)"
