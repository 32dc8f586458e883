"""A simulation as a Chrome trace, in the form that torch.profiler exports: host and device as processes, kernels, memory in use.
How a real profile is lined up with a simulation is in `profile.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchgraft.analysis.simulate.report import SimulatedKernel, Simulation

HOST, DEVICE = 1, 0  # as processes; torch.profiler numbers devices from 0
THREAD, STREAM = 1, 7  # the stream that torch.profiler shows for torch's default one
_MICRO = 1e6


def chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """The timeline as plain values, which chrome://tracing and Perfetto open when written as JSON.

    >>> import torch, torchgraft
    >>> trace = chrome_trace(torchgraft.simulate(torch.nn.Linear(4, 4), torch.empty(1, 4, device="meta")))
    >>> [event["name"] for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    ['matmul nt fp32']
    """
    on_device = simulation.machine.kind == "gpu"
    events = [named_event("process_name", HOST, "host"), named_event("thread_name", HOST, "Python and torch", THREAD)]
    if on_device:
        events += [
            named_event("process_name", DEVICE, simulation.machine.name),
            named_event("thread_name", DEVICE, f"stream {STREAM}", STREAM),
        ]
    events += _node_spans(simulation, on_device)
    before = 0
    for number, kernel in enumerate(simulation.kernels, 1):
        events += _kernel_events(kernel, number, on_device, kernel.call != before)
        before = kernel.call
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceName": simulation.headline(),
        "deviceProperties": [_properties(simulation)] if on_device else [],
        "traceEvents": events,
    }


def host_span(kernel: SimulatedKernel, on_device: bool) -> tuple[float, float]:
    """When an operator begins and ends on the host; without a device its kernel runs there."""
    if on_device:
        return kernel.issued - kernel.host_seconds, kernel.issued
    return kernel.start - kernel.host_seconds, kernel.start + kernel.seconds


def operator_text(operator: str) -> str:
    """The name of an operator as profiles have it.

    >>> operator_text("aten.addmm.default")
    'aten::addmm'
    """
    space, _, rest = operator.partition(".")
    return f"{space}::{rest.partition('.')[0]}" if rest else operator


def named_event(what: str, process: int, name: str, thread: int = 0) -> dict[str, Any]:
    """A process or a thread gets its name."""
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": {"name": name}}


def span_event(name: str, kind: str, process: int, thread: int, start: float, end: float, args: Any) -> dict[str, Any]:
    """Something that takes from one time to another, in seconds."""
    times = {"ts": round(start * _MICRO, 4), "dur": round(max(end - start, 0.0) * _MICRO, 4)}
    return {"ph": "X", "cat": kind, "name": name, "pid": process, "tid": thread, **times, "args": args}


def _node_spans(simulation: Simulation, on_device: bool) -> list[dict[str, Any]]:
    """A span around the operators of each node and phase, where they come one after the other."""
    found: list[dict[str, Any]] = []
    before: tuple[str | None, str] | None = None
    for kernel in simulation.kernels:
        start, end = host_span(kernel, on_device)
        if (kernel.node, kernel.phase) == before:
            found[-1]["dur"] = round(max(end * _MICRO - found[-1]["ts"], 0.0), 4)
            continue
        before = kernel.node, kernel.phase
        name = kernel.node or "(between nodes)"
        title = name if kernel.phase == "forward" else f"{name} ({kernel.phase})"
        found.append(
            span_event(title, "user_annotation", HOST, THREAD, start, end, {"node": name, "phase": kernel.phase})
        )
    return found


def _kernel_events(kernel: SimulatedKernel, number: int, on_device: bool, is_first: bool) -> list[dict[str, Any]]:
    """The events of one kernel; the first of an operator brings the operator along."""
    start, end = host_span(kernel, on_device)
    why = {
        "bound by": kernel.bound,
        "compute (us)": kernel.compute * _MICRO,
        "memory (us)": kernel.memory * _MICRO,
        "FLOPs": kernel.flops,
        "bytes": kernel.bytes,
    }
    named = {"External id": kernel.call, "node": kernel.node, "phase": kernel.phase}
    live = {"bytes in use": kernel.live_bytes}
    memory = {"ph": "C", "name": "memory", "pid": DEVICE if on_device else HOST, "tid": 0, "args": live}
    name = operator_text(kernel.caller)
    if not on_device:
        ran = span_event(name, "cpu_op", HOST, THREAD, start, end, {**named, **why})
        return [ran, {**memory, "ts": ran["ts"]}]
    issued = span_event(name, "cpu_op", HOST, THREAD, start, end, named)
    title = " ".join(filter(None, [kernel.kind, kernel.variant, kernel.type]))
    where = {"device": DEVICE, "stream": STREAM, "correlation": number, **named}
    ran = span_event(title, "kernel", DEVICE, STREAM, kernel.start, kernel.start + kernel.seconds, {**where, **why})
    flow = {"cat": "ac2g", "name": "ac2g", "id": number}
    # An arrow begins inside the operator that issues a kernel, which the end of a span is not.
    arrow = {"ph": "s", "pid": HOST, "tid": THREAD, "ts": issued["ts"] + issued["dur"] / 2, **flow}
    tip = {"ph": "f", "pid": DEVICE, "tid": STREAM, "ts": ran["ts"], "bp": "e", **flow}
    return [*([issued] if is_first else []), arrow, ran, tip, {**memory, "ts": ran["ts"]}]


def _properties(simulation: Simulation) -> dict[str, Any]:
    machine = simulation.machine
    return {"id": DEVICE, "name": machine.name, "totalGlobalMem": machine.memory_bytes, "numSms": machine.units}
