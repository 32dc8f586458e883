"""What a watched run hands out in the place of plain sizes, numbers, dtypes and devices, so that the program computes them anew.
Where they are read is in `reads.py`; the objects themselves are in `flowing/`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.capturing.flowing.dtypes import FlowingDtype
from torchgraft.capturing.flowing.sizes import SymbolicNumber, wrapped
from torchgraft.capturing.patching.active import active
from torchgraft.capturing.user_code.plain_numbers import asking_code
from torchgraft.capturing.watching.guards import Guards
from torchgraft.capturing.watching.reruns import RunAgain
from torchgraft.ir.node import Node

if TYPE_CHECKING:
    from torchgraft.capturing.watching.watcher import Watcher


class Flow:
    """Numbers, dtypes and devices of one run that flow; numbers and dtypes hold it, and ask it when they must be plain."""

    # Set when the run is over: what it has handed out and somebody still holds is plain from then on.
    is_over = False
    # How often Python has decided something by comparing numbers.
    decisions = 0

    def __init__(self, watcher: Watcher, guards: Guards, sizes_are_symbolic: bool) -> None:
        self._watcher = watcher
        self.guards = guards
        self.create_node = watcher.create_node
        self.guard_number = guards.number
        self.sizes_are_symbolic = sizes_are_symbolic
        self.dtypes_flow = True
        # What nodes are numbers, dtypes, devices and modes, and which.
        self.plain: dict[Node, Any] = {}
        self._numbers: dict[Node, dict[Any, SymbolicNumber]] = {}
        self._sizes: dict[Node, torch.Size] = {}
        self.dtypes: dict[Node, FlowingDtype] = {}
        # Devices that were read: the device itself (so that its identity stays its own), its node, and the guard on it.
        self._devices: dict[int, tuple[torch.device, Node, Node]] = {}
        # What prepares the next run to hand out plain values of a kind.
        self.ask_plainly: Callable[[str], None] = lambda kind: None
        # Functions that remember results, and were asked about symbolic numbers.
        self.remembering: dict[int, Any] = {}
        # Code in which a symbolic number became a plain one, and the names of its file.
        self.asking: dict[int, tuple[CodeType, dict[str, Any]]] = {}

    def be_plain(self) -> None:
        """Hand out plain values only."""
        self.guards.is_plain = True
        self.sizes_are_symbolic = self.dtypes_flow = False

    # ---- numbers ----

    def takes_usual_case(self, number: SymbolicNumber) -> bool:
        """Whether torch is told the usual answer where it would do with it; here it is told what is so, with a guard."""
        return False

    def symbol(self, value: Any, make: Callable[[], Any], description: str) -> Any:
        """A number as the model sees it, whoever asks for it."""
        return wrapped(SymbolicNumber(self, value, make, description))

    def number(self, node: Node, key: Any, value: Any, make: Callable[[], Any], description: str) -> Any:
        """A number read out of a tensor, as the model sees it; `key` says which one of the node's numbers it is."""
        if self.guards.is_plain:
            return value
        known = self._numbers.setdefault(node, {})
        number = known.get(key)
        if number is None:
            number = known[key] = SymbolicNumber(self, value, make, description)
        if self.sizes_are_symbolic:
            return wrapped(number)
        self.guard_number(number)
        return value

    def sizes(self, node: Node, tensor: torch.Tensor) -> torch.Size:
        """The sizes of the tensor that is the value of a node, as the model sees them."""
        known = self._sizes.get(node)
        if known is None:
            known = tensor.size()
            numbers = self._dimensions(node, known)
            if self.sizes_are_symbolic:
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

    def settle(self, node: Node) -> None:
        """Compute the sizes that were read of a tensor, because it is about to change its shape."""
        self._sizes.pop(node, None)
        self.dtypes.pop(node, None)
        for number in self._numbers.pop(node, {}).values():
            number.argument()

    # ---- dtypes and devices ----

    def dtype(self, node: Node, dtype: torch.dtype) -> FlowingDtype:
        """The dtype of the tensor that is the value of a node, as the model sees it."""
        known = self.dtypes.get(node)
        if known is None:
            fact = self.create_node("call_function", getattr, (node, "dtype"), {})
            known = self.dtypes[node] = self.new_dtype(fact, dtype)
        return known

    def new_dtype(self, node: Node, dtype: torch.dtype) -> FlowingDtype:
        """A dtype that is itself the value of a node."""
        self._watcher._has_stand_ins = True
        return FlowingDtype(self, dtype, node)

    def read_device(self, node: Node, device: torch.device) -> None:
        """Where a device goes is not seen: if it does not come to a torch call, then it was there to decide something."""
        fact = self.create_node("call_function", getattr, (node, "device"), {})
        self.plain[fact] = device
        guard = self.guards.value(fact, device, f"device of '{node.name}'")
        self._devices[id(device)] = (device, fact, guard)

    def device_node(self, device: torch.device) -> Node | None:
        """The node of a device that was read of a tensor and is now handed to a torch call."""
        known = self._devices.get(id(device))
        if known is None:
            return None
        if not known[2]._erased:
            self._watcher.graph.erase_node(known[2])
        return known[1]

    # ---- where numbers and dtypes go that nobody sees ----

    def before_plain(self, name: str) -> None:
        """Python's `int`, `float` or `len` is about to give a plain number."""
        watcher = self._watcher
        if active.tracer is watcher and not watcher._switching and self.sizes_are_symbolic:
            asking = asking_code(name)
            if asking is not None:
                self.asking[id(asking[0])] = asking

    def before_key(self, value: Any) -> None:
        """A number or a dtype is about to be the key of a table, which may outlive the run: plain ones may be."""
        if type(value) is FlowingDtype:
            raise self.plainly("dtypes")
        if not self.sizes_are_symbolic:  # a random number, or a choice by the mode
            raise self._watcher.refusal("a number that each run computes anew is the key of a table")
        raise self.plainly("numbers")

    def plainly(self, kind: str) -> RunAgain:
        """What to raise where "numbers", "dtypes" or "modes" that flow will not do: the run is made again with plain ones."""
        return RunAgain(functools.partial(self.ask_plainly, kind))

    def end(self) -> None:
        """Forget the run; numbers and this refer to one another, which is not left to the garbage collector."""
        vars(self).clear()
        self.is_over = True
