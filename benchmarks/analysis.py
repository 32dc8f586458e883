"""The facts about a program, measured: memory predicted beside memory taken, FLOPs beside FlopCounterMode, and their time.
Run it with `python -m benchmarks.analysis`; on a machine with a GPU the memory is measured there as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import torchgraft
from benchmarks import report
from benchmarks.allocations import taken_on_cpu, taken_on_gpu
from benchmarks.core import always
from benchmarks.measure import Arm, Experiment, Fresh, Plan, Row, figures, measure
from benchmarks.models import zoo_model
from torchgraft import zoo

# Names of the zoo, how large a batch, and the sizes of the inputs.
SUBJECTS: dict[str, tuple[int, dict[str, int]]] = {
    "resnet50": (8, {"size": 224}),
    "transformer": (8, {"length": 128}),
}


# ---- memory: predicted and taken ----


@dataclass(frozen=True)
class Prediction:
    """One line: what was predicted, what was taken, both beyond what was there before."""

    subject: str
    predicted: int
    taken: int

    @property
    def error(self) -> float:
        return self.predicted / self.taken - 1

    def __str__(self) -> str:
        megabytes = f"{self.predicted / 1e6:10.1f} MB {self.taken / 1e6:10.1f} MB"
        return f"{self.subject:44} {megabytes} {self.error:+8.2%}"


def predictions(device: str) -> Iterator[Prediction]:
    for name, (batch, sizes) in SUBJECTS.items():
        model = zoo.create(name).to(device)
        args = tuple(tensor.to(device) for tensor in zoo.example_inputs(name, batch=batch, **sizes))
        program = torchgraft.symbolic_trace(model)

        def run(program: Any = program, args: Any = args) -> None:
            with torch.no_grad():
                program(*args)

        def step(program: Any = program, args: Any = args) -> None:
            program.zero_grad()
            result = program(*args)
            result.backward(torch.ones_like(result))

        for title, action, training in (("run", run, False), ("training step", step, True)):
            predicted = torchgraft.memory(program, *args, training=training)
            action()  # the first time a library makes itself at home
            program.zero_grad()
            taken = taken_on_gpu(action) if device == "cuda" else taken_on_cpu(action)
            yield Prediction(f"{name}, batch {batch}, {title}, {device}", predicted.peak - predicted.resident, taken)


# ---- FLOPs: ours and FlopCounterMode's ----


def flops() -> Iterator[str]:
    for name, (batch, sizes) in SUBJECTS.items():
        model, args = zoo_model(name), zoo.example_inputs(name, batch=batch, **sizes)
        with torch.device("meta"):
            bare = zoo.create(name)
        inputs = tuple(torch.empty_like(tensor, device="meta") for tensor in args)
        with FlopCounterMode(display=False) as counter:
            bare(*inputs).sum().backward()
        counted = torchgraft.cost(model, *args)
        theirs = counter.get_flop_counts()["Global"]
        same = all(sum(work.flops for work in counted.operators[str(key)]) == count for key, count in theirs.items())
        known = f"{sum(theirs.values()):,} by FlopCounterMode, {'the same' if same else 'DIFFERENT'} by operator"
        yield f"{name}, batch {batch}: {counted.total.flops:,} FLOPs, of which {known}; unknown: {dict(counted.unknown)}"


# ---- how long it takes ----


def experiments() -> list[Experiment]:
    result = []
    for name in SUBJECTS:
        arms = (Arm("FlopCounterMode", partial(count_theirs, name)), Arm("ours", partial(count_ours, name)))
        row = Row(f"FLOPs, forward and backward, {name}", None, theirs="FlopCounterMode")
        result.append(Experiment(row.name, arms, (row,)))
    return result


def count_theirs(name: str) -> Fresh:
    """On fake tensors too, made beforehand."""
    model, args = zoo_model(name), zoo.example_inputs(name)
    mode = FakeTensorMode()
    with mode:
        fake = zoo.create(name).train(model.training)
    inputs = [mode.from_tensor(tensor) for tensor in args]

    def run() -> None:
        with mode, FlopCounterMode(display=False):
            fake(*inputs).sum().backward()

    return always(run)


def count_ours(name: str) -> Fresh:
    """Everything included: fake copies, every operator, bytes, nodes and modules; the program is captured beforehand."""
    program, args = torchgraft.symbolic_trace(zoo_model(name)), zoo.example_inputs(name)
    return always(lambda: torchgraft.cost(program, *args))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.analysis", description=__doc__)
    parser.add_argument("--only", choices=("memory", "flops", "time"), help="one part of it")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    print(report.Environment.current())
    if only in (None, "memory"):
        print(f"\n{'peak beyond what was there before':44} {'predicted':>13} {'taken':>13} {'error':>8}")
        for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            for prediction in predictions(device):
                print(prediction, flush=True)
    if only in (None, "flops"):
        print("", *flops(), sep="\n")
    if only in (None, "time"):
        print(f"\n{report.header_line()}")
        for experiment in experiments():
            for figure in figures(experiment, measure(experiment, Plan())):
                print(report.line(figure), flush=True)


if __name__ == "__main__":
    main()
