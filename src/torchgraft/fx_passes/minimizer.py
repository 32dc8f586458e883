"""torch.fx's net_min_base: find the nodes for which two ways to run a program differ, to be subclassed for a backend.
`run_a` and `run_b` are given a piece of the program as a module, and inputs; the pieces are cut by `splitting/fusing.py`.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError, GraphError
from torchgraft.fx_passes.tools import CALLABLE_NODE_OPS, FxNetAccFusionsFinder
from torchgraft.interpreter import Interpreter
from torchgraft.ir.node import Node
from torchgraft.passes.shape_prop import ShapeProp
from torchgraft.splitting.fusing import fuse_as_graphmodule


class FxNetMinimizerBadModuleError(GraftError):
    """A piece of the program cannot be made a module."""


class FxNetMinimizerRunFuncError(GraftError):
    """`run_a` or `run_b` raised."""


class FxNetMinimizerResultMismatchError(GraftError):
    """The two results differ."""


@dataclass
class _MinimizerSettingBase:
    """Options: whether a piece is given what the pieces before it computed (`accumulate_error`); how to search
    ("sequential", "binary", "accumulate", "block", "skip" or "defined"); whether to go on after the first find; whether
    `run_nodes` compares every value in between (`return_intermediate`). All values that leave a piece are compared anyway."""

    accumulate_error: bool = False
    traverse_method: str = "sequential"
    find_all: bool = False
    return_intermediate: bool = False
    all_outputs: bool = False

    def __str__(self) -> str:
        return "FX Minimizer Settings:\n" + "".join(f"\t{name}: {value}\n" for name, value in vars(self).items())


class _Piece(NamedTuple):
    """What a piece takes, what leaves it, and its calls, by the names of the nodes they were."""

    inputs: list[str]
    outputs: list[str]
    calls: dict[str, Node]


class _MinimizerBase:
    """Looks for culprits. `compare_fn(a, b, names)` returns a number and whether the results agree; `reports` keeps the tries."""

    def __init__(
        self,
        module: GraphModule,
        sample_input: Sequence[Any],
        compare_fn: Callable[[Any, Any, list[str]], tuple[float, bool]],
        settings: _MinimizerSettingBase,
        module_exporter: Callable[[Any, GraphModule, str], None] | None = None,
        exclusion_fn: Callable[[list[Node], int, int], None] | None = None,
    ) -> None:
        self.module = module
        self.sample_input = sample_input
        self.compare_fn = compare_fn
        self.settings = settings
        self.module_exporter = module_exporter
        self.exclusion_fn = exclusion_fn
        self.results: dict[Any, Any] = {}
        self.reports: list[list[str]] = []
        self.iteration = 0
        self._pieces: weakref.WeakKeyDictionary[GraphModule, _Piece] = weakref.WeakKeyDictionary()
        self.run_shape_prop()
        self.fusions = FxNetAccFusionsFinder(
            module, {node for node in module.graph.nodes if node.op in CALLABLE_NODE_OPS}
        )()
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        if len(names) != len(sample_input):
            raise GraphError(
                f"Placeholder count ({len(names)}) does not match sample_input count ({len(sample_input)})\n"
                "  give a sample for each input"
            )
        self.a_outputs: dict[str, Any] = dict(zip(names, sample_input, strict=True))
        self.b_outputs: dict[str, Any] = dict(self.a_outputs)
        self._true_values = _values(module, sample_input)

    def run_shape_prop(self) -> None:
        """Note shapes in the program's metadata."""
        ShapeProp(self.module).propagate(*self.sample_input)

    def run_a(self, mod: GraphModule, inputs: Any, report_idx: int = -1) -> Any:
        """Run a piece in the trusted way."""
        raise RuntimeError("run_a() is not implemented.")

    def run_b(self, mod: GraphModule, inputs: Any, report_idx: int = -1) -> Any:
        """Run a piece in the way that is questioned."""
        raise RuntimeError("run_b() is not implemented.")

    def minimize(
        self,
        start: str | None = None,
        end: str | None = None,
        skip_nodes: list[str] | None = None,
        find_last_node: bool | None = None,
    ) -> set[Node]:
        """The nodes between `start` and `end` (names, included) for which the two ways differ or fail.

        "skip" leaves out `skip_nodes`. "block" finds the shortest stretch that differs, by halving; with `find_last_node` it is
        cut at its end only, with False at its beginning only.
        """
        nodes = self._collect_nodes(start, end)
        method = self.settings.traverse_method
        if method == "sequential":
            return self._first_or_all([[node] for node in nodes])
        if method == "binary":
            return self._binary(nodes)
        if method == "accumulate":
            return self._accumulate(nodes)
        if method == "block":
            return self._block(nodes, find_last_node)
        if method == "defined":
            return set() if self._agrees(nodes) else set(nodes)
        if method == "skip":
            if skip_nodes is None:
                raise RuntimeError("'skip_nodes' can't be None when 'traverse_method' is 'skip'.")
            return self._first_or_all(_pieces_without(nodes, set(skip_nodes)))
        raise RuntimeError(f"Unknown traverse method {method}!")

    def run_nodes(self, start: str | None = None, end: str | None = None) -> None:
        """Run one piece both ways and compare; what came out is in `reports`."""
        self._agrees(self._collect_nodes(start, end), self.settings.return_intermediate)

    def print_report(self, report: list[str]) -> None:
        """Print one report."""
        print("\n . ".join(report))  # noqa: T201 (printing is what the method is asked for)

    def print_reports(self) -> None:
        """Print all reports."""
        for report in self.reports:
            self.print_report(report)

    def _collect_nodes(self, start: str | None, end: str | None) -> list[Node]:
        nodes = [node for node in self.module.graph.nodes if node.op in CALLABLE_NODE_OPS]
        names = [node.name for node in nodes]
        for name in (start, end):
            if name is not None and name not in names:
                raise FxNetMinimizerBadModuleError(f"the program has no call '{name}'; it has {', '.join(names)}")
        first = 0 if start is None else names.index(start)
        last = len(names) - 1 if end is None else names.index(end)
        return nodes[first : last + 1]

    def _agrees(self, nodes: list[Node], intermediate: bool = False, first: int = -1, last: int = -1) -> bool:
        if self.exclusion_fn is not None:
            nodes = list(nodes)
            self.exclusion_fn(nodes, first, last)  # takes out of the list what it does not want
        if not nodes:
            self.reports.append(["All nodes are excluded by user"])
            return True
        self.iteration += 1
        self.reports.append([f"Run and compare {nodes[0].name} to {nodes[-1].name}, {len(nodes)} nodes"])
        members = self._with_groups(nodes)
        try:
            split_module, name = self._build_submodule(set(members))
            self._run_and_compare(split_module, name, [node.name for node in members] if intermediate else [])
        except (FxNetMinimizerRunFuncError, FxNetMinimizerResultMismatchError):
            return False
        return True

    def _build_submodule(self, nodes: set[Node]) -> tuple[torch.nn.Module, str]:
        """A module with the piece that consists of `nodes` in it, and the name that the piece has there."""
        members = [node for node in self.module.graph.nodes if node in nodes]
        if not members:
            raise FxNetMinimizerBadModuleError(f"Minimize submodule was not found with nodes {nodes}")
        piece, inputs, outputs = fuse_as_graphmodule(self.module, members, "Minimized")
        names = [node.name for node in members]
        calls = [node for node in piece.graph.nodes if node.op in CALLABLE_NODE_OPS]
        whole = torch.nn.Module()
        whole.add_module("minimize", piece)
        self._pieces[piece] = _Piece(
            [node.name for node in inputs], [node.name for node in outputs], dict(zip(names, calls, strict=True))
        )
        return whole, "minimize"

    def _run_and_compare(
        self, split_module: torch.nn.Module, submod_name: str, output_names: list[str], report_idx: int = -1
    ) -> None:
        """Run a piece both ways and compare what it returns: `output_names`, or all that leaves it where there are none."""
        piece: Any = getattr(split_module, submod_name)
        about = self._pieces[piece]
        names = about.outputs
        if output_names and not self.settings.all_outputs:
            names = [name for name in about.calls if name in output_names]
            results = [about.calls[name] for name in names]
            piece.graph.output_node().args = (results[0] if len(results) == 1 else tuple(results),)
        if not names:
            return
        if not self.reports:
            self.reports.append([])
        report = self.reports[report_idx]
        a_inputs, b_inputs = [self._inputs(about.inputs, stored) for stored in (self.a_outputs, self.b_outputs)]
        try:
            a_result = self.run_a(piece, a_inputs, report_idx)
            b_result = self.run_b(piece, b_inputs, report_idx)
        except Exception as error:
            report.append(f"Exception raised when running {submod_name}: {error}")
            raise FxNetMinimizerRunFuncError(f"Exception raised when running {submod_name}: {error}") from error
        for name, a_value, b_value in zip(names, _as_list(a_result, names), _as_list(b_result, names), strict=True):
            self.a_outputs[name], self.b_outputs[name] = a_value, b_value
        number, agrees = self.compare_fn(a_result, b_result, names)
        self.results[tuple(names)] = number
        report.append(f"Numerical accuracy = {number}")
        if agrees:
            return
        report.append(f"Result mismatch for {names}")
        if self.module_exporter is not None:
            self.module_exporter(a_inputs, piece, f"{names[0]}_cpu")
            self.module_exporter(b_inputs, piece, f"{names[0]}_acc")
        raise FxNetMinimizerResultMismatchError(f"Result mismatch for {names}")

    def _with_groups(self, nodes: list[Node]) -> list[Node]:
        wanted = {member for node in nodes for member in self.fusions.get(node, {node})}
        return [node for node in self.module.graph.nodes if node in wanted]

    def _inputs(self, names: Sequence[str], stored: dict[str, Any]) -> tuple[Any, ...]:
        if not self.settings.accumulate_error:
            return tuple([self._true_values[name] for name in names])
        return tuple([stored.get(name, self._true_values[name]) for name in names])

    def _first_or_all(self, pieces: list[list[Node]]) -> set[Node]:
        culprits: set[Node] = set()
        for number, piece in enumerate(pieces):
            if not self._agrees(piece, first=number, last=number + 1):
                culprits.update(piece)
                if not self.settings.find_all:
                    break
        return culprits

    def _binary(self, nodes: list[Node]) -> set[Node]:
        if not nodes or self._agrees(nodes):
            return set()
        if len(nodes) == 1:
            return set(nodes)
        middle = len(nodes) // 2
        culprits = self._binary(nodes[:middle])
        if culprits and not self.settings.find_all:
            return culprits
        return culprits | self._binary(nodes[middle:])

    def _accumulate(self, nodes: list[Node]) -> set[Node]:
        culprits: set[Node] = set()
        for end in range(1, len(nodes) + 1):
            if not self._agrees(nodes[:end]):
                culprits.add(nodes[end - 1])
                if not self.settings.find_all:
                    break
        return culprits

    def _block(self, nodes: list[Node], find_last_node: bool | None) -> set[Node]:
        """A stretch from which nothing can be taken at its end, then nothing at its beginning, without the difference going."""
        if not nodes or self._agrees(nodes):
            return set()
        first, last = 0, len(nodes)
        if find_last_node is not False:
            last = 1 + bisect_left(range(1, last), True, key=lambda end: not self._agrees(nodes[:end]))
        if not find_last_node:
            lengths = range(1, last)
            first = (
                last - 1 - bisect_left(lengths, True, key=lambda length: not self._agrees(nodes[last - length : last]))
            )
        return set(nodes[first:last])


def _values(module: GraphModule, inputs: Sequence[Any]) -> dict[str, Any]:
    """What every node computes."""
    interpreter = Interpreter(module, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(*inputs)
    return {node.name: value for node, value in interpreter.env.items()}


def _as_list(result: Any, names: list[str]) -> list[Any]:
    return [result] if len(names) == 1 else list(result)


def _pieces_without(nodes: list[Node], skipped: set[str]) -> list[list[Node]]:
    pieces: list[list[Node]] = [[]]
    for node in nodes:
        if node.name in skipped:
            pieces.append([])
        else:
            pieces[-1].append(node)
    return [piece for piece in pieces if piece]
