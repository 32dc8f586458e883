"""The watched run: a model runs once on example inputs, for real, and every torch call it makes is written down.
What Python reads out of tensors is answered in `reads.py`; what starts a run and what becomes of its graph is in `program.py`.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchgraft.capturing.active import active
from torchgraft.capturing.model_state import ModelState
from torchgraft.capturing.module_patches import ModuleForward, TrainingFlag, read_attribute
from torchgraft.capturing.outside_state import OutsideState
from torchgraft.capturing.reads import RESHAPING, KeepWhole, Reads, at_line, is_handled
from torchgraft.capturing.refusals import UnsupportedArgument
from torchgraft.capturing.sizes import SymbolicNumber, unwrapped, wrapped
from torchgraft.capturing.spelling import Spelling, spelling_of
from torchgraft.capturing.surroundings import Surroundings
from torchgraft.capturing.tensors import has_tensor, tensors_in
from torchgraft.capturing.tracer_base import UNCHANGED_TYPES
from torchgraft.errors import TraceError
from torchgraft.ir.arguments import rebuild_tuple
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import check_length, check_training
from torchgraft.ir.node import Argument, Node
from torchgraft.ir.origin import current_source_line, is_user_code, user_instruction
from torchgraft.ir.structures import attributes_of, has_attributes, put_together, set_attributes, take_apart

_MARK = "_torchgraft_value"
_SIMPLE = UNCHANGED_TYPES - {torch.device}
MakeNode = Callable[[], Node]


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
            return watcher.call(function, args, kwargs or {})
        finally:
            watcher._instruction = None


class Watcher(Reads):
    """Writes down one run of a model."""

    _runs_for_real = True

    def __init__(
        self,
        root: torch.nn.Module,
        is_leaf: Callable[[torch.nn.Module, str], bool],
        sizes_are_symbolic: bool = True,
        flags_are_plain: bool = False,
    ) -> None:
        super().__init__()
        self.graph = Graph()
        self.root = root
        self.paths = paths_of_modules(root)
        self._names = names_of_tensors(self.paths)
        self.state = ModelState(self.paths)
        for module in self.paths:
            if not type(module).__module__.startswith("torch.nn."):
                self.state.watch(module)  # also those that are only called where nobody watches
        self.surroundings = Surroundings(self.paths)
        self.outside = OutsideState(lambda value: False)
        self.sizes_are_symbolic = sizes_are_symbolic
        self.flags_are_plain = flags_are_plain
        self._is_leaf = is_leaf
        self._whole: dict[torch.nn.Module, bool] = {}
        # Modules that ran as one call; what they change of themselves, each run of the program changes.
        self.ran_whole: set[torch.nn.Module] = set()
        self._switching = False
        # The user's instruction that is running, while that is known: looking for it takes longer than making a node.
        self._instruction: tuple[CodeType | None, int] | None = None
        # Where capture was called: what is around that is no business of the model's.
        self._call_site = user_instruction(1)
        self._open_contexts: list[Any] = []
        self._modules: list[torch.nn.Module] = [root]
        # What came from outside the run, by identity: the object itself (so that the identity stays its own) and its node.
        self._outside: dict[int, tuple[Any, Node | MakeNode]] = {}
        # Objects among them, with what was in them.
        self._objects: dict[int, tuple[Any, dict[Any, Any]]] = {}
        self._inputs: set[int] = set()
        self._found_attributes = False
        self._constants: dict[int, tuple[Any, Node]] = {}
        # A torch call that failed although the run went on: the model caught the error, and was steered by it.
        self.recovered: tuple[torch.nn.Module, str] | None = None

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> Node:
        """Put a node in the graph."""
        graph = self.graph
        node = graph._make_node(kind, target, args, kwargs, name or graph._target_to_str(target), type_expr)
        node._origin = (*(self._instruction or user_instruction(2)), self._scope_chain)
        return node

    # ---- tensors, objects and their nodes ----

    def node_of(self, tensor: torch.Tensor) -> Node:
        mark = tensor.__dict__.get(_MARK)
        if mark is not None and mark[0] is self:
            node = mark[1]
            if type(node) is not Node:
                node = node()
                tensor.__dict__[_MARK] = (self, node)
            return node
        return self._outside_node(tensor) or self.unwatched(self._fetch, tensor)

    def _outside_node(self, value: Any) -> Node | None:
        known = self._outside.get(id(value))
        if known is None:
            return None
        node = known[1]
        if type(node) is not Node:
            node = node()  # type: ignore[operator]
            self._outside[id(value)] = (known[0], node)
        return node

    def _fetch(self, tensor: torch.Tensor) -> Node:
        """The node of a tensor that no call of this run has made."""
        name = self._attribute_name(tensor)
        if name is not None:
            node = self.create_node("get_attr", name, (), {})
        elif tensor.grad_fn is not None or _is_wrapped(tensor) or is_young(tensor):
            raise KeepWhole(self._modules[-1], f"a tensor was made in a way that cannot be watched{at_line()}")
        else:
            node = self.constant("_tensor_constant", tensor)
            self.surroundings.know(tensor)
        self._outside[id(tensor)] = (tensor, node)
        return node

    def _attribute_name(self, value: Any) -> str | None:
        """The path of a parameter, a buffer, or (looked for when first needed) a plain attribute of the model."""
        name = self._names.get(id(value))
        if name is None and not self._found_attributes:
            self._found_attributes = True
            for module, path in self.paths.items():
                for key, item in vars(module).items():
                    if isinstance(item, (torch.Tensor, torch.Generator)) and key.isidentifier():
                        self._names.setdefault(id(item), f"{path}.{key}" if path else key)
                        if isinstance(item, torch.Tensor):
                            self.unwatched(self.surroundings.know, item)
            name = self._names.get(id(value))
        return name

    def constant(self, prefix: str, value: Any) -> Node:
        """A node that fetches a value kept with the program."""
        known = self._constants.get(id(value))
        if known is None:
            number = len(self.graph._constants)
            while hasattr(self.root, f"{prefix}{number}"):
                number += 1
            self.graph._constants[f"{prefix}{number}"] = value
            known = self._constants[id(value)] = (value, self.create_node("get_attr", f"{prefix}{number}", (), {}))
        return known[1]

    def add_input(self, tensor: torch.Tensor, node: Node | MakeNode) -> None:
        """Say that a tensor is (part of) an input of the model."""
        self._outside[id(tensor)] = (tensor, node)
        self._inputs.add(id(tensor))

    def add_object(self, value: Any, node: Node | MakeNode) -> None:
        """Say that an object of the run is the value of a node."""
        self._outside[id(value)] = (value, node)
        self._objects[id(value)] = (value, dict(vars_of(value)))

    def is_known(self, value: Any) -> bool:
        """Whether an object is the value of a node, as it is and not only as it looks."""
        return id(value) in self._objects

    def known_objects(self) -> list[Any]:
        """Containers and objects that are values of nodes, and could be written into."""
        return [value for value, _ in self._objects.values() if not isinstance(value, tuple)]

    def changed_objects(self) -> list[tuple[Any, dict[Any, Any], dict[Any, Any]]]:
        """Objects that are values of nodes and were changed since, with what was in them then and is now."""
        found = [(value, before, vars_of(value)) for value, before in self._objects.values()]
        return [entry for entry in found if list(entry[1]) != list(entry[2]) or not _same_parts(entry[2], entry[1])]

    def is_static(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the same size in every run: parameters, buffers and constants."""
        mark = tensor.__dict__.get(_MARK)
        if mark is not None and mark[0] is self:
            return False
        return id(tensor) not in self._inputs

    def part(self, node: Node | MakeNode, key: Any, by_attribute: bool = False) -> MakeNode:
        """What makes the node of a part of a value: an item, or an attribute."""
        made: list[Node] = []

        def make() -> Node:
            if not made or made[0]._erased:
                whole = node if isinstance(node, Node) else node()
                function = getattr if by_attribute else operator.getitem
                made[:] = [self.create_node("call_function", function, (whole, key), {})]
            return made[0]

        return make

    def register(self, result: Any, node: Node | MakeNode, given: dict[int, int]) -> Any:
        """Note that a result is the value of a node; containers are taken apart when a part is used.

        `given` has the version of every tensor the call received. A call that hands one of them through unchanged is not
        the same as no call (dropout in evaluation mode), so its result gets an identity of its own.
        """
        if isinstance(result, torch.Tensor):
            address = id(result)
            if address in given and given[address] == _version(result):
                result = result.view_as(result)
                address = id(result)
            if address in self._outside:
                self._outside[address] = (result, node)
            else:
                result.__dict__[_MARK] = (self, node)
            return result
        if isinstance(result, (tuple, list)):
            items = [self.register(item, self.part(node, index), given) for index, item in enumerate(result)]
            if all(new is old for new, old in zip(items, result, strict=True)):
                return result
            return rebuild_tuple(result, items) if isinstance(result, tuple) else type(result)(items)
        if isinstance(result, dict):
            for key, item in result.items():
                new = self.register(item, self.part(node, key), given)
                if new is not item:
                    result[key] = new
        return result

    def register_anything(self, result: Any, node: Node | MakeNode, given: dict[int, int], what: str) -> Any:
        """The same for what a leaf returned, which may hold numbers and objects: numbers flow on, plain values are checked."""
        if isinstance(result, torch.Tensor):
            return self.register(result, node, given)
        make = node if not isinstance(node, Node) else lambda: node
        if type(result) in (int, float) and self.sizes_are_symbolic:
            return wrapped(SymbolicNumber(self, result, make, f"the result of {what}"))
        if result is None or type(result) in UNCHANGED_TYPES:
            if result is not None:
                self.guard(make(), result, f"the result of {what}")
            return result
        is_container = isinstance(result, (tuple, list, dict))
        parts = result if isinstance(result, dict) else dict(enumerate(result)) if is_container else vars_of(result)
        if isinstance(result, list):
            self._guard_length(make(), result, what)
        elif isinstance(result, dict) and all(isinstance(key, str) for key in result):
            keys = self.create_node("call_function", list, (make(),), {})
            self.guard(keys, list(result), f"the keys of the result of {what}")
        new = {
            key: self.register_anything(item, self.part(node, key, not is_container), given, what)
            for key, item in parts.items()
        }
        if any(new[key] is not item for key, item in parts.items()):
            result = _with_parts(result, new)
        self.add_object(result, make)
        return result

    # ---- calls ----

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch call and write it down."""
        spelling = spelling_of(function)
        if spelling.special is not None and args and isinstance(args[0], torch.Tensor):
            return spelling.special(self, function, args, kwargs)
        if spelling.property or spelling.on_numbers or spelling.leaves_torch or spelling.name == "_set_grad_enabled":
            return self._unusual_call(spelling, function, args, kwargs)
        simple = self._simple(args, kwargs)
        if simple is not None:
            lowered, given = simple
        else:
            lowered = self._lowered(args, kwargs)
            args, kwargs = concrete(args), concrete(kwargs)
            given = _versions((args, kwargs))
        if is_handled(*self._instruction) and self._instruction != self._call_site:  # type: ignore[misc]
            raise KeepWhole(self._modules[-1], f"it goes on if a call fails{at_line()}")
        if spelling.may_write or (kwargs and ("out" in kwargs or "inplace" in kwargs)):
            self._before_writing(spelling.name, (args, kwargs))
        self._switching = True  # what torch asks and does on the way is part of this call
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            self._note_failure(error)
            raise
        finally:
            self._switching = False
        if len(args) == spelling.operands and not kwargs and isinstance(args[0], torch.Tensor):
            node = self.create_node("call_function", spelling.operator, *lowered)
        else:
            node = self.create_node(spelling.opcode, spelling.target, *lowered)
        if type(result) is torch.Tensor:
            # requires_grad_() and its like write nothing that torch counts.
            return self.register(result, node, {} if spelling.is_written_back else given)
        return self._write_down(node, spelling, given, result)

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
            self.create_node("call_function", setattr, (lowered[0][0], spelling.property, lowered[0][1]), {})
        else:
            self.create_node("call_function", function, *lowered)
        return function(*args, **kwargs)

    def _write_down(self, node: Node, spelling: Spelling, given: dict[int, int], result: Any) -> Any:
        if has_tensor(result):
            if spelling.of_any_length and not hasattr(result, "_fields"):
                self._guard_length(node, result, f"{spelling.name}()")
            return self.register(result, node, given)
        if result is None:
            return None
        if not given and not self._is_from_numbers(node):
            self.graph.erase_node(node)  # says nothing about tensors
            return result
        return self.register_anything(result, node, given, f"{spelling.name}() of a tensor")

    def _is_from_numbers(self, node: Node) -> bool:
        return bool(node._input_nodes)

    def _guard_length(self, node: Node, result: Any, what: str) -> None:
        where = str(current_source_line() or "an unknown line")
        arguments = (node, len(result), f"the number of results of {what}", where)
        self.create_node("call_function", check_length, arguments, {})

    def _note_failure(self, error: Exception) -> None:
        if self.recovered is None:
            self.recovered = (self._modules[-1], f"it goes on after {type(error).__name__}{at_line()}")

    def _before_writing(self, name: str, values: Any) -> None:
        for tensor in tensors_in(values):
            if id(tensor) not in self._inputs:
                self.surroundings.save_if_known(tensor)
            if name in RESHAPING:
                self.settle_sizes(tensor)

    def _simple(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[int, int]] | None:
        """What `_lowered` and `_versions` say of the arguments of most calls, tensors and plain values, at once."""
        given: dict[int, int] = {}
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                given[id(value)] = _version(value)
            elif kind not in _SIMPLE:
                return None
        node_of = self.node_of
        positional = tuple([node_of(value) if id(value) in given else value for value in args])
        if not kwargs:
            return (positional, {}), given
        return (
            positional,
            {key: node_of(value) if id(value) in given else value for key, value in kwargs.items()},
        ), given

    def _lowered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments of a call as arguments of a node."""
        try:
            return self.create_arg(tuple(args)), self.create_arg(dict(kwargs)) if kwargs else {}
        except (TypeError, ValueError, TraceError, AttributeError) as error:
            raise KeepWhole(self._modules[-1], f"{error}{at_line()}") from error

    def call_leaf(
        self, target: Any, function: Callable[..., Any], args: Any, kwargs: Any, name: str | None = None
    ) -> Any:
        """Run a function without looking inside, and write it down as one call."""
        if self._switching or not has_tensor((args, kwargs)):
            return function(*args, **kwargs)
        node = self.create_node("call_function", target, *self._lowered(args, kwargs), name)
        return self.unwatched(self._run_leaf, function, node, concrete(args), concrete(kwargs), None)

    def call_random(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of Python's random numbers or of torch's random state, which gives something else each time."""
        if self._switching:
            return function(*args, **kwargs)
        node = self.create_node("call_function", function, *self._lowered(args, kwargs))
        result = self.unwatched(function, *concrete(args), **concrete(kwargs))
        self.surroundings.explain_python_draw()
        if isinstance(result, torch.Tensor):
            return self.unwatched(self.register, result, node, {})
        if isinstance(result, (int, float)):
            return wrapped(SymbolicNumber(self, result, lambda: node, f"{function.__name__}()"))
        if result is None or isinstance(result, torch.Generator):
            return result
        raise KeepWhole(self._modules[-1], f"{function.__name__}() draws what cannot be written down{at_line()}")

    # ---- arguments ----

    def create_arg(self, a: Any) -> Argument:
        """Turn a value of the run into an argument."""
        cls = type(a)
        if cls is torch.Tensor or cls is torch.nn.Parameter or isinstance(a, torch.Tensor):
            return self.node_of(a)
        if cls in UNCHANGED_TYPES:
            if cls is torch.device and id(a) in self._devices:
                node = self.node_of(self._devices[id(a)][1])
                return self.create_node("call_function", getattr, (node, "device"), {})
            return a
        number = unwrapped(a)
        if number is not None:
            return number.argument()
        if cls is not tuple:
            known = self._outside_node(a)
            if known is not None:
                if self.is_known(a) and self.changed_objects():
                    # The program writes into objects at its end, and this call would see them as they were.
                    raise KeepWhole(None, f"it changes a {cls.__name__} and hands it on{at_line()}")
                return known
        if isinstance(a, tuple) and "__new__" in vars(cls) and "_fields" not in vars(cls) and hasattr(a, "_fields"):
            return self._opaque(a)  # a named tuple with a constructor of its own, which may want tensors
        if isinstance(a, torch.nn.Module) and a in self.paths and self.paths[a]:
            return self.create_node("get_attr", self.paths[a], (), {})
        try:
            return super().create_arg(a)
        except NotImplementedError:
            return self._opaque(a)

    def _opaque(self, a: Any) -> Node:
        """The node of an object that code cannot spell."""
        if isinstance(a, torch.Generator):
            name = self._attribute_name(a)
            if name is not None:
                return self.create_node("get_attr", name, (), {})
        template, parts = take_apart(a, self.is_of_this_run)
        if parts and not callable(a):
            arguments = (self.constant("_template", template), *[self.create_arg(part) for part in parts])
            return self.create_node("call_function", put_together, arguments, {})
        is_closed = not callable(a) and not has_attributes(a) and is_young(a)  # a deque, a generator
        known = type(a).__module__ == "numpy" or isinstance(a, torch.Generator)
        if parts or is_closed or known or self._closes_over(a):
            raise KeepWhole(
                self._modules[-1], f"a {type(a).__name__} made on the way cannot be written down{at_line()}"
            )
        return self.constant("_object_constant", a)

    def is_of_this_run(self, value: Any) -> bool:
        """Whether a value was computed by this run."""
        return isinstance(value, torch.Tensor) or unwrapped(value) is not None

    def _closes_over(self, function: Any) -> bool:
        """Whether a function has values of this run with it: in its closure, its defaults, or what it is bound to."""
        if isinstance(function, MethodType):
            return not isinstance(function.__self__, torch.nn.Module) or function.__self__ not in self.paths
        if isinstance(function, FunctionType):
            if "<locals>" in function.__qualname__ and is_user_code(function.__code__):
                return True  # made by this run, and a program with it could not be pickled
            held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
            held += list(function.__defaults__ or ())
        else:
            held = [*getattr(function, "args", ()), *(getattr(function, "keywords", None) or {}).values()]
        return any(take_apart(value, self.is_of_this_run)[1] or isinstance(value, list) for value in held) or any(
            self._closes_over(value) for value in held if isinstance(value, FunctionType)
        )

    # ---- modules; the patches of nn.Module ask here ----

    def _call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return self.call_module(module, ModuleForward(module, self), args, kwargs)

    def call_module(self, m: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module; a leaf is written down as one call, any other by what it does."""
        path = self.paths.get(m)
        if path is None and not self._switching and _has_tensors(m):
            what = f"{type(m).__name__} is called, and is no submodule of the model"
            raise KeepWhole(self._modules[-1], f"{what}{at_line()}")
        if path is None or self._switching:
            return forward(*args, **kwargs)
        outer = self._scope_chain
        self._scope_chain = (outer, path, path, type(m))
        if path != "" and self._is_whole(m, path) and not self._has_other_tensors(m):
            try:
                return self._call_whole(m, path, forward, args, kwargs)
            finally:
                self._scope_chain = outer
        self._modules.append(m)
        try:
            return forward(*args, **kwargs)
        finally:
            self._modules.pop()
            self._scope_chain = outer

    def _is_whole(self, module: torch.nn.Module, path: str) -> bool:
        known = self._whole.get(module)
        if known is None:
            known = self._is_leaf(module, path) or isinstance(module, torch.jit.ScriptModule)
            self._whole[module] = known
        return known or has_hooks(module)

    def _has_other_tensors(self, module: torch.nn.Module) -> bool:
        """Whether something stands in for the parameters of a module, as torch.func.functional_call has it."""
        modules = module.modules() if module._modules else (module,)
        return any(
            value is not None and id(value) not in self._names
            for inner in modules
            for value in inner._parameters.values()
        )

    def _call_whole(self, m: torch.nn.Module, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if hooks_for_all():
            raise KeepWhole(self._modules[-1], f"there are hooks for all modules{at_line()}")
        self.ran_whole.add(m)
        with torch._C.DisableTorchFunction():  # else each question about a tensor would come to us
            simple = self._simple(args, kwargs)
        lowered, given = (self._lowered(args, kwargs), None) if simple is None else simple
        node = self.create_node("call_module", path, *lowered)
        if not type(m).__module__.startswith("torch.nn.") or getattr(m, "max_norm", None) is not None:
            self.unwatched(self._save_all, m)
        if given is None:
            args, kwargs = concrete(args), concrete(kwargs)
        elif _is_plain_leaf(m):
            with torch._C.DisableTorchFunction():  # nobody would look at the calls inside
                return self.unwatched(self._run_leaf, forward, node, args, kwargs, given)
        return self.unwatched(self._run_leaf, forward, node, args, kwargs, given)

    def _save_all(self, module: torch.nn.Module) -> None:
        for inner in module.modules():
            self.state.watch(inner)
            for value in (*inner._parameters.values(), *inner._buffers.values()):
                if value is not None:
                    self.surroundings.save(value)

    def _run_leaf(
        self, forward: Callable[..., Any], node: Node, args: Any, kwargs: Any, given: dict[int, int] | None
    ) -> Any:
        """`given`, where it is known, says that all arguments are tensors and plain values."""
        before = [] if given is not None else _mutable_parts((args, kwargs))
        given = _versions((args, kwargs)) if given is None else given
        try:
            result = forward(*args, **kwargs)
        except Exception as error:
            self._note_failure(error)
            raise
        if any(not _same_parts(vars_of(value), parts) for value, parts in before):
            raise KeepWhole(self._modules[-1], f"{node.target} changes an object that it is given")
        if type(result) is torch.Tensor:
            return self.register(result, node, given)
        return self.register_anything(result, node, given, str(node._target))

    def unwatched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run something without writing it down."""
        previous = active.tracer, self._switching
        active.tracer, self._switching = None, True
        try:
            return function(*args, **kwargs)
        finally:
            active.tracer, self._switching = previous

    def _enter_module(self, module: torch.nn.Module) -> None:
        self.state.watch(module)
        self.outside.watch_class(type(module))

    def _read_attribute(self, module: torch.nn.Module, name: str) -> Any:
        return read_attribute(module, name)

    def _is_written_in_place(self, module: torch.nn.Module, name: str, value: Any) -> bool:
        return False  # the value is the buffer itself, and that is no change

    def _before_write(self, module: torch.nn.Module, name: str, value: Any) -> None:
        if self._switching:
            return
        try:
            self.state.before_write(module, name, value, self)
        except TraceError as error:
            raise KeepWhole(module, f"it writes self.{name}{at_line()}") from error

    def _remembered(self, error: TraceError) -> Any:
        """What a symbolic trace would refuse, a watched run keeps whole; an odd argument may be kept as an object."""
        return error if isinstance(error, UnsupportedArgument) else KeepWhole(self._modules[-1], str(error))

    def _training_decides(self, module: torch.nn.Module) -> bool:
        value = module.__dict__["training"]
        if (module, "training") not in self._guarded and not self._is_of_every_run(module):
            self._guarded.add((module, "training"))
            where = str(current_source_line() or type(module).__name__)
            self.create_node("call_function", check_training, (self._training_node(module), value, where), {})
        return value

    def _is_of_every_run(self, module: torch.nn.Module) -> bool:
        """Whether a module is made by the model while it runs, so that its mode is the same each time."""
        return module not in self.paths and is_young(module)

    def _training_node(self, module: torch.nn.Module) -> Node | bool:
        path = self.paths.get(module)
        if path is None and is_young(module):
            return bool(module.__dict__["training"])
        if path is None:
            raise KeepWhole(
                self._modules[-1], f"{type(module).__name__} is no submodule, and asks for its mode{at_line()}"
            )
        return self.create_node("get_attr", f"{path}.training" if path else "training", (), {})


def paths_of_modules(root: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """The path of every module, the first one where it has several; `named_modules` in a fifth of its time."""
    paths: dict[torch.nn.Module, str] = {}
    pending = [(root, "")]
    while pending:
        module, prefix = pending.pop()
        if module in paths:  # used twice, or a circle
            continue
        paths[module] = prefix[:-1]
        for name, inner in reversed(module._modules.items()):
            if inner is not None:
                pending.append((inner, f"{prefix}{name}."))
    return paths


def names_of_tensors(paths: dict[torch.nn.Module, str]) -> dict[int, str]:
    """The path of every parameter and buffer, by identity; the first one where it has several."""
    names: dict[int, str] = {}
    for module, path in paths.items():
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is not None:
                    names.setdefault(id(value), f"{path}.{name}" if path else name)
    return names


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling a module does more than running its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _is_plain_leaf(module: torch.nn.Module) -> bool:
    """Whether a module of torch.nn has plain parameters and no modules inside, and no other mode than ours is at work."""
    return (
        not module._modules
        and type(module).__module__.startswith("torch.nn.")
        and all(value is None or type(value) is torch.nn.Parameter for value in module._parameters.values())
        and torch._C._len_torch_function_stack() == 1
    )


def hooks_for_all() -> bool:
    """Whether there are hooks that run whenever any module is called."""
    everywhere = torch.nn.modules.module
    return bool(
        everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks or everywhere._global_backward_hooks
    )


def _has_tensors(module: torch.nn.Module) -> bool:
    return any(
        value is not None
        for inner in module.modules()
        for table in (inner._parameters, inner._buffers)  # a loss without weights has a buffer that is None
        for value in table.values()
    )


def is_young(value: Any) -> bool:
    """Whether an object was made since the run began: the collector is off then, and has looked at everything before."""
    return any(item is value for item in gc.get_objects(generation=0))


def _is_wrapped(tensor: torch.Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def vars_of(value: Any) -> dict[Any, Any]:
    """The parts of a container, or the attributes of an object, as they are now."""
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return {} if callable(value) or not has_attributes(value) else attributes_of(value)


def _same_parts(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return len(now) == len(before) and all(key in now and now[key] is part for key, part in before.items())


def _mutable_parts(value: Any, depth: int = 0) -> list[tuple[Any, dict[Any, Any]]]:
    """Containers and objects among the arguments of a call, which the call may change."""
    if depth > 4 or isinstance(value, (torch.Tensor, torch.nn.Module, type, str, int, float, BuiltinFunctionType)):
        return []
    parts = vars_of(value)
    found = (
        []
        if isinstance(value, tuple) or (not parts and not isinstance(value, (list, dict)))
        else [(value, dict(parts))]
    )
    for item in list(parts.values()):
        found += _mutable_parts(item, depth + 1)
    return found


def _with_parts(value: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(value, tuple):
        return rebuild_tuple(value, list(parts.values()))
    if isinstance(value, list):
        value[:] = parts.values()
    elif isinstance(value, dict):
        value.update(parts)
    else:
        set_attributes(value, parts)
    return value


def concrete(value: Any) -> Any:
    """The same value with plain numbers in the place of symbolic ones."""
    cls = type(value)
    if cls is torch.Tensor or cls in UNCHANGED_TYPES:
        return value
    if cls is tuple or cls is list:
        return cls([concrete(item) for item in value])
    number = unwrapped(value)
    if number is not None:
        return number.value
    if isinstance(value, TrainingFlag):
        return value._module.__dict__["training"]
    if isinstance(value, torch.Size):
        return torch.Size([concrete(item) for item in value])
    if cls is dict:
        return {key: concrete(item) for key, item in value.items()}
    if cls is slice:
        return slice(concrete(value.start), concrete(value.stop), concrete(value.step))
    return value


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode, where nobody counts
        return 0


def _versions(value: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[int, int]:
    """The version of every tensor among the arguments of a call."""
    found: dict[int, int] = {}
    for item in (*value[0], *value[1].values()):
        if type(item) is torch.Tensor:
            found[id(item)] = _version(item)
        elif type(item) not in UNCHANGED_TYPES:
            found.update({id(tensor): _version(tensor) for tensor in tensors_in(item)})
    return found
