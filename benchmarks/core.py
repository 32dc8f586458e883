"""The measures of the core, as a table of experiments: tracing, generated code, edits, memory and running.
The two libraries have the same names, so every measure is written once and takes the library as an argument.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from benchmarks.measure import Arm, Experiment, Fresh, Row, Run
from benchmarks.models import (
    MixedChain,
    PairChain,
    pair_pattern,
    pair_replacement,
    small_mlp,
    traced_chain,
    traced_zoo_model,
    zoo_model,
)

ZOO = {"resnet50": "ResNet-50", "resnet152": "ResNet-152", "transformer": "12-layer Transformer"}

Subject = Callable[[ModuleType], Fresh]
Source = Callable[[ModuleType], Any]


def experiments(theirs: ModuleType, ours: ModuleType) -> list[Experiment]:
    """Every experiment, in the order of the table."""
    both = Pair(theirs, ours)
    return [
        *tracing(both),
        *scaling(both),
        *generated_code(both),
        *copies_and_checks(both),
        *edits(both),
        *patterns(both),
        *memory(both),
        *running(theirs, ours),
    ]


class Pair:
    """The two libraries, and the short way to an experiment that gives both the same subject."""

    def __init__(self, theirs: ModuleType, ours: ModuleType) -> None:
        self.theirs = theirs
        self.ours = ours

    def __call__(
        self,
        name: str,
        subject: Subject,
        required: float | None,
        *,
        per: int = 1,
        count: Callable[[Any], int] | None = None,
        meter: str = "seconds",
        rounds: int | None = None,
    ) -> Experiment:
        return Experiment(
            name,
            (
                Arm("torch.fx", lambda: subject(self.theirs), per, count),
                Arm("ours", lambda: subject(self.ours), per, count),
            ),
            (Row(name, required),),
            meter=meter,
            rounds=rounds,
        )


def always(run: Run) -> Fresh:
    """For what can be run again and again on the same subject."""
    return lambda: run


def nodes_of_graph(graph: Any) -> int:
    return len(graph.nodes)


def nodes_of_module(module: Any) -> int:
    return len(module.graph.nodes)


def small(library: ModuleType) -> Any:
    return traced_zoo_model("resnet50", library)


def large(library: ModuleType) -> Any:
    return traced_chain(MixedChain, 20_000, library)


def copied(source: Source, library: ModuleType) -> Any:
    """A module of its own for what edits it; the source is shared by many experiments."""
    module = source(library)
    return library.GraphModule(module, copy.deepcopy(module.graph))


def generate(module: Any) -> Any:
    """Make the module have its code: torch.fx has it already, torchgraft makes it when it is first asked for."""
    _ = module.forward
    _ = module.code
    return module


# Tracing


def tracing(both: Pair) -> Iterator[Experiment]:
    for key, title in ZOO.items():
        yield both(f"Tracer().trace, {title}", partial(trace, key), 5.0, count=nodes_of_graph)
        yield both(f"symbolic_trace, {title}", partial(symbolic_trace, key), 5.0, count=nodes_of_module)
        yield both(f"symbolic_trace and code, {title}", partial(trace_and_generate, key), None, count=nodes_of_module)


def trace(key: str, library: ModuleType) -> Fresh:
    model = zoo_model(key)
    return always(lambda: library.Tracer().trace(model))


def symbolic_trace(key: str, library: ModuleType) -> Fresh:
    model = zoo_model(key)
    return always(lambda: library.symbolic_trace(model))


def trace_and_generate(key: str, library: ModuleType) -> Fresh:
    model = zoo_model(key)
    return always(lambda: generate(library.symbolic_trace(model)))


def scaling(both: Pair) -> Iterator[Experiment]:
    """The cost of a node at several sizes, sampled in turn, with the garbage collector off and on."""
    for collector, title, lengths in (
        (False, "trace, per node", (2_000, 20_000, 200_000)),
        (True, "trace, per node, garbage collector on", (2_000, 200_000)),
    ):
        arms = []
        for length in lengths:
            most = length == 200_000
            prepare = partial(trace_chain, length)
            theirs, ours = partial(prepare, both.theirs), partial(prepare, both.ours)
            arms.append(Arm(f"torch.fx {length}", theirs, length, nodes_of_graph, slow=most))
            arms.append(Arm(f"ours {length}", ours, length, nodes_of_graph, long=most))
        rows = [Row(f"{title}, {length:,} nodes", None, f"torch.fx {length}", f"ours {length}") for length in lengths]
        growth = f"{title}, 200,000 over 2,000"
        rows.append(Row(growth, 1.3, "torch.fx 200000", "ours 200000", "torch.fx 2000", "ours 2000"))
        yield Experiment(title, tuple(arms), tuple(rows), collector=collector)


def trace_chain(length: int, library: ModuleType) -> Fresh:
    model = MixedChain(length)
    return always(lambda: library.Tracer().trace(model))


# Generated code


def generated_code(both: Pair) -> Iterator[Experiment]:
    for title, source in (
        *[(ZOO[key], partial(traced_zoo_model, key)) for key in ("resnet50", "transformer")],
        ("20,000 nodes", large),
    ):
        yield both(f"recompile, {title}", partial(recompile, source), 3.0, count=nodes_of_module)
        yield both(
            f"recompile and compile, {title}", partial(recompile, source, compiled=True), None, count=nodes_of_module
        )


def recompile(source: Source, library: ModuleType, compiled: bool = False) -> Fresh:
    """An edit before every sample (not measured), so that nobody can answer from a cache of the whole text.

    `recompile()` of torchgraft writes the text and leaves compiling it to the first run; with `compiled` that is included.
    Python's own `compile()` takes about half of torch.fx's time, so no library can be more than twice as fast there.
    """
    module = copied(source, library)
    graph = module.graph
    first = next(iter(graph.nodes))
    extra: list[Any] = []

    def run() -> Any:
        module.recompile()
        return generate(module) if compiled else module

    def fresh() -> Run:
        if extra:
            graph.erase_node(extra.pop())
        else:
            with graph.inserting_after(first):
                extra.append(graph.call_function(torch.relu, (first,)))
        return run

    return fresh


# Copies and checks


def copies_and_checks(both: Pair) -> Iterator[Experiment]:
    for title, source in (("ResNet-50", small), ("20,000 nodes", large)):
        yield both(f"deepcopy of a graph, {title}", partial(deepcopy, source), 3.0, count=nodes_of_graph)
    for title, source in (("ResNet-50", small), ("20,000 nodes", large)):
        yield both(f"lint, {title}", partial(lint, source), 3.0)
    for title, source in (("ResNet-50", small), ("2,000 nodes", partial(traced_chain, MixedChain, 2_000))):
        yield both(f"Transformer, {title}", partial(transform, source, False), 3.0, count=nodes_of_module)
        yield both(f"Transformer and code, {title}", partial(transform, source, True), None, count=nodes_of_module)


def deepcopy(source: Source, library: ModuleType) -> Fresh:
    graph = source(library).graph
    return always(lambda: copy.deepcopy(graph))


def lint(source: Source, library: ModuleType) -> Fresh:
    return always(source(library).graph.lint)


def transform(source: Source, generated: bool, library: ModuleType) -> Fresh:
    module = source(library)
    if generated:
        return always(lambda: generate(library.Transformer(module).transform()))
    return always(lambda: library.Transformer(module).transform())


# Edits


def edits(both: Pair) -> Iterator[Experiment]:
    yield both("dead code, ResNet-50, nothing dead", partial(dead_code, small, 0), 3.0, count=int)
    yield both("dead code, 20,000 nodes, nothing dead", partial(dead_code, large, 0), 3.0, count=int)
    yield both("dead code, 20,000 nodes and 10,000 dead", partial(dead_code, large, 10_000), 3.0, count=int)
    yield both("swap every op of 20,000, new nodes", swap_nodes, 3.0, count=int)
    yield both("swap every op of 20,000, by target", swap_targets, 3.0, count=int)


def dead_code(source: Source, dead: int, library: ModuleType) -> Fresh:
    """Nodes without users are added before every sample (not measured), and every sample takes them out again."""
    graph = copied(source, library).graph

    def run() -> int:
        graph.eliminate_dead_code()
        return len(graph.nodes)

    def fresh() -> Run:
        live = [node for node in graph.nodes if node.op != "output"][:dead]
        for node in live:
            with graph.inserting_after(node):
                graph.call_function(torch.abs, (node,))
        return run

    return fresh


OTHER = {torch.relu: torch.sigmoid, torch.sigmoid: torch.relu, torch.neg: torch.abs, torch.abs: torch.neg}


def swap_nodes(library: ModuleType) -> Fresh:
    """The documented way: a new node after the old, its uses moved over, the old erased."""
    graph = copied(partial(traced_chain, PairChain, 20_000), library).graph

    # A walk sees what is inserted after the current node, so it would swap for ever: go over a list.
    def run() -> int:
        swapped = 0
        for node in list(graph.nodes):
            if node.op == "call_function":
                with graph.inserting_after(node):
                    new = graph.call_function(OTHER[node.target], node.args, node.kwargs)
                node.replace_all_uses_with(new)
                graph.erase_node(node)
                swapped += 1
        return swapped

    return always(run)


def swap_targets(library: ModuleType) -> Fresh:
    graph = copied(partial(traced_chain, PairChain, 20_000), library).graph

    def run() -> int:
        swapped = 0
        for node in graph.nodes:
            if node.op == "call_function":
                node.target = OTHER[node.target]
                swapped += 1
        return swapped

    return always(run)


# Patterns


def patterns(both: Pair) -> Iterator[Experiment]:
    """Two sizes sampled in turn, because what is asked is also that the time grows with the graph and no faster.

    torch.fx generates code inside the call, so one arm of its own stands against ours without and with code.
    """
    arms = []
    rows = []
    for length in (2_000, 20_000):
        large = length == 20_000
        theirs, ours = f"torch.fx {length}", f"ours {length}"
        arms.append(Arm(theirs, partial(replace_pattern, length, True, both.theirs), count=int, slow=large))
        arms.append(Arm(ours, partial(replace_pattern, length, False, both.ours), count=int, long=large))
        arms.append(Arm(f"{ours} code", partial(replace_pattern, length, True, both.ours), count=int, long=large))
        size = f"{length:,} nodes, {length // 2:,} matches"
        rows.append(Row(f"replace_pattern, {size}", 100.0 if large else None, theirs, ours))
        rows.append(Row(f"replace_pattern and code, {size}", None, theirs, f"{ours} code"))
    growth = "replace_pattern, per node, 20,000 over 2,000"
    rows.append(Row(growth, 1.3, "torch.fx 20000", "ours 20000", "torch.fx 2000", "ours 2000", times_larger=10))
    yield Experiment("replace_pattern", tuple(arms), tuple(rows))


def replace_pattern(length: int, generated: bool, library: ModuleType) -> Fresh:
    original = traced_chain(PairChain, length, library)

    def fresh() -> Run:
        module = library.GraphModule(original, copy.deepcopy(original.graph))

        def run() -> int:
            matches = library.replace_pattern(module, pair_pattern, pair_replacement)
            if generated:
                generate(module)
            return len(matches)

        return run

    return fresh


# Memory


def memory(both: Pair) -> Iterator[Experiment]:
    yield both(
        "Python bytes per node, 20,000 nodes",
        partial(trace_chain, 20_000),
        1.0,
        per=20_000,
        count=nodes_of_graph,
        meter="bytes",
        rounds=1,
    )
    yield both(
        "Python bytes of a graph, ResNet-50",
        partial(trace, "resnet50"),
        None,
        count=nodes_of_graph,
        meter="bytes",
        rounds=3,
    )


# Running


def running(theirs: ModuleType, ours: ModuleType) -> Iterator[Experiment]:
    """Small tensors, no gradients: what is left is the cost of going from one operation to the next."""
    libraries = {"torch.fx": theirs, "ours": ours}
    subjects: list[tuple[str, Callable[[], nn.Module], tuple[int, ...], int]] = [
        ("MLP of 12 modules", small_mlp, (2, 16), 200),
        ("200 ops", partial(MixedChain, 200), (2,), 30),
    ]
    for title, make, shape, calls in subjects:
        name = f"generated module, {title}"
        arms = [
            Arm(label, partial(run_module, make, shape, calls, library), calls) for label, library in libraries.items()
        ]
        arms.append(Arm("eager", partial(run_module, make, shape, calls, None), calls))
        yield Experiment(name, tuple(arms), (Row(name, 1.0), Row(f"{name}, against eager", None, "eager")))
        name = f"Interpreter, {title}"
        arms = [
            Arm(label, partial(interpret, make, shape, calls, library), calls) for label, library in libraries.items()
        ]
        yield Experiment(name, tuple(arms), (Row(name, 2.0),))


def run_module(make: Callable[[], nn.Module], shape: tuple[int, ...], calls: int, library: ModuleType | None) -> Fresh:
    model = make()
    return repeated(library.symbolic_trace(model) if library else model, shape, calls)


def interpret(make: Callable[[], nn.Module], shape: tuple[int, ...], calls: int, library: ModuleType) -> Fresh:
    return repeated(library.Interpreter(library.symbolic_trace(make())).run, shape, calls)


def repeated(function: Callable[[torch.Tensor], Any], shape: tuple[int, ...], calls: int) -> Fresh:
    value = torch.ones(shape)

    def run() -> None:
        with torch.no_grad():
            for _ in range(calls):
                function(value)

    return always(run)
