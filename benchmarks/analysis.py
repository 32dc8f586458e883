"""The facts about a program, measured: FLOPs beside FlopCounterMode, and how long it takes to find them.
Run it with `python -m benchmarks.analysis`; the memory of programs, which it shows as well, is measured in `memory.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import torchgraft
from benchmarks import memory, report
from benchmarks.core import always
from benchmarks.measure import Arm, Experiment, Fresh, Plan, Row, figures, measure
from benchmarks.models import zoo_model
from torchgraft import zoo

# Names of the zoo, how large a batch, and the sizes of the inputs.
SUBJECTS: dict[str, tuple[int, dict[str, int]]] = {
    "resnet50": (8, {"size": 224}),
    "transformer": (8, {"length": 128}),
}


# ---- FLOPs: ours and FlopCounterMode's ----


def flops() -> Iterator[str]:
    for name, (batch, sizes) in SUBJECTS.items():
        model, args = zoo_model(name), zoo.example_inputs(name, batch=batch, **sizes)
        with torch.device("meta"):
            bare = zoo.create(name)
        inputs = tuple(torch.empty_like(tensor, device="meta") for tensor in args)
        with FlopCounterMode(display=False) as counter:
            bare(*inputs).sum().backward()
        counted = torchgraft.cost(model, args)
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
    return always(lambda: torchgraft.cost(program, args))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.analysis", description=__doc__)
    parser.add_argument("--only", choices=("memory", "flops", "time"), help="one part of it")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    print(report.Environment.current())
    if only in (None, "memory"):
        memory.print_shown()
    if only in (None, "flops"):
        print("", *flops(), sep="\n")
    if only in (None, "time"):
        print(f"\n{report.header_line()}")
        for experiment in experiments():
            for figure in figures(experiment, measure(experiment, Plan())):
                print(report.line(figure), flush=True)


if __name__ == "__main__":
    main()
