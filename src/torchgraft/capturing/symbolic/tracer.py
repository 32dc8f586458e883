"""Tracer: runs a model's forward with proxies and returns the graph of what it did; `symbolic_trace` makes a module of it.
The pieces it uses: placeholders (`inputs.py`), the model's tensors (`attributes.py`), leaf functions (`wrapping.py`), calls
on real tensors (`recording.py`), context managers (`regions.py`), the promise that the model stays as it was
(`model_state.py`), and what is looked at at the end (`trace_checks.py`).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn.utils import parametrize

from torchgraft.capturing.patching.active import acquire_all, active, paused_collection, release_all
from torchgraft.capturing.patching.fx_tracing import fx_tracing_patches
from torchgraft.capturing.patching.module_patches import (
    MODULE_PATCHES,
    ModuleForward,
    call_module,
    plain_mode,
    read_attribute,
)
from torchgraft.capturing.patching.regions import remove_empty_regions
from torchgraft.capturing.patching.switches import refuse_hooks_for_all_modules
from torchgraft.capturing.patching.wrapping import Autowrap, wrapped_patches
from torchgraft.capturing.refusals import ConversionError, UnsupportedArgument, in_lines, refusal_of, was_caught_by_user
from torchgraft.capturing.state.model_state import ModelState
from torchgraft.capturing.symbolic.attributes import ModelAttributes
from torchgraft.capturing.symbolic.checks import (
    NUMBERS,
    drop_constants,
    guard_identities,
    refuse_compared_types,
    refuse_missing_hooks,
    refuse_root_hooks,
)
from torchgraft.capturing.symbolic.inplace import PLAIN_FORM, renew_constants, simplify_in_place
from torchgraft.capturing.symbolic.inputs import create_inputs
from torchgraft.capturing.symbolic.proxy import ParameterProxy, Proxy
from torchgraft.capturing.symbolic.questions import Questions
from torchgraft.capturing.symbolic.recording import RecordingMode
from torchgraft.capturing.tracer_base import Scope, overrides
from torchgraft.capturing.user_code.comparisons import compared_with_none
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GraftError, TraceError, UnknownMethodError, UnknownModuleError
from torchgraft.ir.contexts import enter_context
from torchgraft.ir.graph import Graph
from torchgraft.ir.guards import check_given, check_training
from torchgraft.ir.modules import has_hooks, no_model, paths_of_modules
from torchgraft.ir.node import Node
from torchgraft.ir.origin import current_source_line, source_line

# What torch says itself; a model that is being traced gets a guard with the answer. Not by its public name, which another
# thread may have patched when this file is first imported.
_is_grad_enabled = torch._C.is_grad_enabled
_ANSWERS = frozenset(
    {"to_bool", "iter", "keys", "call_module", "create_proxy", "create_node", "create_arg", "path_of_module", "proxy"}
)
_RULES = _ANSWERS | {"is_leaf_module", "getattr", "_module_getattr"}
# Those in which no forward of the model runs.
_OWN_CODE = _RULES - {"call_module", "iter"}


class Tracer(ModelAttributes):
    """Symbolic tracing. Subclass it and override methods to change what is kept whole, recorded or refused.

    >>> import torch
    >>> class Everything(Tracer):
    ...     def is_leaf_module(self, module, path):
    ...         return False
    >>> graph = Everything().trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    >>> [node.name for node in graph.nodes if node.op == "call_function"]
    ['linear', 'relu']
    """

    record_stack_traces = True
    # Whether no subclass has a say in how modules are called and nodes are made.
    _default_rules = True
    _default_answers = True
    # Whether a subclass finds paths of its own: it may install a module of which the model has none.
    _installs_modules = False
    _state: Any = None

    def __init__(
        self,
        autowrap_modules: Iterable[ModuleType] = (math,),
        autowrap_functions: Iterable[Callable[..., Any]] = (),
        param_shapes_constant: bool = False,
    ) -> None:
        super().__init__()
        self._autowrap = Autowrap(autowrap_modules, autowrap_functions)
        self.param_shapes_constant = param_shapes_constant
        self.submodule_paths: dict[torch.nn.Module, str] | None = None
        self._begin()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._default_rules = not overrides(cls, Tracer, _RULES)
        cls._default_answers = not overrides(cls, Tracer, _ANSWERS)
        cls._installs_modules = overrides(cls, Tracer, frozenset({"path_of_module"}))
        cls._default_getattr = not overrides(cls, Tracer, frozenset({"getattr", "_module_getattr"}))
        for name in _OWN_CODE & vars(cls).keys():
            if isinstance(method := vars(cls)[name], FunctionType):
                setattr(cls, name, _not_the_models(method))

    def _begin(self) -> None:
        """Forget everything about an earlier trace."""
        self.graph = Graph(tracer_cls=type(self))
        self._mode: RecordingMode | None = None
        self._switching = False
        self._calls: dict[str, int] = {}
        self._open_contexts: list[tuple[Any, Node]] = []
        self._mode_guards: set[torch.nn.Module] = set()
        self._parameter_cache: dict[str, Proxy] = {}
        self._optional_inputs: dict[Node, str] = {}
        self._handed_out: dict[int, Any] = {}
        self._held: list[Any] = []
        self._refusals: list[TraceError] = []
        self._questions = Questions(self)
        self._function: Any = None
        self._last_of_inputs: Node = self.graph._root
        self._entered: set[type] = set()
        self._leaf_types: dict[type, bool] = {}
        self._forget_attributes()

    # ---- decisions that users override ----

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of `m` stays one node. By default the modules of torch.nn do, except Sequential."""
        home = type(m).__module__
        is_torch = home.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(m, torch.nn.Sequential)
        return is_torch or home.startswith("torch.jit")

    def path_of_module(self, mod: torch.nn.Module) -> str:
        """The dotted path of a module in the model."""
        path = None if self.submodule_paths is None else self.submodule_paths.get(mod)
        if path is None:
            path = next((name for name, module in self.root.named_modules() if module is mod), None)
        if path is None:
            line = current_source_line()
            what = f"module is not installed as a submodule of the traced model: {type(mod).__name__}"
            fix = "assign it to an attribute of the model before tracing"
            raise self._remembered(UnknownModuleError(in_lines(what, line, fix)))
        return path

    def call_module(
        self, m: torch.nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record a call of a leaf module, or run the forward of any other with the traced values."""
        path = self.path_of_module(m)
        if self._installs_modules and self._state is not None and m not in self._state.paths:
            self._state.let_edit(self.root)
        count = self._calls[path] = self._calls.get(path, -1) + 1
        before = self._enter_scope(path, type(m), f"{path}@{count}" if count else path)
        try:
            is_leaf = self.is_leaf_module(m, path)
            if has_hooks(m):
                is_leaf = True
                self._refuse_new_hooks(m)
            if is_leaf:
                if parametrize._cache_enabled:
                    self._refuse_cached_parametrisations()
                return self.create_proxy("call_module", path, args, kwargs)
            return forward(*args, **kwargs)
        finally:
            self._leave_scope(before)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        """What the model gets when it reads a parameter, buffer or submodule of a module."""
        if isinstance(attr_val, torch.nn.Parameter):
            path = self._parameter_paths.get(id(attr_val))
        elif self.proxy_buffer_attributes and isinstance(attr_val, torch.Tensor):
            path = self._buffer_paths.get(id(attr_val))
        else:
            return attr_val
        if path is None:
            return attr_val
        proxy = parameter_proxy_cache.get(path)
        if proxy is None:
            options: dict[str, Any] = {}
            if self.param_shapes_constant and isinstance(attr_val, torch.nn.Parameter):
                # An override of create_proxy need not know about factories.
                if "proxy_factory_fn" in inspect.signature(self.create_proxy).parameters:
                    options["proxy_factory_fn"] = functools.partial(_parameter_proxy, self, path, attr_val)
            proxy = parameter_proxy_cache[path] = self.create_proxy("get_attr", path, (), {}, **options)
        return proxy

    def _module_getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        return self.getattr(attr, attr_val, parameter_proxy_cache)

    @property
    def _autowrap_search(self) -> list[ModuleType]:
        return self._autowrap.modules

    @property
    def _autowrap_function_ids(self) -> set[int]:
        return self._autowrap.function_ids

    # ---- refusals that the model may catch ----

    def _remembered(self, error: TraceError) -> TraceError:
        if self._default_answers:  # an overridden method may have asked us first, and have an answer of its own
            self._refusals.append(error)
        return error

    def _caught_refusal(self) -> TraceError | None:
        """What we raised and the model caught."""
        # torch tries on its own account whether a value is a number, and goes on where it is none.
        refusals, self._refusals = self._refusals, []
        is_tried = (ConversionError, UnsupportedArgument)
        return next((e for e in refusals if not isinstance(e, is_tried) or was_caught_by_user(e)), None)

    # ---- self.training ----

    def _training_node(self, module: torch.nn.Module) -> Node:
        path = (self.submodule_paths or {}).get(module)
        if path is None:
            raise UnknownModuleError(
                f"self.training of a {type(module).__name__} that is not part of the model was read"
            )
        return self.create_node("get_attr", f"{path}.training" if path else "training", (), {})

    def _training_decides(self, module: torch.nn.Module) -> bool:
        value = module.__dict__["training"]
        if module not in self._mode_guards and module in (self.submodule_paths or {}):
            self._mode_guards.add(module)
            where = str(current_source_line() or type(module).__name__)
            self.create_node("call_function", check_training, (self._training_node(module), value, where), {})
        return value

    # ---- tracing ----

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Placeholders for the parameters of the traced function, and a function of exactly these values."""
        return create_inputs(self, root_fn, is_module, concrete_args)

    def trace(self, root: torch.nn.Module | Callable[..., Any], concrete_args: Any = None) -> Graph:
        """Run `root` with proxies and return the graph of what it did. The model is left exactly as it was."""
        function, is_module = self._prepare(root)
        self._function = inspect.unwrap(function)
        self._state.watch(self.root)
        self._state.refuse_generators()
        previous, previous_scope = active.tracer, self._scope_chain
        records_gradients = _is_grad_enabled()
        self._hold([*MODULE_PATCHES, *fx_tracing_patches(), *wrapped_patches(), *self._autowrap.library_patches()])
        self._hold(self._autowrap.patches(getattr(self._function, "__globals__", {})))
        active.tracer = self
        try:
            with paused_collection, RecordingMode(self) as self._mode:
                self._run(function, is_module, concrete_args)
        except BaseException as error:
            self._state.restore()
            self._explain(error)
            raise
        finally:
            active.tracer = previous
            if _is_grad_enabled() is not records_gradients:  # switched by a forward, and never switched back
                torch.set_grad_enabled(records_gradients)
            release_all(self._held)
            constants = self._mode.values.readable_nodes() if self._mode is not None else []
            self._mode, self._scope_chain, self.submodule_paths = None, previous_scope, None
            self._autowrap.forget()
        changed, refusal = self._state.restore(), self._caught_refusal()
        if refusal is not None:
            raise refusal
        self._state.refuse_changes(changed)
        self._tidy(constants)
        return self.graph

    def _run(self, function: Callable[..., Any], is_module: bool, concrete_args: Any) -> None:
        """Call the function with proxies, and end the graph with what it returns."""
        call, args = self.create_args_for_root(function, is_module, concrete_args)
        self._last_of_inputs = self.graph._root._prev
        result = self.create_arg(call(*args))
        annotation = getattr(self._function, "__annotations__", {}).get("return")
        self.create_node("output", "output", (result,), {}, type_expr=annotation)

    def _explain(self, error: BaseException) -> None:
        """Raise what is to be said about an error that ended the trace, if it is not ours."""
        caught = self._caught_refusal()
        if isinstance(error, GraftError) or not isinstance(error, Exception):
            return
        refusal = caught or refusal_of(error)
        if refusal is not None:
            raise refusal from error
        refuse_missing_hooks(error, self._state.paths)
        error.add_note(
            "while tracing symbolically, where every input is a proxy, optional ones too\n"
            "fix an input with concrete_args, keep the module that raises as a leaf (Tracer.is_leaf_module), or use "
            "torchgraft.capture(model, args)"
        )

    def _tidy(self, constants: list[Node]) -> None:
        """Take out of a finished graph what nobody needs, and add what has to be checked when it runs."""
        if self.graph._constants:
            renew_constants(self.graph, self._ids_of_tensors_outside)
        drop_constants(self.graph, constants)
        # Most programs have nothing of what is looked for below, and one walk shows it.
        nodes = list(self.graph.nodes)
        targets = {node._target for node in nodes}
        if enter_context in targets:
            remove_empty_regions(self.graph)
        guard_identities(nodes, self._last_of_inputs, [item.__code__ for item in self._functions()])
        if not targets.isdisjoint(PLAIN_FORM):
            simplify_in_place(nodes, self._state.paths, enter_context in targets)
        if not targets.isdisjoint(NUMBERS):
            refuse_compared_types(self.graph)

    def _call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module of the model, or another one, is called."""
        cls = type(module)
        # The default rule looks at the type alone, so that it is asked once for each; see call_module.
        is_leaf = self._leaf_types.get(cls)
        is_asked = is_leaf is None and self._default_rules and not self._is_overridden
        if is_asked and not parametrize._cache_enabled:
            is_leaf = self._leaf_types[cls] = self.is_leaf_module(module, "")
        path = None if is_leaf is None else self.submodule_paths.get(module)  # type: ignore[union-attr]
        if path is None or ((is_asked or not is_leaf) and has_hooks(module)):
            return self.call_module(module, ModuleForward(module, self), args, kwargs)
        outer = self._scope_chain
        count = self._calls[path] = self._calls.get(path, -1) + 1
        self._scope_chain = (outer, f"{path}@{count}" if count else path, path, cls)
        try:
            if not is_leaf:
                self._enter_module(module)
                if self._optional_inputs:
                    self._guard_optional_inputs(module, args, kwargs)
                return call_module(module, *args, **kwargs)
            return self._record("call_module", path, args, kwargs, None, None, 4)
        finally:
            self._scope_chain = outer

    def _enter_module(self, module: torch.nn.Module) -> None:
        """The forward of a module is about to run."""
        self._state.watch(module)
        cls = type(module)
        if cls not in self._entered:
            self._entered.add(cls)
            self._hold(self._autowrap.patches(getattr(cls.forward, "__globals__", {})))

    def _guard_optional_inputs(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optional input goes on to a forward that may ask whether it is None."""
        code: Any = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        named = {} if code is None else {**dict(zip(code.co_varnames[1:], args, strict=False)), **kwargs}
        for name, value in named.items():
            node = value.node if type(value) is Proxy else None
            instruction = compared_with_none(code, name) if node in self._optional_inputs else None
            if node is not None and instruction is not None:
                where = str(source_line(code, instruction))
                self.create_node("call_function", check_given, (node, self._optional_inputs.pop(node), where), {})

    def _read_attribute(self, module: torch.nn.Module, name: str) -> Any:
        """A parameter, buffer or submodule, as `Tracer.getattr` hands it out."""
        if self._default_getattr:
            return self.getattr(name, read_attribute(module, name), self._parameter_cache)
        value = self._module_getattr(name, read_attribute(module, name), self._parameter_cache)
        if isinstance(value, torch.Tensor):
            self._handed_out[id(value)] = value
        return value

    # ---- questions about traced values ----

    def _class_of(self, proxy: Proxy) -> type:
        return self._questions.class_of(proxy)

    def _has_attribute(self, proxy: Proxy, name: str) -> bool:
        return self._questions.has_attribute(proxy, name)

    def _may_be_text(self) -> bool:
        return self._questions.may_be_text()

    def _may_be_key(self, proxy: Proxy) -> bool:
        return self._questions.may_be_key(proxy)

    def _refuse_cached_parametrisations(self) -> None:
        text = in_lines(
            "cannot trace within parametrize.cached()",
            current_source_line(),
            "a parametrization would be computed once there, and for every call in the program",
            "leave the context out, or keep the surrounding module as a leaf (Tracer.is_leaf_module)",
        )
        raise self._remembered(TraceError(text))

    def _refuse_new_hooks(self, module: torch.nn.Module) -> None:
        try:
            self._state.refuse_new_hooks(module)
        except TraceError as error:
            raise self._remembered(error) from None

    def _before_write(self, module: torch.nn.Module, name: str, value: Any) -> None:
        if not self._switching:
            try:
                self._state.before_write(module, name, plain_mode(value), self)
            except TraceError as error:
                raise self._remembered(error) from None

    def _before_tensor_write(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        path = None if self._switching else self._path_of_tensor(tensor)
        if path is not None:
            try:
                self._state.before_tensor_write(tensor, path, name, value, self)
            except TraceError as error:
                raise self._remembered(error) from None

    def _is_written_in_place(self, module: torch.nn.Module, name: str, value: Any) -> bool:
        """`self.buffer += x` writes into the buffer and then assigns it to itself; the first is recorded, the second nothing."""
        if not isinstance(value, Proxy) or name not in module._buffers:
            return False
        node, path = value.node, (self.submodule_paths or {}).get(module)
        written = node._args[0] if node._args else None
        in_place = str(node._target).endswith("_") or node._target in PLAIN_FORM
        return (
            in_place
            and isinstance(written, Node)
            and written._op == "get_attr"
            and written._target == (f"{path}.{name}" if path else name)
        )

    def _keep_up_to_date(self) -> None:
        super()._keep_up_to_date()
        self._leaf_types = {}

    def _hold(self, patches: list[Any]) -> None:
        acquire_all(patches)
        self._held += patches

    def _prepare(self, root: Any) -> tuple[Callable[..., Any], bool]:
        """Set up a fresh trace and find the function to run: (function, whether it takes the model as `self`)."""
        function, model, is_module = root, None, False
        if isinstance(root, torch.nn.Module):
            if not hasattr(type(root), self.traced_func_name):
                raise UnknownMethodError(
                    f"traced_func_name={self.traced_func_name} doesn't exist in {type(root).__name__}\n"
                    "  name one of its methods"
                )
            model, is_module = root, True
            function = getattr(type(root), self.traced_func_name)
            own = root.__dict__.get(self.traced_func_name)
            if own is not None:  # a forward put on the instance is the one that runs in eager mode
                function, is_module = own, False
            refuse_root_hooks(root)
        elif isinstance(root, MethodType) and isinstance(root.__self__, torch.nn.Module):
            model, function, is_module = root.__self__, root.__func__, True
        elif not callable(root):
            raise TraceError(f"cannot trace {root!r}\n  give an nn.Module, a function or a bound method")
        elif (problem := no_model(root)) is not None:
            raise TraceError(f"cannot trace {problem}")
        elif not inspect.isroutine(root) and not isinstance(root, functools.partial):
            function = root.__call__
        refuse_hooks_for_all_modules()
        self.root = torch.nn.Module() if model is None else model
        self._begin()
        self.submodule_paths = paths_of_modules(self.root)
        self._state = ModelState(dict(self.submodule_paths))  # which a subclass may add to
        return function, is_module

    def _functions(self) -> list[FunctionType]:
        """The traced function, and the forwards that were entered."""
        functions = [self._function, *[cls.forward for cls in self._entered]]  # type: ignore[attr-defined]
        return [item for item in map(inspect.unwrap, functions) if isinstance(item, FunctionType)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tracer:
        # The autowrap lists hold Python modules, which cannot be copied and need not be.
        import copy

        result = type(self).__new__(type(self))
        memo[id(self)] = result
        for name, value in vars(self).items():
            result.__dict__[name] = value if name in ("_autowrap", "_mode", "_held") else copy.deepcopy(value, memo)
        return result


def _not_the_models(method: FunctionType) -> Callable[..., Any]:
    """A method of a user's tracer: what it does is neither recorded, guarded nor refused."""

    @functools.wraps(method)
    def run(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        before, self._switching = self._switching, True
        try:
            return method(self, *args, **kwargs)
        finally:
            self._switching = before

    return run


def _parameter_proxy(tracer: Tracer, path: str, parameter: torch.nn.Parameter, node: Node) -> ParameterProxy:
    return ParameterProxy(tracer, node, path, parameter)


def symbolic_trace(
    root: torch.nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None
) -> GraphModule:
    """Capture a model or function without inputs, by running it with proxies.

    >>> program = symbolic_trace(lambda x: torch.relu(x).neg())
    >>> [node.name for node in program.graph.nodes]
    ['x', 'relu', 'neg', 'output']
    """
    tracer = Tracer()
    graph = tracer.trace(root, concrete_args)
    name = type(root).__name__ if isinstance(root, torch.nn.Module) else getattr(root, "__name__", type(root).__name__)
    return GraphModule(tracer.root, graph, name)


__all__ = ["Scope", "Tracer", "UnsupportedArgument", "symbolic_trace"]
