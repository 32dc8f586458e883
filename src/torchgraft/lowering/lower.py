"""`lower`: a captured program in ATen or core ATen operators, with the same guards, free sizes, regions and calls kept whole.
Which calls stay calls is said in `kinds.py`, how an operator becomes a node in `operators.py`; forward and backward as one
program are in `joint.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from torchgraft.capturing.flowing.sizes import SymbolicNumber, combine, unwrapped, wrapped
from torchgraft.capturing.state.model_state import ModelState
from torchgraft.capturing.whole import whole_model
from torchgraft.codegen.calling import copied_inputs, example_inputs, placeholder_values
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BridgeError, GraftError
from torchgraft.ir.arguments import leaves
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.copying import inherit_origin
from torchgraft.ir.guards import check_length, check_result, check_training
from torchgraft.ir.modules import paths_of_modules
from torchgraft.ir.node import Node, map_arg
from torchgraft.ir.verify import find_attribute
from torchgraft.lowering.autocast import WithoutAutocast, is_autocast
from torchgraft.lowering.decompositions import core_decompositions
from torchgraft.lowering.guards import guard_state, guard_tensors
from torchgraft.lowering.kinds import SIGNS, Kind, kind_of, kind_of_kept
from torchgraft.lowering.modes import recording
from torchgraft.lowering.recorder import Recorder, ViewWritten
from torchgraft.lowering.tensors import TracedTensor, can_be_traced
from torchgraft.lowering.torch_calls import called, flowing, is_constant_size, spelled
from torchgraft.lowering.values import Flow, concrete, flows_in, has_nodes, is_known, plain_values, traced_in
from torchgraft.results.progress import stage


def lower(
    program: GraphModule, args: Any = (), kwargs: dict[str, Any] | None = None, *, level: str = "aten"
) -> GraphModule:
    """The program in torch's operators, at level "aten" or "core_aten".

    It is run once, node by node, on copies of the inputs, which have to pass its guards; the operators that torch runs for a
    node take its place. It should be a program at level "function": modules that it calls stay calls. Guards, sizes, regions
    and calls that were kept whole stay the nodes they are, and each new node has the name of the node it comes from in
    `meta["from_node"]`, with its source line and module path.

    >>> import torchgraft
    >>> program = torchgraft.capture(torch.nn.Linear(2, 3), (torch.ones(4, 2),), level="function")
    >>> lowered = lower(program, (torch.ones(4, 2),))
    >>> [str(node.target) for node in lowered.graph.nodes if "aten" in str(node.target)]
    ['aten.linear.default']
    >>> lowered(torch.ones(7, 2)).shape
    torch.Size([7, 3])
    """
    if level not in ("aten", "core_aten"):
        raise ValueError(f'level must be "aten" or "core_aten", not "{level}"')
    if not isinstance(program, GraphModule):
        raise TypeError(
            f"expected a captured program, got a {type(program).__name__}\n  capture(model, args, level={level!r}) takes a model"
        )
    if "" in program.meta.get("kept_whole", {}):
        return program  # one call, at every level
    is_core = level == "core_aten"
    given = example_inputs(args, kwargs)
    with stage(f"lowering to {level}"):
        try:
            walk = _walked(program, is_core, given)
        except ViewWritten:
            walk = _walked(program, is_core, given, keeps_views=True)
    recorder = walk.recorder
    recorder.note_numbers()
    recorder.graph.set_codegen(program.graph._codegen)
    result = GraphModule(program, recorder.graph, type(program).__name__)
    result._adopt_state(program)
    result.meta.update(program.meta)
    result.meta["kept_calls"] = walk.kept
    drop_unused(result)
    return result


def _walked(program: GraphModule, is_core: bool, given: Any, keeps_views: bool = False) -> Walk:
    recorder = Recorder(is_above_autograd=True, decompositions=core_decompositions() if is_core else None)
    recorder.keeps_views = keeps_views
    walk = Walk(program, recorder, placeholder_values(program, *copied_inputs(*given)))
    walk.run()
    return walk


def inputs_text(program: GraphModule) -> str:
    """Where a guard on inputs stands."""
    return f"the inputs of {type(program).__name__}"


class Walk:
    """One run of a program on traced tensors."""

    def __init__(self, program: GraphModule, recorder: Recorder, inputs: dict[Node, Any]) -> None:
        self.program = program
        self.recorder = recorder
        self.inputs = inputs
        self.env: dict[Node, Any] = {}
        # Calls of torch that could not be taken apart, by the name of the node, and why.
        self.kept: dict[str, str] = {}
        self._attributes: dict[str, Any] = {}
        self._placeholders: dict[Node, Any] = {}
        self._contexts: list[Any] = []

    def run(self) -> None:
        """Write down the whole program; the model, its tensors and the random numbers are restored afterwards."""
        recorder, program = self.recorder, self.program
        paths = paths_of_modules(program)
        if (model := whole_model(program)) is not None:  # which is no submodule of it
            paths[model] = ""
        self._state = state = ModelState(paths)
        recorder.before_write = state.tensors.save_if_known
        for module in state.paths:
            state.watch(module)
        try:
            self.begin()
            last_use = {used: node for node in program.graph.nodes for used in node.all_input_nodes}
            for node in program.graph.nodes:
                recorder.begin(node)
                self.env[node] = self.node(node)
                # Who shares memory with a tensor is decided among those that are looked at again.
                for used in (node, *node.all_input_nodes):
                    if last_use.get(used, node) is node:
                        self.env.pop(used, None)
        finally:
            for context in reversed(self._contexts):
                context.__exit__(None, None, None)
            state.restore_all()

    def begin(self) -> None:
        """Make the inputs, and have the program check what the operators are going to be chosen by."""
        inputs = {}
        for node, value in self.inputs.items():
            new = self.recorder.create_node("placeholder", node.target, node.args, {}, node.name, node.type)
            inherit_origin(new, node)
            self._placeholders[node] = known = self._known(value, new, is_outside=True)
            if type(known) is TracedTensor:
                inputs[node.name] = known
        guard_tensors(self.recorder, inputs, inputs_text(self.program))
        if self.recorder.decompositions is not None:
            names = dict.fromkeys(str(node.target) for node in self.program.graph.find_nodes(op="get_attr"))
            guard_state(self.recorder, names, self._attribute)
        self.begin_operators()

    def begin_operators(self) -> None:
        """All that the program begins with is written. Where casts are operators of their own, autocast would cast again."""
        self.recorder.end_of_inputs()
        self.without_autocast = WithoutAutocast(self.recorder)

    def node(self, node: Node) -> Any:
        """Write down one node of the program; its value."""
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        args, kwargs = map_arg(node.args, self.env.__getitem__), map_arg(node.kwargs, self.env.__getitem__)
        if node.op == "output":
            return self._output(args)
        return self.call(kind_of(node, args, kwargs), node, args, kwargs)

    def call(self, kind: Kind, node: Node, args: Any, kwargs: Any) -> Any:
        """Do with a call what is done with its kind."""
        if kind is Kind.GUARD:
            return self._guard(node, args, kwargs)
        if kind is Kind.NUMBER:
            return _arithmetic(self.recorder, node, args)
        if kind is not Kind.OPERATORS:
            return self._kept(node, args, kwargs)
        last, fixed = self.recorder.begin(node), self.recorder.fixed
        try:
            value = self._recorded(node, args, kwargs)
        except Exception as error:  # what torch cannot do with traced tensors, a program can still call
            reason = f"{type(error).__name__}: {error}"
        else:
            # Scripted code takes sizes as plain numbers.
            is_tied = isinstance(node.target, torch.jit.ScriptFunction) and self.recorder.fixed != fixed
            if not is_tied or self.recorder.has_written(last):
                return value
            reason = "its code is TorchScript, in which sizes would be those of the example"
        self.recorder.take_back(last)
        self.kept[node.name] = reason
        return self.call(kind_of_kept(node, args, kwargs), node, args, kwargs)

    # ---- where values come from ----

    def _placeholder(self, node: Node) -> Any:
        return self._placeholders[node]

    def _output(self, args: Any) -> Node | None:
        self.without_autocast.close()
        output = self.recorder.create_node("output", "output", self.recorder.argument(args), {})
        output.meta["val"] = map_arg(output.args[0], lambda result: result.meta.get("val"))
        return output

    def _attribute(self, target: str) -> Any:
        if target not in self._attributes:
            value, problem = find_attribute(self.program, target)
            assert problem is None, problem
            node = self.recorder.create_node("get_attr", target, (), {})
            if isinstance(value, torch.Tensor) and can_be_traced(value):
                actual = value if self.recorder.is_above_autograd else value.detach()
                self._attributes[target] = self.recorder.traced(actual, node, is_static=True, is_outside=True)
            else:
                self._attributes[target] = Flow(value, node)
        return self._attributes[target]

    def _known(self, value: Any, node: Node, is_outside: bool = False) -> Any:
        """A value of this run that is the value of a node."""
        if isinstance(value, torch.Tensor) and can_be_traced(value):
            actual = value if self.recorder.is_above_autograd else value.detach()
            return self.recorder.traced(actual, node, is_outside=is_outside)
        # Autograd takes other numbers by their value, and the backward would not see a change.
        if type(value) is int or (type(value) is float and not self.recorder.is_above_autograd):
            return wrapped(SymbolicNumber(self.recorder, value, lambda: node, node.name))
        return Flow(value, node)

    # ---- what becomes of a call ----

    def _guard(self, node: Node, args: Any, kwargs: Any) -> Node | None:
        if not has_nodes((args, kwargs)):
            return None  # on what turned out to be the same in every run
        if node.target in (check_length, check_result) and isinstance(args[0], (tuple, list, dict)):
            return None  # checked where it was made
        if node.target is check_training:
            with self.recorder.before_effects(args[0].node):
                return self._copied(node, args, kwargs)
        return self._copied(node, args, kwargs)

    def _copied(self, node: Node, args: Any, kwargs: Any) -> Node:
        argument = self.recorder.argument
        return self.recorder.create_node(node.op, node.target, argument(args), argument(kwargs), node.name, node.type)

    def _kept(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The same call in the new program; run on the real tensors."""
        if node.op == "call_module" and node.target not in self.program.meta.get("kept_whole", {}):
            self.kept[node.name] = "the program calls a module; capture it at level 'function' to see inside"
        plain_args, plain_kwargs = concrete(args), concrete(kwargs)
        if node.op == "call_module":
            module = self.program.get_submodule(str(node.target))
            self._state.tensors.save_all(module)
            function: Callable[..., Any] = module
        elif node.op == "call_method":
            function = getattr(plain_args[0], str(node.target))
            plain_args = plain_args[1:]
        else:
            function = node.target
        if node.target in _MOVING:
            for tensor in traced_in((args, kwargs)):
                self._state.tensors.save_if_known(tensor.actual)
                self._state.tensors.keep_place(tensor.actual)
        try:
            value = function(*plain_args, **plain_kwargs)
        except Exception as error:
            # Where casts are operators, what torch's autograd has seen of the run is not what it sees of the program.
            if not (self.without_autocast.has_casts and self.recorder.is_above_autograd) or isinstance(
                error, GraftError
            ):
                raise
            raise BridgeError(
                f"cannot lower '{node.name}' under autocast: {type(error).__name__}: {str(error).partition(chr(10))[0]}\n"
                f"  at {self.recorder.line()}\n  lower the program to level 'aten', or capture it outside of autocast"
            ) from error
        if node.target is enter_context:
            self._contexts.append(value)
        elif node.target is exit_context:
            self._contexts.pop()
        if self.without_autocast.has_casts and is_autocast(node):
            return value  # the casts that it makes are operators
        new = self._copied_kept(node, args, kwargs)
        for tensor in traced_in((args, kwargs)):
            if (
                self.recorder.is_above_autograd
                and tensor.requires_grad != tensor.actual.requires_grad
                and tensor.is_leaf
            ):
                tensor.requires_grad_(tensor.actual.requires_grad)
            if tensor.actual is value:  # it was written, or a flag of it was set
                tensor.source = new
                return tensor
        # It may be, or share memory with, what others hold.
        return self._known(value, new, is_outside=True)

    def _copied_kept(self, node: Node, args: Any, kwargs: Any) -> Node:
        if node.target in _WITHOUT_CASTS:
            return self._copied(node, args, kwargs)
        with self.without_autocast.as_it_was():
            return self._copied(node, args, kwargs)

    def _recorded(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The operators that a call of torch runs, in its place."""
        recorder = self.recorder
        made, given, named = spelled(recorder, node, args, kwargs)
        recorder.flows = flowing(made, given, named)
        before = recorder.graph._root._prev
        try:
            with recording(recorder), recorder.asking():
                value = called(made, plain_values(given), plain_values(named))
        finally:
            recorder.flows = {}
        if is_constant_size(made, value):
            return value
        is_written = recorder.graph._root._prev is not before
        results = leaves(value)
        if not (results and all(map(is_known, results))) and not (value is None and is_written):
            recorder.take_back(before)
            return self.call(kind_of_kept(node, args, kwargs), node, args, kwargs)
        for flow in dict.fromkeys(flows_in((given, named))):
            if not flow.used or not recorder.is_above_autograd:  # the backward may use it, too
                recorder.guard_flow(flow)
            flow.used = False
        return value


def _arithmetic(recorder: Recorder, node: Node, args: Any) -> Any:
    """The result of arithmetic on numbers, itself symbolic."""
    operands = [unwrapped(value) or SymbolicNumber(recorder, value, None) for value in args]
    name = node.target.__name__
    return wrapped(combine(node.target, SIGNS.get(name, name), *operands))


# What casts nothing.
_WITHOUT_CASTS = frozenset(
    {operator.getitem, getattr, setattr, "tolist", "numpy", "data_ptr", enter_context, exit_context}
)
# What may give a tensor another memory.
_MOVING = frozenset({setattr, "set_", "resize_", "resize_as_"})
# What only fetches something, and is needed by nobody but those who use it.
_READS = frozenset({"size", "stride", getattr, operator.getitem})
_READS |= {torch.ops.aten.detach.default, torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default}


def drop_unused(program: GraphModule) -> None:
    """Drop what was fetched and never used, and sizes that nobody needed after all."""
    for node in reversed(program.graph.nodes):
        is_read = node.op == "get_attr" or node.target in _READS
        if is_read and not node._users:
            program.graph.erase_node(node)
