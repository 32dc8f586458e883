"""The measures of shapes: ShapeProp and FakeTensorProp beside torch.fx's, on tensors with and without data, and propagate-shapes.
Beside both stands the program run by itself on the same tensors: whoever notes the shape of every value pays at least that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.core import always
from benchmarks.measure import Arm, Experiment, Fresh, Row
from benchmarks.models import MixedChain, traced_chain
from benchmarks.passes import of_network
from torchgraft.analysis.fake import fake_module, fake_tree

Source = Callable[[ModuleType], Any]

SUBJECTS: dict[str, tuple[Source, torch.Tensor]] = {
    "ResNet-152": (of_network("resnet152"), torch.zeros(1, 3, 64, 64)),
    "20,000 nodes": (partial(traced_chain, MixedChain, 20_000), torch.zeros(4)),
}
# ShapeProp runs ResNet-152, and that alone takes four fifths of torch.fx's time: nobody can be three times faster there.
REQUIRED = {
    ("ShapeProp", "20,000 nodes"): 3.0,
    ("ShapeProp on fakes", "20,000 nodes"): 3.0,
    ("propagate-shapes", "20,000 nodes"): 3.0,
    ("FakeTensorProp", "20,000 nodes"): 3.0,
    ("FakeTensorProp", "ResNet-152"): 3.0,
    ("ShapeProp", "ResNet-152"): 1.0,
    ("ShapeProp on fakes", "ResNet-152"): 3.0,
    ("propagate-shapes", "ResNet-152"): 3.0,
}


def experiments(theirs: ModuleType, ours: ModuleType) -> Iterator[Experiment]:
    """Every experiment about shapes, in the order of the table."""
    for (name, title), required in REQUIRED.items():
        label = f"{name}, {title}"
        source, example = SUBJECTS[title]
        floor = run_by_itself if name == "ShapeProp" else run_on_fakes
        arms = (
            Arm("torch.fx", partial(PROPAGATIONS[name], source, example, theirs), long=True),
            Arm("ours", partial(PROPAGATIONS[name], source, example, ours), long=True),
            Arm("by itself", partial(floor, source, example, ours), long=True),
        )
        rows = (Row(label, required), Row(f"{label}, against the program by itself", None, "by itself"))
        yield Experiment(label, arms, rows, rounds=3)


def mode() -> FakeTensorMode:
    """torch.fx's FakeTensorProp leaves the weights of modules as they are."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def shape_prop(source: Source, example: torch.Tensor, library: ModuleType, fake: bool = False) -> Fresh:
    program = source(library)
    kind = importlib.import_module(f"{library.__name__}.passes.shape_prop").ShapeProp
    return always(lambda: kind(program, mode() if fake else None).propagate(example))


def fake_tensor_prop(source: Source, example: torch.Tensor, library: ModuleType) -> Fresh:
    program = source(library)
    kind = importlib.import_module(f"{library.__name__}.passes.fake_tensor_prop").FakeTensorProp
    return always(lambda: kind(program, mode()).propagate(example))


def propagate_shapes(source: Source, example: torch.Tensor, library: ModuleType) -> Fresh:
    if library is torch.fx:
        return shape_prop(source, example, library, fake=True)
    program = source(library)
    return always(lambda: library.passes.PropagateShapes(inputs=(example,)).run(program))


def run_by_itself(source: Source, example: torch.Tensor, library: ModuleType) -> Fresh:
    program = source(library)
    return always(lambda: program(example))


def run_on_fakes(source: Source, example: torch.Tensor, library: ModuleType) -> Fresh:
    """With the weights made fakes beforehand, which the propagations do themselves."""
    fakes = mode()
    fake_program, fake_example = fake_module(source(library), fakes), fake_tree(example, fakes)

    def run() -> Any:
        with fakes:
            return fake_program(fake_example)

    return always(run)


PROPAGATIONS: dict[str, Callable[..., Fresh]] = {
    "ShapeProp": shape_prop,
    "ShapeProp on fakes": partial(shape_prop, fake=True),
    "FakeTensorProp": fake_tensor_prop,
    "propagate-shapes": propagate_shapes,
}
