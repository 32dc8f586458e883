"""What Python reads out of tensors during a watched run: sizes, items, dtypes, devices. A number that only flows on stays
symbolic (`sizes.py`); whatever decides something becomes a guard. Calls that make tensors are in `watcher.py`.
"""

from __future__ import annotations

import dis
import functools
import operator
import os
import sys
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from torchgraft.capturing.flowing.dtypes import FlowingDtype, plain_dtype
from torchgraft.capturing.flowing.memos import take_out
from torchgraft.capturing.flowing.sizes import SymbolicNumber, unwrapped, wrapped
from torchgraft.capturing.tracer_base import TracerBase
from torchgraft.ir.bytecode import instructions
from torchgraft.ir.guards import check_value
from torchgraft.ir.input_kinds import is_parameter
from torchgraft.ir.node import Node
from torchgraft.ir.origin import asked_once, at, current_source_line, is_user_code

# Properties that say nothing about what a program computes.
_UNGUARDED = frozenset({"_backward_hooks", "output_nr", "data", "_version"})
# What is present or absent, and otherwise no value that could be compared.
_PRESENT_OR_ABSENT = frozenset({"grad_fn", "grad", "_base"})
# What the copies that the run gets do not have in common with the inputs.
_LOST_BY_COPYING = frozenset({"_base", "_version"})
_TO_NUMBER = frozenset({"__bool__", "__int__", "__float__", "__index__", "__complex__"})
# Calls that give a tensor another shape in place: sizes read before them have to be computed before them.
RESHAPING = frozenset(
    {
        "t_",
        "transpose_",
        "swapaxes_",
        "swapdims_",
        "squeeze_",
        "unsqueeze_",
        "resize_",
        "resize_as_",
        "set_",
        "as_strided_",
    }
    | {"__set__"}
)


class KeepWhole(BaseException):
    """A module does something that cannot be written down; capture is tried again with it as one call.

    No Exception, because a model may catch those.
    """

    def __init__(self, module: torch.nn.Module | None, reason: str) -> None:
        super().__init__(reason)
        self.module = module
        self.reason = reason


class RunAgain(BaseException):
    """The run is better made once more, after something was prepared for it. No Exception, because a model may catch those."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        super().__init__()
        self.prepare = prepare


def at_line() -> str:
    """The user's line that is running, for the end of a sentence."""
    return at(current_source_line())


class Reads(TracerBase):
    """The part of a watcher that answers questions about tensors."""

    sizes_are_symbolic: bool
    _instruction: tuple[CodeType | None, int] | None
    _modules: list[torch.nn.Module]
    _inputs: set[int]

    # Set when the run is over: what it has handed out and somebody still holds is plain from then on.
    is_over = False

    def __init__(self) -> None:
        # Whether everything is handed out plain, and nothing is checked: a run that is only compared with another.
        self.is_plain = False
        # What nodes are numbers, dtypes, devices and modes, and which.
        self.plain: dict[Node, Any] = {}
        # Numbers and dtypes that were keys of tables.
        self._keys: list[weakref.ref[Any]] = []
        # Functions that remember results, and were asked about symbolic numbers.
        self.remembering: dict[int, Any] = {}
        self._numbers: dict[Node, dict[Any, SymbolicNumber]] = {}
        self._sizes: dict[Node, torch.Size] = {}
        self._guarded: set[Any] = set()
        self.dtypes_flow = True
        self._dtypes: dict[Node, FlowingDtype] = {}
        # Called where symbolic dtypes, and modes (if true), will not do, before the run is made again.
        self.ask_plainly: Callable[[bool], None] = lambda flags: None
        # Devices that were read: the device itself (so that its identity stays its own), its node, and the guard on it.
        self._devices: dict[int, tuple[torch.device, Node, Node]] = {}

    def node_of(self, tensor: torch.Tensor) -> Node:
        """The node whose value a tensor is."""
        raise NotImplementedError

    def is_static(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the same size in every run."""
        raise NotImplementedError

    def register(self, result: Any, node: Any, given: dict[int, int]) -> Any:
        """Note that a result is the value of a node."""
        raise NotImplementedError

    # ---- guards ----

    def guard(self, node: Any, expected: Any, condition: str) -> Node:
        """Have the program check that a value is what it is in this run."""
        where = str(current_source_line() or "an unknown line")
        if isinstance(node, Node) and node._op == "call_method" and node._target == "item" and not node.users:
            node = node._args[0]  # the guard looks into the tensor itself
        return self.create_node("call_function", check_value, (node, self.create_arg(expected), condition, where), {})

    def is_asked(self, *key: Any) -> bool:
        """Whether a guard is not needed: nothing is checked in this run, or the same was asked before."""
        if self.is_plain or key in self._guarded:
            return True
        self._guarded.add(key)
        return False

    def guard_fact(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        """Have the program check a property of a tensor, once."""
        node = self.node_of(tensor)
        if not self.is_asked(node, name):
            fact = self.create_node("call_function", getattr, (node, name), {})
            self.guard(fact, value, f"{name} of '{node.name}'")

    def guard_class(self, tensor: torch.Tensor) -> None:
        """Have the program check, once, whether an input is a parameter; every other class is checked anyway."""
        if id(tensor) in self._inputs and not self.is_asked(id(tensor), "class"):
            node = self.node_of(tensor)
            answer = self.create_node("call_function", is_parameter, (node,), {})
            self.guard(answer, type(tensor) is torch.nn.Parameter, f"isinstance('{node.name}', Parameter)")

    def guard_number(self, number: SymbolicNumber) -> None:
        """Python asked for the plain value: from here on the program is right only for this one."""
        node = number.argument()
        if isinstance(node, Node) and not self.is_asked(node, "value"):
            self.guard(node, number.value, str(number))

    def guard_dtype(self, dtype: FlowingDtype) -> None:
        """Python asked for the plain dtype."""
        if not self.is_asked(dtype.node, "value"):
            self.guard(dtype.node, dtype.value, dtype.described())

    def guarded_comparison(self, one: FlowingDtype, other: Any) -> bool:
        """Whether a dtype equals another, which the program checks, once."""
        answer = one.value is plain_dtype(other)
        if answer and type(other) is not FlowingDtype:
            self.guard_dtype(one)
        operand = other.node if type(other) is FlowingDtype else other
        is_known = (one.node, "value") in self._guarded and (operand is other or (operand, "value") in self._guarded)
        if not is_known and not self.is_asked(one.node, operand):
            equal = self.create_node("call_function", operator.eq, (one.node, operand), {})
            text = other.described() if type(other) is FlowingDtype else str(other)
            self.guard(equal, answer, f"({one.described()} == {text})")
        return answer

    def guarded_part(self, node: Node, name: str, value: Any) -> Any:
        """An attribute of a plain value, which the program checks, once."""
        if not self.is_asked(node, name):
            part = self.create_node("call_function", getattr, (node, name), {})
            self.guard(part, value, f"{name} of '{node.name}'")
        return value

    # ---- numbers ----

    def number(self, node: Node, key: Any, value: Any, make: Callable[[], Any], description: str) -> Any:
        """A number read out of a tensor, as the model sees it; `key` says which one of the node's numbers it is."""
        if self.is_plain:
            return value
        known = self._numbers.setdefault(node, {})
        number = known.get(key)
        if number is None:
            number = known[key] = SymbolicNumber(self, value, make, description)
        if self._numbers_flow():
            return wrapped(number)
        self.guard_number(number)
        return value

    def _numbers_flow(self) -> bool:
        """Whether the function that asks is given symbolic numbers."""
        return self.sizes_are_symbolic and not asks_types(self._instruction[0] if self._instruction else None)

    def settle_sizes(self, tensor: torch.Tensor) -> None:
        """Compute the sizes that were read of a tensor, because it is about to change its shape."""
        node = self.node_of(tensor)
        self._sizes.pop(node, None)
        self._dtypes.pop(node, None)
        for number in self._numbers.pop(node, {}).values():
            number.argument()

    def _size(self, tensor: torch.Tensor) -> torch.Size:
        if self.is_plain or self.is_static(tensor):
            return tensor.size()
        node = self.node_of(tensor)
        known = self._sizes.get(node)
        if known is None:
            known = tensor.size()
            numbers = self._dimensions(node, known)
            if self._numbers_flow():
                known = self._sizes[node] = torch.Size([wrapped(number) for number in numbers])
            else:
                for number in numbers:
                    self.guard_number(number)
        return known

    def _dimensions(self, node: Node, sizes: torch.Size) -> list[SymbolicNumber]:
        known = self._numbers.setdefault(node, {})
        for index, value in enumerate(sizes):
            if index not in known:
                make = functools.partial(self.create_node, "call_method", "size", (node, index), {})
                known[index] = SymbolicNumber(self, value, make, f"{node._name}.size({index})")
        return [known[index] for index in range(len(sizes))]

    def call_size(self, function: Any, args: Any, kwargs: Any) -> Any:
        sizes = self._size(args[0])
        dimension = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return sizes if dimension is None else sizes[int(dimension)]

    def call_len(self, function: Any, args: Any, kwargs: Any) -> int:
        if not args[0].dim():
            return len(args[0])
        number = self._size(args[0])[0]
        if unwrapped(number) is not None:
            self.before_plain("len")
        return int(number)

    def before_key(self, value: Any) -> None:
        """Called where a number or a dtype is about to be the key of a table, which may outlive the run."""
        self._keys.append(weakref.ref(value))

    def take_out_keys(self) -> bool:
        """Take the numbers of this run out of tables that outlive it; whether there were any."""
        keys, self._keys = [key() for key in self._keys], []
        self._sizes.clear()
        return take_out([key for key in keys if key is not None])

    def before_plain(self, name: str) -> None:
        """Called where a number is about to become a plain one, by Python's function of this name."""

    def call_numel(self, function: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if self.is_plain or self.is_static(tensor):
            return tensor.numel()
        node = self.node_of(tensor)
        make = functools.partial(self.create_node, "call_method", "numel", (node,), {})
        return self.number(node, "numel", tensor.numel(), make, f"{node._name}.numel()")

    def call_dim(self, function: Any, args: Any, kwargs: Any) -> int:
        # torch asks before it iterates, and unbind() refuses a tensor without dimensions just as well.
        if (
            not self.is_plain
            and not self.is_static(args[0])
            and sys._getframe(3).f_code is not torch.Tensor.__iter__.__code__
        ):
            self.guard_fact(args[0], "ndim", args[0].dim())
        return args[0].dim()

    def call_item(self, function: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if tensor.device.type == "meta":
            raise KeepWhole(self._modules[-1], f"the value of a tensor without data was read{at_line()}")
        value = tensor.item()
        if self.is_plain:
            return value
        node = self.node_of(tensor)
        # Made now: the tensor may be written into before the number is used.
        item = self.create_node("call_method", "item", (node,), {})
        if isinstance(value, complex):
            self.guard(item, value, f"{node.name}.item()")
            return value
        return self.number(item, "item", value, lambda: item, f"{node.name}.item()")

    def call_number(self, function: Any, args: Any, kwargs: Any) -> Any:
        number = self.call_item(function, args[:1], {})
        symbol = unwrapped(number)
        if symbol is not None and function.__name__ in ("__int__", "__float__"):
            self.before_plain(function.__name__.strip("_"))
        return function(args[0]) if symbol is None else function(torch.tensor(symbol._decide()))

    # ---- properties ----

    def read(self, tensor: Any, name: str) -> Any:
        """A property of a tensor."""
        if name == "shape":
            return self._size(tensor)
        result = getattr(tensor, name)
        if name in _LOST_BY_COPYING and id(tensor) in self._inputs:
            raise KeepWhole(self._modules[-1], f"{name} of an input was read{at_line()}")
        if name in _PRESENT_OR_ABSENT and not self.is_plain:
            self._guard_presence(tensor, name, result)
        if isinstance(result, torch.Tensor):
            node = self.create_node("call_function", getattr, (self.node_of(tensor), name), {})
            return self.register(result, node, {})
        if self.is_plain:
            return result
        if name == "device":
            self._read_device(tensor, result)
        elif name == "dtype" and self.dtypes_flow and _may_flow(sys._getframe(4).f_code):
            return self._flowing(tensor, result)
        elif name == "ndim" and self.is_static(tensor):
            return result
        elif name not in _UNGUARDED and name not in _PRESENT_OR_ABSENT:
            self.guard_fact(tensor, name, result)
        return result

    def _guard_presence(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        fact = self.create_node("call_function", getattr, (self.node_of(tensor), name), {})
        absent = self.create_node("call_function", operator.is_, (fact, None), {})
        self.guard(absent, value is None, f"absence of {name} of '{self.node_of(tensor).name}'")

    def _read_device(self, tensor: torch.Tensor, device: torch.device) -> None:
        if _is_taken_apart(*(self._instruction or (None, 0))):
            self.guard_fact(tensor, "device", device)
            return
        # Where it goes is not seen: if it does not come to a torch call, then it was there to decide something.
        node = self.node_of(tensor)
        fact = self.create_node("call_function", getattr, (node, "device"), {})
        self.plain[fact] = device
        self._devices[id(device)] = (device, fact, self.guard(fact, device, f"device of '{node.name}'"))

    def _flowing(self, tensor: torch.Tensor, dtype: torch.dtype) -> FlowingDtype:
        node = self.node_of(tensor)
        known = self._dtypes.get(node)
        if known is None:
            self._has_stand_ins = True
            fact = self.create_node("call_function", getattr, (node, "dtype"), {})
            known = self._dtypes[node] = FlowingDtype(self, dtype, fact)
        return known

    def device_node(self, device: torch.device) -> Node | None:
        """The node of a device that was read of a tensor and is now handed to a torch call."""
        known = self._devices.get(id(device))
        if known is None:
            return None
        if not known[2]._erased:
            self.graph.erase_node(known[2])
        return known[1]


@asked_once
def _may_flow(code: CodeType) -> bool:
    """Whether a function that reads a dtype may be given one that flows: the rest of torch compares by identity."""
    return is_user_code(code) or code.co_filename.startswith(_LAYERS)


_LAYERS = os.path.dirname(torch.nn.__file__) + os.sep


@asked_once
def asks_types(code: CodeType | None) -> bool:
    """Whether a function compares the type of something, which for a symbolic number is not what it is for a plain one."""
    if code is None:
        return False
    if not _SYMBOLIC_CLASSES.isdisjoint(code.co_names):
        return is_user_code(code)
    if "type" not in code.co_names:
        return False
    listing = [item for item in instructions(code) if item.opname not in ("PUSH_NULL", "PRECALL")]
    for place, item in enumerate(listing):
        if item.opname in ("LOAD_GLOBAL", "LOAD_NAME") and item.argval == "type":
            following = listing[place + 1 : place + 6]
            if following[0].argval != "self" and any(after.opname in _COMPARISONS for after in following):
                return True
    return False


_COMPARISONS = ("COMPARE_OP", "IS_OP", "CONTAINS_OP")
_SYMBOLIC_CLASSES = frozenset({"SymInt", "SymFloat", "SymBool"})


@asked_once
def _is_taken_apart(code: CodeType | None, instruction: int) -> bool:
    """Whether the instruction reads a device that is then compared or asked for its type, as far as one function shows."""
    if code is None:
        return False
    listing = [item for item in instructions(code) if item.opname not in ("PUSH_NULL", "PRECALL")]
    positions = {item.offset: place for place, item in enumerate(listing)}
    place = positions.get(instruction)
    if place is None or place + 1 >= len(listing):
        return False
    if _decides(listing, place):
        return True
    following = listing[place + 1]
    if not following.opname.startswith("STORE_"):
        return False
    loads = [index for index, item in enumerate(listing) if _loads(item, following.argval)]
    return any(_decides(listing, index) for index in loads)


def _loads(item: dis.Instruction, name: Any) -> bool:
    # Python 3.13 loads two variables at once; then argval has both names.
    return item.opname.startswith("LOAD_") and (
        item.argval == name or (type(item.argval) is tuple and name in item.argval)
    )


def _decides(listing: list[dis.Instruction], place: int) -> bool:
    following = listing[place + 1 : place + 3]
    if following and following[0].opname in ("LOAD_ATTR", "LOAD_METHOD") and following[0].argval in ("type", "index"):
        return True
    return any(item.opname in _COMPARISONS for item in following)


# How a method or function that reads is answered, by its name.
SPECIAL: dict[str, Any] = {
    "size": Reads.call_size,
    "__len__": Reads.call_len,
    "numel": Reads.call_numel,
    "nelement": Reads.call_numel,
    "dim": Reads.call_dim,
    "ndimension": Reads.call_dim,
    "item": Reads.call_item,
    **dict.fromkeys(_TO_NUMBER, Reads.call_number),
}
