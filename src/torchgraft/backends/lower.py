"""`lower`: a model or program compiled by a backend, as a module with the model's signature.
Which program fits a call is found by `variants.py`, what is done with one by the backend; `auto.py` chooses among backends.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any, overload

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.analysis.comparison import frozen_leaves, tensors_in
from torchgraft.backends.auto import candidates, key_of, measure, saved_choice
from torchgraft.backends.backend import PRECISIONS, Backend, Options, find_backend
from torchgraft.backends.freezing import frozen
from torchgraft.backends.parts import Compiled, compile_parts, differences, within
from torchgraft.backends.sizes import OneForEachSize, for_one_size
from torchgraft.backends.variants import Variant, VariantModule, call_text, late_guard, program_or_error
from torchgraft.backends.watch import Grown, ModelWatch
from torchgraft.capturing.patching.wrapping import looking_inside
from torchgraft.capturing.program import capture
from torchgraft.capturing.state.model_state import ModelState
from torchgraft.codegen.calling import copied_inputs, example_inputs, placeholder_values
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BackendError, GraftError, GuardError, InputError, one_line
from torchgraft.ir.modules import no_model, paths_of_modules
from torchgraft.ir.structures import put_together, take_apart
from torchgraft.lowering.lower import lower as lower_to_operators
from torchgraft.recording.program_comparison import compare as compare_programs
from torchgraft.recording.situations import Situation, situations

_SIMPLE = frozenset({int, float, bool, str, type(None)})
_LAYOUTS = ("auto", "channels_last", "contiguous")


class Lowered(VariantModule):
    """What `lower` makes: a module with the model's signature that runs compiled programs, without gradients.

    `explain()` says what the backend took and what stays in Python, `variants()` which programs there are. Where weights of the
    model have changed, a call raises BackendError until `refresh()` is called.
    """

    def __init__(
        self, model: Any, backend: Backend, options: Options, on_guard: str, max_variants: int, verify: bool
    ) -> None:
        super().__init__(model, on_guard, max_variants)
        self.backend, self.options, self.verifies = backend, options, verify
        self.example: tuple[Any, dict[str, Any]] = ((), {})
        self._is_program = isinstance(model, GraphModule) and not _has_modes(model)
        self.__dict__["_subject"] = None  # not by assigning: a submodule would be one of the model's
        self.choice: Any = None

    # ---- calling ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled program that fits; in training mode and under autocast, the model's own Python."""
        training = self.training and not self._is_program
        if training or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            mode = "in training mode" if training else "under autocast"
            self._say_once(f"{self._name}: runs the model's own Python {mode}")
            return self._model(*args, **kwargs)
        if torch.is_grad_enabled():
            self._refuse_gradients(args, kwargs)
            torch._C._set_grad_enabled(False)
            try:
                return super().forward(*args, **kwargs)
            finally:
                torch._C._set_grad_enabled(True)
        return super().forward(*args, **kwargs)

    def _refuse_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            found = (value,) if isinstance(value, torch.Tensor) or type(value) in _SIMPLE else tensors_in(value)
            if any(isinstance(item, torch.Tensor) and item.requires_grad for item in found):
                raise InputError(
                    f"a lowered module computes no gradients, and an input of {self._name} requires one\n"
                    "  give x.detach(), call it under torch.no_grad(), or use the model itself for training"
                )

    def _changed(self, change: str) -> None:
        if isinstance(change, Grown):
            self.__dict__["_subject"] = None
            return super()._changed(change)
        raise BackendError(
            f"{self._name} was lowered with other weights: {change}\n"
            "  call .refresh() on the lowered module, which compiles again with the model as it is now"
        )

    def refresh(self) -> None:
        """Forget what was compiled; the next call compiles again, with the weights that the model has then."""
        with self._lock:
            self._variants, self._hints, self._watch = (), {}, None
            self.__dict__["_subject"] = None

    def explain(self) -> str:
        """What the backend took, and for every call that stays in Python why, with its source line."""
        texts = [
            item.text(self._name, self.backend.name) for variant in self._variants for item in compiled_of(variant)
        ]
        eager = [f"{self._name} for {item.inputs}: {item.runs_as}" for item in self._variants if item.program is None]
        return "\n".join([*texts, *eager]) or f"{self._name} is not compiled yet: call it"

    def save(self, path: str | PathLike[str]) -> None:
        """Write the program of the example, the weights and the options to a file for `load_lowered`, which compiles again."""
        from torchgraft.backends.saving import save_lowered

        save_lowered(self, path)

    # ---- making variants ----

    def _make(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """Capture and compile for a call."""
        self._watch = ModelWatch(self._model, weights=True)
        given = self._cast(args), self._cast(kwargs)
        subject = self._subject_now()
        with torch.no_grad(), looking_inside():
            found = program_or_error(lambda: capture(subject, *given, level="function"))
        if isinstance(found, str):
            return self._eager(why, args, kwargs, found)
        if "" in found.meta.get("kept_whole", {}):
            return self._eager(why, args, kwargs, f"it is one call: {found.meta['kept_whole']['']}")
        body = frozen(found, placeholder_values(found, *given))
        is_free = self.backend.sizes_are_free and late_guard(body) is None
        # Checks of sizes are gone in the program for one size, so that more of them can be tried.
        if not is_free and (reason := late_guard(for_one_size(body, *given))) is not None:
            return self._eager(why, args, kwargs, reason)
        self._watch.leave_out(body)
        run = self._compiled(body, is_free, *given)
        variant = Variant(
            self._number(), why, call_text(args, kwargs), run, found, runs_as=self.backend.name, is_frozen=True
        )
        variant.run = run if self._keeps_types() else _Casting(run, self._cast, self._cast_back)
        if self.verifies:
            self._verify(variant, args, kwargs)
        return variant

    def _compiled(self, body: GraphModule, is_free: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        backend, options = self.backend, self.options

        def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
            text = call_text(args, kwargs)
            sized = body if is_free else for_one_size(body, args, kwargs)
            if not backend.takes_all:
                # Parts are tried while they are compiled; what they write of the model's state is put back.
                writes = Aliases(sized.graph).has_writes
                with _kept_state(self._subject_now()) if writes else contextlib.nullcontext():
                    return compile_parts(backend, sized, args, kwargs, options, text)
            calls = len([node for node in sized.graph.nodes if node.op not in ("placeholder", "get_attr", "output")])
            values = tuple(placeholder_values(sized, args, kwargs).values())
            run = within(options.time_limit, lambda: backend.compile(sized, values, options))
            return Compiled(run, text, calls, calls, 1, module=sized)

        try:
            if is_free:
                return _Whole(make(args, kwargs))
            found = OneForEachSize(self._name, make, self.max_variants)
            found._new_for(args, kwargs)
            return found
        except (GraftError, MemoryError):
            raise
        except Exception as error:
            raise BackendError(f"the backend '{backend.name}' fails on {self._name}: {one_line(error)}") from error

    # ---- precision ----

    def _keeps_types(self) -> bool:
        return not self.options.is_chosen or self._type_of_model() in (None, PRECISIONS[self.options.precision])

    def _type_of_model(self) -> torch.dtype | None:
        if not isinstance(self._model, torch.nn.Module):
            return None
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)

    def _subject_now(self) -> Any:
        """The model, or a copy of it in the precision to compute in."""
        if self._keeps_types():
            return self._model
        if self._subject is None:
            self.__dict__["_subject"] = copy.deepcopy(self._model).to(PRECISIONS[self.options.precision])
        return self._subject

    def _cast(self, value: Any) -> Any:
        """Inputs in the precision to compute in."""
        if self._keeps_types():
            return value
        return _mapped(value, PRECISIONS[self.options.precision], None)

    def _cast_back(self, value: Any) -> Any:
        return _mapped(value, self._type_of_model() or torch.float32, PRECISIONS[self.options.precision])

    # ---- is it right ----

    def _verify(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare with the model on the example and on other values; raise with the first node that differs."""
        planned = situations(args, kwargs, 0, True, False, False)
        if self.options.precision in ("fp16", "bf16"):
            # Beyond the range of the example, 16 bits may say nothing about a model: its own roundings decide.
            planned = [item for item in planned if item.name != "other values"]
        for item in planned:
            situation = item.make()
            try:
                expected = _leaves_after(self._model, self._model, situation)
            except Exception:  # other values may go another way, and a model may refuse them
                if item is planned[0]:
                    raise
                continue
            try:
                found = _leaves_after(_limited(variant.run, self.options.time_limit), self._model, situation)
            except GuardError:  # other values may go another way
                continue
            wrong = differences(expected, found, self.options.precision, "lowered module")
            if wrong:
                where = self._first_difference(variant, situation.args, situation.kwargs)
                raise BackendError(
                    f"the backend '{self.backend.name}' does not compute what {self._name} computes\n"
                    f"  on {situation.name}: {wrong[0]}{where}\n"
                    "  use another backend or precision; verify=False skips this check"
                )

    def _first_difference(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        module = next((item.module for item in compiled_of(variant) if item.module is not None), None)
        if module is None or variant.program is None:
            return ""
        try:
            found = compare_programs(variant.program, module, self._cast(args), self._cast(kwargs)).first_difference
        except Exception:  # it only helps to look; the difference itself has been found
            return ""
        return f"\n  first difference: {found}" if found is not None else ""

    # ---- copies ----

    def _arguments(self) -> tuple[Any, ...]:
        return self.backend, self.options, self.on_guard, self.max_variants, self.verifies

    def __deepcopy__(self, memo: dict[int, Any]) -> Lowered:
        """A lowered copy of the model; it compiles anew."""
        result = Lowered(copy.deepcopy(self._model, memo), *self._arguments())
        memo[id(self)] = result
        return result

    def __reduce__(self) -> Any:
        return Lowered, (self._model, *self._arguments())


class _Whole:
    """A program that is compiled once for all sizes."""

    def __init__(self, compiled: Compiled) -> None:
        self.found = {None: compiled}
        self.run = compiled.run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class _Casting:
    """Runs a program in another precision than that of its inputs and results."""

    def __init__(self, inner: Any, cast: Callable[[Any], Any], cast_back: Callable[[Any], Any]) -> None:
        self.inner, self.found, self._cast, self._cast_back = inner, inner.found, cast, cast_back

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._cast_back(self.inner(*self._cast(args), **self._cast(kwargs)))


def compiled_of(variant: Variant) -> list[Compiled]:
    """What was compiled for a variant, one for each size."""
    run = variant.run.inner if isinstance(variant.run, _Casting) else variant.run
    return list(getattr(run, "found", {}).values())


def _mapped(value: Any, dtype: torch.dtype, only: torch.dtype | None) -> Any:
    """Floating-point tensors in another dtype, inside containers and objects too; with `only`, those of one dtype."""

    def is_meant(item: Any) -> bool:
        return isinstance(item, torch.Tensor) and item.is_floating_point() and only in (None, item.dtype)

    if isinstance(value, torch.Tensor):
        return value.to(dtype) if is_meant(value) else value
    template, tensors = take_apart(value, is_meant)
    return put_together(template, *[tensor.to(dtype) for tensor in tensors]) if tensors else value


def _limited(run: Callable[..., Any], seconds: float | None) -> Callable[..., Any]:
    return lambda *args, **kwargs: within(seconds, functools.partial(run, *args, **kwargs))


def _leaves_after(function: Callable[..., Any], model: Any, situation: Situation) -> dict[str, Any]:
    """What a call returns and leaves in its inputs; what it does to the model and to random states is put back."""
    values, keywords = situation.copied()
    with _kept_state(model), torch.no_grad():
        result = function(*values, **keywords)
        return frozen_leaves(result, "output") | frozen_leaves((values, keywords), "inputs afterwards")


@contextlib.contextmanager
def _kept_state(model: Any) -> Iterator[None]:
    """What runs change of a model and of random states is put back."""
    root = model if isinstance(model, torch.nn.Module) else torch.nn.Module()
    state = ModelState(paths_of_modules(root))
    state.tensors  # noqa: B018 (as they are before the first run)
    try:
        yield
    finally:
        state.restore_all()


@overload
def lower(
    model: torch.nn.Module | Callable[..., Any],
    args: Any = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    level: str,
) -> GraphModule: ...


@overload
def lower(
    model: torch.nn.Module | Callable[..., Any],
    args: Any = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    backend: str | Backend = ...,
    precision: str | None = ...,
    layout: str = ...,
    on_guard: str | None = ...,
    max_variants: int = ...,
    verify: bool = ...,
    time_limit: float | None = ...,
    choice: str | PathLike[str] | None = ...,
) -> Lowered: ...


def lower(
    model: torch.nn.Module | Callable[..., Any],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backend: str | Backend = "auto",
    precision: str | None = None,
    layout: str = "auto",
    on_guard: str | None = None,
    max_variants: int = 8,
    verify: bool = True,
    time_limit: float | None = None,
    choice: str | PathLike[str] | None = None,
    level: str | None = None,
) -> Lowered | GraphModule:
    """A module with the signature of a model or program that runs it compiled by a backend, without gradients.

    `backend` is "native" (torch's own kernels, everywhere), "inductor", "cudagraphs", "openvino", "onnxruntime", a
    backend of your own, or "auto", which measures those that are installed. What a backend does not take stays in Python:
    `.explain()` says what and why. `precision` is "fp32", "tf32", "bf16" or "fp16" (where it is not given, that of the model),
    `layout` is "auto", "channels_last" or "contiguous". Results are compared with the model's on the example and on other values,
    unless `verify` is False; `time_limit` is how many seconds compiling a part may take, and with "auto" all candidates together.

    What "auto" has measured is in `.choice`; with a file in `choice` it is kept there, and used again for the same inputs on the
    same machine. `follow_progress` tells how far it is.

    Other sizes just run. Where a guard says no, `on_guard` decides as in `adapt`: "recapture" (for a model), "raise" (for a
    captured program), or "eager". If weights of the model change, a call raises BackendError until `.refresh()`.

    With `level` ("aten" or "core_aten") it is a captured program in torch's operators instead, that runs in Python.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    >>> fast = lower(model, torch.ones(2, 4), backend="native")
    >>> fast(torch.ones(5, 4)).shape, fast.variants()
    (torch.Size([5, 4]), <Variants: Sequential has 1 variant>)
    """
    if level is not None:
        return lower_to_operators(model, args, kwargs, level=level)  # type: ignore[arg-type]
    if (problem := no_model(model)) is not None:
        raise TypeError(f"cannot lower {problem}")
    values, keywords = example_inputs(args, kwargs)
    if precision not in (None, *PRECISIONS):
        raise ValueError(f'precision must be "fp32", "tf32", "bf16" or "fp16", not {precision!r}')
    if layout not in _LAYOUTS:
        raise ValueError(f'layout must be "auto", "channels_last" or "contiguous", not {layout!r}')
    if on_guard is None:
        on_guard = "raise" if isinstance(model, GraphModule) else "recapture"
    chosen = None if backend == "auto" else find_backend(backend)
    if getattr(model, "training", False) and not (isinstance(model, GraphModule) and not _has_modes(model)):
        raise BackendError(
            "cannot lower a model in training mode: lowered modules are for inference\n  call model.eval() first"
        )
    options = Options(precision or _precision_of(model), layout, time_limit, precision is not None)

    def lowered(by: Backend, options: Options = options) -> Lowered:
        module = Lowered(model, by, options, on_guard or "", max_variants, verify)
        module.example = given, named = copied_inputs(values, keywords)
        with torch.no_grad():
            module(*given, **named)
        return module

    if chosen is not None:
        return lowered(chosen)
    return _quickest(model, values, keywords, options, lowered, choice)


def _quickest(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    lowered: Callable[..., Lowered],
    path: str | PathLike[str] | None,
) -> Lowered:
    """The module of the backend that is quickest on these inputs, or of the one that a file says was."""
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "model")
    key = key_of(name, args, kwargs, options.precision)
    known = saved_choice(path, key)
    if known is not None:
        module = lowered(find_backend(known.backend))
        module.choice = known
        return module
    made: dict[str, Lowered] = {}

    def make(backend: Backend, seconds: float) -> Callable[[], Any]:
        made[backend.name] = module = lowered(backend, dataclasses.replace(options, time_limit=seconds))
        if any(item.program is None for item in module._variants):
            raise BackendError(f"it runs the model's own Python: {module._variants[0].runs_as}")
        return lambda: module(*args, **kwargs)

    devices = {tensor.device.type for tensor in tensors_in((args, kwargs))} or {"cpu"}
    found = candidates("cuda" if "cuda" in devices else "cpu")
    eager = functools.partial(model, *args, **kwargs)
    try:
        choice = measure(key, found, make, eager, options.time_limit)
    except BackendError:
        if not made:
            raise
        return (
            made["native"] if "native" in made else next(iter(made.values()))
        )  # the model's own Python, for all of them
    module = made[choice.backend]
    module.options, module.choice = options, choice
    if path is not None:
        choice.save(path)
    return module


def _has_modes(program: GraphModule) -> bool:
    """Whether it matters that a program is in training mode; that of a function always is."""
    return any(True for _ in program.children()) or any(True for _ in program.parameters())


def _precision_of(model: Any) -> str:
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, "fp32")
