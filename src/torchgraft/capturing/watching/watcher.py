"""The watched run: a model runs once on example inputs, for real, and every torch call it makes is written down.
Which node a value is, is known in `values.py`; what starts a run and what becomes of its graph is in `program.py`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from torchgraft.capturing.flowing.dtypes import FlowingDtype
from torchgraft.capturing.flowing.sizes import SymbolicNumber, wrapped
from torchgraft.capturing.patching.active import active
from torchgraft.capturing.patching.module_patches import ModuleForward, call_module
from torchgraft.capturing.refusals import UnsupportedArgument
from torchgraft.capturing.state.model_state import ModelState, is_from_torch
from torchgraft.capturing.user_code.plain_numbers import asking_code
from torchgraft.capturing.watching.call_arguments import CallArguments
from torchgraft.capturing.watching.hooks import RunHooks
from torchgraft.capturing.watching.parts import concrete, mutable_parts, parts_now, same_parts
from torchgraft.capturing.watching.reads import RESHAPING, KeepWhole, RunAgain, at_line
from torchgraft.capturing.watching.spelling import SPELLINGS, Spelling, spelling_of
from torchgraft.capturing.watching.tensors import has_tensor, tensors_in, versions_in
from torchgraft.capturing.watching.values import MARK
from torchgraft.errors import TraceError
from torchgraft.ir.arguments import EMPTY_DICT
from torchgraft.ir.guards import check_result, check_training, is_guard
from torchgraft.ir.input_kinds import class_name
from torchgraft.ir.modules import has_hooks, hooks_for_all
from torchgraft.ir.node import Node
from torchgraft.ir.origin import current_source_line, user_instruction

_Tensor = torch.Tensor
# Why a small module stays a call: at a level where its mode is given, it need not.
OTHER_MODE = "it does something else in the other mode"


class WatchingMode(TorchFunctionMode):
    """Hands every torch call to the watcher."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watcher = self.watcher
        if watcher._switching or active.tracer is not watcher:
            return function(*args, **(kwargs or {}))
        watcher._instruction = user_instruction(2)
        try:
            return watcher.call(function, args, kwargs or EMPTY_DICT)
        finally:
            watcher._instruction = None


class Watcher(CallArguments):
    """Writes down one run of a model."""

    _runs_for_real = True

    def __init__(
        self,
        root: torch.nn.Module,
        state: ModelState,
        is_leaf: Callable[[torch.nn.Module, str], bool],
        sizes_are_symbolic: bool = True,
        flags_are_plain: bool = False,
        hooks: RunHooks | None = None,
    ) -> None:
        super().__init__(root, state, sizes_are_symbolic)
        self.hooks = hooks or RunHooks()
        self.flags_are_plain = flags_are_plain
        self._is_leaf = is_leaf
        self._whole: dict[torch.nn.Module, bool] = {}
        self._modes: dict[torch.nn.Module, Node] = {}
        # Modules that ran as one call; what they change of themselves, each run of the program changes.
        self.ran_whole: set[torch.nn.Module] = set()
        # Modules that are no part of the model and were asked for their modes, and the module that asked.
        self.asked_modes: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        # What was drawn from the random numbers of Python and numpy; a second run is given the same.
        self.draws: list[Any] = []
        self.replayed: list[Any] | None = None
        self._open_contexts: list[Any] = []
        # Modules that wrote attributes of their own, and how; at the end of the run all has to be as it was.
        self.written: dict[torch.nn.Module, str] = {}
        # Code in which a symbolic number became a plain one, and the names of its file.
        self.asking: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        # A torch call that failed although the run went on: the model caught the error, and was steered by it.
        self.recovered: tuple[torch.nn.Module, str] | None = None

    def be_plain(self, first: Watcher) -> None:
        """Hand out plain numbers, dtypes and modes, and check nothing: this run is only compared with the first."""
        self.is_plain = self.flags_are_plain = True
        self.sizes_are_symbolic = self.dtypes_flow = False
        self.replayed = list(first.draws)

    # ---- calls ----

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch call and write it down."""
        spelling = SPELLINGS.get(function) or spelling_of(function)
        if not spelling.is_usual:
            if spelling.special is not None and args and isinstance(args[0], _Tensor):
                return spelling.special(self, function, args, kwargs)
            if spelling.special is None:
                return self._unusual_call(spelling, function, args, kwargs)
        simple, given = self._simple(args, kwargs)
        if simple is not None:
            arguments, named = simple
        else:
            (arguments, named), args, kwargs = self._taken(args, kwargs, given)
        code, instruction = self._instruction  # type: ignore[misc]
        if spelling.writes(args, kwargs):
            self._before_writing(spelling.name, (args, kwargs))
        self._switching = True  # what torch asks and does on the way is part of this call
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            self._note_failure(error)
            raise
        finally:
            self._switching = False
        if len(args) == spelling.operands and not kwargs and isinstance(args[0], _Tensor):
            opcode, target, wish = "call_function", spelling.operator, spelling.operator_wish
        else:
            opcode, target, wish = spelling.opcode, spelling.target, spelling.wish
        node = self.graph._make_node(opcode, target, arguments, named, wish, None)
        node._origin = (code, instruction, self._scope_chain)
        self.calls.append(node)
        if type(result) is not _Tensor:
            return self._write_down(node, spelling, given, result)
        address = id(result)
        if address not in given and address not in self._outside:
            result.__dict__[MARK] = (self, node)
            return result
        # requires_grad_() and its like write nothing that torch counts.
        return self.register(result, node, {} if spelling.is_written_back else given)

    def call_unseen(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that torch's override protocol is not asked about."""
        with torch._C.DisableTorchFunction():  # else each question about a tensor would come to us
            self._instruction = user_instruction(2)
            try:
                return self.call(function, args, kwargs)
            finally:
                self._instruction = None

    def _unusual_call(self, spelling: Spelling, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if spelling.name == "__get__":
            return self.read(args[0], spelling.property)
        if spelling.on_numbers:
            return self.unwatched(function, *args, **kwargs)
        if spelling.leaves_torch:
            raise KeepWhole(self._modules[-1], f"{spelling.name}() takes a tensor out of torch{at_line()}")
        lowered = self._lowered(args, kwargs)
        args, kwargs = concrete(args), concrete(kwargs)
        if spelling.property:
            self._before_writing(spelling.name, (args, kwargs))
            self.create_call("call_function", setattr, (lowered[0][0], spelling.property, lowered[0][1]), {})
        else:
            self.create_call("call_function", function, *lowered)
        return function(*args, **kwargs)

    def _write_down(self, node: Node, spelling: Spelling, given: dict[int, int], result: Any) -> Any:
        if has_tensor(result):
            if spelling.of_any_length and not self.is_plain and not hasattr(result, "_fields"):
                self._guard_length(node, result, f"{spelling.name}()")
            return self.register(result, node, given)
        if result is None:
            if is_guard(node._target) and not node._input_nodes:
                self.graph.erase_node(node)  # a program inside the model checks what is constant here
            return None
        if not given:
            self.calls.pop()  # says nothing about tensors
            if not self._is_from_numbers(node):
                self.graph.erase_node(node)
                return result
        return self.register_anything(result, node, given, f"{spelling.name}() of a tensor")

    def _is_from_numbers(self, node: Node) -> bool:
        return bool(node._input_nodes)

    def _note_failure(self, error: Exception) -> None:
        if self.recovered is None:
            self.recovered = (self._modules[-1], f"it goes on after {type(error).__name__}{at_line()}")

    def _before_writing(self, name: str, values: Any) -> None:
        for tensor in tensors_in(values):
            if id(tensor) not in self._inputs:
                self.state.tensors.save_if_known(tensor)
            if name in RESHAPING:
                self.settle_sizes(tensor)
                self.state.tensors.keep_place(tensor)
                if self.is_static(tensor) and not (name == "__set__" and _are_of_one_shape(values[0])):
                    raise KeepWhole(self._modules[-1], f"it changes the shape of a tensor that it keeps{at_line()}")

    def call_leaf(
        self, target: Any, function: Callable[..., Any], args: Any, kwargs: Any, name: str | None = None
    ) -> Any:
        """Run a function without looking inside, and write it down as one call."""
        if self._switching or not has_tensor((args, kwargs)):
            return function(*args, **kwargs)
        node = self.create_call("call_function", target, *self._lowered(args, kwargs), name)
        return self.unwatched(self._run_leaf, function, node, concrete(args), concrete(kwargs), None)

    def call_random(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of Python's random numbers or of torch's random state, which gives something else each time."""
        if self._switching:
            return function(*args, **kwargs)
        if function.__name__ == "shuffle":
            raise KeepWhole(self._modules[-1], f"shuffle() puts a list into an order that Python then reads{at_line()}")
        node = self.create_call("call_function", function, *self._lowered(args, kwargs))
        if self.replayed:
            result = self.replayed.pop(0)
        else:
            result = self.unwatched(function, *concrete(args), **concrete(kwargs))
        if isinstance(result, torch.Tensor):
            return self.unwatched(self.register, result, node, {})
        if isinstance(result, (int, float)):
            self.draws.append(result)
            if self.is_plain:
                self.plain[node] = result
                return result
            return wrapped(SymbolicNumber(self, result, lambda: node, f"{function.__name__}()"))
        if result is None or isinstance(result, torch.Generator):
            return result
        raise KeepWhole(self._modules[-1], f"{function.__name__}() draws what cannot be written down{at_line()}")

    def before_packing(self) -> None:
        """An encoder would pack what is not padded, unless gradients are needed."""
        raise KeepWhole(self._modules[-1], "it packs what is not padded where no gradients are needed")

    def before_plain(self, name: str) -> None:
        """Python's `int`, `float` or `len` is about to give a plain number."""
        if active.tracer is self and not self._switching and self.sizes_are_symbolic:
            asking = asking_code(name)
            if asking is not None:
                self.asking[id(asking[0])] = asking

    # ---- modules; the patches of nn.Module ask here ----

    def _call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module; a leaf is written down as one call, any other by what it does."""
        path = self.paths.get(module)
        if path is None or self._switching:
            return self._call_other(module, path, args, kwargs)
        outer = self._scope_chain
        self._scope_chain = (outer, path, path, type(module))
        try:
            if path and self._is_whole(module, path) and not self._has_other_tensors(module):
                return self._call_whole(module, path, args, kwargs)
            self._modules.append(module)
            try:
                self._enter_module(module)
                return call_module(module, *args, **kwargs)
            finally:
                self._modules.pop()
        finally:
            self._scope_chain = outer

    def _call_other(self, module: torch.nn.Module, path: str | None, args: Any, kwargs: Any) -> Any:
        """Run a module that is not the model's, or one inside a call that is written down."""
        if path is None and not self._switching and self._has_other_tensors(module):
            what = f"{type(module).__name__} is called, and is no submodule of the model"
            raise KeepWhole(self._modules[-1], f"{what}{at_line()}")
        self._enter_module(module)
        return call_module(module, *args, **kwargs)

    def _is_whole(self, module: torch.nn.Module, path: str) -> bool:
        known = self._whole.get(module)
        if known is None:
            known = self._is_leaf(module, path) or isinstance(module, torch.jit.ScriptModule)
            self._whole[module] = known
        return self.hooks.make_whole(self, module, known) if has_hooks(module) else known

    def _has_other_tensors(self, module: torch.nn.Module) -> bool:
        """Whether a module has parameters that are not the model's: torch.func.functional_call has put them there, or it is no
        part of the model. (`self.layers[1:]` makes one around modules of the model.)"""
        known = self._names
        for inner in module.modules() if module._modules else (module,):
            for value in inner._parameters.values():
                if value is not None and id(value) not in known:
                    return True
        return False

    def _call_whole(self, m: torch.nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        if hooks_for_all():
            raise KeepWhole(self._modules[-1], f"there are hooks for all modules{at_line()}")
        if parametrize._cache_enabled:  # what is computed once for all calls, a program would compute for each
            raise KeepWhole(self._modules[-1], f"it keeps the results of parametrisations{at_line()}")
        self.ran_whole.add(m)
        is_of_torch = _is_of_torch(m)
        if not is_of_torch or m.__dict__.get("max_norm") is not None:
            self.unwatched(self._keep_all, m)
        with torch._C.DisableTorchFunction():  # else each question about a tensor would come to us
            lowered, given = self._simple(args, kwargs)
            if lowered is not None and is_of_torch and _is_plain_leaf(m):  # nobody would look at the calls inside
                return self._run_plain_leaf(m, self.create_call("call_module", path, *lowered), args, kwargs, given)
        forward: Callable[..., Any] = ModuleForward(m, self)
        if not is_of_torch:
            forward = self.hooks.around(self, m, forward)
        if lowered is not None:
            node = self.create_call("call_module", path, *lowered)
            return self.unwatched(self._run_leaf, forward, node, args, kwargs, given, is_of_torch)
        node = self.create_call("call_module", path, *self._lowered(args, kwargs))
        return self.unwatched(self._run_leaf, forward, node, concrete(args), concrete(kwargs), None, is_of_torch)

    def _run_plain_leaf(
        self, module: torch.nn.Module, node: Node, args: Any, kwargs: Any, given: dict[int, int]
    ) -> Any:
        """The same as `_run_leaf` for a module of torch's that is given tensors and plain values."""
        self._enter_module(module)
        active.tracer, self._switching = None, True
        try:
            result = call_module(module, *args, **kwargs)
        except Exception as error:
            self._note_failure(error)
            raise
        finally:
            active.tracer, self._switching = self, False
        if type(result) is not _Tensor:
            return self.unwatched(self.register_anything, result, node, given, str(node._target))
        if id(result) in given or id(result) in self._outside:
            return self.unwatched(self.register, result, node, given)
        result.__dict__[MARK] = (self, node)
        return result

    def _is_given_plain(self, node: Node) -> bool:
        """Whether a call is given modes or numbers, which the program computes anew."""
        return not self.plain.keys().isdisjoint(node._input_nodes)

    def _guard_kind(self, node: Node, result: Any, make: Callable[[], Node] | None = None) -> None:
        """Have the program check what a call gives that may give something else in another mode: a tuple, say, or None in it."""
        found = node if make is None else make()
        if result is None:
            absent = self.create_node("call_function", operator.is_, (found, None), {})
            self.guard(absent, True, f"the absence of a result of '{node._target}'")
        kind = next((kind for kind in (torch.Tensor, tuple, list, dict) if isinstance(result, kind)), None)
        if kind is None:
            return
        where = str(current_source_line() or "an unknown line")
        length = len(result) if kind is tuple else None
        self.create_node("call_function", check_result, (found, class_name(kind), length, str(node._target), where), {})
        if kind is tuple:
            for index, item in enumerate(result):
                self._guard_kind(node, item, self.part(found, index))

    def _run_leaf(
        self,
        forward: Callable[..., Any],
        node: Node,
        args: Any,
        kwargs: Any,
        given: dict[int, int] | None,
        is_of_torch: bool = True,
    ) -> Any:
        """`given`, where it is known, says that all arguments are tensors and plain values."""
        before = [] if given is not None else mutable_parts((args, kwargs))
        given = versions_in((args, kwargs)) if given is None else given
        try:
            result = forward(*args, **kwargs)
        except Exception as error:
            self._note_failure(error)
            raise
        if any(not same_parts(parts_now(value), parts) for value, parts in before):
            raise KeepWhole(self._modules[-1], f"{node.target} changes an object that it is given")
        # What torch's modules return depends on what they are given; a mode or a number may be something else later.
        if not self.is_plain and (not is_of_torch or self._is_given_plain(node)):
            self._guard_kind(node, result)
        if type(result) is torch.Tensor:
            return self.register(result, node, given)
        return self.register_anything(result, node, given, str(node._target))

    def _keep_all(self, module: torch.nn.Module) -> None:
        for inner in module.modules():
            self.state.watch(inner)
        self.state.tensors.save_all(module)

    def _enter_module(self, module: torch.nn.Module) -> None:
        self.state.watch(module)

    def _is_written_in_place(self, module: torch.nn.Module, name: str, value: Any) -> bool:
        return False  # the value is the buffer itself, and that is no change

    def _before_write(self, module: torch.nn.Module, name: str, value: Any) -> None:
        if self._switching:
            return
        if type(value) is FlowingDtype:  # it may be read where nobody watches
            raise RunAgain(functools.partial(self.ask_plainly, False))
        if module not in self.paths or not self.state.is_change(module, name, value):
            return
        reason = f"it writes self.{name}{at_line()}"
        if not self._may_be_put_back(module, name, value):
            raise KeepWhole(module, reason)
        self.written.setdefault(module, reason)
        self.state.watch(module)

    def _may_be_put_back(self, module: torch.nn.Module, name: str, value: Any) -> bool:
        """Whether an attribute may be written, as a note that is taken away before the run ends: only what is watched reads it.
        Modes, parameters, buffers and modules are also read by what runs as one call."""
        is_state = name == "training" or isinstance(value, (torch.nn.Module, torch.nn.Parameter))
        is_state = is_state or any(name in table for table in (module._parameters, module._buffers, module._modules))
        return not is_state and not (self.paths[module] and self._is_whole(module, self.paths[module]))

    def _before_tensor_write(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        """Somebody writes an attribute onto a tensor, which is lost unless the tensor is."""
        mark = tensor.__dict__.get(MARK)
        if mark is None or mark[0] is not self:
            raise KeepWhole(self._modules[-1], f"it writes the attribute {name} of a tensor{at_line()}")
        self.with_attributes[id(tensor)] = tensor

    def _remembered(self, error: TraceError) -> Any:
        """What a symbolic trace would refuse, a watched run keeps whole; an odd argument may be kept as an object."""
        return error if isinstance(error, UnsupportedArgument) else KeepWhole(self._modules[-1], str(error))

    def _training_decides(self, module: torch.nn.Module) -> bool:
        value = module.__dict__["training"]
        if self.is_plain:
            return value
        if self._modules[-1] is module and self._is_small(module):
            raise KeepWhole(module, f"{OTHER_MODE}{at_line()}")
        if module in self.paths and not self.is_asked(module, "training"):
            where = str(current_source_line() or type(module).__name__)
            self.create_node("call_function", check_training, (self._training_node(module), value, where), {})
        elif module not in self.paths:
            self.asked_modes.append((module, self._modules[-1]))
        return value

    def _is_small(self, module: torch.nn.Module) -> bool:
        """Whether a module inside the model is one that a program may as well call, as it calls a dropout: without modules of its
        own, and torch's or without tensors."""
        is_one = not module._modules and (_is_of_torch(module) or not (module._parameters or module._buffers))
        return is_one and bool(self.paths.get(module))

    def _training_node(self, module: torch.nn.Module) -> Node | bool:
        path, mode = self.paths.get(module), bool(module.__dict__["training"])
        if path is None:  # made by the run, which then makes another one the next time
            self.asked_modes.append((module, self._modules[-1]))
            return mode
        known = self._modes.get(module)
        if known is None:  # the same in all of a run: whoever sets a mode in between is kept whole
            target = f"{path}.training" if path else "training"
            known = self._modes[module] = self.create_node("get_attr", target, (), {})
            self.plain[known] = mode
        return known


def _is_of_torch(module: torch.nn.Module) -> bool:
    return is_from_torch(type(module))  # type: ignore[arg-type]


def _is_plain_leaf(module: torch.nn.Module) -> bool:
    """Whether a module has plain parameters and no modules inside, and no other mode than ours is at work."""
    return (
        not module._modules
        and all(value is None or type(value) is torch.nn.Parameter for value in module._parameters.values())
        and torch._C._len_torch_function_stack() == 1
    )


def _are_of_one_shape(values: Any) -> bool:
    return len({value.shape for value in values if isinstance(value, _Tensor)}) == 1
