"""The calls of a watched run: each is made for real and written down, with what it is given and what it gives.
How a function is spelled in a program is in `spelling.py`; calls of modules are in `modules.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.capturing.watching.arguments import Arguments
from torchgraft.capturing.watching.parts import concrete, mutable_parts, parts_now, same_parts
from torchgraft.capturing.watching.reads import Reads
from torchgraft.capturing.watching.reruns import KeepWhole, at_line
from torchgraft.capturing.watching.spelling import SPELLINGS, Spelling, spelling_of
from torchgraft.capturing.watching.tensors import has_tensor, versions_in
from torchgraft.capturing.watching.values import MARK, Values
from torchgraft.capturing.watching.writes import Writes
from torchgraft.ir.answers import ANSWER, looks_of
from torchgraft.ir.guards import is_guard, is_told_length
from torchgraft.ir.node import Node
from torchgraft.ir.origin import user_instruction

if TYPE_CHECKING:
    from torchgraft.capturing.watching.watcher import Watcher

_Tensor = torch.Tensor


class Calls:
    """Makes the calls of one run and writes them down."""

    def __init__(self, watcher: Watcher, values: Values, arguments: Arguments, reads: Reads, writes: Writes) -> None:
        self._watcher, self._values, self._arguments, self._reads, self._writes = (
            watcher, values, arguments, reads, writes,
        )  # fmt: skip
        self._make_node = watcher.graph._make_node
        # The nodes of calls, in order; all others fetch, compute numbers, or check.
        self.nodes: list[Node] = []
        # A call that failed although the run went on: the model caught the error, and was steered by it.
        self.recovered: tuple[torch.nn.Module, str] | None = None
        # What was drawn from the random numbers of Python and numpy; a second run is given the same.
        self.draws: list[Any] = []
        self.replayed: list[Any] | None = None

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch call and write it down."""
        watcher, values = self._watcher, self._values
        spelling = SPELLINGS.get(function) or spelling_of(function)
        if not spelling.is_usual:
            if spelling.special is not None and args and isinstance(args[0], _Tensor):
                return spelling.special(self._reads, function, args, kwargs)
            if spelling.special is None:
                return self._unusual_call(spelling, function, args, kwargs)
        simple, given = self._arguments.simple(args, kwargs)
        if simple is not None:
            arguments, named = simple
        else:
            (arguments, named), args, kwargs = self._arguments.taken(args, kwargs, given)
        code, instruction = watcher._instruction  # type: ignore[misc]
        if spelling.writes(args, kwargs):
            self._writes.before_call(spelling.name, (args, kwargs))
        watcher._switching = True  # what torch asks and does on the way is part of this call
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            self.note_failure(error)
            raise
        finally:
            watcher._switching = False
        if len(args) == spelling.operands and not kwargs and isinstance(args[0], _Tensor):
            opcode, target, wish = "call_function", spelling.operator, spelling.operator_wish
            if spelling.is_reflected:
                if isinstance(args[1], _Tensor):  # the operator would ask the other one first
                    opcode, target, wish = spelling.opcode, spelling.target, spelling.wish
                else:
                    arguments = arguments[::-1]
        else:
            opcode, target, wish = spelling.opcode, spelling.target, spelling.wish
        node = self._make_node(opcode, target, arguments, named, wish, None)
        node._origin = (code, instruction, watcher._scope_chain)
        self.nodes.append(node)
        if type(result) is not _Tensor:
            return self._write_down(node, spelling, given, result)
        address = id(result)
        if address not in given and address not in values.outside:
            result.__dict__[MARK] = (values, node)
            return result
        # requires_grad_() and its like write nothing that torch counts.
        return values.register(result, node, {} if spelling.is_written_back else given)

    def unseen(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that torch's override protocol is not asked about."""
        with torch._C.DisableTorchFunction():  # else each question about a tensor would come to us
            self._watcher._instruction = user_instruction(2)
            try:
                return self.call(function, args, kwargs)
            finally:
                self._watcher._instruction = None

    def _unusual_call(self, spelling: Spelling, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watcher = self._watcher
        if spelling.name == "__get__":
            return self._reads.property_of(args[0], spelling.property)
        if spelling.on_numbers:
            return watcher.unwatched(function, *args, **kwargs)
        if spelling.leaves_torch:
            raise watcher.refusal(f"{spelling.name}() takes a tensor out of torch")
        lowered = self._arguments.lowered(args, kwargs)
        args, kwargs = concrete(args), concrete(kwargs)
        if spelling.property:
            self._writes.before_call(spelling.name, (args, kwargs))
            watcher.create_call("call_function", setattr, (lowered[0][0], spelling.property, lowered[0][1]), {})
        else:
            watcher.create_call("call_function", function, *lowered)
        return function(*args, **kwargs)

    def _write_down(self, node: Node, spelling: Spelling, given: dict[int, int], result: Any) -> Any:
        """Note what a call gives that is no plain tensor."""
        watcher = self._watcher
        if has_tensor(result):
            is_open = spelling.of_any_length and not is_told_length(spelling.name, node.args, node.kwargs)
            if is_open and not watcher.is_plain and not hasattr(result, "_fields"):
                watcher.guards.length(node, result, f"{spelling.name}()")
            return self._values.register(result, node, given)
        if result is None:
            if is_guard(node._target) and not node._input_nodes:
                watcher.graph.erase_node(node)  # a program inside the model checks what is constant here
            return None
        if not given:
            self.nodes.pop()  # says nothing about tensors
            if not node._input_nodes:  # nor about numbers
                watcher.graph.erase_node(node)
                return result
        return self._values.register_anything(result, node, given, f"{spelling.name}() of a tensor")

    def note_failure(self, error: Exception) -> None:
        """A call has failed; whether that ends the run is not known yet."""
        if self.recovered is None:
            self.recovered = (self._watcher.modules.stack[-1], f"it goes on after {type(error).__name__}{at_line()}")

    # ---- calls that are not looked into ----

    def leaf(
        self,
        target: Any,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        name: str | None = None,
        always: bool = False,
    ) -> Any:
        """Run a function without looking inside, and write it down as one call; without tensors only if it is `always` to be."""
        if self._watcher._switching or not (always or has_tensor((args, kwargs))):
            return function(*args, **kwargs)
        # It may write into parameters that it is given.
        self._watcher.unwatched(self._writes.before_call, "", (args, kwargs))
        node = self._watcher.create_call("call_function", target, *self._arguments.lowered(args, kwargs), name)
        node.meta["is_wrapped"] = True  # it stays one call where the program is traced in its turn
        result = self._watcher.unwatched(self.run_whole, function, node, concrete(args), concrete(kwargs), None)
        if always:  # whoever runs the program without data cannot ask again
            node.meta[ANSWER] = self._watcher.unwatched(looks_of, result)
        return result

    def run_whole(
        self,
        function: Callable[..., Any],
        node: Node,
        args: Any,
        kwargs: Any,
        given: dict[int, int] | None,
        is_of_torch: bool = True,
    ) -> Any:
        """Run what is one call; `given`, where it is known, says that all arguments are tensors and plain values."""
        before = [] if given is not None else mutable_parts((args, kwargs))
        given = versions_in((args, kwargs)) if given is None else given
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            self.note_failure(error)
            raise
        if any(not same_parts(parts_now(value), parts) for value, parts in before):
            module = self._watcher.modules.stack[-1]
            raise KeepWhole(module, f"{node.target} changes an object that it is given")
        # What torch's modules return depends on what they are given; a mode or a number may be something else later.
        is_open = not is_of_torch or not self._watcher.flow.plain.keys().isdisjoint(node._input_nodes)
        if is_open and not self._watcher.is_plain:
            self._watcher.guards.kind(node, result, str(node._target))
        if type(result) is torch.Tensor:
            return self._values.register(result, node, given)
        return self._values.register_anything(result, node, given, str(node._target))

    def random(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of Python's random numbers or of torch's random state, which gives something else each time."""
        watcher = self._watcher
        if watcher._switching:
            return function(*args, **kwargs)
        if function.__name__ == "shuffle":
            raise watcher.refusal("shuffle() puts a list into an order that Python then reads")
        node = watcher.create_call("call_function", function, *self._arguments.lowered(args, kwargs))
        if self.replayed:
            result = self.replayed.pop(0)
        else:
            result = watcher.unwatched(function, *concrete(args), **concrete(kwargs))
        if isinstance(result, torch.Tensor):
            return watcher.unwatched(self._values.register, result, node, {})
        if isinstance(result, (int, float)):
            self.draws.append(result)
            if watcher.is_plain:
                watcher.flow.plain[node] = result
                return result
            return watcher.flow.symbol(result, lambda: node, f"{function.__name__}()")
        if result is None or isinstance(result, torch.Generator):
            return result
        raise watcher.refusal(f"{function.__name__}() draws what cannot be written down")
