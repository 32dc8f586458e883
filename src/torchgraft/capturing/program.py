"""`capture`: from a model and example inputs to a GraphModule, by a watched run.
What is written down during the run is decided in `watch.py`; capture without inputs is `symbolic_trace` in `tracer.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from torchgraft.capturing.active import Beginning, CodePatch, acquire_all, active, paused_collection, release_all
from torchgraft.capturing.dtypes import DTYPE_PATCHES
from torchgraft.capturing.example import ExampleInputs, refuse_iterators
from torchgraft.capturing.free_dimensions import check_free
from torchgraft.capturing.hooks import RunHooks
from torchgraft.capturing.identities import (
    compare_ours,
    compares_identity,
    compares_variables,
    identity_patches,
    line_of_comparison,
)
from torchgraft.capturing.kinds import PARAMETER_PATCH, type_patches
from torchgraft.capturing.leftovers import Left, have_program_leave, sees_only_itself
from torchgraft.capturing.memos import memo_patches
from torchgraft.capturing.min_max import BUILTIN_PATCHES
from torchgraft.capturing.mode_statements import choice_patches, methods_of_torch
from torchgraft.capturing.mode_switches import guard_modes, has_own_train, only_switches
from torchgraft.capturing.module_patches import MODULE_GETATTR, MODULE_PATCHES, TENSOR_ATTRIBUTE_PATCH
from torchgraft.capturing.packing import PACKING_PATCHES
from torchgraft.capturing.plain_numbers import call_ours, number_patches
from torchgraft.capturing.reads import KeepWhole, RunAgain
from torchgraft.capturing.refusals import UnsupportedArgument
from torchgraft.capturing.regions import remove_empty_regions
from torchgraft.capturing.results import result_argument, write_objects
from torchgraft.capturing.same_program import does_the_same
from torchgraft.capturing.watch import Watcher, WatchingMode
from torchgraft.capturing.whole import eager_error, modules_of, program_name, whole_program
from torchgraft.capturing.wrapping import SCRIPT_PATCH, Autowrap, wrapped_patches
from torchgraft.codegen.calling import example_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import TraceError
from torchgraft.ir.contexts import exit_context
from torchgraft.ir.modules import has_hooks, hooks_for_all, inner_modules, no_model, paths_of_modules

LeafRule = Callable[[torch.nn.Module, str], bool] | Iterable[Any] | type | str | None


def capture(
    model: torch.nn.Module | Callable[..., Any],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    level: str = "module",
    leaf: LeafRule = None,
    dynamic: dict[str, Iterable[int]] | None = None,
) -> GraphModule:
    """Run `model` once on the example inputs and return what it did as a program.

    `level` is "module" (the modules of torch.nn stay calls), "function" (torch functions; parameters are fetched), "aten",
    "core_aten" (torch's operators, see `lowering/lower.py`) or "joint" (forward and backward, see `lowering/training.py`). `leaf`
    names modules to keep whole: types, dotted paths, or a predicate of module and path. `dynamic` names dimensions of inputs
    that must stay free (`{"x": [0]}`): capture raises if the model fixed one.

    What cannot be written down (a numpy round trip, a counter kept in an attribute) is kept as one call that runs the original
    Python; `program.meta["kept_whole"]` says which modules, and why.

    >>> program = capture(lambda x: x.view(x.shape[0], -1) * 2, (torch.ones(2, 3, 4),))
    >>> program(torch.ones(5, 3, 4)).shape
    torch.Size([5, 12])
    """
    values, keywords = example_inputs(args, kwargs)
    if level in ("aten", "core_aten", "joint"):
        return _operator_program(model, values, keywords, level, leaf, dynamic)
    if level not in ("module", "function"):
        raise ValueError(f'level must be "module", "function", "aten", "core_aten" or "joint", not {level!r}')
    if (problem := no_model(model)) is not None:
        raise TypeError(f"cannot capture {problem}")
    run = _Capture(model, values, keywords, _leaf_rule(level, leaf))
    _check_leaf_names(leaf, run.paths.values())
    program = run.run()
    if dynamic:
        check_free(program, model, values, keywords, dynamic)
    return program


def _operator_program(model: Any, args: Any, kwargs: Any, level: str, leaf: LeafRule, dynamic: Any) -> GraphModule:
    """The levels below torch's functions, which are lowerings of the program at level "function"."""
    if level == "joint":
        from torchgraft.lowering.training import joint_program

        return joint_program(model, args, kwargs)
    from torchgraft.lowering.lower import lower

    program = capture(model, args, kwargs, level="function", leaf=leaf)
    lowered = lower(program, args, kwargs, level=level)
    if dynamic:
        check_free(lowered, model, args, kwargs, dynamic)
    return lowered


class _Capture:
    """One capture: watched runs, each asking less of the model than the one before, until one is good."""

    def __init__(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rule: Callable[[torch.nn.Module, str], bool]
    ) -> None:
        self.model, self.args, self.kwargs, self.rule = model, args, kwargs, rule
        owner = getattr(model, "__self__", None)
        self.owner = next((item for item in (model, owner) if isinstance(item, torch.nn.Module)), None)
        self.root = modules_of(model) if self.owner is None else self.owner
        self.paths = paths_of_modules(self.root)
        self.kept: dict[type, str] = {}
        self.symbolic, self.plain_flags, self.plain_dtypes = True, False, False
        # Modules with hooks that cannot be looked into, and why.
        self.closed: dict[torch.nn.Module, str] = {}
        self._watchers: list[Watcher] = []
        self.choices = choice_patches({cls for cls, path in self._classes() if path is None or not rule(*path)})

    def _classes(self) -> Iterable[tuple[Any, tuple[torch.nn.Module, str] | None]]:
        """The classes of the modules; with a module and its path, where torch's own code chooses, unless it is called whole."""
        for module, path in self.paths.items():
            cls: Any = type(module)
            yield cls, (module, path) if methods_of_torch(cls) else None

    def run(self) -> GraphModule:
        reason = self._reason_for_one_call()
        while reason is None:
            hooks = RunHooks(self.closed)
            with paused_collection:
                try:
                    return self._finished(self._program(hooks))
                except KeepWhole as request:
                    reason = self._keep(request, hooks)
                except RunAgain as request:
                    request.prepare()
                except Exception as error:
                    reason = self._ask_less(error, hooks)
                finally:
                    self._forget_watchers()
        program = whole_program(self.model, self.owner, self.args, self.kwargs)
        program.meta["kept_whole"] = {"": reason}
        return program

    def _program(self, hooks: RunHooks) -> GraphModule:
        """The program of a run. Where it leaves something in the model, another one has to show that the next does the same."""
        run = self._watched(hooks)
        if run.left:
            graph, length = run.program.graph, len(run.program.graph.nodes)
            again = self._next_run(run, RunHooks(self.closed, hooks.opened))
            # A number of the first run that is asked once more writes that down in the first graph.
            is_repeated = again is not None and not again.left and len(graph.nodes) == length
            if again is None or not is_repeated or not does_the_same(graph, again.program.graph):
                run.refuse()
            have_program_leave(run.program, run.left)
        return run.program

    def _next_run(self, run: _Run, hooks: RunHooks) -> _Run | None:
        """A run of the model as another has left it; None if it cannot be written down."""
        entries = [item.entry for item in run.left if item.entry is not None]
        for entry in entries:
            entry.put()
        try:
            return self._watched(hooks)
        except (KeepWhole, Exception):
            return None
        finally:
            for entry in entries:
                entry.take_back()

    def _watched(self, hooks: RunHooks) -> _Run:
        watcher = Watcher(self.root, self.paths, self._is_leaf, self.symbolic, self.plain_flags, hooks)
        watcher.dtypes_flow, watcher.ask_plainly = not self.plain_dtypes, self._ask_plainly
        self._watchers.append(watcher)
        return _watched_run(watcher, self.model, self.args, self.kwargs, self._whole_modules(), self.choices)

    def _forget_watchers(self) -> None:
        """The numbers of a run and its watcher refer to one another; they are not left to the garbage collector."""
        for watcher in self._watchers:
            vars(watcher).clear()
        self._watchers.clear()

    def _finished(self, program: GraphModule) -> GraphModule:
        named = self.root.named_modules() if self.kept or self.closed else ()
        found = {path: self.kept.get(type(module)) or self.closed.get(module) for path, module in named}
        program.meta["kept_whole"] = {path: reason for path, reason in found.items() if reason is not None}
        return program

    def _is_leaf(self, module: torch.nn.Module, path: str) -> bool:
        return type(module) in self.kept or self.rule(module, path)

    def _whole_modules(self) -> set[torch.nn.Module]:
        return inner_modules(module for module in self.paths if type(module) in self.kept) if self.kept else set()

    def _reason_for_one_call(self) -> str | None:
        """Why a model is not looked into at all."""
        refuse_iterators(self.model, self.args, self.kwargs)
        parameters = chain.from_iterable([module._parameters.values() for module in self.paths if module._parameters])
        unusual = [value for value in parameters if value is not None and type(value) is not torch.nn.Parameter]
        if any(map(is_lazy, unusual)):
            raise TraceError(
                f"cannot capture {type(self.root).__name__}: it has lazy parameters, and running it would change it; "
                "run it once on these inputs, then capture it"
            )
        if self.model is not self.root:
            return None
        if has_hooks(self.root):
            return "it has hooks, which run around its forward"
        if hooks_for_all():
            return "there are hooks for all modules"
        return "it was to stay a leaf" if self.rule(self.root, "") else None

    def _keep(self, request: KeepWhole, hooks: RunHooks) -> str | None:
        """Keep a module whole in the next run; a reason, if that is the model itself."""
        module = request.module
        if module in hooks.looked_into:
            self.closed[module] = request.reason
            return None
        # Kept already, and that was no help: something outside calls into it. Or it is only a container.
        while module is not None and (type(module) in self.kept or not _is_callable(module)):
            module = self._parent(module)
        if module is None or module is self.root or type(module) is torch.nn.Module:
            if not hooks.looked_into:
                return request.reason
            self.closed |= dict.fromkeys(hooks.looked_into, request.reason)  # it may have been one of the hooks
            return None
        self.kept[type(module)] = request.reason
        return None

    def _parent(self, module: torch.nn.Module) -> torch.nn.Module | None:
        path = self.paths.get(module)
        return self.root.get_submodule(path.rpartition(".")[0]) if path else None

    def _ask_plainly(self, flags: bool) -> None:
        """Hand out plain dtypes in the next run, and plain flags, if those are not good either."""
        self.plain_dtypes, self.plain_flags = True, self.plain_flags or flags

    def _ask_less(self, error: Exception, hooks: RunHooks) -> str | None:
        """Hand out plain numbers and flags in the next run; a reason, if that is what was done already."""
        if isinstance(error, TraceError) and not isinstance(error, UnsupportedArgument):
            raise error
        if not self.plain_flags and "TrainingFlag" in str(error):
            self.plain_flags = True
        elif any(watcher._dtypes for watcher in self._watchers):
            self.plain_dtypes = True
        elif self.choices:
            self.choices = []  # looking at both sides of one may have failed
        elif self.symbolic:
            self.symbolic = False
        elif hooks.looked_into:
            self.closed |= dict.fromkeys(hooks.looked_into, f"{type(error).__name__}: {error}")
        else:
            raised = eager_error(self.model, self.root, self.args, self.kwargs)
            if raised is not None:
                raise raised
            return f"it fails when it is watched: {type(error).__name__}: {error}"
        return None


def _is_callable(module: torch.nn.Module) -> bool:
    # A scripted module has a forward that its class cannot be asked for.
    return inspect.getattr_static(type(module), "forward") is not torch.nn.Module.forward


def _check_leaf_names(leaf: LeafRule, paths: Iterable[str]) -> None:
    """Refuse the path of a module that there is none at."""
    wanted = [leaf] if isinstance(leaf, str) else leaf if isinstance(leaf, (list, tuple, set, frozenset)) else []
    unknown = [item for item in wanted if isinstance(item, str) and item not in set(paths)]
    if unknown:
        raise ValueError(f"leaf names '{unknown[0]}', and the model has no module there; see model.named_modules()")


def _leaf_rule(level: str, leaf: LeafRule) -> Callable[[torch.nn.Module, str], bool]:
    def chosen(module: torch.nn.Module, path: str) -> bool:
        if isinstance(leaf, type):
            return isinstance(module, leaf)
        if isinstance(leaf, str):
            return path == leaf
        if callable(leaf):
            return bool(leaf(module, path))
        return any(isinstance(module, item) if isinstance(item, type) else path == item for item in leaf)  # type: ignore[union-attr]

    def rule(module: torch.nn.Module, path: str) -> bool:
        if leaf is not None and chosen(module, path):
            return True
        return level == "module" and path != "" and _is_layer(type(module))  # type: ignore[arg-type]

    return rule


@functools.lru_cache(maxsize=4096)
def _is_layer(cls: Any) -> bool:
    """Whether a class of modules is one call at the level of modules."""
    return cls.__module__.startswith(("torch.nn", "torch.ao.nn")) and not issubclass(cls, torch.nn.Sequential)


# ---- one run ----


class _Run(NamedTuple):
    """What came of a watched run: the program, what was left in the model, and what to call to keep whole what left it."""

    program: GraphModule
    left: list[Left]
    refuse: Callable[[], None]


_AUTOWRAP = Autowrap((), ())
# Those of torch's own functions and methods are for proxies, as are those of attributes and modes.
_PATCHES = [
    patch
    for patch in MODULE_PATCHES
    if getattr(patch, "holder", None) not in (torch, torch.Tensor, TorchFunctionMode) and patch is not MODULE_GETATTR
]
_PATCHES += [TENSOR_ATTRIBUTE_PATCH, *BUILTIN_PATCHES, SCRIPT_PATCH, PARAMETER_PATCH, *DTYPE_PATCHES, *PACKING_PATCHES]


def _watched_run(
    watcher: Watcher,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    whole: set[torch.nn.Module],
    choices: list[CodePatch],
) -> _Run:
    inputs = ExampleInputs(watcher, function, args, kwargs)
    watcher.outside.watch_function(function)
    watcher.outside.watch_function(inspect.unwrap(function))
    watcher.beginning, watcher.boundary = Beginning(), _watched_run.__code__
    patches: list[Any] = [*_PATCHES, *wrapped_patches(), *_AUTOWRAP.library_patches()]
    patches += [*type_patches(function, watcher.paths), *identity_patches(), *choices]
    patches += [*memo_patches(), *number_patches()]
    acquire_all(patches)
    parameters = [item for module in watcher.paths for item in module._parameters.values() if item is not None]
    gradients = [item.grad for item in parameters]
    previous, active.tracer = active.tracer, watcher
    try:
        with WatchingMode(watcher):
            result = inputs.call(function)
            output = result_argument(watcher, result)
            watcher.unwatched(write_objects, watcher)
            # While what it may change of the model is still going to be put back.
            own = has_own_train(watcher.paths)
            switches = not own or watcher.unwatched(only_switches, watcher.root, watcher.paths)
            del result
    finally:
        active.tracer, watcher._checked_frame = previous, None
        release_all(patches)
        for item, gradient in zip(parameters, gradients, strict=True):
            if item.grad is not gradient:  # a model that differentiates itself
                item.grad = gradient
        changed = [(module, f"self.{name}") for module, name in watcher.state.restore() if not _draws(module, name)]
        outside = watcher.outside.restore()
        has_kept = watcher.forget_keys()
        unseen = [*watcher.surroundings.restore(), *changed, *([] if outside is None else [(None, outside[0])])]
    if has_kept:
        raise TypeError("a table outside of the model has a size as its key")
    if watcher.asking and call_ours(watcher.asking.values()):
        raise RunAgain(lambda: None)
    if watcher._has_stand_ins:
        _compare_plainly(watcher, {id(patch.function) for patch in patches if isinstance(patch, CodePatch)})
    if unseen:
        whole = whole | inner_modules(watcher.ran_whole)
        watcher.hooks.refuse_left([item for item in watcher.state.left if item.module in whole])
    left = [item for item in watcher.state.left if not _draws(item.module, item.name)]
    if len(unseen) > len(changed) or not _can_be_left(watcher, left, whole):
        left = []
        _refuse_unseen(watcher, changed, unseen, whole)
    if watcher.recovered is not None:
        raise KeepWhole(*watcher.recovered)
    comparing = [item.__code__ for item in watcher.outside.functions if compares_variables(item.__code__)]
    if comparing:
        inputs.guard_identities(str(line_of_comparison(comparing[0]) or "an unknown line"))
    watcher.create_node("output", "output", (output,), {})
    if not switches:
        guard_modes(watcher.graph, watcher.paths)
    _tidy(watcher)
    program = GraphModule(watcher.root, watcher.graph, program_name(function))
    program._adopt_state(watcher.root)
    return _Run(program, left, functools.partial(_refuse_unseen, watcher, changed, unseen, whole))


def _compare_plainly(watcher: Watcher, changed: set[int]) -> None:
    """Make the run again if functions compare by identity what may have been modes and dtypes, and cannot be asked otherwise."""
    functions = [item for item in watcher.outside.functions if id(item) not in changed]
    comparing = [item for item in functions if compares_identity(item.__code__)]
    if comparing:
        is_mended = compare_ours(comparing)
        raise RunAgain((lambda: None) if is_mended else functools.partial(watcher.ask_plainly, True))


def _draws(module: torch.nn.Module, name: str) -> bool:
    """Whether an attribute is a generator of torch's: what draws from it is written down."""
    return isinstance(vars(module).get(name), torch.Generator)


def _may_be_read(watcher: Watcher) -> bool:
    """Whether something ran that nobody watched, and that may have read what the run wrote into attributes."""
    return not all(map(sees_only_itself, watcher.ran_whole))


def _can_be_left(watcher: Watcher, left: list[Left], whole: set[torch.nn.Module]) -> bool:
    """Whether a program can leave what the run left, if the next run does the same."""
    if not left or _may_be_read(watcher):
        return False
    return all(item.is_constant and item.module not in whole for item in left)


def _refuse_unseen(
    watcher: Watcher,
    changed: list[tuple[torch.nn.Module, str]],
    unseen: list[tuple[torch.nn.Module | None, str]],
    whole: set[torch.nn.Module],
) -> None:
    """Keep whole what the run did that the program would not do."""
    is_read = _may_be_read(watcher)
    for module, reason in watcher.written.items():
        if is_read or any(module is owner for owner, _ in changed):
            raise KeepWhole(module, reason)
    for owner, what in unseen:
        if owner not in whole:
            raise KeepWhole(owner, f"it changes {what}")


def _tidy(watcher: Watcher) -> None:
    """Drop reads and numbers that nothing uses, and regions in which nothing happens."""
    for node in reversed(watcher.graph.nodes):
        is_read = node._op == "get_attr" or node._target in _READS
        if is_read and not node.users:
            watcher.graph.erase_node(node)
    if watcher.graph.find_nodes(op="call_function", target=exit_context):
        remove_empty_regions(watcher.graph)


_READS = frozenset({getattr, "size", "numel", "item"})
