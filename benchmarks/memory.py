"""Memory predicted beside memory taken, for models, batches, dtypes and layouts, as runs and as steps of training.
`python -m benchmarks.memory` takes a few that show it, on the CPU and on a GPU if there is one; `--every` all, on the GPU.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

import torchgraft
from benchmarks import report
from benchmarks.allocations import taken_on_cpu, taken_on_gpu
from torchgraft import zoo

HEADER = f"{'peak beyond what was there before':64} {'predicted':>13} {'taken':>13} {'error':>8}"


@dataclass(frozen=True)
class Variant:
    """A model of the zoo with its options and sizes, and how it is run."""

    name: str
    sizes: tuple[tuple[str, int], ...]
    batch: int = 8
    options: tuple[tuple[str, str], ...] = ()
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    def __str__(self) -> str:
        words = [self.name, *(value for _, value in self.options), f"batch {self.batch}", str(self.dtype)[6:]]
        return ", ".join([*words, *(["channels last"] if self.channels_last else [])])

    def program(self, device: str) -> tuple[torchgraft.GraphModule, tuple[torch.Tensor, ...]]:
        model = zoo.create(self.name, **dict(self.options)).to(device, self.dtype)
        inputs = zoo.example_inputs(self.name, batch=self.batch, **dict(self.sizes))
        args = [tensor.to(device, self.dtype) if tensor.is_floating_point() else tensor.to(device) for tensor in inputs]
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            args = [tensor.contiguous(memory_format=torch.channels_last) for tensor in args]
        return torchgraft.symbolic_trace(model), tuple(args)


IMAGES, TOKENS = (("size", 224),), (("length", 128),)
SHOWN = (Variant("resnet50", IMAGES), Variant("transformer", TOKENS))


def every() -> Iterator[Variant]:
    dtypes = torch.float32, torch.bfloat16, torch.float16
    for name, batch, dtype, last in product(("resnet50", "resnet18"), (8, 64), dtypes, (False, True)):
        yield Variant(name, IMAGES, batch, (), dtype, last)
    for attention, batch, dtype in product(("softmax", "fused"), (8, 64), dtypes):
        yield Variant("transformer", TOKENS, batch, (("attention", attention),), dtype)


# ---- what is done with them ----


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
        return f"{self.subject:64} {megabytes} {self.error:+8.2%}"


def predictions(variant: Variant, device: str, thorough: bool) -> Iterator[Prediction]:
    """A run and a step of training; if thorough also forward with gradients, and steps with an optimizer."""
    program, args = variant.program(device)
    optimizers = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam} if thorough else {}
    measured: dict[str, tuple[Callable[[], None], dict[str, Any], str]] = {
        "run": (partial(run, program, args), {}, "peak"),
        **({"forward": (partial(forward, program, args), {"training": True}, "forward_peak")} if thorough else {}),
        "step": (partial(step, program, args, None), {"training": True}, "peak"),
    }
    for name, make in optimizers.items():
        made = make(program.parameters(), lr=1e-4)
        options: dict[str, Any] = {"optimizer": partial(make, lr=1e-4)}
        measured[f"step with {name}"] = partial(step, program, args, made), options, "peak"
    for title, (action, options, field) in measured.items():
        predicted = torchgraft.memory(program, args, **options)
        for _ in range(2):  # the first time a library makes itself at home
            action()
            program.zero_grad()
        gc.collect()
        taken = taken_on_gpu(action) if device == "cuda" else taken_on_cpu(action)
        program.zero_grad()
        yield Prediction(f"{variant}, {title}, {device}", getattr(predicted, field) - predicted.resident, taken)


def run(program: Any, args: tuple[Any, ...]) -> None:
    with torch.no_grad():
        program(*args)


def forward(program: Any, args: tuple[Any, ...]) -> None:
    program(*args)


def step(program: Any, args: tuple[Any, ...], optimizer: torch.optim.Optimizer | None) -> None:
    program.zero_grad()
    result = program(*args)
    result.backward(torch.ones_like(result))
    del result
    if optimizer is not None:
        optimizer.step()


def print_shown() -> None:
    """The few that show it, on every device that is here."""
    print(f"\n{HEADER}")
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for variant in SHOWN:
            for prediction in predictions(variant, device, thorough=False):
                print(prediction, flush=True)


def print_every() -> None:
    """All of them on the GPU, and which was worst."""
    print(f"\n{HEADER}")
    found = []
    for variant in every():
        for prediction in predictions(variant, "cuda", thorough=True):
            found.append(prediction)
            print(prediction, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    worst = max(found, key=lambda prediction: abs(prediction.error))
    print(f"{len(found)} predictions, the worst: {worst}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--every", action="store_true", help="every variant, on the GPU")
    is_every = parser.parse_args().every
    if is_every and not torch.cuda.is_available():
        parser.error("--every wants a GPU, and torch sees none here")
    torch.set_num_threads(1)
    print(report.Environment.current())
    if is_every:
        print_every()
    else:
        print_shown()


if __name__ == "__main__":
    main()
