"""Forward and backward of a captured program as one program without state, in ATen operators.
How the operators are written down is in `operators.py`, how the program is cut in two in `partition.py`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchgraft.capturing.whole import call_whole, whole_model
from torchgraft.codegen.calling import placeholder_values
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BridgeError, GraftError
from torchgraft.ir.arguments import leaves
from torchgraft.ir.contexts import enter_context, exit_context
from torchgraft.ir.guards import check_inputs, check_length
from torchgraft.ir.node import Node
from torchgraft.ir.origin import source_of
from torchgraft.ir.verify import find_attribute
from torchgraft.lowering.autocast import active_casts
from torchgraft.lowering.entries import Joint, OutputEntry, Primal, finish, held_tensors, named_parts
from torchgraft.lowering.guards import guard_state, guard_tensors
from torchgraft.lowering.kept_calls import record_kept, refuse_own_learning
from torchgraft.lowering.kinds import Kind
from torchgraft.lowering.lower import Walk, drop_unused, inputs_text
from torchgraft.lowering.modes import recording
from torchgraft.lowering.operators import part_of
from torchgraft.lowering.recorder import Recorder, ViewWritten
from torchgraft.lowering.tensors import TracedTensor
from torchgraft.lowering.values import concrete, plain_values, traced_in


class _Written(BaseException):
    """Memory of a primal is written: the program has to begin with a copy of it. No Exception, because torch catches those."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.memories = [tensor.untyped_storage()._cdata for tensor in tensors]


def lower_to_joint(program: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], result_name: str) -> Joint:
    """Run a program and its gradients once, and write both down."""
    kept = program.meta.get("kept_whole", {})
    if "" in kept and whole_model(program) is None:
        what = f"the function is one call that runs Python\n  because {kept['']}"
        raise _refusal(what, f"rewrite it with tensor operations, or {_INSTEAD}")
    copied: set[int] = set()
    may_take_usual_case, keeps_views = True, False
    # Gradients are what is asked for, whatever the caller has switched off around this.
    with torch.inference_mode(False), torch.enable_grad():
        while True:
            walk = _JointWalk(program, placeholder_values(program, args, kwargs), copied)
            walk.recorder.may_take_usual_case, walk.recorder.keeps_views = may_take_usual_case, keeps_views
            try:
                walk.run()
                if not walk.written:
                    return walk.finished(result_name)
            except _Written as request:
                walk.written.update(request.memories)
            except ViewWritten:
                keeps_views = True
            except GraftError:
                raise
            except Exception as error:  # the program itself ran when it was captured
                if walk.recorder.took_usual_case:  # a size of 1 is broadcast: what torch asks is answered, and checked
                    may_take_usual_case = False
                elif not walk.written:  # else it may run where it writes copies
                    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                    raise _refusal(text + _at(walk.recorder.above), _INSTEAD) from error
            copied.update(map(walk.number_of, walk.written))


def _refusal(what: str, remedy: str) -> BridgeError:
    return BridgeError(f"cannot write forward and backward as one program: {what}\n  {remedy}")


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
        self.modules: dict[str, torch.nn.Module] = {}
        self.result: Any = None
        self._own = copied
        # The memories of the primals that were written: the program has to begin with copies of these.
        self.written: set[int] = set()
        self._traced_primals: list[TracedTensor] = []
        self._current: list[TracedTensor] = []
        self._by_identity: dict[int, int] = {}
        self._seen_gradients: set[Any] = set()
        # Objects with traced tensors in them, which calls that stayed one call have returned.
        self._objects: dict[int, Any] = {}

    def number_of(self, memory: int) -> int:
        """The primal with this memory."""
        memories = [item.actual.untyped_storage()._cdata for item in self._traced_primals]
        found = [index for index, item in enumerate(memories) if item == memory]
        if len(found) > 1:
            names = " and ".join([f"'{self.primals[index].name}'" for index in found[:2]])
            raise _refusal(
                f"{names} share memory, and one of them is written", "give each a memory of its own with clone()"
            )
        return found[0]

    # ---- primals ----

    def begin(self) -> None:
        """Make the inputs of the joint program."""
        for primal in held_tensors(self.program):
            if primal.value._backward_hooks:
                raise _refusal(f"'{primal.name}' has a hook that changes its gradient", f"remove it, or {_INSTEAD}")
            self._add(primal, primal.value)
        self._inputs = {node: self._input(str(node.target), value) for node, value in self.inputs.items()}
        named = dict(zip([item.name for item in self.primals], self._traced_primals, strict=True))
        inputs = {item.name: named[item.name] for item in self.primals if item.kind == "input"}
        guard_tensors(self.recorder, inputs, inputs_text(self.program))
        guard_state(self.recorder, [name for name in named if name not in inputs], named.__getitem__)
        self.begin_operators()
        with recording(self.recorder):
            self._current = [
                torch.ops.aten.clone.default(item) if index in self._own else item
                for index, item in enumerate(self._traced_primals)
            ]
        # What was copied is the program's own.
        self.recorder.before_write = self._before_write

    def _before_write(self, actual: torch.Tensor) -> None:
        """Note that a primal is written, and go on where that can be undone: there may be hundreds of them."""
        memory = actual.untyped_storage()._cdata
        if any(item.actual.untyped_storage()._cdata == memory for item in self._traced_primals):
            if not self._state.tensors.save_if_known(actual):
                raise _Written(actual)
            self.written.add(memory)

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
            return self._of(value)
        if type(value) in (bool, int, float, str, type(None)):
            self.attributes[target] = value
        return value

    def _of(self, tensor: torch.Tensor) -> TracedTensor:
        return self._current[self._by_identity[id(tensor)]]

    def _known(self, value: Any, node: Node, is_outside: bool = False) -> Any:
        """Numbers in a list that the backward may need stay symbolic, one by one."""
        if type(value) is not list or not value or any(type(item) is not int for item in value):
            return super()._known(value, node, is_outside)
        recorder = self.recorder
        arguments = (node, len(value), f"the length of '{node.name}'", recorder.line())
        recorder.create_node("call_function", check_length, arguments, {})
        items = enumerate(value)
        return [recorder.number(item, part_of(recorder, node, index), f"{node.name}[{index}]") for index, item in items]

    # ---- calls ----

    def node(self, node: Node) -> Any:
        """Write down one node; gradients that are computed for it later come from its line, too."""
        value = super().node(node)
        for leaf in pytree.tree_leaves(value):
            if type(leaf) is TracedTensor and leaf.requires_grad:
                self._mark_gradients(self._gradient_of(leaf), node)
        return value

    def _gradient_of(self, tensor: TracedTensor) -> Any:
        # Of a view whose base was written, torch makes the gradient function when it is asked, by taking the view again.
        with recording(self.recorder) if tensor._is_view() else contextlib.nullcontext():
            return tensor.grad_fn

    def _output(self, args: Any) -> None:
        node, (result,) = self.program.graph.output_node(), args
        # An object of a class that torch has been told how to take apart stays what it is.
        known = pytree.SUPPORTED_NODES.get(type(result)) if isinstance(node.args[0], Node) else None
        stays = known is not None and known.flatten_with_keys_fn is not None and isinstance(result, dict)
        self.result = result if stays else plain_values(result)

    def _recorded(self, node: Node, args: Any, kwargs: Any) -> Any:
        try:
            return super()._recorded(node, args, kwargs)
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

    def call(self, kind: Kind, node: Node, args: Any, kwargs: Any) -> Any:
        """Do with a call what is done with its kind, where gradients are wanted."""
        if node.target is check_inputs:
            return None  # the inputs are in another form here; whoever flattens them checks that
        if kind is Kind.QUESTION:  # asked when a step is run, before inputs become primals
            return node.target(*concrete(args), **concrete(kwargs))
        if kind is Kind.GRADIENT:  # as it was when the program was captured: primals are detached
            return getattr(*(args if isinstance(args[0], torch.Tensor) else concrete(args)))
        if kind is Kind.WRITE:
            if args[1:] == ("requires_grad", True) and self._is_inner(args[0]):
                args[0].requires_grad_()  # nobody gets that gradient
                return None
            raise _refusal(f"it writes {args[1]} of a tensor{_at(node)}", "write it in place with copy_()")
        if kind is Kind.REGION or kind is Kind.RESULT:
            return self._run(node, args, kwargs)
        if kind is Kind.MODULE:
            return self._module(str(node.target), self.program.get_submodule(str(node.target)), args, kwargs)
        if node.target is call_whole and (model := whole_model(self.program)) is not None:
            _, _, positional, packed, named, packed_named = args
            return self._module("model", model, (*positional, *packed), {**named, **packed_named})
        if node.target is operator.getitem and isinstance(args[0], (tuple, list, dict)):
            return self._hold(self._run(node, args, kwargs))
        if node.target is torch._pack_padded_sequence:  # its gradient reads numbers that traced tensors do not show
            return self._one_call(node, args, kwargs)
        if kind is Kind.FOREIGN or (node.target is operator.getitem and kind is Kind.READ and traced_in(args)):
            return self._foreign(node, args, kwargs)
        if any(id(leaf) in self._objects for leaf in leaves((args, kwargs))):
            return self._hold(self._run(node, args, kwargs))
        if kind is Kind.OPERATORS:
            return self._unless_fixed(functools.partial(super().call, kind), node, args, kwargs, True)
        return super().call(kind, node, args, kwargs)

    def _is_inner(self, value: Any) -> bool:
        """Whether a traced tensor was made by the program: it is neither an input nor state."""
        actual = value.actual if type(value) is TracedTensor else None
        return actual is not None and all(actual is not primal.actual for primal in self._traced_primals)

    def _unless_fixed(self, write: Callable[..., Any], node: Node, args: Any, kwargs: Any, is_torch: bool) -> Any:
        """What a call computes, unless sizes of this run go into that, or decide in a function that is not torch's: then it stays
        one call, if it can."""
        recorder = self.recorder
        last, fixed, decisions = recorder.begin(node), recorder.fixed, recorder.decisions
        value = write(node, args, kwargs)
        is_free = recorder.fixed == fixed and (is_torch or recorder.decisions == decisions)
        if is_free or node.name in self.kept or recorder.has_written(last):
            return value
        recorder.take_back(last)
        try:
            return self._one_call(node, args, kwargs)
        except Exception:
            recorder.take_back(last)
            return write(node, args, kwargs)

    def _run(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Make a call on traced tensors; what it computes with them is recorded."""
        function, args, kwargs = node.target, plain_values(args), plain_values(kwargs)
        if node.op == "call_method":
            function, args = getattr(args[0], str(node.target)), args[1:]
        with recording(self.recorder):
            value = function(*args, **kwargs)
        if function is enter_context:
            self._contexts.append(value)
        elif function is exit_context:
            self._contexts.pop()
        return value

    def _foreign(self, node: Node, args: Any, kwargs: Any) -> Any:
        if node.name not in self.kept:  # it was not tried yet
            last = self.recorder.begin(node)
            try:
                return self._unless_fixed(self._run, node, args, kwargs, False)
            except Exception as error:
                self.recorder.take_back(last)
                self.kept[node.name] = f"{type(error).__name__}: {error}"
        return self._one_call(node, args, kwargs)

    def _one_call(self, node: Node, args: Any, kwargs: Any) -> Any:
        function = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        return self._record_kept(function, function, {}, args, kwargs)

    def _module(self, path: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """A module that was kept whole is one call, with its parameters among the primals."""
        named = {name: self._of(value) for name, value in module.named_parameters()}
        self._state.tensors.save_all(module)
        refuse_own_learning(module, args, kwargs)
        fetched = self.recorder.create_node("get_attr", path, (), {})
        self.modules[path] = module
        return self._record_kept(module, fetched, named, args, kwargs)

    def _record_kept(self, function: Any, spelled: Any, state: dict[str, Any], args: Any, kwargs: Any) -> Any:
        with self.without_autocast.as_it_was():
            return self._hold(record_kept(self.recorder, function, spelled, state, args, kwargs))

    def _hold(self, value: Any) -> Any:
        if not isinstance(value, (torch.Tensor, bool, int, float, str, type(None))):
            self._objects[id(value)] = value
        return value

    # ---- results and gradients ----

    def finished(self, result_name: str) -> Joint:
        """The program with its gradients and outputs."""
        recorder = self.recorder
        pairs, structure = pytree.tree_flatten_with_path(self.result)
        named = [(result_name + pytree.keystr(path), leaf) for path, leaf in pairs]
        learning = {name: leaf for name, leaf in named if type(leaf) is TracedTensor and leaf.requires_grad}
        results: dict[str, Any] = {}
        places = [named_parts(name, leaf, results) for name, leaf in named]
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
        self.without_autocast.close()
        recorder.note_numbers()
        finish(recorder.graph, outputs)
        module = GraphModule(self.modules, recorder.graph, f"{type(self.program).__name__}Joint")
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
            # `loss.backward()` stands behind the user's region of autocast, not inside it.
            with contextlib.ExitStack() as without, recording(self.recorder):
                for device, _ in active_casts():
                    without.enter_context(torch.autocast(device, enabled=False))
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


class _Place(int):
    """The number of a primal, in the place of a tensor among inputs."""
