"""Which code a call reaches (operator, function of torch's or Python's, module, program, a user's own) and who says what it does.
Answers are kept, and given to passes, by `nodes.py`.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from torchgraft.analysis.effects.declared import PURE, is_declared_effect, is_declared_pure
from torchgraft.analysis.effects.examples import Inputs, Known, Slot
from torchgraft.analysis.effects.findings import OUTSIDE, Effects, Findings, Places
from torchgraft.analysis.effects.operators import Operator, announces_write, operator_of, operator_of_method
from torchgraft.analysis.effects.python_functions import (
    find_python_call,
    is_container_method,
    is_in_place_name,
    is_pure_method_name,
)
from torchgraft.analysis.effects.trials import (
    NOT_TORCHS,
    NotTorchs,
    can_be_tried,
    configuration,
    try_function,
    try_module,
)
from torchgraft.ir.arguments import leaves, map_plain
from torchgraft.ir.modules import has_hooks, hooks_for_all, is_from_torch
from torchgraft.ir.node import Node
from torchgraft.ir.verify import find_attribute

_KEYS = frozenset({int, float, bool, complex, str, bytes, type(None), type(Ellipsis), torch.Size})
_MARKS = frozenset({"_is_impure", PURE})
_PLAIN_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def find_call(node: Any) -> Effects:
    """What a call does, with the numbers of its input nodes in the place of the nodes."""
    call = _Call(node)
    if node.op == "call_module":
        call.find_module()
    elif node.op == "call_method":
        call.find_method(node.target)
    else:
        call.find_function()
    return call.findings.effects()


def call_key(node: Any) -> Any:
    """What decides the effects of a call; TypeError if it cannot be a key, or if the answer must not be kept."""
    keys = _Keys()
    target = node.target
    if node.op == "call_module":
        module = submodule(node.graph.owning_module, target)
        if module is None or not is_from_torch(module) or not _MARKS.isdisjoint(vars(module)):
            raise TypeError("what it does is not known by its configuration")
        try:
            target = configuration(module)
        except NotTorchs as problem:
            raise TypeError from problem
    elif node.op == "call_function":
        if can_be_tried(target):
            keys.shape_of = _shape_of_attribute
        elif isinstance(target, types.FunctionType | torch._ops.HigherOrderOperator):
            raise TypeError("a function of a user's, or of programs")
    args = keys.of(node.args)
    return (node.op, target, args, keys.of(node.kwargs)) if node.kwargs else (node.op, target, args)


class _Keys:
    """Argument trees as keys, with numbers in the place of nodes."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.shape_of: Any = None

    def of(self, value: Any) -> Any:
        cls = type(value)
        if cls is Node or hasattr(cls, "all_input_nodes"):
            number = self.numbers.setdefault(value, len(self.numbers))
            return Node, number, None if self.shape_of is None else self.shape_of(value)
        if cls in _KEYS:
            return cls, value  # 1, 1.0 and True are equal, but not to code that asks for their class
        if isinstance(value, list | tuple):
            return (cls, *map(self.of, value))
        if isinstance(value, dict):
            return (dict, *[(name, self.of(item)) for name, item in value.items()])
        if cls is slice:
            return (slice, self.of(value.start), self.of(value.stop), self.of(value.step))
        if isinstance(value, _PLAIN_TORCH):
            return value
        raise TypeError("not a constant")


class _Call:
    """One call while its effects are being found."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.args, self.kwargs = tuple(node.args), dict(node.kwargs)
        self.findings = Findings()
        self.numbers = {value: number for number, value in enumerate(inputs_of(node))}

    def memory(self, tree: Any) -> Places:
        """The numbers of the nodes in a tree of arguments, and OUTSIDE for a tensor that is a constant."""
        return frozenset(
            [
                OUTSIDE if isinstance(leaf, torch.Tensor) else self.numbers[leaf]
                for leaf in leaves(tree)
                if is_node(leaf) or isinstance(leaf, torch.Tensor)
            ]
        )

    @property
    def everything(self) -> Places:
        return self.memory((self.args, self.kwargs))

    # ---- functions ----

    def find_function(self) -> None:
        target = self.node.target
        found = self.findings
        if is_declared_pure(target):
            found.shares |= self.everything
        elif isinstance(target, types.FunctionType) and is_declared_effect(target):
            found.shares |= {*self.everything, OUTSIDE}
            found.write_outside(f"{_name(target)} was declared to have an effect")
        else:
            self._find_known_function(target)
            if not found.writes and is_declared_effect(target):
                found.write_outside(f"{_name(target)} was declared to have an effect")

    def _find_known_function(self, target: Any) -> None:
        # What torch.library.custom_op returns calls one overload.
        target = getattr(target, "_opoverload", target)
        operator = operator_of("call_function", target)
        if operator is not None:
            self._find_operator(operator, target)
        elif can_be_tried(target):
            self._try_function(target)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self._find_higher_order(target)
        elif isinstance(target, types.MethodDescriptorType | types.WrapperDescriptorType) and issubclass(
            torch.Tensor, target.__objclass__
        ):
            self.find_method(target.__name__)  # torch.Tensor.add(x, y)
        elif isinstance(target, types.MethodWrapperType) and isinstance(target.__self__, types.GetSetDescriptorType):
            self._find_property(target)
        elif _is_symbolic(target) or (isinstance(target, type) and _is_plain_class(target)):
            self.findings.shares |= self.everything
        elif not find_python_call(self.findings, target, self.args, self.kwargs, self.memory):
            self._give_up(f"{_name(target)} {NOT_TORCHS}")

    def _find_operator(self, operator: Operator, target: Any) -> None:
        found = self.findings
        operator.find(found, self.args, self.kwargs, self.memory)
        if found.shares and operator.is_unmarked and not found.writes and not found.unknown:
            tried = try_function(target, self._inputs(lambda node: None))
            if tried is not None:
                found.shares = _outer(tried.shares)

    def _find_property(self, target: Any) -> None:
        """`torch.Tensor.data.__get__(x)`, and its `__set__`."""
        self.findings.shares |= self.everything
        if target.__name__ != "__get__":
            self._give_up(f"sets the attribute {target.__self__.__name__} of a tensor")

    def _find_higher_order(self, target: Any) -> None:
        """An operator on programs (cond, map, …) has the effects of the programs it is given."""
        root = self.node.graph.owning_module
        fetched = [node for node in self.numbers if node.op == "get_attr"]
        programs = {node: module for node in fetched if (module := submodule(root, node.target)) is not None}
        if not programs or not all(map(_is_program, programs.values())):
            self._give_up(f"{_name(target)} calls what is only known when it runs")
            return
        for node, program in programs.items():
            self._find_program(program, f"{node.target}.", self.everything)

    def _give_up(self, reason: str) -> None:
        self.findings.give_up(reason, self.everything)

    # ---- methods ----

    def find_method(self, name: str) -> None:
        """A method of a value of unknown class, taken for a tensor where tensors have such a method."""
        found = self.findings
        owner = self.memory(self.args[:1])
        method = getattr(torch.Tensor, name, None)
        operator = operator_of_method(name)
        is_python = isinstance(method, types.FunctionType)
        if is_in_place_name(name) or (is_python and announces_write(name)):
            found.write(owner, f"{name} writes its object")
            found.shares |= owner
        elif is_python:
            self._try_function(method)
        elif method is not None and operator is not None:
            self._find_operator(operator, method)
        elif method is None and is_pure_method_name(name):
            found.shares |= self.everything
        elif method is None and is_container_method(name):
            found.write(owner, f"{name} changes its object")
            found.shares |= self.everything
        else:
            self._give_up(f"calls the method {name} of a value of unknown class")

    # ---- what is tried ----

    def _try_function(self, function: Any) -> None:
        self._take(
            try_function(function, self._inputs(_shape_of_attribute))
            or try_function(function, self._inputs(_shape_of_value)),
            _name(function),
        )

    def _inputs(self, shape_of: Any) -> Inputs:
        def convert(value: Any) -> Any:
            if is_node(value):
                return Slot(self.numbers[value], shape_of(value))
            if isinstance(value, torch.Tensor):
                return Slot(-1 - len(self.numbers), (tuple(value.shape), value.dtype))
            return value

        return Inputs(map_plain(self.args, convert), map_plain(self.kwargs, convert))

    def _take(self, effects: Effects | None, name: str) -> None:
        if effects is None:
            self._give_up(f"{name} could not be tried: the shapes of its arguments are not known")
            return
        found = self.findings
        found.writes |= _outer(effects.writes)
        found.reasons = dict.fromkeys(effects.reasons)
        found.shares |= _outer(effects.shares)
        found.random |= effects.random
        if effects.unknown:
            self._give_up(f"{name} may do anything")

    # ---- modules ----

    def find_module(self) -> None:
        node, found = self.node, self.findings
        module = submodule(node.graph.owning_module, node.target)
        if module is None:
            self._give_up(f"calls the module '{node.target}', which is not there")
            return
        if module.__dict__.get("_is_impure", getattr(type(module), "_is_impure", False)):
            found.write_outside("the module is marked _is_impure")
        if is_declared_pure(module):
            found.shares |= {*self.everything, ""}
        elif _is_program(module) and not has_hooks(module) and not hooks_for_all():
            self._find_program(module, "", None)
        else:
            try:
                configuration(module)
            except NotTorchs as problem:
                self._give_up(str(problem))
                return
            self._take(
                try_module(module, self._inputs(_shape_of_attribute))
                or try_module(module, self._inputs(_shape_of_value)),
                type(module).__name__,
            )

    def _find_program(self, program: Any, prefix: str, given: Places | None) -> None:
        """Read a program node by node; `prefix` is the path of its state, `given` what may reach any of its inputs."""
        from torchgraft.analysis.effects.nodes import effects_of

        found = self.findings
        places: dict[Any, set[Any]] = {}
        positional = list(self.args)
        for node in program.graph.nodes:
            inputs = set().union(*[places[source] for source in node.all_input_nodes])
            if node.op == "placeholder":
                if given is not None or node.target.startswith("*"):
                    places[node] = set(self.everything if given is None else given)
                else:
                    value = self.kwargs[node.target] if node.target in self.kwargs else positional and positional.pop(0)
                    places[node] = set(self.memory(value))
                continue
            if node.op == "output":
                found.shares |= inputs
                continue
            effects = effects_of(node)

            def outer(place: Any, places: dict[Any, set[Any]] = places) -> set[Any]:
                if is_node(place):
                    return places[place]
                return {place if place == OUTSIDE else f"{prefix}{place}"}

            places[node] = set().union(*map(outer, effects.shares))
            for place in effects.writes:
                found.write(outer(place), f"{program.__class__.__name__}: {'; '.join(effects.reasons)}")
                if is_node(place) and not writes_only_numbers(node):
                    places[place] |= inputs  # a list holds what is put into it
            if effects.random:
                found.draw("; ".join(effects.reasons))
            if effects.unknown:
                self._give_up("; ".join(effects.reasons))


# ---- small questions ----


def is_node(value: Any) -> bool:
    """Whether a value is a node, ours or torch.fx's."""
    return hasattr(type(value), "all_input_nodes")


def inputs_of(node: Any) -> list[Any]:
    """The input nodes in the order in which the arguments mention them, which `call_key` counts too."""
    return list(dict.fromkeys([leaf for leaf in leaves((node.args, node.kwargs)) if is_node(leaf)]))


def writes_only_numbers(node: Any) -> bool:
    """Whether a node that writes changes elements of tensors, and cannot make one value hold or share another, as a list can."""
    target = node.target
    if node.op == "call_method":
        return announces_write(target) and target != "set_"
    if node.op == "call_module":
        return is_from_torch(submodule(node.graph.owning_module, target))
    return operator_of(node.op, target) is not None or can_be_tried(target)


def submodule(root: torch.nn.Module | None, path: str) -> torch.nn.Module | None:
    """The module at a dotted path, without running anything."""
    module = root
    for name in path.split("."):
        children = None if module is None else module.__dict__.get("_modules")
        if not isinstance(children, dict):
            return None
        module = children.get(name)
    return module


def _is_program(module: Any) -> bool:
    # Only a captured program has both; asking any module for `graph` might run a property of the user's.
    cls = type(module)
    return hasattr(cls, "recompile") and hasattr(cls, "graph") and hasattr(module.graph, "owning_module")


def _outer(places: Places) -> set[Any]:
    """Places of a run, where a number below zero is a tensor among the constants."""
    return {OUTSIDE if type(place) is int and place < 0 else place for place in places}


def _is_symbolic(target: Any) -> bool:
    """Whether a function computes on sizes (torch.sym_max, …)."""
    name = getattr(target, "__name__", "")
    if name == "sym_fresh_size":
        return False
    return getattr(target, "__module__", None) == "torch" and name.lstrip("_").startswith(("sym_", "is_"))


def _is_plain_class(cls: type) -> bool:
    """Whether making an object of a class only puts the arguments into it."""
    return cls.__module__ in ("torch", "collections") and not isinstance(vars(cls).get("__init__"), types.FunctionType)


def _shape_of_attribute(node: Any) -> Known | None:
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    value = find_attribute(node.graph.owning_module, node.target)[0]
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def _shape_of_value(node: Any) -> Known | None:
    known = node.meta.get("tensor_meta", node.meta.get("val"))
    shape, dtype = getattr(known, "shape", None), getattr(known, "dtype", None)
    if isinstance(dtype, torch.dtype) and shape is not None and all(type(size) is int for size in shape):
        return tuple(shape), dtype
    return _shape_of_attribute(node)


def _name(known: Any) -> str:
    return getattr(known, "__qualname__", None) or getattr(known, "__name__", None) or type(known).__name__
