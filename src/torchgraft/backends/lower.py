"""`lower`: a model or program compiled by a backend, as a module with the model's signature.
What that module does is in `lowered.py`; how a backend is chosen by measuring, in `auto.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, overload

import torch

from torchgraft.analysis.comparison import Tolerance, compare, frozen_leaves, tensors_in
from torchgraft.backends.auto import candidates, key_of, measure, saved_choice
from torchgraft.backends.backend import PRECISIONS, Backend, Options, find_backend
from torchgraft.backends.lowered import Lowered, has_modes
from torchgraft.backends.precision import precision_of
from torchgraft.backends.verifying import left_as_it_was
from torchgraft.codegen.calling import copied_inputs, example_inputs
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.errors import BackendError
from torchgraft.ir.modules import no_model
from torchgraft.lowering.lower import lower as lower_to_operators
from torchgraft.results.files import refuse_unwritable

_LAYOUTS = ("auto", "channels_last", "contiguous")


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
    backend: str | Backend | Sequence[str] = ...,
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
    backend: str | Backend | Sequence[str] = "auto",
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

    `backend` is "native" (torch's own kernels, everywhere), "inductor", "cudagraphs", "openvino", "onnxruntime", a backend of
    your own, or "auto", which measures those that are installed; of several names it measures these. What a backend does not
    take stays in Python: `.explain()` says what and why. `precision` is "fp32", "tf32", "bf16" or "fp16" (where it is not given,
    that of the model), `layout` is "auto", "channels_last" or "contiguous". Results are compared with the model's on the example
    and on other values, unless `verify` is False; `time_limit` is how many seconds compiling a part may take, and with "auto" all
    candidates together.

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
    if time_limit is not None and not time_limit > 0:
        raise ValueError(f"time_limit must be a number of seconds above 0, not {time_limit!r}")
    if on_guard is None:
        on_guard = "raise" if isinstance(model, GraphModule) else "recapture"
    names = [backend] if isinstance(backend, (str, Backend)) else list(backend)
    if not names:
        raise ValueError('backend is empty: give a name, several names, or "auto"')
    chosen = None if len(names) > 1 or names[0] == "auto" else find_backend(names[0])
    if getattr(model, "training", False) and not (isinstance(model, GraphModule) and not has_modes(model)):
        raise BackendError(
            "cannot lower a model in training mode: lowered modules are for inference\n  call model.eval() first"
        )
    options = Options(precision or precision_of(model), layout, time_limit, precision is not None)

    def lowered(by: Backend, options: Options = options) -> Lowered:
        module = Lowered(model, by, options, on_guard or "", max_variants, verify)
        module.example = given, named = copied_inputs(values, keywords)
        module.prepare(given, named)
        return module

    if chosen is not None:
        return lowered(chosen)
    return _quickest(model, values, keywords, options, lowered, choice, None if names[0] == "auto" else names)


def _quickest(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    lowered: Callable[..., Lowered],
    path: str | PathLike[str] | None,
    names: list[Any] | None,
) -> Lowered:
    """The module of the backend that is quickest on these inputs, or of the one that a file says was."""
    if path is not None:
        refuse_unwritable(path)
    key = key_of(model, args, kwargs, options.precision)
    known = saved_choice(path, key)
    if known is not None and (names is None or known.backend in names):
        module = lowered(find_backend(known.backend))
        module.choice = known
        return module
    made: dict[str, Lowered] = {}

    def make(backend: Backend, seconds: float) -> Callable[[], Any]:
        made[backend.name] = module = lowered(backend, dataclasses.replace(options, time_limit=seconds))
        if any(item.program is None for item in module._variants):
            raise BackendError(f"it runs the model's own Python: {module._variants[0].runs_as}")
        return of_inputs(module)

    devices = {tensor.device.type for tensor in tensors_in((args, kwargs))} or {"cpu"}
    found = (
        candidates("cuda" if "cuda" in devices else "cpu") if names is None else [find_backend(name) for name in names]
    )
    of_inputs = _calls(model, args, kwargs)
    try:
        with left_as_it_was(model):  # thousands of calls may be made
            choice = measure(key, found, make, of_inputs(model), options.time_limit)
    except BackendError:
        if not made:
            raise
        return (
            made["native"] if "native" in made else next(iter(made.values()))
        )  # the model's own Python, for all of them
    module = made[choice.backend]
    made.clear()
    gc.collect()  # the others give back their threads and memory
    module.options, module.choice = options, choice
    if path is not None:
        choice.save(path)
    return module


def _calls(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Callable[[], Any]]:
    """How to call a module or function with copies of inputs; where the model writes into them, with new ones each time."""
    given, named = copied_inputs(args, kwargs)
    before = frozen_leaves((given, named), "inputs")
    with left_as_it_was(model), torch.no_grad():
        model(*given, **named)
    if not compare(before, frozen_leaves((given, named), "inputs"), Tolerance(0.0, 0.0)).differences:
        return lambda function: functools.partial(function, *given, **named)

    def anew(function: Any) -> Any:
        values, keywords = copied_inputs(args, kwargs)
        return function(*values, **keywords)

    return lambda function: functools.partial(anew, function)
