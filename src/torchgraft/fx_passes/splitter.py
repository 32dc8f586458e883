"""torch.fx's splitter_base: a program cut into parts for an accelerator (`_run_on_acc_0`) and parts for the host
(`_run_on_cpu_1`), to be subclassed for a backend. The parts are those of `torchgraft.split`; what is added is that no part hands
another a value that is no tensor, unless that is allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError
from torchgraft.fx_passes.node_events import NodeEvent as NodeEvent
from torchgraft.fx_passes.node_events import NodeEventTracker as NodeEventTracker
from torchgraft.fx_passes.split_utils import move_non_tensor_nodes_on_boundary
from torchgraft.fx_passes.tools import CALLABLE_NODE_OPS, FxNetAccFusionsFinder, get_node_target, is_node_output_tensor
from torchgraft.ir.node import Node
from torchgraft.passes.shape_prop import ShapeProp
from torchgraft.splitting.operator_support import OperatorSupportBase
from torchgraft.splitting.order import Order
from torchgraft.splitting.split_module import split_by_tags
from torchgraft.splitting.strategies import regions_of_two_kinds

DEFAULT_MIN_ACC_MODULE_SIZE = 1
DEFAULT_SKIP_FUSION = False
DEFAULT_ALLOW_NON_TENSOR = False


class FxNetSplitterInternalError(GraftError):
    """The splitter cannot do what it is asked for."""


@dataclass
class _SplitterSettingBase:
    """Options: the smallest part worth the accelerator; whether to skip the search for groups; whether values that are no
    tensors may go between parts; how many accelerator parts there may be at most (-1: any number)."""

    min_acc_module_size: int = DEFAULT_MIN_ACC_MODULE_SIZE
    skip_fusion: bool = DEFAULT_SKIP_FUSION
    allow_non_tensor: bool = DEFAULT_ALLOW_NON_TENSOR
    max_acc_splits: int = -1
    move_non_tensor_nodes_on_boundary: bool = False


@dataclass
class Subgraph:
    """A part: for the accelerator or not, and its nodes."""

    is_acc: bool
    nodes: list[Node]
    device_ordinal: int | None = None


class SplitResult(NamedTuple):
    """The split module, the inputs of each part, and how the parts that are not for the accelerator are called."""

    split_module: GraphModule
    submodule_inputs: dict[str, Any]
    non_acc_submodule_prefix: str


class FxNetAccNodesFinder:
    """The nodes for the accelerator: those it supports, less those that would exchange values that are no tensors with others.

    Why each node is where it is, is in `tracker`.
    """

    def __init__(self, module: GraphModule, operator_support: OperatorSupportBase, allow_non_tensor: bool) -> None:
        self.module = module
        self.operator_support = operator_support
        self.allow_non_tensor = allow_non_tensor
        self.acc_nodes: set[Node] = set()
        self.tracker = NodeEventTracker(0, "_fx_net_tracker")

    def __call__(self) -> set[Node]:
        modules = dict(self.module.named_modules())
        self.acc_nodes = set()
        for node in self.module.graph.nodes:
            if node.op not in CALLABLE_NODE_OPS:
                self.tracker.add(node, "init_cpu|not_callable")
            elif self.operator_support.is_node_supported(modules, node):
                self.tracker.add(node, "init_acc|callable_and_operator_supported")
                self.acc_nodes.add(node)
            else:
                self.tracker.add(node, "init_cpu|operator_support")
        if not self.allow_non_tensor:
            self.reduce_acc_nodes_non_tensor_input()
            self.reduce_acc_nodes_non_tensor_output()
        self.tracker.dump()
        return self.acc_nodes

    def reduce_acc_nodes_non_tensor_input_helper(self, cpu_worklist: list[Node]) -> None:
        """Take out what uses these nodes of the host, which give no tensors, and so on for what gives none itself."""
        while cpu_worklist:
            cause = cpu_worklist.pop(0)
            for user in cause._users:
                if user in self.acc_nodes:
                    self.acc_nodes.remove(user)
                    self.tracker.add(user, "acc_del|user_of_new_cpu_node", cause)
                    if not is_node_output_tensor(user):
                        self.tracker.add(user, "new_cpu_node|non_tensor_output")
                        cpu_worklist.append(user)

    def reduce_acc_nodes_non_tensor_input(self) -> None:
        """Take out nodes that a node of the host hands something that is no tensor."""
        of_the_host = [node for node in self._calls() if node not in self.acc_nodes and not is_node_output_tensor(node)]
        for node in of_the_host:
            self.tracker.add(node, "new_cpu_node|callable_non_tensor_input")
        self.reduce_acc_nodes_non_tensor_input_helper(of_the_host)

    def reduce_acc_nodes_non_tensor_output(self) -> None:
        """Take out nodes that hand a node of the host something that is no tensor."""
        while lost := [
            node
            for node in self._calls()
            if node in self.acc_nodes
            and not is_node_output_tensor(node)
            and any(user not in self.acc_nodes for user in node._users)
        ]:
            for node in lost:
                user = next(user for user in node._users if user not in self.acc_nodes)
                self.tracker.add(node, "acc_del|non_tensor_output_with_cpu_user", user)
            self.acc_nodes.difference_update(lost)
            self.reduce_acc_nodes_non_tensor_input_helper(lost)

    def _calls(self) -> list[Node]:
        return [node for node in self.module.graph.nodes if node.op in CALLABLE_NODE_OPS]


def generate_inputs_for_submodules(
    model: torch.nn.Module, inputs: Sequence[Any], target_submodules: Iterable[str], deepcopy: bool = False
) -> dict[str, Any]:
    """What each of these submodules is called with when the model runs on `inputs`."""
    results: dict[str, Any] = {}
    handles = []
    for name in target_submodules:

        def note(module: torch.nn.Module, args: Any, name: str = name) -> None:
            results[name] = copy.deepcopy(args) if deepcopy else args

        handles.append(model.get_submodule(name).register_forward_pre_hook(note))
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return results


class _SplitterBase:
    """Splits a module; calling it gives the split module. Backends override `_lower_model_to_backend` and `_find_culprit`."""

    def __init__(
        self,
        module: GraphModule,
        sample_input: Sequence[Any],
        operator_support: OperatorSupportBase,
        settings: _SplitterSettingBase,
        non_acc_submodule_name: str = "_run_on_cpu_",
        return_tuple: bool = False,
        nodes_finder: Any = None,
    ) -> None:
        self.module = module
        self.sample_input = sample_input
        self.operator_support = operator_support
        self.settings = settings
        self.non_acc_submodule_name = non_acc_submodule_name
        self._return_tuple = return_tuple
        self.tags: list[str] = []
        ShapeProp(module).propagate(*sample_input)
        self.acc_nodes = (nodes_finder or FxNetAccNodesFinder(module, operator_support, settings.allow_non_tensor))()
        self.fusions = {} if settings.skip_fusion else FxNetAccFusionsFinder(module, self.acc_nodes)()

    def _lower_model_to_backend(self, mod: GraphModule, inputs: Any) -> torch.nn.Module:
        return mod

    def _find_culprit(self, mod: GraphModule, inputs: Any) -> str:
        return "Unable to find a culprit because _find_culprit() function is not implemented."

    def put_nodes_into_subgraphs(self) -> list[Subgraph]:
        """The largest parts of either kind, in an order in which they can run."""
        return self._subgraphs(1)

    def remove_small_acc_subgraphs(self, subgraphs: list[Subgraph]) -> list[Subgraph]:
        """The parts again, with those that are too small for the accelerator given to the host."""
        smallest = min([len(part.nodes) for part in subgraphs if part.is_acc], default=0)
        is_large = smallest >= self.settings.min_acc_module_size
        return subgraphs if is_large else self._subgraphs(self.settings.min_acc_module_size)

    def _subgraphs(self, min_size: int) -> list[Subgraph]:
        order = Order(self.module.graph)
        kinds = [all(node in self.acc_nodes for node in unit) for unit in order.units]
        groups, _ = regions_of_two_kinds(order, kinds, min_size)
        result = []
        for kind, numbers in groups:
            nodes = sorted([node for number in numbers for node in order.units[number]], key=order.position.__getitem__)
            result.append(Subgraph(kind, nodes))
        return result

    def tag(self, subgraphs: list[Subgraph]) -> None:
        """Write the name of its part on every node."""
        self.tags = []
        for number, subgraph in enumerate(subgraphs):
            self.tags.append(f"{'_run_on_acc_' if subgraph.is_acc else self.non_acc_submodule_name}{number}")
            for node in subgraph.nodes:
                node.tag = self.tags[-1]  # type: ignore[attr-defined]

    def split(self, remove_tag: bool = False) -> GraphModule:
        """The module split by the tags."""
        result = split_by_tags(self.module, self.tags, return_tuple=self._return_tuple)
        if remove_tag:
            for node in self.module.graph.nodes:
                if hasattr(node, "tag"):
                    del node.tag
        return result

    def __call__(self) -> GraphModule:
        subgraphs = self.remove_small_acc_subgraphs(self.put_nodes_into_subgraphs())
        if self.settings.move_non_tensor_nodes_on_boundary:
            move_non_tensor_nodes_on_boundary(subgraphs)
        count = sum(subgraph.is_acc for subgraph in subgraphs)
        if 0 < self.settings.max_acc_splits < count:
            raise FxNetSplitterInternalError(
                f"cannot fulfil max_acc_splits limit: {count} parts for the accelerator, {self.settings.max_acc_splits} allowed; "
                "raise the limit or min_acc_module_size"
            )
        self.tag(subgraphs)
        return self.split()

    def generate_split_results(self) -> SplitResult:
        """The split module together with what each part is called with."""
        module = self()
        names = [name for name, _ in module.named_children()]
        inputs = generate_inputs_for_submodules(module, self.sample_input, names)
        return SplitResult(module, inputs, self.non_acc_submodule_name)

    def node_support_preview(self, dump_graph: bool = False) -> str:
        """What is supported and what is not, by name and dtypes."""
        modules = dict(self.module.named_modules())
        found: dict[bool, dict[str, None]] = {True: {}, False: {}}
        for node in self.module.graph.nodes:
            if node.op in CALLABLE_NODE_OPS:
                dtypes = tuple([_dtype(source) for source in node.args])
                keywords = {name: _dtype(source) for name, source in node.kwargs.items() if isinstance(source, Node)}
                line = f"{get_node_target(modules, node)}: ({dtypes}, {keywords})"
                found[bool(self.operator_support.is_node_supported(modules, node))][line] = None
        parts = [
            f"\n{word} node types in the model:\n" + "".join(f"{line}\n" for line in found[kind])
            for kind, word in _WORDS
        ]
        return "".join(parts)

    def split_preview(self, dump_graph: bool = False) -> str:
        """Which parts there would be, and whether the accelerator's can be lowered and run."""
        subgraphs = self.remove_small_acc_subgraphs(self.put_nodes_into_subgraphs())
        self.tag(subgraphs)
        lines = [f"{tag}: {len(subgraph.nodes)} node(s)" for tag, subgraph in zip(self.tags, subgraphs, strict=True)]
        module = self.split(remove_tag=True).eval()
        accelerated = [tag for tag in self.tags if tag.startswith("_run_on_acc_")]
        inputs = generate_inputs_for_submodules(module, self.sample_input, accelerated)
        for name in accelerated:
            part: Any = module.get_submodule(name)
            try:
                self._lower_model_to_backend(part, inputs[name])(*inputs[name])
                lines.append(f"{name}: Lowering and running succeed!")
            except RuntimeError as error:
                culprit = self._find_culprit(part, inputs[name])
                lines.append(f"{name}: Run into an error during lowering or inference! {error} {culprit}")
        return "\n".join(lines)


_WORDS = ((True, "Supported"), (False, "Unsupported"))


def _dtype(value: Any) -> Any:
    return getattr(value.meta.get("tensor_meta"), "dtype", None) if isinstance(value, Node) else None
