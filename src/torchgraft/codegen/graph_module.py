"""GraphModule: a program together with its parameters, an `nn.Module` like any other whose `forward` is generated code.
The text of that code comes from `source.py`; saving it as a package is in `folder.py`.

Rule 6 of the IR lives here: code is generated when it is first needed after an edit, so nobody can forget `recompile()`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import linecache
import weakref
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from torchgraft.codegen.attributes import Adoption, assign_attribute, is_plain_tensor, place_attribute
from torchgraft.codegen.source import PythonCode, PyTreeCodeGen
from torchgraft.errors import GraphError, GuardError
from torchgraft.ir.explaining import explanation
from torchgraft.ir.graph import EditHooks, Graph, SharedHooks
from torchgraft.ir.guards import Guard, find_guards
from torchgraft.ir.leaf_functions import GENERATED
from torchgraft.ir.modules import paths_around
from torchgraft.ir.node import Node

if TYPE_CHECKING:
    from torchgraft.recording.verify import Verification

_numbers = itertools.count()
# Files of code that is gone. The garbage collector may find that out while linecache walks over its entries (it does so for
# every traceback), so they are taken out later.
_stale: list[str] = []


class _PendingForward:
    """Stands where `forward` belongs until it is needed; looking at it compiles the code of the graph as it is then."""

    def __get__(self, instance: Any, owner: type) -> Any:
        module = instance if instance is not None else owner._instance()  # type: ignore[attr-defined]
        if module is None:
            return self
        module._compile()
        return module.forward if instance is not None else owner.forward  # type: ignore[attr-defined]


_PENDING = _PendingForward()


def compile_function(code: PythonCode, class_name: str, function_name: str) -> FunctionType:
    """Run generated source and return the function it defines; its lines stay visible to tracebacks and inspect."""
    while _stale:
        linecache.cache.pop(_stale.pop(), None)
    filename = f"<torchgraft {class_name} {next(_numbers)}>"
    linecache.cache[filename] = (len(code.src), None, code.src.splitlines(keepends=True), filename)
    scope = {**code.globals, GENERATED: True}
    exec(compile(code.src, filename, "exec", dont_inherit=True), scope)
    function = scope[function_name]
    weakref.finalize(function, _stale.append, filename)
    return function


class GraphModule(torch.nn.Module):
    """A module that runs a graph.

    `root` is the model (or a dict from dotted paths to values) that the graph's `call_module` and `get_attr` nodes refer to.
    Parameters and submodules are shared with it.

    >>> import torch, torchgraft
    >>> graph = torchgraft.Graph()
    >>> x = graph.placeholder("x")
    >>> _ = graph.output(graph.call_module("layer", (x,)))
    >>> program = GraphModule({"layer": torch.nn.ReLU()}, graph)
    >>> program(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    if TYPE_CHECKING:  # TorchScript reads the annotations of a class as types of its own
        meta: dict[str, Any]
        _edits: int
        _graph: Graph
        _edit_hooks: EditHooks
        _deepcopy_hooks: list[Callable[[GraphModule], Any]]
    _instance: Any = staticmethod(lambda: None)
    _python_code: Any = None
    _plain_tensors: Any = ()
    # TorchScript compiles every property it is not told to leave alone.
    __jit_unused_properties__ = [  # noqa: RUF012 (TorchScript looks for a list)
        *("code", "graph", "guards", "_create_node_hooks", "_erase_node_hooks", "_replace_hooks", "_lineno_map"),
    ]

    def __new__(cls, *args: Any, **kwargs: Any) -> GraphModule:
        # `forward` must be found on the class (by torch.jit, copies and super()), so each instance has a class of its own.
        base = cls.__dict__.get("_shared_class", cls)
        members = {"_shared_class": base, "__module__": base.__module__, "_python_code": None, "forward": _PENDING}
        if base.__call__ is GraphModule.__call__:
            members["__call__"] = _copy_function(GraphModule.__call__)
        own = type(base.__name__, (base,), members)
        instance: GraphModule = super().__new__(own)
        own._instance = weakref.ref(instance)  # type: ignore[attr-defined]
        return instance

    def __init__(self, root: torch.nn.Module | dict[str, Any], graph: Graph, class_name: str = "GraphModule") -> None:
        super().__init__()
        type(self).__name__ = type(self).__qualname__ = class_name
        self.meta = {}
        self._edit_hooks = EditHooks()
        self._deepcopy_hooks = []
        if isinstance(root, torch.nn.Module):
            self.training = root.training
            self._adopt(root, graph)
        elif isinstance(root, dict):
            self._adopt_values(root, graph)
        else:
            raise GraphError(f"Unsupported type {type(root).__name__} passed for root! Give an nn.Module or a dict")
        self.graph = graph

    def _adopt(self, root: torch.nn.Module, graph: Graph) -> None:
        constants = graph._constants
        paths = _referenced_paths(graph)
        _refuse_own_names(paths)
        adoption = Adoption(root, self)
        plain = list(root._plain_tensors) if isinstance(root, GraphModule) else []
        for path in paths:
            if path in constants and not hasattr(root, path):
                place_attribute(self, path, constants[path], persistent=False)
                is_plain = is_plain_tensor(constants[path])
            else:
                is_plain = adoption.adopt(path)
            if is_plain:
                plain.append(path)
        adoption.put_in_order()
        if plain:
            self._plain_tensors = tuple(plain)

    def _adopt_state(self, root: torch.nn.Module) -> None:
        """Take on the parameters and buffers of the model that the program does not use, for the sake of checkpoints."""
        Adoption(root, self).adopt_state(_OWN_NAMES)

    def _adopt_values(self, root: dict[str, Any], graph: Graph) -> None:
        values = {**graph._constants, **root}
        missing = {node._target: node for node in graph.nodes if node._op in ("get_attr", "call_module")}
        for path, node in missing.items():
            if path not in values:
                raise GraphError(
                    f"Node {node._name} referenced target {path} but that target was not provided in ``root``! "
                    "Add it to the dict"
                )
        # Outer paths first, so that a module given for `a` does not wipe out what was placed at `a.b`.
        for path in sorted(missing, key=lambda item: item.count(".")):
            assign_attribute(self, path, values[path])

    # ---- the program and its code ----

    @property
    def graph(self) -> Graph:
        """The program. Edit it freely; the next call runs what it then says."""
        return self._graph

    @graph.setter
    def graph(self, graph: Graph) -> None:
        if not isinstance(graph, Graph):
            raise GraphError(f"Expected a Graph instance, but got {type(graph).__name__}; give a torchgraft.Graph")
        previous = self.__dict__.get("_graph")
        if previous is not None and previous is not graph:
            previous._remove_owner(self)
        self.__dict__["_graph"] = graph
        graph._add_owner(self)
        # A subclass may have a constructor of its own, which leaves ours out.
        hooks = self.__dict__.setdefault("_edit_hooks", EditHooks())
        graph._hooks = hooks if len(graph._owners) == 1 else SharedHooks(graph)
        self._graph_changed()

    def _graph_changed(self) -> None:
        cls = type(self)
        cls._python_code = None
        self.__dict__["_edits"] = self.__dict__.get("_edits", 0) + 1
        cls.forward = _PENDING  # type: ignore[assignment]

    def recompile(self) -> PythonCode:
        """Generate the code now; Python compiles it when it is first run. Calling this is never necessary."""
        graph, cls = self._graph, type(self)
        code = graph.python_code(root_module="self")
        codegen = graph._codegen
        if isinstance(codegen, PyTreeCodeGen):
            self._in_spec, self._out_spec = codegen.in_spec, codegen.out_spec
        cls._python_code = code
        cls.forward = _PENDING  # type: ignore[assignment]
        graph._fresh = True
        return code

    def _generated(self) -> PythonCode:
        code = type(self)._python_code
        return self.recompile() if code is None else code

    def _compile(self) -> None:
        code = self._generated()
        cls = type(self)
        cls.forward = compile_function(code, cls.__name__, self._graph._codegen._func_name)

    @property
    def code(self) -> str:
        """The generated Python source; this text is what runs."""
        return self._generated().src

    @property
    def guards(self) -> list[Guard]:
        """What the program was captured for."""
        return find_guards(self._graph)

    def explain(self) -> str:
        """What was fixed when the program was captured, what was kept whole, and why, in plain words."""
        lines = [explanation(self._graph)]
        for path, reason in self.meta.get("kept_whole", {}).items():
            lines.append(f"{path or 'The model'} is kept as one call that runs its Python: {reason}")
        return "\n".join(lines)

    def verify(
        self, model: Callable[..., Any], args: Any = (), kwargs: dict[str, Any] | None = None, **options: Any
    ) -> Verification:
        """Whether this program does what `model` does, on these inputs and in other situations; see `torchgraft.verify`."""
        from torchgraft.recording.verify import verify

        return verify(model, self, args, kwargs, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; an error inside it is annotated with the generated line and the user's."""
        if torch.compiler.is_dynamo_compiling():
            # Asking for the number of edits makes torch.compile look at it, and compile again after an edit.
            _generate_code(type(self), self._edits)
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:
            better = self._graph._codegen.error_of_call(error, self, args, kwargs)
            if better is not None:
                raise better from error
            if not isinstance(error, GuardError):  # which names the user's line itself
                _annotate(error, self)
            raise

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile with torch.compile in place; the code is generated first, because torch.compile cannot do that inside."""
        self._ready()
        super().compile(*args, **kwargs)

    def _ready(self) -> None:
        if type(self).__dict__["forward"] is _PENDING:
            self._compile()

    def print_readable(
        self,
        print_output: bool = True,
        include_stride: bool = False,
        include_device: bool = False,
        colored: bool = False,
        *,
        fast_sympy_print: bool = False,
        expanded_def: bool = False,
        additional_meta: Sequence[str] | None = None,
    ) -> str:
        """The program with shapes at line ends and the user's source lines above groups, nested programs included; the options
        are those of `Graph.python_code`, and how fast sizes are written is no question here."""
        options: dict[str, Any] = {
            "include_stride": include_stride,
            "include_device": include_device,
            "colored": colored,
        }
        options |= {"expanded_def": expanded_def, "additional_meta": additional_meta}
        text = _readable_text(type(self).__name__, self, options)
        if print_output:
            print(text)  # noqa: T201 (printing is what the caller asks for)
        return text

    def to_folder(self, folder: str | PathLike[str], module_name: str = "FxModule") -> None:
        """Write the program as a Python package from which `module_name` can be imported."""
        from torchgraft.codegen.folder import write_folder

        write_folder(self, folder, module_name)

    def _repr_svg_(self) -> str | None:
        """A drawing for notebooks; a large program is drawn with its modules closed, a huge one only printed."""
        from torchgraft.view.drawing import draw

        count = len(self.graph.nodes)
        if count > 3000:
            return None
        return draw(self).svg if count <= 300 else draw(self, depth=2, fold=True).svg

    # ---- submodules ----

    def add_submodule(self, target: str, m: torch.nn.Module) -> bool:
        """Install a module at a dotted path; False where something that is no module stands in the way."""
        *containers, name = target.split(".")
        holder: torch.nn.Module = self
        for part in containers:
            inner = getattr(holder, part, None)
            if inner is None:
                inner = torch.nn.Module()
                setattr(holder, part, inner)
            if not isinstance(inner, torch.nn.Module):
                return False
            holder = inner
        holder.add_module(name, m)
        return True

    def delete_submodule(self, target: str) -> bool:
        """Remove the module at a dotted path; False where there is none."""
        *containers, name = target.split(".")
        holder: Any = self
        for part in containers:
            holder = getattr(holder, part, None)
            if not isinstance(holder, torch.nn.Module):
                return False
        if not isinstance(getattr(holder, name, None), torch.nn.Module):
            return False
        delattr(holder, name)
        return True

    def delete_all_unused_submodules(self) -> None:
        """Remove every submodule that no node refers to."""
        if "_whole_model" in self.__dict__:  # one call of a model, whose own modules these are
            return
        used: set[str] = set()
        for node in self.graph.nodes:
            if node._op not in ("call_module", "get_attr"):
                continue
            used.update(paths_around(node._target))
            if node._op == "call_module":
                module = self.get_submodule(node._target)
                used.update(f"{node._target}.{name}" for name, _ in module.named_modules() if name)
        for name in [name for name, _ in self.named_modules() if name and name not in used]:
            self.delete_submodule(name)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> GraphModule:
        """Tensors that are no buffers of the model follow the program to other devices, but keep their type as they do there."""
        before = []
        for path in self._plain_tensors:
            container, _, name = path.rpartition(".")
            with contextlib.suppress(AttributeError):  # an edit may have taken it away
                holder = self.get_submodule(container)
                before.append((holder, name, holder._buffers.get(name)))
        super()._apply(fn, recurse)
        for holder, name, tensor in before:
            now = holder._buffers.get(name)
            if tensor is not None and now is not None and now.dtype != tensor.dtype:
                holder._buffers[name] = tensor.to(now.device)
        return self

    # ---- hooks on edits ----

    @property
    def _create_node_hooks(self) -> list[Callable[[Node], Any]]:
        return self._edit_hooks.create

    @property
    def _erase_node_hooks(self) -> list[Callable[[Node], Any]]:
        return self._edit_hooks.erase

    @property
    def _replace_hooks(self) -> list[Callable[..., Any]]:
        return self._edit_hooks.replace

    @property
    def _lineno_map(self) -> dict[int, int | None] | None:
        return self._generated()._lineno_map

    def _register_create_node_hook(self, f: Callable[[Node], Any]) -> None:
        self._edit_hooks.create.append(_checked_hook(f))

    def _unregister_create_node_hook(self, f: Callable[[Node], Any]) -> None:
        self._edit_hooks.create.remove(f)

    def _register_erase_node_hook(self, f: Callable[[Node], Any]) -> None:
        self._edit_hooks.erase.append(_checked_hook(f))

    def _unregister_erase_node_hook(self, f: Callable[[Node], Any]) -> None:
        self._edit_hooks.erase.remove(f)

    def _register_replace_node_hook(self, f: Callable[..., Any]) -> None:
        self._edit_hooks.replace.append(_checked_hook(f))

    def _unregister_replace_node_hook(self, f: Callable[..., Any]) -> None:
        self._edit_hooks.replace.remove(f)

    @contextlib.contextmanager
    def _set_replace_hook(self, f: Callable[..., Any]) -> Iterator[None]:
        self._register_replace_node_hook(f)
        try:
            yield
        finally:
            self._unregister_replace_node_hook(f)

    def _register_deepcopy_hook(self, f: Callable[[GraphModule], Any]) -> None:
        self._deepcopy_hooks.append(_checked_hook(f))

    def _unregister_deepcopy_hook(self, f: Callable[[GraphModule], Any]) -> None:
        self._deepcopy_hooks.remove(f)

    # ---- copies ----

    def _state(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "forward"}

    def _state_to_copy(self) -> dict[str, Any]:
        """Without what recompiling makes anew from the graph."""
        return {key: value for key, value in self._state().items() if key not in ("_in_spec", "_out_spec")}

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModule:
        result = _bare_copy(self)
        memo[id(self)] = result
        hooks, self_hooks = EditHooks(), self._edit_hooks
        hooks.create, hooks.erase, hooks.replace = (
            list(self_hooks.create),
            list(self_hooks.erase),
            list(self_hooks.replace),
        )
        memo[id(self_hooks)] = hooks
        memo[id(self._deepcopy_hooks)] = list(self._deepcopy_hooks)
        memo[id(self.meta)] = dict(self.meta)  # what is noted about a program is shared, as with nodes
        _install_state(result, copy.deepcopy(self._state_to_copy(), memo))
        for hook in self._deepcopy_hooks:
            hook(result)
        return result

    def __copy__(self) -> GraphModule:
        """A module of its own over the same graph, parameters and submodules."""
        result = _bare_copy(self)
        state = self._state()
        for table in ("_parameters", "_buffers", "_modules"):
            state[table] = dict(state[table])
        _install_state(result, state)
        return result

    def __reduce__(self) -> Any:
        state = self._state_to_copy()
        # Functions watching edits belong to this process.
        state["_edit_hooks"], state["_deepcopy_hooks"] = None, []
        return _restore, (type(self).__dict__["_shared_class"], type(self).__name__, state)

    def _replicate_for_data_parallel(self) -> GraphModule:
        result = copy.copy(self)
        result._is_replica = True  # type: ignore[assignment]
        return result

    def __str__(self) -> str:
        reminder = "# To see more debug info, please use `graph_module.print_readable()`"
        return "\n".join([super().__str__(), self.code, reminder])


def with_own_graph(program: GraphModule) -> GraphModule:
    """A program whose graph may be edited, over the same modules and tensors and with the same notes.

    >>> import torchgraft
    >>> program = torchgraft.symbolic_trace(torch.nn.Linear(2, 2))
    >>> other = with_own_graph(program)
    >>> other.graph is program.graph, other.weight is program.weight
    (False, True)
    """
    result = GraphModule(program, copy.deepcopy(program.graph), type(program).__name__)
    result.meta = dict(program.meta)
    return result


def _copy_function(function: Any) -> FunctionType:
    """The same function with a code object of its own: torch.compile counts its attempts by code object."""
    return FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def _generate_code(own_class: Any, edits: int) -> int:
    """Have the code of a program ready. torch.compile runs this, and does not trace it: it cannot trace how code is made.
    It takes the class, which torch 2.11 can hand over too."""
    module = own_class._instance()
    if module is not None:
        module._ready()
    return edits


# What torch.compiler.assume_constant_result sets; calling that would import Dynamo, which takes longer than torchgraft itself.
_generate_code._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _refuse_own_names(paths: list[str]) -> None:
    for path in paths:
        name = path.partition(".")[0]
        if name in _OWN_NAMES:
            raise GraphError(
                f"cannot make a graph module with an attribute {name!r}: GraphModule uses that name itself; "
                f"rename the attribute of the model that the program refers to as '{path}'"
            )


def _referenced_paths(graph: Graph) -> list[str]:
    return list(dict.fromkeys([node._target for node in graph.nodes if node._op in ("get_attr", "call_module")]))


_OWN_NAMES = frozenset(dir(GraphModule)) - frozenset(dir(torch.nn.Module)) | {
    "meta", "_graph", "_edit_hooks", "_deepcopy_hooks", "_plain_tensors", "_in_spec", "_out_spec",
}  # fmt: skip


def _checked_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    if not callable(hook):
        raise GraphError(f"a hook must be a callable.\n  found {type(hook).__name__}")
    return hook


def _bare_copy(module: GraphModule) -> GraphModule:
    result = GraphModule.__new__(type(module))
    type(result).__name__ = type(result).__qualname__ = type(module).__name__
    return result


def _install_state(module: GraphModule, state: dict[str, Any]) -> None:
    module.__dict__.update(state)
    if module.__dict__["_edit_hooks"] is None:
        module.__dict__["_edit_hooks"] = EditHooks()
    module.graph = module.__dict__["_graph"]


def _restore(shared_class: type[GraphModule], class_name: str, state: dict[str, Any]) -> GraphModule:
    result = GraphModule.__new__(shared_class)
    type(result).__name__ = type(result).__qualname__ = class_name
    _install_state(result, state)
    return result


def _annotate(error: Exception, module: GraphModule) -> None:
    """Say on the error which line of generated code failed, and which line of the user's it was made from."""
    function = type(module).__dict__["forward"]
    code = getattr(function, "__code__", None)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    if trace is None or code is None:
        return
    python_code = module._generated()
    line = trace.tb_lineno
    lines = python_code.src.splitlines()
    # In the words of torch.fx, which users' programs look for.
    where = f"Call using an FX-traced Module, line {line} of the traced Module's generated forward function"
    note = f"{where} ({type(module).__name__}): {lines[line - 1].strip()}"
    index = (python_code._lineno_map or {}).get(line - python_code._prologue_start)
    node = next(itertools.islice(module.graph.nodes, index, None), None) if index is not None else None
    if node is not None:
        note += f"\n  node '{node._name}'"
        if node.stack_trace:
            note += f", made from\n{node.stack_trace.rstrip()}"
        if node._target is torch._assert and "has been specialized" in str(error):
            note += "\nthe value was fixed by concrete_args; pass that one, or trace again without"
    error.add_note(note)


def _readable_text(name: str, module: GraphModule, options: dict[str, Any]) -> str:
    code = module.graph.python_code("self", verbose=True, **options)
    lines = [f"class {name}(torch.nn.Module):", *_indented(code.src.strip("\n").rstrip())]
    for child_name, child in module.named_children():
        if isinstance(child, GraphModule):
            lines += ["", *_indented(_readable_text(child_name, child, options))]
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return [f"    {line}".rstrip() for line in text.splitlines()]
