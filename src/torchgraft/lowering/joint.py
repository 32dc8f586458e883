"""Forward and backward of a captured program as one program without state, in ATen operators.
How the operators are written down is in `recorder.py`, how the program is cut in two in `partition.py`.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from torchgraft.capturing.flowing.sizes import unwrapped
from torchgraft.capturing.watching.modules import OTHER_MODE
from torchgraft.codegen.calling import placeholder_values
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BridgeError, GraftError
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import are_different, check_inputs
from torchgraft.ir.node import Node, map_arg
from torchgraft.ir.origin import source_of
from torchgraft.ir.structures import put_together, put_together_record, take_apart
from torchgraft.ir.verify import find_attribute
from torchgraft.lowering.guards import guard_tensors
from torchgraft.lowering.lower import Walk, drop_unused, has_traced, inputs_text, plain_values
from torchgraft.lowering.modes import recording
from torchgraft.lowering.recorder import Recorder, concrete
from torchgraft.lowering.tensors import TracedTensor


class OutputEntry(NamedTuple):
    """What one entry of the output of a training program is.

    `kind` is "result" (of the model, or of the loss), "update" (the new value of a buffer or input that the model writes in
    place), "gradient" (of a parameter or input) or "saved" (for the backward); `name` says of what.
    """

    kind: str
    name: str


class Primal(NamedTuple):
    """An input of the joint program: a tensor that the program holds, or one among its inputs."""

    kind: str
    name: str
    value: torch.Tensor


class Joint(NamedTuple):
    """A joint program, its primals, its results by name and structure, and the attributes that it took for granted."""

    program: GraphModule
    primals: list[Primal]
    results: list[Any]
    structure: Any
    attributes: dict[str, Any]


class _Written(BaseException):
    """Memory of a primal is written: the program has to begin with a copy of it. No Exception, because torch catches those."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.memories = [tensor.untyped_storage()._cdata for tensor in tensors]


def lower_to_joint(program: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], result_name: str) -> Joint:
    """Run a program and its gradients once, and write both down."""
    copied: set[int] = set()
    # Gradients are what is asked for, whatever the caller has switched off around this.
    with torch.inference_mode(False), torch.enable_grad():
        while True:
            walk = _JointWalk(program, placeholder_values(program, args, kwargs), copied)
            try:
                walk.run()
                return walk.finished(result_name)
            except _Written as request:
                copied.update(map(walk.number_of, request.memories))
            except GraftError:
                raise
            except Exception as error:  # the program itself ran when it was captured
                text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}{_at(walk.recorder.above)}"
                raise BridgeError(f"cannot write forward and backward as one program: {text}\n  {_INSTEAD}") from error


_INSTEAD = "train the program at level 'function', whose gradients autograd computes"


def _at(node: Node | None) -> str:
    line = None if node is None else source_of(node)
    return f"\n  at {line}" if line else ""


class _JointWalk(Walk):
    """A run of a program on traced tensors that have gradients."""

    def __init__(self, program: GraphModule, inputs: dict[Node, Any], copied: set[int]) -> None:
        super().__init__(program, Recorder(is_above_autograd=False, decompositions={}), inputs)
        self.primals: list[Primal] = []
        self.attributes: dict[str, Any] = {}
        self.result: Any = None
        self._own = copied
        self._traced_primals: list[TracedTensor] = []
        self._current: list[TracedTensor] = []
        self._by_identity: dict[int, int] = {}
        self._seen_gradients: set[Any] = set()

    def number_of(self, memory: int) -> int:
        """The primal with this memory."""
        memories = [item.actual.untyped_storage()._cdata for item in self._traced_primals]
        found = [index for index, item in enumerate(memories) if item == memory]
        if len(found) > 1:
            names = " and ".join([f"'{self.primals[index].name}'" for index in found[:2]])
            raise BridgeError(
                f"cannot write forward and backward as one program: {names} share memory, and one of them is written\n"
                "  give each a memory of its own with clone()"
            )
        return found[0]

    # ---- primals ----

    def begin(self) -> None:
        """Make the inputs of the joint program."""
        for kind, name, tensor in _held(self.program):
            self._add(Primal(kind, name, tensor), tensor)
        self._seen: dict[int, torch.Tensor] = {}
        self._inputs = {node: self._input(str(node.target), value) for node, value in self.inputs.items()}
        named = dict(zip([item.name for item in self.primals], self._traced_primals, strict=True))
        inputs = {item.name: named[item.name] for item in self.primals if item.kind == "input"}
        held = {name: tensor for name, tensor in named.items() if name not in inputs}
        guard_tensors(self.recorder, inputs, held, inputs_text(self.program))
        with recording(self.recorder):
            self._current = [
                torch.ops.aten.clone.default(item) if index in self._own else item
                for index, item in enumerate(self._traced_primals)
            ]
        # What was copied is the program's own.
        self.recorder.before_write = self._refuse_write

    def _refuse_write(self, actual: torch.Tensor) -> None:
        memory = actual.untyped_storage()._cdata
        if any(item.actual.untyped_storage()._cdata == memory for item in self._traced_primals):
            raise _Written(actual)

    def _add(self, primal: Primal, tensor: torch.Tensor) -> int:
        node = self.recorder.create_node("placeholder", f"primals_{len(self.primals) + 1}", (), {})
        node.meta["origin_kind"], node.meta["origin_name"] = primal.kind, primal.name
        actual = primal.value.detach()
        traced = self.recorder.traced(actual, node, is_static=primal.kind != "input", is_outside=True)
        traced.requires_grad_(primal.value.requires_grad)
        self._by_identity[id(tensor)] = len(self.primals)
        self.primals.append(primal)
        self._traced_primals.append(traced)
        return len(self.primals) - 1

    def _input(self, name: str, value: Any) -> Any:
        """An input with numbers of primals in the places of its tensors."""
        known = {primal.name for primal in self.primals}
        pairs, spec = pytree.tree_flatten_with_path(value)
        leaves = []
        for path, leaf in pairs:
            if not isinstance(leaf, torch.Tensor):
                leaves.append(leaf)
                continue
            title = name.lstrip("*") + pytree.keystr(path)
            # A parameter may be called like an input, and gradients are looked up by name.
            title = f"input {title}" if title in known else title
            detached = leaf.detach().requires_grad_(leaf.requires_grad)
            leaves.append(_Place(self._add(Primal("input", title, detached), leaf)))
        return pytree.tree_unflatten(leaves, spec)

    def _placeholder(self, node: Node) -> Any:
        return pytree.tree_map(
            lambda leaf: self._current[leaf] if isinstance(leaf, _Place) else leaf, self._inputs[node]
        )

    def _attribute(self, target: str) -> Any:
        value, problem = find_attribute(self.program, target)
        assert problem is None, problem
        if isinstance(value, torch.Tensor):
            return self._current[self._by_identity[id(value)]]
        if type(value) in (bool, int, float, str, type(None)):
            self.attributes[target] = value
        return value

    # ---- calls ----

    def node(self, node: Node) -> Any:
        """Write down one node; gradients that are computed for it later come from its line, too."""
        if node.op == "output":
            result = map_arg(node.args[0], self.env.__getitem__)
            # An object of a class that torch has been told how to take apart stays what it is.
            known = pytree.SUPPORTED_NODES.get(type(result)) if isinstance(node.args[0], Node) else None
            is_known = known is not None and known.flatten_with_keys_fn is not None and isinstance(result, dict)
            self.result = result if is_known else plain_values(result)
            return None
        if node.target is check_inputs:
            return None  # the inputs are in another form here; whoever flattens them checks that
        value = super().node(node)
        for leaf in pytree.tree_leaves(value):
            if type(leaf) is TracedTensor and leaf.grad_fn is not None:
                self._mark_gradients(leaf.grad_fn, node)
        return value

    def _traced(self, node: Node, args: Any, kwargs: Any) -> Any:
        try:
            return super()._traced(node, args, kwargs)
        except RuntimeError as error:
            # An input that autograd takes for a leaf is written: the copy of one is no leaf.
            if "leaf Variable that requires grad" in str(error) and self._leaves():
                raise _Written(*[self._traced_primals[index].actual for index in self._leaves()]) from error
            raise

    def _leaves(self) -> list[int]:
        kinds = [primal.kind == "input" and primal.value.requires_grad for primal in self.primals]
        return [index for index, is_leaf in enumerate(kinds) if is_leaf and index not in self._own]

    def _mark_gradients(self, function: Any, node: Node) -> None:
        pending = [function]
        while pending:
            current = pending.pop()
            if current is None or current in self._seen_gradients:
                continue
            self._seen_gradients.add(current)
            current.register_prehook(functools.partial(self._enter_gradient, node))
            pending += [item for item, _ in current.next_functions]

    def _enter_gradient(self, node: Node, gradients: Any) -> None:
        self.recorder.above = node

    def _kept(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Calls that compute no tensors stay; what runs a user's Python has no gradient that could be written down."""
        if node.op == "call_module" or "" in self.program.meta.get("kept_whole", {}):
            return self._called_module(node, args, kwargs)
        if node.op == "call_function" and (node.target in _ABOUT_INPUTS or _home(node) == "torchgraft.ir.input_kinds"):
            return node.target(*concrete(args), **concrete(kwargs))
        if node.target is getattr and node.args[1] in _ABOUT_GRADIENTS:
            return (
                getattr(args[0], str(node.args[1])) if isinstance(args[0], torch.Tensor) else getattr(*concrete(args))
            )
        if node.target is setattr and type(args[0]) is TracedTensor:
            raise BridgeError(
                f"cannot write forward and backward as one program: it writes {args[1]} of a tensor{_at(node)}\n"
                "  write it in place with copy_()"
            )
        if node.target not in _OF_EVERY_RUN and (not has_traced((args, kwargs)) or node.target in _FACTS):
            return super()._kept(node, args, kwargs)
        function, args, kwargs = node.target, plain_values(args), plain_values(kwargs)
        if node.op == "call_method":
            function, args = getattr(args[0], str(node.target)), args[1:]
        with recording(self.recorder):
            value = function(*args, **kwargs)
        if node.target is enter_context:
            self._contexts.append(value)
        elif node.target is exit_context:
            self._contexts.pop()
        return value

    def _called_module(self, node: Node, args: Any, kwargs: Any) -> Any:
        """A part that was kept whole because it chooses by its mode is run in the mode it is in; any other is refused."""
        kept = self.program.meta.get("kept_whole", {})
        reason = kept.get(str(node.target), kept.get(""))
        if node.op == "call_module" and reason is not None and OTHER_MODE in reason:
            module = self.program.get_submodule(str(node.target))
            self.attributes[f"{node.target}.training"] = module.training
            with recording(self.recorder):
                return module(*plain_values(args), **plain_values(kwargs))
        name = "the model" if "" in kept else f"'{node.target}'"
        raise BridgeError(
            f"cannot write forward and backward as one program: {name} is one call that runs Python"
            f"{f'{chr(10)}  because {reason}' if reason else _at(node)}\n"
            f"  rewrite it with tensor operations, or {_INSTEAD}"
        )

    # ---- results and gradients ----

    def finished(self, result_name: str) -> Joint:
        """The program with its gradients and outputs."""
        recorder = self.recorder
        pairs, structure = pytree.tree_flatten_with_path(self.result)
        named = [(result_name + pytree.keystr(path), leaf) for path, leaf in pairs]
        learning = {name: leaf for name, leaf in named if type(leaf) is TracedTensor and leaf.requires_grad}
        results: dict[str, Any] = {}
        places = [_named(name, leaf, results) for name, leaf in named]
        if not any(type(value) is TracedTensor for value in results.values()):
            raise BridgeError(
                f"cannot write the backward of {type(self.program).__name__}: it returns {type(self.result).__name__}, in which "
                "there are no tensors\n  return tensors in a tuple, list or dict"
            )
        outputs = [(OutputEntry("result", name), recorder.argument(value)) for name, value in results.items()]
        for index, (primal, now) in enumerate(zip(self.primals, self._current, strict=True)):
            if index in self._own:
                outputs.append((OutputEntry("update", primal.name), now.node))
        outputs += self._gradients(learning)
        recorder.note_numbers()
        finish(recorder.graph, outputs)
        module = GraphModule({}, recorder.graph, f"{type(self.program).__name__}Joint")
        drop_unused(module)
        return Joint(module, self.primals, places, structure, self.attributes)

    def _gradients(self, results: dict[str, TracedTensor]) -> list[tuple[OutputEntry, Any]]:
        wanted = [index for index, item in enumerate(self._traced_primals) if item.requires_grad]
        if not results:
            raise BridgeError(
                f"cannot write the backward of {type(self.program).__name__}: no result depends on a parameter or input that "
                "requires a gradient\n  switch it on with requires_grad_(), and return the result in a tuple, list or dict"
            )
        tangents = self._tangents(results)
        self.recorder.is_backward = True
        # What autograd asks before its first step, it asks about the results.
        self.recorder.above = self.program.graph.output_node().all_input_nodes[0]
        try:
            with recording(self.recorder):
                found: Any = torch.autograd.grad(
                    list(results.values()),
                    [self._traced_primals[index] for index in wanted],
                    tangents,
                    allow_unused=True,
                )
        finally:
            self.recorder.is_backward, self.recorder.above = False, None
        pairs = zip(wanted, found, strict=True)
        return [
            (OutputEntry("gradient", self.primals[index].name), item.node) for index, item in pairs if item is not None
        ]

    def _tangents(self, results: dict[str, TracedTensor]) -> list[TracedTensor]:
        """Inputs for the gradients of the results, behind the primals."""
        graph, tangents = self.recorder.graph, []
        last = graph.find_nodes(op="placeholder")[-1]
        for number, (name, result) in enumerate(results.items(), 1):
            with graph.inserting_after(last):
                last = graph.placeholder(f"tangents_{number}")
            last.meta["origin_kind"], last.meta["origin_name"] = "tangent", name
            tangent = self.recorder.traced(
                torch.ones_like(result.actual), last, is_static=result.is_static, is_outside=True
            )
            tangent.sizes = None if result.is_static else result.symbolic_sizes()
            tangents.append(tangent)
        return tangents


def finish(graph: Graph, outputs: list[tuple[OutputEntry, Any]]) -> None:
    """Add the output to a training program, with its entries named."""
    output = graph.output(tuple([value for _, value in outputs]))
    output.meta["entries"] = [entry for entry, _ in outputs]
    output.meta["val"] = map_arg(output.args[0], lambda node: node.meta.get("val"))


class _Place(int):
    """The number of a primal, in the place of a tensor among inputs."""


class Name(str):
    """The name of a result, in the place of a tensor among results."""


def _named(name: str, leaf: Any, results: dict[str, Any]) -> Any:
    """A part of the result with names in the places of what every run computes: tensors and sizes, added to the results.

    What is in an object of its own kind, as in a cache of keys and values, is returned; it is given no tangent.
    """
    template, parts = take_apart(leaf, lambda item: type(item) is TracedTensor or unwrapped(item) is not None)
    names = [Name(name if part is leaf else f"{name}: part {index}") for index, part in enumerate(parts)]
    results.update(zip(names, parts, strict=True))
    return put_together(template, *names)


# Regions, and results made of values that every run computes, which may be sizes or lie inside an object.
_OF_EVERY_RUN = frozenset({enter_context, exit_context, put_together, put_together_record})
# What takes a value apart or asks something about it: the program does so, too.
_FACTS = frozenset({getattr, operator.getitem})
# Questions about inputs that are asked when a step is run, before they become primals.
_ABOUT_INPUTS = frozenset({isinstance, operator.is_, are_different, type, hasattr})
# Facts about tensors that are as they were when the program was captured: primals are detached.
_ABOUT_GRADIENTS = frozenset({"requires_grad", "is_leaf", "grad_fn", "retains_grad", "grad"})


def _home(node: Node) -> str:
    return getattr(node.target, "__module__", None) or ""


def _held(program: GraphModule) -> list[tuple[str, str, torch.Tensor]]:
    """The tensors that a program fetches: its parameters, its buffers, then constants; each once."""
    targets = dict.fromkeys(str(node.target) for node in program.graph.find_nodes(op="get_attr"))
    kinds: dict[str, str] = {}
    for kind, pairs in (
        ("parameter", program.named_parameters(remove_duplicate=False)),
        ("buffer", program.named_buffers(remove_duplicate=False)),
    ):
        kinds |= {name: kind for name, _ in pairs if name in targets}
    kinds |= {name: "constant" for name in targets if name in program.graph._constants or name not in kinds}
    order = sorted(kinds, key=lambda name: ("parameter", "buffer", "constant").index(kinds[name]))
    found: dict[int, tuple[str, str, torch.Tensor]] = {}
    for name in order:
        value, _ = find_attribute(program, name)
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), (kinds[name], name, value))
    return list(found.values())
