"""Modules that keep several captured programs of one model and run the one whose guards hold: the variants.
What is done with a program before it runs is the business of who makes the variants: nothing (`adapt.py`), or compiling
(`lower.py`).

A guard is the only judge of which program may run. What a call looks like (`call_key`) only says which one to try first.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _len_torch_function_stack
from torch.utils._device import DeviceContext

from torchgraft.backends.calls import call_key, call_text, likeness
from torchgraft.backends.watch import Held, ModelWatch
from torchgraft.capturing.state.tensor_state import TorchRandomStates, kept_draws
from torchgraft.capturing.whole import SHARED_WITH_MODEL
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import GuardError, TraceError, one_line
from torchgraft.results.shown import Tabular
from torchgraft.results.tables import Table, seconds_text

log = logging.getLogger("torchgraft.backends")

ON_GUARD = ("recapture", "raise", "eager")
# Calls that look different are told apart by so many hints at most; then they are collected anew.
_MOST_HINTS = 1024


@dataclass(eq=False)
class Variant:
    """One program of a model, and how it is run; without a program it is the model's own Python."""

    number: int
    why: str
    inputs: str
    run: Callable[..., Any]
    program: GraphModule | None = None
    seconds: float = 0.0
    runs_as: str = "captured program"
    calls: int = 0
    last_used: float = 0.0
    links: list[Link] = field(default_factory=list)
    # What a backend has made of the program, with `found`: one for each size.
    compiled: Any = None
    # Tensors of the model whose values are in what was compiled: their names, by identity.
    constants: dict[int, str] = field(default_factory=dict)
    # What other paths of the model change, as it was when this program was captured.
    held: list[Held] = field(default_factory=list)
    # Whether a check comes after random numbers were drawn.
    puts_back_draws: bool = False

    def follow_model(self) -> None:
        """Have the program see what was assigned to attributes of the model since."""
        for link in self.links:
            link.follow()


class Link:
    """An attribute that a program has in a container of its own, and the module of the model that it belongs to."""

    __slots__ = ("copy", "name", "original")

    def __init__(self, original: torch.nn.Module, copy: torch.nn.Module, name: str) -> None:
        self.original, self.copy, self.name = original, copy, name

    def follow(self) -> None:
        """Give the program what the model has now."""
        value = getattr(self.original, self.name)
        if getattr(self.copy, self.name) is not value:
            table = self.copy._buffers if self.name in self.copy._buffers else None
            if table is not None and isinstance(value, torch.Tensor):
                table[self.name] = value
            else:
                setattr(self.copy, self.name, value)


class Variants(Tabular):
    """The programs that a module keeps: for what inputs each was captured, and why."""

    def __init__(self, name: str, variants: list[Variant]) -> None:
        self._name, self._variants = name, variants

    def __len__(self) -> int:
        return len(self._variants)

    def headline(self) -> str:
        """How many there are."""
        return f"{self._name} has {len(self)} variant{'' if len(self) == 1 else 's'}"

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each variant, the one that was captured first at the top."""
        return [
            {
                "number": item.number,
                "inputs": item.inputs,
                "runs": item.runs_as,
                "calls": item.calls,
                "seconds": item.seconds,
                "why": item.why,
            }
            for item in self._variants
        ]

    def _table(self) -> Table:
        cells = [
            (
                str(row["number"]),
                row["inputs"],
                row["runs"],
                str(row["calls"]),
                seconds_text(row["seconds"]),
                row["why"],
            )
            for row in self.rows()
        ]
        columns = ("variant", "captured for", "runs", "calls", "made in", "why")
        return Table(self.headline(), columns, cells, frozenset({"variant", "calls", "made in"}))


class VariantModule(torch.nn.Module):
    """A module in the place of a model, which runs the variant that fits a call, and makes one where none does."""

    # Whether programs have copies of the model's weights.
    watches_weights = False

    def __init__(self, model: Any, on_guard: str, max_variants: int) -> None:
        if on_guard not in ON_GUARD:
            raise ValueError(f'on_guard must be "recapture", "raise" or "eager", not {on_guard!r}')
        if type(max_variants) is not int or max_variants < 1:
            raise ValueError(f"max_variants must be a whole number of at least 1, not {max_variants!r}")
        self.__dict__["_model"] = model
        super().__init__()
        self.on_guard, self.max_variants = on_guard, max_variants
        self._name = type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "model")
        self._lock = threading.RLock()
        self._variants: tuple[Variant, ...] = ()
        self._hints: dict[Any, Variant] = {}
        self._made = 0
        self._said: set[str] = set()
        self._watch: ModelWatch | None = None
        # What paths of the model change themselves.
        self._moving: list[Held] = []
        if isinstance(model, torch.nn.Module):
            self.__dict__.update({name: model.__dict__[name] for name in SHARED_WITH_MODEL if name in model.__dict__})
        function = model.forward if isinstance(model, torch.nn.Module) else model
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(function)

    # ---- what stands for the model ----

    @property
    def training(self) -> bool:
        """The mode of the model, which is this module's."""
        return bool(getattr(self._model, "training", False))

    @training.setter
    def training(self, mode: bool) -> None:
        if "_lock" in self.__dict__ and isinstance(self._model, torch.nn.Module):  # not what nn.Module.__init__ sets
            self._model.training = mode

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(self.__dict__["_model"], name)

    # ---- variants ----

    def variants(self) -> Variants:
        """The programs that there are now, for what inputs each was captured and why."""
        return Variants(self._name, list(self._variants))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program that this call fits; where there is none, do what `on_guard` says."""
        if is_watched():
            return self._model(*args, **kwargs)
        return self._run_variant(args, kwargs)

    def _run_variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._watch is not None and (change := self._watch.change()) is not None:
            self._changed(change)
        found = self._variants
        first: Variant | None = found[0] if len(found) == 1 else None
        key = None
        if first is None and found:
            key = call_key(args, kwargs, self.training)
            first = self._hints.get(key)
        if first is None:
            return self._search(key, [], None, args, kwargs)
        try:
            return self._run(first, args, kwargs)
        except GuardError as error:
            return self._search(key, [first], error, args, kwargs)

    def _changed(self, change: str) -> None:
        """The model is no longer what it was captured from: forget what was made of it."""
        with self._lock:
            self._variants, self._hints, self._watch, self._moving = (), {}, None, []
        log.info("%s: all variants go, because %s", self._name, change)

    def _run(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if variant.links:
            variant.follow_model()
        if variant.held and (held := next((item for item in variant.held if item.differs()), None)) is not None:
            raise GuardError(
                f"the program was captured with another value of {held.what}, which a path of the model changes"
            )
        if variant.puts_back_draws:
            result = _with_draws_put_back(variant.run, args, kwargs)
        else:
            result = variant.run(*args, **kwargs)
        if variant.program is None or not variant.calls:
            self._settle(variant)
        variant.calls += 1
        variant.last_used = time.monotonic()
        return result

    def _settle(self, variant: Variant) -> None:
        """Do not mind what a run of the model has just changed itself."""
        changed = self._watch.settle() if self._watch is not None and not variant.calls else None
        if not changed:
            return
        with self._lock:
            self._moving += changed
            texts = {held.what for held in changed}
            variant.held = [held for held in variant.held if held.what not in texts]
            for other in self._variants:
                if other is not variant and other.program is not None:
                    other.held = [*other.held, *changed]

    def _search(
        self, key: Any, tried: list[Variant], error: GuardError | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Try the variants that were not tried yet, the one that was used last first; else do what `on_guard` says."""
        if key is None:
            key = call_key(args, kwargs, self.training)
        made: Variant | None = None
        while made is None:
            for variant in sorted(self._untried(tried), key=lambda item: -item.last_used):
                try:
                    result = self._run(variant, args, kwargs)
                except GuardError as refusal:
                    error = error or refusal
                    tried.append(variant)
                    continue
                self._remember(key, variant)
                return result
            if error is not None and self.on_guard == "raise":
                raise error
            if error is not None and self.on_guard == "eager":
                self._say_once(f"{self._name}: runs the model's own Python, because {first_line(error)}")
                return self._model(*args, **kwargs)
            with self._lock:
                if not self._untried(tried):  # else another thread has made one meanwhile
                    made = self._add("the first call" if error is None else first_line(error), args, kwargs)
        self._remember(key, made)
        try:
            return self._run(made, args, kwargs)
        except GuardError as refusal:  # what a guard looks at has changed since, by another thread or the model itself
            self._say_once(f"{self._name}: runs the model's own Python once, because {first_line(refusal)}")
            return self._model(*args, **kwargs)

    def _untried(self, tried: list[Variant]) -> list[Variant]:
        return [variant for variant in self._variants if variant not in tried]

    def _remember(self, key: Any, variant: Variant) -> None:
        if len(self._hints) >= _MOST_HINTS:
            self._hints = {}
        self._hints[key] = variant

    def _add(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """Make a variant for a call; where there are too many, the one that was used least recently goes."""
        begin = time.perf_counter()
        if self._watch is None:
            self._watch = ModelWatch(self._model, self.watches_weights)
        held = [item.now() for item in self._moving]
        with kept_draws():  # a first call draws what the model would draw
            variant = self._make(why, args, kwargs)
        variant.held = held
        variant.seconds = time.perf_counter() - begin
        variant.last_used = time.monotonic()
        if len(self._variants) >= self.max_variants:
            self._drop(min(self._variants, key=lambda item: item.last_used), "it was used least recently")
        self._variants = (*self._variants, variant)
        log.info(
            "%s: variant %d made in %s, because %s", self._name, variant.number, seconds_text(variant.seconds), why
        )
        return variant

    def _drop(self, variant: Variant, reason: str) -> None:
        self._variants = tuple([item for item in self._variants if item is not variant])
        self._hints = {key: item for key, item in list(self._hints.items()) if item is not variant}
        log.info("%s: variant %d goes, %s", self._name, variant.number, reason)

    def _number(self) -> int:
        self._made += 1
        return self._made

    def _make(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        raise NotImplementedError

    def _eager(self, why: str, args: Any, kwargs: Any, reason: str) -> Variant:
        """A variant that runs the model itself, for calls that look like this one."""
        self._say_once(f"{self._name}: runs the model's own Python, because {reason}")
        inputs, model, expected = call_text(args, kwargs), self._model, likeness(args, kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            if likeness(args, kwargs) != expected:
                raise GuardError(f"the model's own Python runs for calls like {inputs}")
            return model(*args, **kwargs)

        return Variant(self._number(), why, inputs, run, runs_as=f"the model's own Python: {reason}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.info("%s", text)


def _with_draws_put_back(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a program; where a guard of it fails, whoever runs next draws the random numbers that it has drawn."""
    states = TorchRandomStates()
    try:
        return run(*args, **kwargs)
    except GuardError:
        states.put_back()
        raise


def links_of(model: Any, program: GraphModule) -> list[Link]:
    """The attributes of a program that stand in containers of its own and have to be what the model has."""
    if not isinstance(model, torch.nn.Module) or model is program:
        return []
    found: dict[str, Link] = {}
    for node in program.graph.nodes:
        if node._op != "get_attr" or node._target in found or node._target in program.graph._constants:
            continue
        path, _, name = node._target.rpartition(".")
        try:
            original, copy = model.get_submodule(path), program.get_submodule(path)
            getattr(original, name)
        except AttributeError:  # something that the program alone has
            continue
        if original is not copy:
            found[node._target] = Link(original, copy, name)
    return list(found.values())


def program_or_error(make: Callable[[], GraphModule]) -> GraphModule | str:
    """A captured program, or in words why there is none; what the model itself raises is raised."""
    try:
        return make()
    except TraceError as error:
        return one_line(error)


def first_line(error: BaseException) -> str:
    """What happened, without where and what to do."""
    return str(error).partition("\n")[0]


def is_watched() -> bool:
    """Whether somebody traces this run, transforms it (vmap) or takes derivatives forwards, and should see the model itself; a
    default device is no tracing."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    if forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None:
        return True
    if torch._C._len_torch_dispatch_stack():
        return True
    depth = _len_torch_function_stack()
    if not depth:
        return False
    modes = [torch._C._get_function_stack_at(level) for level in range(depth)]
    return not all(isinstance(mode, DeviceContext) for mode in modes)
