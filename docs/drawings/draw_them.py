"""Makes the drawings of this folder again: the MLP, a Transformer block and ResNet-50 at each level, and a few options.
Run it from anywhere: `python docs/drawings/draw_them.py`. The same code gives the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

import torchgraft
from torchgraft import zoo

FOLDER = Path(__file__).parent
LEVELS = ("module", "function", "aten", "core_aten", "joint")


class Net(torch.nn.Module):
    """The example on the first page, which symbolic tracing refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 100:
            x = x / 100
        result: torch.Tensor = self.layers(x.view(x.shape[0], -1))
        return result


MODELS = {"mlp": ("mlp", {}), "transformer_block": ("transformer", {"layers": 1}), "resnet50": ("resnet50", {})}


def main() -> None:
    for name, drawing in [*levels(), *options()]:
        path = drawing.save(FOLDER / f"{name}.svg")
        sys.stdout.write(f"{path.name}: {drawing.width} × {drawing.height}, {drawing.boxes} boxes\n")


def levels(titles: Iterable[str] = tuple(MODELS)) -> Iterator[tuple[str, torchgraft.Drawing]]:
    """The first example, and models at each level."""
    torch.manual_seed(0)
    yield "first_example", torchgraft.draw(Net(), torch.randn(2, 2, 4), direction="right", theme="light")
    for title in titles:
        name, settings = MODELS[title]
        model, inputs = zoo.create(name, **settings).eval(), zoo.example_inputs(name)
        for level in LEVELS:
            program = torchgraft.capture(model, inputs, level=level)
            # The lower levels come with shapes; the upper two are run once to see them.
            args = inputs if level in ("module", "function") else ()
            yield f"{title}_{level}", torchgraft.draw(program, args=args, theme="light")


def options() -> Iterator[tuple[str, torchgraft.Drawing]]:
    """Folded, to a depth, to the right, on dark."""
    model, inputs = zoo.create("resnet50").eval(), zoo.example_inputs("resnet50")
    program = torchgraft.capture(model, inputs)
    yield "resnet50_depth_1", torchgraft.draw(program, args=inputs, depth=1, theme="light")
    yield "resnet50_folded", torchgraft.draw(program, args=inputs, fold=True, theme="light")
    model, inputs = zoo.create("transformer").eval(), zoo.example_inputs("transformer")
    program = torchgraft.capture(model, inputs)
    yield "transformer_folded_dark", torchgraft.draw(program, args=inputs, fold=True, theme="dark")
    yield "transformer_depth_1_right", torchgraft.draw(program, args=inputs, depth=1, direction="right", theme="light")


if __name__ == "__main__":
    main()
