"""What `lower` returns: a module with the model's signature that compiles programs of the model with one backend, and runs them.
Which program fits a call is found by `variants.py`, whether its numbers are right by `verifying.py`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection
from os import PathLike
from typing import Any

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.analysis.comparison import tensors_in
from torchgraft.backends.backend import PRECISIONS, Backend, Options
from torchgraft.backends.calls import call_text
from torchgraft.backends.freezing import frozen
from torchgraft.backends.late_guards import draws_before_check, late_guard, lift_guards
from torchgraft.backends.parts import Compiled, compile_parts, within
from torchgraft.backends.precision import Casting, type_of_model
from torchgraft.backends.sizes import OneForEachSize, for_one_size
from torchgraft.backends.variants import Variant, VariantModule, is_watched, program_or_error
from torchgraft.backends.verifying import first_wrong
from torchgraft.backends.watch import Grown, ModelWatch
from torchgraft.capturing.patching.wrapping import looking_inside
from torchgraft.capturing.program import capture
from torchgraft.capturing.state.model_state import kept_state
from torchgraft.codegen.calling import placeholder_values
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BackendError, GraftError, InputError, one_line
from torchgraft.ir.input_kinds import misfit_of_tensor
from torchgraft.ir.structures import in_dtype
from torchgraft.ir.verify import find_attribute
from torchgraft.recording.program_comparison import compare as compare_programs

_SIMPLE = frozenset({int, float, bool, str, type(None)})


class Lowered(VariantModule):
    """What `lower` makes: a module with the model's signature that runs compiled programs, without gradients.

    `explain()` says what the backend took and what stays in Python, `variants()` which programs there are. Where weights of the
    model have changed, a call raises BackendError until `refresh()` is called.
    """

    watches_weights = True

    def __init__(
        self, model: Any, backend: Backend, options: Options, on_guard: str, max_variants: int, verify: bool
    ) -> None:
        super().__init__(model, on_guard, max_variants)
        self.backend, self.options, self.verifies = backend, options, verify
        self.example: tuple[Any, dict[str, Any]] = ((), {})
        self._is_program = isinstance(model, GraphModule) and not has_modes(model)
        self.__dict__["_subject"] = None  # not by assigning: a submodule would be one of the model's
        self.choice: Any = None

    # ---- calling ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled program that fits; in training mode and under autocast, the model's own Python."""
        if is_watched():  # before torch is asked for modes, which would become checks of the program
            return self._model(*args, **kwargs)
        training = self.training and not self._is_program
        if training or torch._C._is_any_autocast_enabled():
            mode = "in training mode" if training else "under autocast"
            self._say_once(f"{self._name}: runs the model's own Python {mode}")
            return self._model(*args, **kwargs)
        if torch.is_grad_enabled():
            self._refuse_gradients(args, kwargs)
            torch._C._set_grad_enabled(False)
            try:
                return self._run_variant(args, kwargs)
            finally:
                torch._C._set_grad_enabled(True)
        return self._run_variant(args, kwargs)

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

    def drawn_program(self) -> Any:
        """What `draw` shows: the program of the first variant, with what the backend runs and what stays in Python marked."""
        found = next(
            (item for variant in self._variants for item in compiled_of(variant) if item.whole is not None), None
        )
        if found is None or found.whole is None:
            args, kwargs = self.example
            return capture(self._model, args, kwargs)
        result = GraphModule(found.whole, copy.deepcopy(found.whole.graph), self._name)
        for node in result.graph.nodes:
            if node.op.startswith("call_"):
                node.meta["drawn_as"] = "python" if node.name in found.stays else "compiled"
                node.meta["drawn_note"] = found.stays.get(node.name, "")
        result.meta["legend"] = {"compiled": f"runs on {self.backend.name}"}
        return result

    def save(self, path: str | PathLike[str]) -> None:
        """Write the program of the example, the weights and the options to a file for `load_lowered`, which compiles again."""
        from torchgraft.backends.saving import save_lowered

        save_lowered(self, path)

    # ---- making variants ----

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for calls like this one, without calling the model for its effects."""
        with self._lock, torch.no_grad():
            self._add("the first call", args, kwargs)

    def _make(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """Capture and compile for a call."""
        watch = self._watch
        assert watch is not None
        if (unusual := next(filter(None, map(_unusual, tensors_in((args, kwargs)))), None)) is not None:
            return self._eager(why, args, kwargs, f"an input is {unusual}")
        given = self._cast(args), self._cast(kwargs)
        subject = self._subject_now()
        with torch.no_grad(), looking_inside():
            found = program_or_error(lambda: capture(subject, *given, level="function"))
        if isinstance(found, str):
            return self._eager(why, args, kwargs, found)
        if "" in found.meta.get("kept_whole", {}):
            return self._eager(why, args, kwargs, f"it is one call: {found.meta['kept_whole']['']}")
        body = frozen(found, placeholder_values(found, *given))
        reads = watch.watch_program(found, body) if self._keeps_types() else {}
        lift_guards(body)
        is_free = self.backend.sizes_are_free and late_guard(body) is None
        # Checks of sizes are gone in the program for one size, so that more of them can be tried.
        if not is_free and (reason := late_guard(for_one_size(body, *given))) is not None:
            return self._eager(why, args, kwargs, reason)
        if not self._keeps_types() and (name := _written_state(body)) is not None:
            return self._eager(why, args, kwargs, f"it writes '{name}', and computes with a copy of the model")
        own = watch.leave_out(body)
        self._make_way(watch)
        if (reason := _moves(reads, own, watch)) is not None:
            return self._eager(why, args, kwargs, reason)
        compiled = self._compiled(body, is_free, *given)
        run = compiled.run if isinstance(compiled, _Whole) else compiled
        variant = Variant(self._number(), why, call_text(args, kwargs), run, found, runs_as=self.backend.name)
        variant.compiled = compiled
        variant.constants = {key: name for key, name in reads.items() if key not in own}
        variant.puts_back_draws = draws_before_check(body)
        variant.run = run if self._keeps_types() else Casting(run, self._cast, self._cast_back)
        if self.verifies:
            self._verify(variant, args, kwargs)
        return variant

    def _compiled(self, body: GraphModule, is_free: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        backend, options = self.backend, self.options
        refused: dict[str, str] = {}

        def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
            text = call_text(args, kwargs)
            sized = body if is_free else for_one_size(body, args, kwargs)
            if not backend.takes_all:
                # Parts are tried while they are compiled; what they write of the model's state is put back.
                writes = Aliases(sized.graph).has_writes
                with kept_state(self._subject_now()) if writes else contextlib.nullcontext():
                    return compile_parts(backend, sized, args, kwargs, options, text, refused)
            calls = len([node for node in sized.graph.nodes if node.op not in ("placeholder", "get_attr", "output")])
            values = tuple(placeholder_values(sized, args, kwargs).values())
            run = within(options.time_limit, lambda: backend.compile(sized, values, options))
            return Compiled(run, text, calls, calls, 1, module=sized, whole=sized)

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

    def _make_way(self, watch: ModelWatch) -> None:
        """Programs that have as constants what another path of the model writes are no longer right: they go."""
        for variant in self._variants:
            if (reason := _moves(variant.constants, frozenset(), watch)) is not None:
                self._drop(variant, reason)

    def _settle(self, variant: Variant) -> None:
        """What the model's own Python changes matters to programs that were compiled before, and to no others."""
        if variant.program is None and all(item.program is None for item in self._variants):
            self._watch = self.__dict__["_subject"] = None

    # ---- precision ----

    def _keeps_types(self) -> bool:
        return not self.options.is_chosen or type_of_model(self._model) in (None, PRECISIONS[self.options.precision])

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
        return in_dtype(value, PRECISIONS[self.options.precision])

    def _cast_back(self, value: Any) -> Any:
        return in_dtype(value, type_of_model(self._model) or torch.float32, PRECISIONS[self.options.precision])

    # ---- is it right ----

    def _verify(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrong = first_wrong(self._model, variant.run, args, kwargs, self.options)
        if wrong is None:
            return
        situation, difference = wrong
        where = self._first_difference(variant, situation.args, situation.kwargs)
        raise BackendError(
            f"the backend '{self.backend.name}' does not compute what {self._name} computes\n"
            f"  on {situation.name}: {difference}{where}\n"
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


def _unusual(tensor: torch.Tensor) -> str | None:
    """What an input is that no backend takes; None for a plain tensor."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"a tensor of the layout {'nested' if tensor.is_nested else str(tensor.layout).removeprefix('torch.')}"
    problem = misfit_of_tensor(tensor, "")
    return problem and problem[2].removeprefix("got ")


def _moves(reads: dict[int, str], own: Collection[int], watch: ModelWatch) -> str | None:
    """Why a program cannot have tensors as they are now; None where nothing writes them but the program itself."""
    name = next((name for key, name in reads.items() if key in watch.moving and key not in own), None)
    return None if name is None else f"another path of the model writes '{name}'"


def _written_state(body: GraphModule) -> str | None:
    """A tensor of the model that a program writes."""
    memory = Aliases(body.graph)
    found = {node.target: find_attribute(body, node.target)[0] for node in body.graph.find_nodes(op="get_attr")}
    if not memory.has_writes:
        return None
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    return next((name for name, value in tensors.items() if memory.is_state_written(value)), None)


class _Whole:
    """A program that is compiled once for all sizes."""

    def __init__(self, compiled: Compiled) -> None:
        self.found = {None: compiled}
        self.run = compiled.run


def compiled_of(variant: Variant) -> list[Compiled]:
    """What was compiled for a variant, one for each size."""
    return list(variant.compiled.found.values()) if variant.compiled is not None else []


def has_modes(program: GraphModule) -> bool:
    """Whether it matters that a program is in training mode; that of a function always is."""
    return any(True for _ in program.children()) or any(True for _ in program.parameters())
