"""`capture`: from a model and example inputs to a GraphModule, by a watched run.
What is written down during the run is decided in `watcher.py`; capture without inputs is `symbolic_trace` in `tracer.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchgraft.capturing.flowing.memos import forget
from torchgraft.capturing.free_dimensions import check_free
from torchgraft.capturing.patching.active import paused_collection
from torchgraft.capturing.refusals import UnsupportedArgument
from torchgraft.capturing.state.leftovers import Left, have_program_leave, sees_only_itself
from torchgraft.capturing.state.model_state import ModelState
from torchgraft.capturing.user_code.mode_statements import choice_patches, methods_of_torch
from torchgraft.capturing.watching.hooks import RunHooks
from torchgraft.capturing.watching.reruns import KeepWhole, RunAgain
from torchgraft.capturing.watching.run import Run, watched_run
from torchgraft.capturing.watching.same_program import Difference, first_difference, has_checks_of
from torchgraft.capturing.watching.signatures import refuse_iterators
from torchgraft.capturing.watching.watcher import Watcher
from torchgraft.capturing.whole import eager_error, modules_of, program_name, whole_program
from torchgraft.codegen.calling import example_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import TraceError
from torchgraft.ir.modules import has_hooks, hooks_for_all, inner_modules, is_from_torch, no_model, paths_of_modules
from torchgraft.ir.origin import at, source_of
from torchgraft.results.progress import stage

LeafRule = Callable[[torch.nn.Module, str], bool] | Iterable[Any] | type | str | None


def capture(
    model: torch.nn.Module | Callable[..., Any],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    level: str = "module",
    leaf: LeafRule = None,
    dynamic: dict[str, Iterable[int]] | None = None,
    runs: int = 2,
) -> GraphModule:
    """Run `model` on the example inputs and return what it did as a program.

    `level` is "module" (the modules of torch.nn stay calls), "function" (torch functions; parameters are fetched), "aten",
    "core_aten" (torch's operators, see `lowering/lower.py`) or "joint" (forward and backward, see `lowering/training.py`). `leaf`
    names modules to keep whole: types, dotted paths, or a predicate of module and path. `dynamic` names dimensions of inputs
    that must stay free (`{"x": [0]}`): capture raises if the model fixed one.

    The model runs twice, the second time as the first run left it; what does not do the same both times, because it depends on
    something else than inputs, attributes and torch's random numbers and modes, is kept whole. `runs=1` leaves this out.

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
    if runs not in (1, 2):
        raise ValueError(f"runs must be 1 or 2, not {runs!r}")
    run = _Capture(model, values, keywords, _leaf_rule(level, leaf), runs)
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
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rule: Callable[[torch.nn.Module, str], bool],
        runs: int,
    ) -> None:
        self.model, self.args, self.kwargs, self.rule, self.runs = model, args, kwargs, rule, runs
        owner = getattr(model, "__self__", None)
        self.owner = next((item for item in (model, owner) if isinstance(item, torch.nn.Module)), None)
        self.root = modules_of(model) if self.owner is None else self.owner
        self.paths = paths_of_modules(self.root)
        self.kept: dict[type, str] = {}
        # Modules with hooks that cannot be looked into, and why.
        self.closed: dict[torch.nn.Module, str] = {}
        self._watchers: list[Watcher] = []
        self._begin()
        self.choices = choice_patches({cls for cls, path in self._classes() if path is None or not rule(*path)})

    def _begin(self) -> None:
        """Ask everything of the model again."""
        self.symbolic, self.plain_flags, self.plain_dtypes = True, False, False
        self._is_repeated = False

    def _classes(self) -> Iterable[tuple[Any, tuple[torch.nn.Module, str] | None]]:
        """The classes of the modules; with a module and its path, where torch's own code chooses, unless it is called whole."""
        for module, path in self.paths.items():
            cls: Any = type(module)
            yield cls, (module, path) if methods_of_torch(cls) else None

    def run(self) -> GraphModule:
        reason = self._reason_for_one_call()
        if reason is None:
            self.state = ModelState(self.paths)
            self.state.refuse_generators()
            self.state.tensors  # noqa: B018 (as they are before the first run)
            for module in self.paths:
                if not is_from_torch(module):
                    self.state.watch(module)  # also those that are only called where nobody watches
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
        """The program of a run, if the next runs do the same."""
        try:
            first = self._watched(hooks)
            left = self._left_by(first)
            if left:
                self._check_next(first, left, hooks)
            if self.runs > 1:
                self._check_second(first, left, hooks)
        finally:
            self.state.restore_all()
        program = GraphModule(self.root, first.record.graph, program_name(self.model))
        program._adopt_state(self.root)
        if left:
            have_program_leave(program, left)
        return program

    def _watched(self, hooks: RunHooks, like: Run | None = None) -> Run:
        """Run the model; with `like`, only to compare it with that run, and so with plain numbers, dtypes and modes."""
        watcher = Watcher(self.root, self.state, self._is_leaf, self.symbolic, self.plain_flags, hooks)
        watcher.flow.dtypes_flow, watcher.flow.ask_plainly = not self.plain_dtypes, self._ask_plainly
        if like is not None:
            watcher.be_plain(like.watcher)
        self._watchers.append(watcher)
        with stage("watching the model run" if like is None else "watching the model run a second time"):
            return watched_run(watcher, self.model, self.args, self.kwargs, [] if like else self.choices)

    def _forget_watchers(self) -> None:
        """The numbers of a run and its watcher refer to one another; they are not left to the garbage collector."""
        for watcher in self._watchers:
            forget(watcher.flow.remembering)
            watcher.end()
        self._watchers.clear()

    # ---- what a run leaves, and whether the next ones do the same ----

    def _left_by(self, run: Run) -> list[Left]:
        """What a run left in the model, which is constants that a program can leave, too; else what left it is kept whole."""
        watcher = run.watcher
        left = [item for item in self.state.left() if not _draws(item.module, item.name)]
        if not left and not watcher.writes.written:
            return []
        whole = self._whole_modules() | inner_modules(watcher.modules.ran_whole)
        watcher.modules.hooks.refuse_left([item for item in left if item.module in whole])
        left = [item for item in left if item.module not in whole]
        # What runs as one call may read what the run has written, and would read something else when the program runs.
        may_be_read = not all(map(sees_only_itself, watcher.modules.ran_whole))
        changed = [item for item in left if may_be_read or not item.is_constant]
        for module, reason in watcher.writes.written.items():
            if may_be_read or any(module is item.module for item in changed):
                raise KeepWhole(module, reason)
        for item in changed:
            raise KeepWhole(item.module, f"it changes self.{item.name}")
        return left

    def _check_next(self, first: Run, left: list[Left], hooks: RunHooks) -> None:
        """Raise unless a run that finds what the first has left does the same, checks no more, and leaves no more."""
        self.state.tensors.restore()
        graph = first.record.graph
        length = len(graph.nodes)
        try:
            again = self._watched(RunHooks(self.closed, hooks.opened))
            # A number of the first run that is asked once more writes that down in the first graph.
            is_same = len(graph.nodes) == length and has_checks_of(first.record, again.record)
        except (KeepWhole, Exception):
            is_same = False
        if not is_same:
            self._refuse_left(first, left)
        self._check_left(first, left)

    def _check_left(self, first: Run, left: list[Left]) -> None:
        """Raise if the model is not as the first run left it."""
        now = self._left_by(first)
        if [(item.module, item.name, item.entry) for item in now] != [
            (item.module, item.name, item.entry) for item in left
        ]:
            self._refuse_left(first, left or now)

    def _refuse_left(self, run: Run, left: list[Left]) -> None:
        module = left[0].module
        raise KeepWhole(module, run.watcher.writes.written.get(module, f"it changes self.{left[0].name}"))

    def _check_second(self, first: Run, left: list[Left], hooks: RunHooks) -> None:
        """Raise unless a second run, as the first left the model and the world, does the same."""
        self.state.tensors.restore()
        forget(first.watcher.flow.remembering)
        second = self._watched(RunHooks(self.closed, hooks.opened), like=first)
        difference = first_difference(first.record, second.record)
        if difference is not None:
            self._disagree(difference, first, is_left=bool(left))
        for module, place in first.watcher.modes.asked_outside:
            if any(module is other for other, _ in second.watcher.modes.asked_outside):
                name = type(module).__name__
                raise KeepWhole(place, f"it asks for the mode of a {name}, which is no submodule of the model")
        self._check_left(first, left)

    def _disagree(self, difference: Difference, first: Run, is_left: bool) -> None:
        """Two runs did not do the same. It may be that the first filled a cache, or that what was handed out for numbers, dtypes
        and modes was taken for something else; if it is neither, the model depends on something that nobody has seen."""
        if not self._is_repeated and not is_left:
            self._is_repeated = True
            raise RunAgain(lambda: None)
        if not difference.is_made and not self.plain_flags and first.watcher._has_stand_ins:
            raise RunAgain(functools.partial(self._ask_plainly, "modes"))
        if not difference.is_made and self.symbolic and first.record.plain:
            self.symbolic = False
            raise RunAgain(lambda: None)
        self._begin()
        node = difference.node
        scope = None if node is None or node._origin is None else node._origin[2]
        if node is not None and node._op == "call_module" and scope is not None:
            scope = scope[0]  # whoever calls the module
        place = "" if node is None else at(source_of(node))
        module = self.root if scope is None else self.root.get_submodule(scope[2])
        raise KeepWhole(module, f"it does not do the same in two runs: {difference.what}{place}")

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

    def _ask_plainly(self, kind: str) -> None:
        """Hand out plain numbers or dtypes in the next run, or plain modes, too, if those are not good either."""
        if kind == "numbers":
            self.symbolic = self._is_repeated = False
        else:
            self.plain_dtypes, self.plain_flags = True, self.plain_flags or kind == "modes"

    def _ask_less(self, error: Exception, hooks: RunHooks) -> str | None:
        """Hand out plain numbers and flags in the next run; a reason, if that is what was done already."""
        if isinstance(error, TraceError) and not isinstance(error, UnsupportedArgument):
            raise error
        if not self.plain_flags and "TrainingFlag" in str(error):
            self.plain_flags = True
        elif any(watcher.flow.dtypes for watcher in self._watchers):
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


def _draws(module: torch.nn.Module, name: str) -> bool:
    """Whether an attribute is a generator of torch's: what draws from it is written down."""
    return isinstance(vars(module).get(name), torch.Generator)


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
