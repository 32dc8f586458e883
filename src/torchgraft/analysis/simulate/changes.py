"""What can be thought changed about a program or a machine: other figures of the machine, passes run, layers in integers.
Which combinations are simulated, and the table of them, are in `what_if.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torchgraft.analysis.simulate.clocks import Step
from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.machine import RATES, Machine, scaled
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError

if TYPE_CHECKING:
    from torchgraft.quantize.schemes import Numbers, Scheme

AS_IT_IS = "as it is"
FACTORS = ("bandwidth", "compute", "host")  # figures of a machine that can be thought better or worse
_RATES = (*RATES, "row_elements")  # what kernels do in a second by other measures than the machine's peak
_TYPE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
_BETWEEN_VALUES = ("bmm", "baddbmm", "addbmm")  # products of two computed values, such as attention's: no weights


@dataclass(frozen=True)
class Change:
    """One thing to think changed: `factors` of the machine, `passes` over the program, a scheme to `quantize` its layers by."""

    name: str
    factors: Mapping[str, float] = field(default_factory=dict)
    passes: Any = None
    quantize: Scheme | None = None

    def on_machine(self, machine: Machine) -> Machine:
        """The machine with its figures multiplied.

        >>> h200 = Machine.named("h200")
        >>> Change("twice", {"bandwidth": 2.0}).on_machine(h200).bandwidth / h200.bandwidth
        2.0
        """
        factor = {name: self.factors.get(name, 1.0) for name in FACTORS}
        return replace(
            machine,
            bandwidth=machine.bandwidth * factor["bandwidth"],
            cache_bandwidth=machine.cache_bandwidth * factor["bandwidth"],
            peak={name: rate * factor["compute"] for name, rate in machine.peak.items()},
            kernels={kind: scaled(figures, factor["compute"], _RATES) for kind, figures in machine.kernels.items()},
            host={name: seconds / factor["host"] for name, seconds in machine.host.items()},
        )

    def on_program(self, program: GraphModule, args: tuple[Any, ...], is_ours: bool = False) -> GraphModule:
        """The program after the passes; one that is not ours to edit stays as it is."""
        if self.passes is None:
            return program
        from torchgraft.passes import Pipeline

        changed = program if is_ours else copy.deepcopy(program)
        edits = Pipeline(self.passes).passes
        Pipeline([edit.with_example(args) for edit in edits] if args else edits)(changed)
        return changed


def changes_of(factors: Mapping[str, float | None], passes: Any, quantize: str | Scheme | None) -> list[Change]:
    """Nothing changed, each change alone, and all of them together where there are several."""
    found = []
    for name, factor in factors.items():
        if factor is None:
            continue
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise GraftError(f"{name} is multiplied by a positive number, not by {factor!r}\nfor example {name}=2")
        found.append(Change(f"{name} × {factor:g}", {name: float(factor)}))
    if passes is not None:
        from torchgraft.passes import Pipeline

        # Names that are wrong are said here, before the work.
        found.append(Change(str(Pipeline(passes)), passes=passes))
    if quantize is not None:
        found.append(Change(quantize if isinstance(quantize, str) else "quantized", quantize=_scheme(quantize)))
    if len(found) > 1:
        merged = {name: value for change in found for name, value in change.factors.items()}
        found.append(Change("all of these", merged, passes, _scheme(quantize)))
    return [Change(AS_IT_IS), *found]


def _scheme(quantize: str | Scheme | None) -> Scheme | None:
    if quantize is None:
        return None
    from torchgraft.quantize.schemes import scheme

    return scheme(quantize)


# ---- layers in integers ----


def quantized_steps(steps: list[Step], scheme: Scheme, machine: Machine) -> tuple[list[Step], int]:
    """The steps with the layers computed as a scheme says, and how many bytes of weights that saves.

    Layers are products and convolutions with weights. Where inputs become integers too, the product is one of integers; else
    weights are only read as such. Inputs whose scale is found at run time are read once more for it.
    """
    if scheme.inputs is not None and _type(scheme.inputs) not in machine.precisions:
        raise GraftError(f"{machine.name} has no {_type(scheme.inputs)}\nit has {', '.join(machine.precisions)}")
    found: list[Step] = []
    seen: set[int] = set()
    saved = 0
    for step in steps:
        kernel = step.kernel
        if kernel is None or step.phase != "forward" or not _is_layer(kernel):
            found.append(step)
            continue
        changed, less = _quantized(kernel, scheme)
        if scheme.dynamic:
            elements = kernel.sizes[0] * kernel.sizes[1] * kernel.sizes[3] // kernel.window
            look = Kernel(step.operator, "reduction", kernel.type, elements, elements * _TYPE_BYTES[kernel.type])
            found.append(replace(step, kernel=replace(look, variant="all", elements=elements), calls=0))
        found.append(replace(step, kernel=changed))
        count, _, columns, depth = kernel.sizes
        size = count * columns * depth * _TYPE_BYTES[kernel.type]
        weights = {memory for memory, bytes_, made in step.touched if bytes_ == size and not made}
        saved += less if weights and not weights & seen else 0  # tied weights are there once
        seen |= weights
    return found, saved


def _is_layer(kernel: Kernel) -> bool:
    return (
        kernel.kind in ("matmul", "convolution")
        and bool(kernel.sizes)
        and kernel.type in _TYPE_BYTES
        and not any(f".{name}." in kernel.operator for name in _BETWEEN_VALUES)
    )


def _type(numbers: Numbers) -> str:
    return "fp8" if numbers.kind == "float8" else "int8"


def _quantized(kernel: Kernel, scheme: Scheme) -> tuple[Kernel, int]:
    """The kernel as a scheme has it, and the bytes of weights that it does not read any more."""
    count, rows, columns, depth = kernel.sizes
    size = _TYPE_BYTES[kernel.type]
    if scheme.cast is not None:
        name = {"bfloat16": "bf16", "float16": "fp16"}[scheme.cast]
        return replace(kernel, type=name, read=kernel.read * 2 // size, written=kernel.written * 2 // size), 0
    less_weights = less_inputs = 0
    if scheme.weights is not None:
        less_weights = max(int(count * columns * depth * (size - scheme.weights.bits / 8)), 0)
    if scheme.inputs is not None:
        less_inputs = max(int(count * rows * depth * (size - scheme.inputs.bits / 8)) // kernel.window, 0)
    read = max(kernel.read - less_weights - less_inputs, kernel.read // 8)
    type_ = kernel.type if scheme.inputs is None else _type(scheme.inputs)
    return replace(kernel, type=type_, read=read), less_weights
