"""torch.fx's PassBase and PassManager: passes that return a result, run in an order that keeps constraints.
Our own passes and pipelines are in `torchgraft.passes`; both kinds can be given to this manager.
"""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import PassError
from torchgraft.passes.definition import PassReport
from torchgraft.splitting.fusing import sorted_stably

Constraint = Callable[[Any, Any], bool]


class PassResult(NamedTuple):
    """The module after a pass, and whether the pass changed it."""

    graph_module: Any
    modified: bool


class PassBase(abc.ABC):
    """A pass of torch.fx: `call` does the work; `requires` and `ensures` may check before and after.

    >>> import torchgraft
    >>> class UseSigmoid(PassBase):
    ...     def call(self, graph_module):
    ...         found = graph_module.graph.find_nodes(op="call_function", target=torch.relu)
    ...         for node in found:
    ...             node.target = torch.sigmoid
    ...         return PassResult(graph_module, bool(found))
    >>> UseSigmoid()(torchgraft.symbolic_trace(lambda x: torch.relu(x))).modified
    True
    """

    def __call__(self, graph_module: GraphModule) -> PassResult | None:
        self.requires(graph_module)
        result = self.call(graph_module)
        self.ensures(graph_module)
        return result

    @abc.abstractmethod
    def call(self, graph_module: GraphModule) -> PassResult | None:
        """Edit the module."""

    def requires(self, graph_module: GraphModule) -> None:  # noqa: B027 (a check that a subclass may add)
        """Raise if the pass cannot run on this module."""

    def ensures(self, graph_module: GraphModule) -> None:  # noqa: B027 (a check that a subclass may add)
        """Raise if the pass did not do what it promises."""


def pass_result_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A pass that returns a module or nothing, as one that returns a PassResult."""

    @functools.wraps(fn)
    def wrapped(gm: torch.nn.Module) -> PassResult | None:
        return _as_result(fn(gm), gm, nothing_means=True)

    if not inspect.isfunction(fn):
        wrapped.__name__ = type(fn).__name__
    return wrapped


def this_before_that_pass_constraint(this: Any, that: Any) -> Constraint:
    """The constraint that `this` runs before `that`."""
    return lambda first, second: first != that or second != this


class PassManager:
    """Runs passes in order, as often as `steps` says or until nothing changes.

    >>> import torchgraft
    >>> from torchgraft.passes import RemoveDeadCode
    >>> result = PassManager(passes=[RemoveDeadCode()])(torchgraft.symbolic_trace(lambda x: (torch.relu(x), x)[1]))
    >>> result.modified, [node.name for node in result.graph_module.graph.nodes]
    (True, ['x', 'output'])
    """

    steps: int = 1

    def __init__(
        self,
        passes: list[Callable[..., Any]] | None = None,
        constraints: list[Constraint] | None = None,
        steps: int | None = None,
        run_checks_after_each_pass: bool = False,
        suppress_check_failures: bool = False,
    ) -> None:
        self.passes = passes or []
        self.constraints = constraints or []
        self.steps = steps or self.steps
        self.run_checks_after_each_pass = run_checks_after_each_pass
        self.suppress_check_failures = suppress_check_failures
        self._validated = False

    def add_pass(self, _pass: Callable[..., Any]) -> None:
        """Add a pass at the end."""
        self.passes.append(_pass)
        self._validated = False

    def add_constraint(self, constraint: Constraint) -> None:
        """Add a constraint: a function that says whether its first argument may come before its second."""
        self.constraints.append(constraint)
        self._validated = False

    def validate_constraints(self) -> None:
        """Raise if the passes, as they are, break a constraint."""
        for constraint in self.constraints:
            for index, first in enumerate(self.passes):
                for second in self.passes[index + 1 :]:
                    if not constraint(first, second):
                        raise PassError(
                            f"pass schedule constraint violated. Expected {_name(second)} before {_name(first)}; "
                            "change the order of the passes, or let solve_constraints() find one"
                        )
        self._validated = True

    def solve_constraints(self) -> None:
        """Bring the passes in an order that keeps the constraints."""
        if self.constraints:
            places = range(len(self.passes))
            before = {
                place: [
                    other
                    for other in places
                    if other != place
                    and not all(rule(self.passes[place], self.passes[other]) for rule in self.constraints)
                ]
                for place in places
            }
            try:
                order = sorted_stably(places, before)
            except RuntimeError as error:
                names = [_name(self.passes[place]) for place in places if before[place]]
                raise PassError(f"Circular dependency detected within the following passes: {names}") from error
            self.passes = [self.passes[place] for place in order]
        self._validated = True

    def add_checks(self, check: Callable[[torch.nn.Module], None]) -> None:
        """Run this check on the module before the passes and, if wished, after each."""
        if len(inspect.signature(check).parameters) != 1:
            raise TypeError("PassManager check function should only take in one variable, a module")
        setattr(self, "check", check)  # noqa: B010 (an attribute in the place of a method)

    def check(self, module: torch.nn.Module) -> None:
        """Nothing, until `add_checks`."""

    def __call__(self, module: torch.nn.Module) -> PassResult:
        if not self._validated:
            self.solve_constraints()
        self.check(module)
        was_modified = False
        for _ in range(self.steps):
            modified = False
            for index, each in enumerate(self.passes):
                result = self._run(each, module, [_name(other) for other in self.passes[:index]])
                module, modified = result.graph_module, modified or result.modified
            was_modified = was_modified or modified
            if not modified:
                break
        return PassResult(module, was_modified)

    def _run(self, each: Callable[..., Any], module: Any, earlier: list[str]) -> PassResult:
        try:
            result = _as_result(each(module), module, nothing_means=None)
            if result is None:
                raise TypeError(
                    f"The result of the pass {_name(each)} should be type PassResult. Please wrap it with pass_result_wrapper()"
                )
            if self.run_checks_after_each_pass:
                self.check(result.graph_module)
            return result
        except Exception as error:
            raise PassError(
                f"An error occurred when running the '{_name(each)}' pass after the following passes: {earlier}"
            ) from error


def _as_result(found: Any, module: Any, nothing_means: bool | None) -> Any:
    if isinstance(found, PassReport):
        return PassResult(module, found.changes > 0)
    if hasattr(found, "graph_module"):
        return found
    if nothing_means is None:
        return None
    if found is None:
        return PassResult(module, nothing_means)
    return PassResult(found, True) if isinstance(found, torch.nn.Module) else None


def _name(each: Any) -> str:
    return each.__name__ if inspect.isfunction(each) else type(each).__name__
