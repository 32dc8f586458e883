"""The measures of drawings: times beside their limits, the growth with size, and torch.fx's FxGraphDrawer with Graphviz.
Graphviz works in a process of its own, so that comparison is measured by the clock on the wall.
"""

from __future__ import annotations

import importlib.util
import random
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch

from benchmarks.core import always
from benchmarks.measure import Arm, Experiment, Fresh, Row, Run
from benchmarks.models import MixedChain, traced_chain, traced_zoo_model, zoo_model
from torchgraft import zoo

SIZES = (2_000, 10_000)
LIMITS = {2_000: 5.0, 10_000: 30.0}
# Most a node may cost at the large size, in what it costs at the small one: near linear.
GROWTH = 1.3


def experiments(theirs: ModuleType, ours: ModuleType) -> list[Experiment]:
    """Every experiment, in the order of the table."""
    return [*limits(ours), *joint_programs(ours), *beside_graphviz(theirs, ours)]


def seconds(clock: Callable[[], float], run: Run) -> tuple[float, Any]:
    """A limit says its seconds itself; everything else is timed."""
    started = clock()
    result = run()
    elapsed = clock() - started
    return (result if isinstance(result, float) else elapsed), result


def timed(name: str, arms: list[Arm], rows: list[Row], clock: Callable[[], float] = time.process_time) -> Experiment:
    return Experiment(name, tuple(arms), tuple(rows), rounds=3, own_meter=partial(seconds, clock))


# Times beside their limits


def limits(ours: ModuleType) -> Iterator[Experiment]:
    """Chains, ladders and random programs of two sizes; the limit stands in the place of torch.fx."""
    for title, make in (("chain", chain), ("ladder", ladder), ("random program", random_program)):
        name = f"draw a {title}"
        arms, rows = [], []
        for size in SIZES:
            limit, label = f"limit {size}", f"ours {size}"
            arms.append(Arm(limit, partial(limit_of, LIMITS[size])))
            arms.append(Arm(label, partial(draw, ours, partial(make, ours, size)), long=True))
            rows.append(Row(f"{name} of {size:,} nodes, against {LIMITS[size]:g} s", 1.0, limit, label))
        small, large = SIZES
        rows.append(
            Row(
                f"{name}, per node, {large:,} over {small:,}",
                GROWTH,
                f"limit {large}",
                f"ours {large}",
                f"limit {small}",
                f"ours {small}",
                large / small,
            )
        )
        yield timed(name, arms, rows)


def limit_of(seconds: float) -> Fresh:
    return always(lambda: seconds)


def draw(ours: ModuleType, make: Callable[[], Any]) -> Fresh:
    program = make()
    return always(lambda: ours.draw(program))


@cache
def chain(ours: ModuleType, size: int) -> Any:
    return traced_chain(MixedChain, size, ours)


@cache
def ladder(ours: ModuleType, size: int) -> Any:
    """Two values, each step made of both."""
    graph = ours.Graph()
    one, two = graph.placeholder("one"), graph.placeholder("two")
    for _ in range(size // 2):
        one, two = graph.call_function(torch.add, (one, two)), graph.call_function(torch.mul, (one, two))
    graph.output((one, two))
    return graph


@cache
def random_program(ours: ModuleType, size: int) -> Any:
    """Every node takes one of the last 8 values and one of the last 30."""
    chance = random.Random(0)
    graph = ours.Graph()
    values = [graph.placeholder(f"x{number}") for number in range(4)]
    for _ in range(size):
        values.append(graph.call_function(torch.add, (chance.choice(values[-8:]), chance.choice(values[-30:]))))
    graph.output(values[-1])
    return graph


# Real programs


def joint_programs(ours: ModuleType) -> Iterator[Experiment]:
    """Forward and backward, with everything that the backward takes from the forward."""
    name = "draw a joint program"
    arms, rows = [], []
    for key, title in (("resnet50", "ResNet-50"), ("resnet152", "ResNet-152")):
        arms.append(Arm(f"limit {key}", partial(limit_of, 5.0)))
        arms.append(Arm(f"ours {key}", partial(draw, ours, partial(joint_program, ours, key)), long=True))
        rows.append(Row(f"{name}, {title}, against 5 s", 1.0, f"limit {key}", f"ours {key}"))
    yield timed(name, arms, rows)


@cache
def joint_program(ours: ModuleType, name: str) -> Any:
    return ours.capture(zoo_model(name).eval(), zoo.example_inputs(name, size=64), level="joint")


# Beside Graphviz


def has_graphviz() -> bool:
    """Whether FxGraphDrawer can draw: it needs the program `dot` and the package pydot."""
    return shutil.which("dot") is not None and importlib.util.find_spec("pydot") is not None


def beside_graphviz(theirs: ModuleType, ours: ModuleType) -> Iterator[Experiment]:
    if not has_graphviz():
        return
    subjects: list[tuple[str, Callable[[ModuleType], Any], bool]] = [
        ("ResNet-50", partial(traced_zoo_model, "resnet50"), False),
        ("12-layer Transformer", partial(traced_zoo_model, "transformer"), True),
        ("a chain of 2,000 nodes", partial(traced_chain, MixedChain, 2_000), True),
    ]
    for title, source, slow in subjects:
        name = f"draw {title}, beside FxGraphDrawer with dot"
        arms = [
            Arm("torch.fx", partial(draw_with_graphviz, theirs, source), slow=slow),
            Arm("ours", partial(draw, ours, partial(source, ours))),
        ]
        yield timed(name, arms, [Row(name)], time.perf_counter)


def draw_with_graphviz(theirs: ModuleType, source: Callable[[ModuleType], Any]) -> Fresh:
    drawer = importlib.import_module("torch.fx.passes.graph_drawer").FxGraphDrawer
    program = source(theirs)
    return always(lambda: drawer(program, "program").get_dot_graph().create_svg())
