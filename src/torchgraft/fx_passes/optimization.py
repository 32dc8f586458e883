"""torch.fx's experimental.optimization: batch norms fused into the layers before them, dropout taken out, layouts chosen.
The work of the first is `torchgraft.passes.FuseConvNorm`, which refuses where fusing would be wrong.
"""

from __future__ import annotations

import copy
import operator
import timeit
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchgraft.analysis.aliases import Aliases
from torchgraft.capturing.symbolic.tracer import Tracer, symbolic_trace
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.graph import Graph
from torchgraft.ir.modules import has_hooks
from torchgraft.ir.node import Node
from torchgraft.passes.functionalize import Functionalize
from torchgraft.passes.fuse_conv_norm import FuseConvNorm
from torchgraft.passes.shape_prop import ShapeProp


def fuse(model: nn.Module, inplace: bool = False, no_trace: bool = False) -> GraphModule:
    """A program of the model with every batch norm fused that can be; the model keeps its weights unless `inplace`.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> [type(layer).__name__ for layer in fuse(model).children()]
    ['Conv2d', 'ReLU']
    """
    model = model if inplace else copy.deepcopy(model)
    program = model if no_trace and isinstance(model, GraphModule) else symbolic_trace(model)
    FuseConvNorm().run(program)
    return program


def remove_dropout(model: nn.Module) -> GraphModule:
    """A program of the model without its dropout layers.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    >>> [type(layer).__name__ for layer in remove_dropout(model).children()]
    ['Linear']
    """
    program = symbolic_trace(model)
    for node in program.graph.nodes:
        if node.op == "call_module" and isinstance(program.get_submodule(node.target), nn.Dropout):
            node.replace_all_uses_with(node.all_input_nodes[0])
            program.graph.erase_node(node)
    program.delete_all_unused_submodules()
    return program


def matches_module_pattern(pattern: Iterable[type], node: Node, modules: dict[str, torch.nn.Module]) -> bool:
    """Whether a node and the node it takes its first argument from call modules of just these two types."""
    nodes = (node.args[0], node) if node.args else ()
    kinds = list(pattern)
    return len(nodes) == len(kinds) and all(
        isinstance(each, Node) and each.op == "call_module" and type(modules.get(each.target)) is kind
        for kind, each in zip(kinds, nodes, strict=True)
    )


def optimize_for_inference(
    model: torch.nn.Module, pass_config: dict[str, Any] | None = None, tracer: type[Tracer] = Tracer
) -> torch.nn.Module:
    """A program of the model that runs faster on a CPU: norms fused, dropout gone, stretches in oneDNN's own layout.

    `pass_config` switches the steps off (`{"conv_bn_fuse": False, "remove_dropout": False, "mkldnn_layout_optimize": False}`) or
    says which stretches are worth it (`{"mkldnn_layout_optimize": {"heuristic": f}}`, `f(stretch)` a truth value). Writes that
    nobody else can see become plain calls first; what else writes or is written keeps its layout.

    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()).eval()
    >>> [node.target for node in optimize_for_inference(model).graph.nodes if node.op == "call_method"]
    ['to_mkldnn', 'to_dense']
    """
    config: dict[str, Any] = {
        "conv_bn_fuse": True,
        "remove_dropout": True,
        "mkldnn_layout_optimize": {"heuristic": use_mkl_length},
        **(pass_config or {}),
    }
    if config["conv_bn_fuse"]:
        model = fuse(model)
    if config["remove_dropout"]:
        model = remove_dropout(model)
    layout = config["mkldnn_layout_optimize"]
    if layout is False:
        return model
    if not isinstance(layout, dict):
        raise RuntimeError(f"mkldnn_layout_optimize config is not a dict: it is {layout!r}; give False or a dict")
    if "heuristic" not in layout:
        raise RuntimeError('Heuristic not found in mkldnn_layout_optimize config; give {"heuristic": use_mkl_length}')
    copied = copy.deepcopy(model)
    program = GraphModule(copied, tracer().trace(copied), type(model).__name__)
    Functionalize().run(program)
    use_layout(program, layout["heuristic"])
    return program


# ---- oneDNN's layout ----


Heuristic = Callable[["MklSubgraph"], bool]

_FUNCTIONS = frozenset({torch.relu, torch.sigmoid, functional.relu})


class MklSubgraph:
    """A stretch: its `nodes`, the conversions that lead into it and those that lead out."""

    def __init__(self, fx_graph: Graph) -> None:
        self.fx_graph = fx_graph
        self.nodes: list[Node] = []
        self.start_nodes: list[Node] = []
        self.end_nodes: list[Node] = []


class UnionFind:
    """Sets of whole numbers below `n` that are joined.

    >>> sets = UnionFind(3)
    >>> for number in range(3):
    ...     sets.make_set(number)
    >>> joined = sets.join(0, 2)
    >>> sets.find(0) == sets.find(2), sets.find(0) == sets.find(1)
    (True, False)
    """

    def __init__(self, n: int) -> None:
        self.parent: list[int | None] = [None] * n
        self.size: list[int] = [0] * n

    def make_set(self, v: int) -> None:
        """Let a number be a set of its own."""
        self.parent[v], self.size[v] = v, 1

    def find(self, v: int) -> int:
        """The number of the set of this one."""
        while (above := self.parent[v]) != v:
            if above is None:
                raise ValueError(f"{v} is in no set; call make_set({v}) first")
            self.parent[v] = self.parent[above]
            v = above
        return v

    def join(self, a: int, b: int) -> int | None:
        """Join two sets, and return the number of the union."""
        a, b = self.find(a), self.find(b)
        if a != b:
            a, b = (b, a) if self.size[a] < self.size[b] else (a, b)
            self.parent[b] = a
            self.size[a] += self.size[b]
        return a


def use_mkl_length(graph: MklSubgraph) -> bool:
    """Whether a stretch is long enough to pay for its conversions: more than two calls."""
    return len(graph.nodes) > 2


def gen_mkl_autotuner(example_inputs: list[torch.Tensor], iters: int = 10, warmup: int = 1) -> Heuristic:
    """A heuristic for `optimize_for_inference` that runs each stretch both ways, on the shapes that these inputs give."""
    measured: list[Any] = []

    def is_faster(graph: MklSubgraph) -> bool:
        program: Any = graph.fx_graph.owning_module
        if program not in measured:
            ShapeProp(program).propagate(*example_inputs)
            measured.append(program)
        samples = [torch.randn(tuple(node.args[0].meta["tensor_meta"].shape)) for node in graph.start_nodes]
        results: Any = [node.args[0] for node in graph.end_nodes]
        piece = extract_subgraph(program, graph.nodes, graph.start_nodes, results)

        def in_layout() -> Any:
            return [value.to_dense() for value in piece(*[sample.to_mkldnn() for sample in samples])]

        converted = _seconds(in_layout, iters, warmup)
        reset_modules(piece.graph.nodes, dict(piece.named_modules()), graph.fx_graph.old_modules)  # type: ignore[attr-defined]
        return converted < _seconds(lambda: piece(*samples), iters, warmup)

    return is_faster


def _seconds(run: Callable[[], Any], iterations: int, warmup: int) -> float:
    with torch.no_grad():
        for _ in range(warmup):
            run()
        return timeit.timeit(run, number=iterations)


def extract_subgraph(orig_module: nn.Module, nodes: list[Node], inputs: list[Node], outputs: list[Node]) -> GraphModule:
    """A program of its own of some nodes: it takes the values of `inputs` and returns a list of those of `outputs`.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(lambda x: torch.relu(torch.sin(x)) + 1)
    >>> x, sin, relu, *_ = program.graph.nodes
    >>> extract_subgraph(program, [relu], [sin], [relu])(torch.tensor([-1.0, 2.0]))
    [tensor([0., 2.])]
    """
    graph = Graph()
    values: dict[Node, Node] = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output([values[node] for node in outputs])
    graph.lint()
    return GraphModule(orig_module, graph)


def replace_node_module(node: Node, modules: dict[str, torch.nn.Module], new_module: torch.nn.Module) -> None:
    """Put another module where the node's is, in the table too."""
    parent, _, name = node.target.rpartition(".")
    modules[node.target] = new_module
    setattr(modules[parent], name, new_module)


def modules_to_mkldnn(nodes: Iterable[Node], modules: dict[str, nn.Module]) -> dict[nn.Module, nn.Module]:
    """Put layers with weights in oneDNN's layout in the place of those that the nodes call; the old ones by the new."""
    from torch.utils import mkldnn

    kinds: dict[type, Callable[[Any], nn.Module]] = {
        nn.Conv2d: lambda layer: mkldnn.MkldnnConv2d(layer, torch.float),
        nn.Linear: lambda layer: mkldnn.MkldnnLinear(layer, torch.float),
        nn.BatchNorm2d: mkldnn.MkldnnBatchNorm,
    }
    old: dict[nn.Module, nn.Module] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch makes these layers by way of TorchScript
        for node in nodes:
            module = modules[node.target] if node.op == "call_module" else None
            if type(module) in kinds:
                converted = kinds[type(module)](module)
                old[converted] = copy.deepcopy(module)  # type: ignore[assignment]
                replace_node_module(node, modules, converted)
    return old


def reset_modules(
    nodes: Iterable[Node], modules: dict[str, nn.Module], old_modules: dict[nn.Module, nn.Module]
) -> None:
    """Put back what `modules_to_mkldnn` replaced."""
    for node in nodes:
        if node.op == "call_module" and modules[node.target] in old_modules:
            replace_node_module(node, modules, old_modules[modules[node.target]])


def add_in_layout(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The sum of two tensors in oneDNN's layout, which has none of tensors of different shapes."""
    if first.shape == second.shape:
        return first + second
    return (first.to_dense() + second.to_dense()).to_mkldnn()


def use_layout(program: GraphModule, heuristic: Heuristic) -> None:
    """Convert every stretch that the heuristic agrees to."""
    modules: dict[str, nn.Module] = dict(program.named_modules())
    stretches = _stretches(program, modules)
    graph: Any = program.graph
    graph.old_modules = {}
    for nodes in stretches:
        stretch = _converted(program.graph, nodes)
        graph.old_modules.update(modules_to_mkldnn(nodes, modules))
        if not heuristic(stretch):
            for node in (*stretch.start_nodes, *stretch.end_nodes):
                node.replace_all_uses_with(node.args[0])
                program.graph.erase_node(node)
            reset_modules(nodes, modules, graph.old_modules)
            continue
        for node in nodes:
            if node.target in (operator.add, torch.add):
                node.target = add_in_layout
    program.graph.lint()


def _stretches(program: GraphModule, modules: dict[str, nn.Module]) -> list[list[Node]]:
    """Supported nodes, joined where one hands its value to another; each list in the order of the program."""
    nodes = list(program.graph.nodes)
    calls = Counter(node.target for node in nodes if node.op == "call_module")
    memory = Aliases(program.graph)
    number = {node: position for position, node in enumerate(nodes)}
    sets = UnionFind(len(nodes))
    inside: set[Node] = set()
    for node in nodes:
        if node in memory.effects or memory.is_written(node) or memory.region[node] is not None:
            continue
        if node.op == "call_module":
            is_supported = calls[node.target] == 1 and _is_supported_module(modules[node.target], node)
        else:
            is_supported = _is_supported_function(node, inside)
        if is_supported:
            inside.add(node)
            sets.make_set(number[node])
            for source in node.all_input_nodes:
                if source in inside:
                    sets.join(number[source], number[node])
    result: dict[int, list[Node]] = {}
    for node in nodes:
        if node in inside:
            result.setdefault(sets.find(number[node]), []).append(node)
    return list(result.values())


def _is_supported_module(module: nn.Module, node: Node) -> bool:
    if has_hooks(module) or len(node.args) != 1 or node.kwargs or module.training:
        return False
    tensors = [*module.parameters(), *module.buffers()]
    if any(t.device.type != "cpu" or (t.is_floating_point() and t.dtype != torch.float) for t in tensors):
        return False
    kind: Any = type(module)
    layer: Any = module
    if kind is nn.Conv2d:
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if kind is nn.BatchNorm2d:
        return bool(layer.affine and layer.track_running_stats)
    if kind is nn.MaxPool2d:
        return layer.dilation in (1, (1, 1)) and not layer.return_indices
    if kind is nn.AvgPool2d:
        return layer.divisor_override is None
    if kind is nn.AdaptiveAvgPool2d:
        return layer.output_size in (1, (1, 1))  # other sizes must divide those of the input
    return kind in (nn.Linear, nn.ReLU)


def _is_supported_function(node: Node, inside: set[Node]) -> bool:
    if node.op != "call_function" or node.kwargs or type(node.target).__hash__ is None:
        return False
    if node.target in (operator.add, torch.add):
        return len(node.args) == 2 and all(isinstance(value, Node) and value in inside for value in node.args)
    # By itself a function does not tell that its input is an image or has the right type; a layer before it does.
    return node.target in _FUNCTIONS and len(node.args) == 1 and node.args[0] in inside


def _converted(graph: Graph, nodes: list[Node]) -> MklSubgraph:
    stretch = MklSubgraph(graph)
    stretch.nodes = nodes
    inside = set(nodes)
    entered: dict[Node, Node] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside:
                if source not in entered:
                    with graph.inserting_before(node):
                        entered[source] = graph.call_method("to_mkldnn", (source,))
                node.replace_input_with(source, entered[source])
    stretch.start_nodes = list(entered.values())
    for node in nodes:
        outside = [user for user in node._users if user not in inside]
        if outside:
            with graph.inserting_after(node):
                dense = graph.call_method("to_dense", (node,))
            for user in outside:
                user.replace_input_with(node, dense)
            stretch.end_nodes.append(dense)
    return stretch
