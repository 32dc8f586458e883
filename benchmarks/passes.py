"""The measures of passes: the paper's fusion of convolutions and norms on ResNet-50, and the time of each pass by itself.
Where torch.fx has a counterpart it is measured beside ours; the other passes show their own time and how it grows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from benchmarks.measure import Arm, Experiment, Fresh, Row, Run
from benchmarks.models import MixedChain, traced_chain, zoo_model


def experiments(theirs: ModuleType, ours: ModuleType) -> list[Experiment]:
    """Every experiment about passes, in the order of the table."""
    return [*fusion_time(theirs), *fused_networks(theirs), *counterparts(theirs, ours), *alone(ours), *growth(ours)]


# ---- appendix C of the paper ----


@cache
def network(name: str) -> nn.Module:
    """A network in evaluation mode; not the one that tracing is measured on, which trains."""
    return copy.deepcopy(zoo_model(name)).eval()


def fusion_time(theirs: ModuleType) -> Iterator[Experiment]:
    """The whole transform, capture included, as the paper timed it."""
    for key, title in (("resnet50", "ResNet-50"), ("resnet152", "ResNet-152")):
        name = f"fuse-conv-norm with capture, {title}"
        arms = (Arm("torch.fx", partial(fuse_theirs, key)), Arm("ours", partial(fuse_ours, key)))
        # Both write new weights, ours once and theirs after a copy of the model: no more time is what is asked.
        yield Experiment(name, arms, (Row(name, 1.0),))
    name = "fuse-conv-norm with capture, 20,000 nodes, 1,000 pairs"
    arms = (Arm("torch.fx", partial(fuse_theirs, "layered")), Arm("ours", partial(fuse_ours, "layered"), long=True))
    yield Experiment(name, arms, (Row(name, 3.0),), rounds=3)


def fuse_theirs(key: str) -> Fresh:
    from torch.fx.experimental.optimization import fuse

    model = layered(20_000) if key == "layered" else network(key)
    return lambda: lambda: fuse(model)


def fuse_ours(key: str) -> Fresh:
    import torchgraft
    from torchgraft.passes import FuseConvNorm

    model = layered(20_000) if key == "layered" else network(key)

    def run() -> Any:
        program = torchgraft.symbolic_trace(model)
        FuseConvNorm()(program)
        return program

    return lambda: run


def fused_networks(theirs: ModuleType) -> Iterator[Experiment]:
    """ResNet-50 unfused, fused by torch.fx and fused by us, run in turn. Use the clock on the wall for several threads and the
    GPU; the two fused ones call the same kernels on the same shapes, so their minima are compared.
    """
    threads = dict.fromkeys((1, torch.get_num_threads()))
    settings = [(f"{n} {'thread' if n == 1 else 'threads'}", n, "cpu", 1) for n in threads]
    if torch.cuda.is_available():
        settings += [(f"GPU, batch {batch}", 1, "cuda", batch) for batch in (1, 128)]
    for title, count, device, batch in settings:
        for channels_last in (False, True):
            name = f"fused ResNet-50, {title}{', channels-last' if channels_last else ''}"
            run = partial(run_network, threads=count, device=device, batch=batch, channels_last=channels_last)
            ways = {"unfused": "eager", "torch.fx": "theirs", "ours": "ours"}
            arms = tuple([Arm(label, partial(run, way)) for label, way in ways.items()])
            rows = (Row(name, 1.0, by_minima=True), Row(f"{name}, against unfused", None, "unfused", by_minima=True))
            yield Experiment(name, arms, rows, rounds=15)


@cache
def fused_network(way: str) -> nn.Module:
    model = network("resnet50")
    if way == "eager":
        return model
    return (fuse_theirs if way == "theirs" else fuse_ours)("resnet50")()()


def run_network(way: str, threads: int, device: str, batch: int, channels_last: bool) -> Fresh:
    model = copy.deepcopy(fused_network(way)).to(device)
    images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(device)
    if channels_last:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)

    def run() -> None:
        torch.set_num_threads(threads)
        with torch.no_grad():
            model(images)
        if device == "cuda":
            torch.cuda.synchronize()
        torch.set_num_threads(1)  # as every other measure has it

    return lambda: run


# ---- each pass beside torch.fx's ----


class Repeating(nn.Module):
    """`length` operations, every second of which repeats the one before it."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length // 3):
            x = torch.sin(x) + torch.sin(x)
        return x


@cache
def of_constants(library: ModuleType) -> Any:
    """20,000 nodes, half of them on a buffer; made by hand, because torch.fx computes such things while tracing."""
    graph = library.Graph()
    value = graph.placeholder("x")
    for _ in range(5_000):
        constant = graph.create_node("get_attr", "table")
        for function in (torch.abs, torch.neg):
            constant = graph.call_function(function, (constant,))
        value = graph.call_function(torch.add, (value, constant))
    graph.output(value)
    root = nn.Module()
    root.register_buffer("table", torch.ones(4))
    return library.GraphModule(root, graph)


def of_network(key: str) -> Callable[[ModuleType], Any]:
    @cache
    def traced(library: ModuleType) -> Any:
        return library.symbolic_trace(network(key))

    return traced


def of_chain(kind: type[nn.Module], length: int) -> Callable[[ModuleType], Any]:
    return lambda library: traced_chain(kind, length, library)


def counterparts(theirs: ModuleType, ours: ModuleType) -> Iterator[Experiment]:
    small, large = ("ResNet-152", of_network("resnet152")), ("20,000 nodes", of_chain(MixedChain, 20_000))
    repeating = ("20,000 nodes, a third repeated", of_chain(Repeating, 20_000))
    constant = ("20,000 nodes, half constant", of_constants)
    for name, subjects in (
        ("remove-dead-code", (small, large)),
        ("merge-common", (small, large, repeating)),
        ("fold-constants{freeze=true}", (small, large, constant)),
        ("normalize-arguments", (small, large)),
    ):
        for title, source in subjects:
            label = f"{name}, {title}"
            arms = (
                Arm(
                    "torch.fx",
                    partial(run_theirs, name, source, theirs),
                    slow="normalize" in name and source is large[1],
                ),
                Arm("ours", partial(run_ours, name, source, ours), long=True),
            )
            yield Experiment(label, arms, (Row(label, 3.0),), rounds=3)


def run_ours(name: str, source: Callable[[ModuleType], Any], library: ModuleType) -> Fresh:
    (edit,) = library.passes.Pipeline(name).passes
    original = source(library)

    def fresh() -> Run:
        module = library.GraphModule(original, copy.deepcopy(original.graph))
        return lambda: edit.run(module)

    return fresh


def run_theirs(name: str, source: Callable[[ModuleType], Any], library: ModuleType) -> Fresh:
    original = source(library)
    transform = _theirs(name)

    def fresh() -> Run:
        module = library.GraphModule(original, copy.deepcopy(original.graph))
        return lambda: transform(module)

    return fresh


def _theirs(name: str) -> Callable[[Any], Any]:
    from torch.fx.experimental.const_fold import split_const_subgraphs
    from torch.fx.experimental.normalize import NormalizeArgs
    from torch.fx.passes.dialect.common.cse_pass import CSEPass

    transforms: dict[str, Callable[[Any], Any]] = {
        "remove-dead-code": lambda module: module.graph.eliminate_dead_code(),
        "merge-common": CSEPass(),
        # Theirs computes when the program first runs, unless it is asked to.
        "fold-constants{freeze=true}": lambda module: split_const_subgraphs(module).run_folding(),
        "normalize-arguments": lambda module: NormalizeArgs(module).transform(),
    }
    return transforms[name]


# ---- passes that torch.fx has no counterpart of, and growth ----

# Every pass with a program in which it finds something to look at closely.
GROWING = {
    "remove-dead-code": "varied",
    "merge-common": "varied",
    "fold-constants": "varied",
    "normalize-arguments": "varied",
    "remove-no-ops": "varied",
    "functionalize": "varied",
    "propagate-shapes{inputs=4}": "varied",
    "fuse-conv-norm": "layered",
    "fuse-activations": "layered",
    "merge-linears": "layered",
    "replace-module{old=torch.nn.ReLU, new=torch.nn.GELU}": "layered",
    "reorder-for-memory": "varied",
}
ALONE = tuple(GROWING)[4:]


class Varied(nn.Module):
    """Chains with repetitions, copies, writes and constants."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length // 10):
            y = torch.sin(x) + torch.sin(x)
            x = torch.relu(y.clone()).mul_(0.5) * torch.ones(4).neg()
        return x


class Layered(nn.Module):
    """Small layers, norms and activations, one of each in twenty operations."""

    def __init__(self, length: int) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Conv1d(1, 1, 1), nn.BatchNorm1d(1), nn.ReLU()) for _ in range(length // 20)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            for _ in range(17):
                x = torch.neg(x)
        return x


@cache
def layered(length: int) -> nn.Module:
    return Layered(length).eval()


def alone(ours: ModuleType) -> Iterator[Experiment]:
    """On ResNet-152 and on 20,000 nodes; torch.fx stands nowhere beside them."""
    for name in ALONE:
        if name.startswith("propagate-shapes"):
            continue  # beside ShapeProp in `propagation`
        title = name.partition("{")[0]
        for size, source in (("ResNet-152", noted), ("20,000 nodes", partial(growing, name, 20_000))):
            row = Row(f"{title}, {size}", None, "none")
            yield Experiment(
                row.name, (Arm("ours", partial(run_ours, name, source, ours), long=True),), (row,), rounds=5
            )


@cache
def noted(library: ModuleType) -> Any:
    """ResNet-152 with shapes."""
    program = library.symbolic_trace(network("resnet152"))
    library.passes.PropagateShapes(inputs="1x3x64x64").run(program)
    return program


def growth(ours: ModuleType) -> Iterator[Experiment]:
    """The cost of a node at 20,000 and at 200,000 nodes. Walking over the nodes is measured too: memory is slower than caches."""
    for name in ("a walk over all nodes", *GROWING):
        label = f"{name.partition('{')[0]}, per node"
        run = walk if name == "a walk over all nodes" else partial(run_ours, name)
        arms = tuple(
            [
                Arm(f"ours {length}", partial(run, partial(growing, name, length), ours), length, long=True)
                for length in (20_000, 200_000)
            ]
        )
        rows = (
            Row(f"{label}, 200,000 nodes", None, "none", "ours 200000"),
            Row(f"{label}, 200,000 over 20,000", 1.5, "none", "ours 200000", "none", "ours 20000", by_minima=True),
        )
        yield Experiment(label, arms, rows, rounds=3)


def walk(source: Callable[[ModuleType], Any], library: ModuleType) -> Fresh:
    program = source(library)
    return lambda: lambda: [node.op for node in program.graph.nodes]


@cache
def growing(name: str, length: int, library: ModuleType) -> Any:
    if GROWING.get(name) == "layered":
        return library.symbolic_trace(layered(length))
    program = traced_chain(Varied, length, library)
    if name == "reorder-for-memory":
        for node in program.graph.nodes:
            node.meta["tensor_meta"] = torch.ones(4, device="meta")
    return program
