"""A run of a model under one of torch's own tracers, watched: what it asks about tensors and torch, which becomes conditions of
its program, and what it does that no operator says, which is refused. What is left behind in the model is in `model_watch.py`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from operator import is_
from types import FrameType, TracebackType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchgraft.bridge.input_guards import FACTS
from torchgraft.bridge.model_watch import AttributeWatch, custom_gradient, forward_of, unknown_leaf
from torchgraft.bridge.refusals import (
    refuse_attributes,
    refuse_call,
    refuse_custom_gradient,
    refuse_gradient,
    refuse_hidden_parameter,
    refuse_random,
)
from torchgraft.capturing.active import Patch, acquire_all, active, release_all
from torchgraft.capturing.autograd_functions import FUNCTION_PATCHES
from torchgraft.capturing.kinds import PARAMETER_PATCH, type_patches
from torchgraft.capturing.packing import PACKING_PATCHES
from torchgraft.capturing.parts import mutable_parts, parts_now, same_parts
from torchgraft.capturing.switches import SWITCH_PATCHES
from torchgraft.capturing.wrapping import seed_patches
from torchgraft.ir.origin import SourceLine, at, current_source_line, is_user_code


class Asked:
    """What a model asked while it ran: `facts` about tensors, by their names in `input_guards.py`; `situation`: conditions on
    torch, each with the line that asks; and `recovers`: whether it goes on after errors of torch's."""

    def __init__(self) -> None:
        self.facts: set[str] = set()
        self.situation: dict[str, str] = {}
        self.recovers = False


class RunWatch:
    """Watches one run of the forward of a model; `refuse_found` raises if the program would not do what the model did.

    >>> model, asked = torch.nn.ReLU(), Asked()
    >>> with RunWatch([model], (torch.ones(2),), {}, asked) as run:
    ...     torch.is_grad_enabled()
    True
    >>> list(asked.situation)
    ['torch.is_grad_enabled() == True']
    """

    def __init__(
        self, modules: list[torch.nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked
    ) -> None:
        self.asked = asked
        self._modules = modules
        self._attributes = [AttributeWatch(module) for module in modules]
        self._inputs = InputWatch(args, kwargs)
        self._tensors = TensorWatch(modules, (args, kwargs))
        self._calls = CallWatch(asked, [part for module in modules for part in module.parameters()], (args, kwargs))
        self._listener = Listener(asked)
        self._changed: list[str] = []

    def __enter__(self) -> RunWatch:
        function = forward_of(self._modules[0])
        inner = [part for module in self._modules for part in module.modules()]
        self._patches = [*SWITCH_PATCHES, *FUNCTION_PATCHES, PARAMETER_PATCH, *PACKING_PATCHES, _DEVICE_PATCH]
        self._patches += [*seed_patches(), *type_patches(function, inner)]
        acquire_all(self._patches)
        self._step_hook = register_optimizer_step_pre_hook(self._listener.note_step)
        self._before, active.listener = active.listener, self._listener
        self._calls.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._calls.__exit__(kind, error, trace)
        active.listener = self._before
        self._step_hook.remove()
        release_all(self._patches)
        self._changed = [name for watch in self._attributes for name in watch.restore()]
        self._changed += [*self._inputs.changed(), *self._tensors.changed()]

    def refuse_found(self, model: torch.nn.Module) -> None:
        """Raise for what no ATen program does, with or without gradients."""
        if self._changed:
            refuse_attributes(model, self._changed)
        what = self._listener.what or self._calls.what
        if what is not None:
            refuse_call(model, what)
        random = self._listener.seeding or self._calls.random
        if random is not None:
            refuse_random(model, random)

    def refuse_gradients(self, model: torch.nn.Module, result: Any) -> None:
        """Raise for gradients that are made in another way than from operators."""
        for what, line in (self._calls.gradient, self._listener.gradient):
            if what is not None:
                refuse_gradient(model, what, line)
        if torch.is_grad_enabled() and (model._backward_hooks or model._backward_pre_hooks):
            refuse_gradient(model, "has a backward hook", None)
        name = custom_gradient(result)
        if name is not None:
            refuse_custom_gradient(model, name)
        if unknown_leaf(result, self._tensors.tensors):
            refuse_hidden_parameter(model)


class Listener:
    """Hears what a model asks and switches past the operators; the patches that tell it are in `capturing/`."""

    def __init__(self, asked: Asked) -> None:
        self.what: str | None = None
        # That torch's random numbers were seeded, or their state read or set.
        self.seeding: str | None = None
        self.gradient: tuple[str | None, SourceLine | None] = (None, None)
        self._asked = asked
        self._owner = threading.get_ident()

    def ask_situation(self, what: str, answer: Any, frame: FrameType) -> None:
        """The user asks torch about the situation."""
        if is_user_code(frame.f_code):
            self._asked.situation.setdefault(f"{what} == {answer!r}", at(current_source_line()))

    def ask_class(self, tensor: torch.Tensor) -> type:
        """The user asks for the class of a tensor, and is told that of the tensor it stands for."""
        self._asked.facts.add("class")
        stands_in = type(tensor).__module__.startswith("torch._subclasses.")
        return type(tensor) if not stands_in else _parameter_or_tensor(tensor)

    def before_packing(self) -> None:
        """An encoder would pack what is not padded, unless gradients are needed."""
        if torch.is_grad_enabled():
            self._asked.situation.setdefault("torch.is_grad_enabled() == True", at(current_source_line()))

    def use_function(self, cls: Any) -> None:
        """A torch.autograd.Function is called; somebody may need its backward."""
        if not cls.__module__.startswith("torch.") or cls.__module__ == "torch.utils.checkpoint":
            self._asked.facts.add("requires_grad")

    def refuse(self, what: str, frame: FrameType) -> None:
        """The user switches something that torch's own tracers do not see."""
        if not is_user_code(frame.f_code) or torch.compiler.is_dynamo_compiling():
            return
        if "saved_tensors_hooks" in what:
            self.gradient = ("changes the tensors that are saved for the backward", current_source_line())
        elif self.what is None:
            self.what = f"{what}{at(current_source_line())}"
            raise _Refused(self.what)

    def note_seeding(self, name: str, frame: FrameType) -> None:
        """Torch's random numbers are seeded, or their state read or set."""
        if self.seeding is None and not _is_compiling(frame) and (name not in _READS or is_user_code(frame.f_code)):
            self.seeding = f"calls torch.{name}(){at(current_source_line())}"

    def note_step(self, optimizer: Any, *call: Any) -> None:
        """An optimizer is about to change parameters."""
        if threading.get_ident() == self._owner and self.what is None:
            self.what = f"calls {type(optimizer).__name__}.step(){at(current_source_line())}"
            raise _Refused(self.what)


class _Refused(RuntimeError):
    """Ends a run before something happens that could not be put back; what is raised in the end is made from the note."""


def _parameter_or_tensor(tensor: torch.Tensor) -> type:
    return torch.nn.Parameter if getattr(tensor, "_is_param", False) else torch.Tensor


_read_device = vars(FakeTensor)["device"].fget


def _device(tensor: FakeTensor) -> torch.device:
    """The device of a tensor that stands for another: a property of Python's, so that no mode sees who reads it."""
    listener = active.listener
    if listener is not None and is_user_code(sys._getframe(1).f_code):
        listener._asked.facts.add("device")
    return _read_device(tensor)


_DEVICE_PATCH = Patch(FakeTensor, "device", property(_device))  # type: ignore[arg-type]


class CallWatch(TorchFunctionMode):
    """Notes what a forward asks about tensors, and the first thing that it does to gradients by hand, in `gradient`."""

    def __init__(self, asked: Asked, parameters: list[torch.Tensor], inputs: Any = ()) -> None:
        super().__init__()
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        self._given = {_place(tensor) for tensor in tensors if tensor.layout is torch.strided}
        # The memory of which it is not said in the program whether it is that of another tensor.
        self._undecided: set[int] = set()
        # They need not be of the class while a tracer runs.
        self._parameters = {id(parameter) for parameter in parameters}
        self.what: str | None = None
        self.gradient: tuple[str | None, SourceLine | None] = (None, None)
        self.random: str | None = None
        self._asked = asked
        self._inference = torch.is_inference_mode_enabled()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name in ("__get__", "__set__", "__delete__") else name
        if name in FACTS and is_user_code(sys._getframe(1).f_code):
            self._asked.facts.add(FACTS[name])
        if self.random is None and kwargs and isinstance(kwargs.get("generator"), torch.Generator):
            self.random = f"draws from a torch.Generator{at(current_source_line())}"
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        self._note(func, name, args)
        result = func(*args, **(kwargs or {}))
        self._note_memory(name, args, result)
        return result

    def _note_memory(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Whether a tensor is a view or a copy may depend on how it lies in memory, which tells where it is written or given."""
        source = args[0] if args else None
        if not isinstance(source, torch.Tensor) or source.layout is not torch.strided or _has_no_memory(source):
            return
        if name in _MAY_COPY and isinstance(result, torch.Tensor):
            if name == "contiguous" and result is source:
                self._asked.facts.add("stride")  # a tracer drops what makes no copy
            self._undecided |= {_place(source), _place(result)}
            if _place(source) in self._given:
                self._asked.facts.add("memory")
        elif (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))) and self._undecided:
            if _place(source) in self._undecided:
                self._asked.facts.add("memory")

    def _note(self, func: Any, name: str, args: tuple[Any, ...]) -> None:
        if func is torch._C._set_grad_enabled and args[0] and torch.is_grad_enabled() and _is_switched_by_user():
            # A tracer drops what switches nothing; while gradients are off, it does.
            self._asked.situation.setdefault("torch.is_grad_enabled() == True", at(current_source_line()))
        if name == "grad" and self.what is None and self._is_parameter(args[0]):
            self.what = f"reads or writes the .grad of a parameter{at(current_source_line())}"
        if self.gradient[0] is not None:
            return
        if func in _HOOKS:
            self.gradient = ("puts a hook on a tensor", current_source_line())
        elif func in _SWITCHES and self._is_parameter(args[0]):
            self.gradient = ("switches the gradient of a parameter", current_source_line())
        elif torch.is_inference_mode_enabled() != self._inference:
            self.gradient = ("switches torch.inference_mode()", current_source_line())

    def _is_parameter(self, value: Any) -> bool:
        return id(value) in self._parameters or isinstance(value, torch.nn.Parameter)


def _is_switched_by_user() -> bool:
    """Whether gradients are switched by the model's own code, and not by a function of torch's that it calls (`torch.cond`)."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.endswith(_SWITCHING_FILES):
        frame = frame.f_back
    return frame is not None and is_user_code(frame.f_code)


# Where torch has `enable_grad` and its like, and what makes decorators of them.
_SWITCHING_FILES = (os.path.join("autograd", "grad_mode.py"), os.path.join("utils", "_contextlib.py"))


def _has_no_memory(tensor: torch.Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


_MAY_COPY = frozenset({"contiguous", "flatten", "ravel", "reshape", "reshape_as", "to"})
_HOOKS = frozenset({torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook})
_SWITCHES = frozenset({torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__})  # type: ignore[attr-defined]


_READS = ("get_rng_state", "initial_seed")


def _is_compiling(frame: FrameType | None) -> bool:
    """Whether torch's compiler is at work, for `torch.cond` say: it saves the state of random numbers, and puts it back."""
    while frame is not None and not is_user_code(frame.f_code):
        if frame.f_globals.get("__name__", "").startswith("torch._dynamo."):
            return True
        frame = frame.f_back
    return False


class InputWatch:
    """The containers and objects among the inputs of a call, to be compared."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._before = mutable_parts((list(args), dict(kwargs)))
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda value: isinstance(value, deque))
        self._queues = [(leaf, list(leaf)) for leaf in leaves if isinstance(leaf, deque)]

    def changed(self) -> list[str]:
        """The kinds of those that were changed."""
        changed = [value for value, parts in self._before if not same_parts(parts_now(value), parts)]
        changed += [
            queue for queue, items in self._queues if len(queue) != len(items) or not all(map(is_, queue, items))
        ]
        return [f"a {type(value).__name__} that it is given" for value in changed]


class TensorWatch:
    """The attributes of tensors that a model is given or holds, to be compared.

    >>> x = torch.ones(2)
    >>> watch = TensorWatch([], x)
    >>> x.label = "cat"
    >>> watch.changed()
    ["the attribute 'label' of a tensor that it is given"]
    """

    def __init__(self, modules: list[torch.nn.Module], inputs: Any) -> None:
        given = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        named = [("a tensor that it is given", tensor) for tensor in given]
        for module in modules:
            named += [
                (f"self.{name}", tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())
            ]
        self._before = [(name, tensor, frozenset(vars(tensor))) for name, tensor in named]
        self.tensors = [tensor for _, tensor in named]

    def changed(self) -> list[str]:
        """The attributes that were added; those with an underscore are notes of libraries."""
        return [
            f"the attribute {key!r} of {name}"
            for name, tensor, before in self._before
            for key in vars(tensor)
            if key not in before and not key.startswith("_")
        ]
