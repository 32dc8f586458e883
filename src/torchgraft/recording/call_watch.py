"""Watching one run: the two torch modes that see every call, and the module and the user's line each call was made from.
Only short descriptions are kept, no tensors; how the log is shown and filtered is in `calls.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from torchgraft.analysis.surroundings import modules_behind
from torchgraft.ir.guards import is_guard
from torchgraft.ir.origin import source_line, source_of, user_instruction

_MOST_ITEMS = 8
_LONGEST_TEXT = 40


class TensorBrief(NamedTuple):
    """What is kept of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None
    device: str

    def __str__(self) -> str:
        shape = "[?]" if self.shape is None else str(list(self.shape))
        return f"{str(self.dtype).removeprefix('torch.')}{shape}" + (f"@{self.device}" if self.device else "")


class RawCall(NamedTuple):
    """A call as it is written down while the model runs; texts are made from it later. Times are in nanoseconds."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    path: str
    code: CodeType | None
    instruction: int
    start: int
    end: int
    error: str


class ModuleSpan(NamedTuple):
    """One call of a module."""

    path: str
    start: int
    end: int


# ---- short descriptions ----


def brief(value: Any) -> Any:
    """A short description of a value, which keeps nothing alive: a TensorBrief, or a text.

    >>> str(brief([torch.ones(2, 3), 1.5, {"a": slice(1, None)}]))
    "[float32[2, 3], 1.5, {'a': 1:}]"
    """
    if isinstance(value, torch.Tensor):
        try:
            shape: tuple[int, ...] | None = tuple(value.shape)
        except RuntimeError:  # a nested tensor has no shape
            shape = None
        return TensorBrief(value.dtype, shape, "" if value.is_cpu else str(value.device))
    cls = type(value)
    if value is None or cls in (bool, int, float, complex, torch.dtype, torch.device, torch.layout):
        return repr(value)
    if cls is str:
        return repr(value if len(value) <= _LONGEST_TEXT else value[:_LONGEST_TEXT] + "…")
    if isinstance(value, (tuple, list)) or cls is dict:
        opening, closing = "()" if isinstance(value, tuple) else "{}" if cls is dict else "[]"
        parts = list(itertools.islice(value.items() if cls is dict else value, _MOST_ITEMS + 1))
        texts = [f"{part[0]!r}: {brief(part[1])}" if cls is dict else str(brief(part)) for part in parts[:_MOST_ITEMS]]
        return f"{opening}{', '.join(texts + ['…'] * (len(parts) > _MOST_ITEMS))}{closing}"
    if cls is slice:
        texts = ["" if part is None else str(brief(part)) for part in (value.start, value.stop, value.step)]
        return ":".join(texts if value.step is not None else texts[:2])
    if cls in (torch.SymInt, torch.SymFloat, torch.SymBool):
        return str(value)
    return "…" if value is Ellipsis else str(getattr(value, "__name__", f"<{cls.__name__}>"))


# ---- names ----


def qualified_name(function: Any) -> str:
    """The name under which users know a function, as torch's own `resolve_name` says it where that knows one.

    >>> qualified_name(torch.nn.functional.relu), qualified_name(torch.ops.aten.addmm.default)
    ('torch.nn.functional.relu', 'aten.addmm.default')
    """
    try:
        return _resolved(function)
    except TypeError:  # not every callable can be a key
        return _own_name(function)


@lru_cache(4096)
def _resolved(function: Any) -> str:
    return resolve_name(function) or _own_name(function)


def _own_name(function: Any) -> str:
    name = str(getattr(function, "__qualname__", getattr(function, "__name__", type(function).__name__)))
    home = getattr(function, "__module__", None)
    if home is None and hasattr(function, "__objclass__"):
        home = function.__objclass__.__module__
    owner = getattr(function, "__self__", None)
    if name == "__get__" or name.endswith(".__get__"):
        return f"{_own_name(owner)}.__get__" if owner is not None else name
    return f"{home}.{name}" if home and home != "builtins" else name


# ---- the run ----


class Watch:
    """Writes down the calls of one run of `function`, or of whatever this thread does where it is None."""

    def __init__(self, function: Any, level: str) -> None:
        self.calls: list[RawCall] = []
        self.spans: list[ModuleSpan] = []
        self._roots = [] if function is None else modules_behind(function)
        self._open: list[tuple[torch.nn.Module, str, int]] = []
        self._below: dict[int, tuple[torch.nn.Module, dict[int, str]]] = {}
        self._thread = threading.get_ident()
        self._mode: Any = _Functions(self) if level == "function" else _Operators(self)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch what this thread does."""
        # Hooks for every module leave the modules as they are, and see those that are made on the way.
        enter = torch.nn.modules.module.register_module_forward_pre_hook(self._enter)
        leave = torch.nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        try:
            with self._mode:
                yield
        finally:
            enter.remove()
            leave.remove()

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make one call and write it down."""
        with torch._C.DisableTorchFunction():
            positional, keyword = tuple([brief(item) for item in args]), {}
            if kwargs:
                keyword = {name: brief(item) for name, item in kwargs.items()}
        path = self._open[-1][1] if self._open else ""
        code, instruction = user_instruction(2)
        start = time.perf_counter_ns()
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            place = (path, code, instruction, start, time.perf_counter_ns())
            self.calls.append(RawCall(function, positional, keyword, None, *place, error=type(error).__name__))
            raise
        end = time.perf_counter_ns()
        with torch._C.DisableTorchFunction():
            given = brief(result)
        self.calls.append(RawCall(function, positional, keyword, given, path, code, instruction, start, end, ""))
        return result

    # ---- modules ----

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._open.append((module, self._path_of(module), time.perf_counter_ns()))

    def _leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        while self._open:  # a module whose hook raised never left
            last, path, start = self._open.pop()
            if last is module:
                self.spans.append(ModuleSpan(path, start, time.perf_counter_ns()))
                return

    def _path_of(self, module: torch.nn.Module) -> str:
        """The path through the modules that are running, so that one module under two names has the name it is called by."""
        for caller, path, _ in reversed(self._open):
            name = self._names_below(caller).get(id(module))
            if name:
                return f"{path}.{name}" if path else name
        for prefix, root in self._roots:
            if root is module:
                return prefix
            name = self._names_below(root).get(id(module))
            if name:
                return f"{prefix}.{name}" if prefix else name
        return type(module).__name__

    def _names_below(self, module: torch.nn.Module) -> dict[int, str]:
        known = self._below.get(id(module))
        if known is None:
            names = {id(child): name for name, child in module.named_modules()}
            known = self._below[id(module)] = module, names  # holding the module keeps its id its own
        return known[1]

    # ---- calls of generated code ----

    def generated_code(self) -> dict[CodeType, GeneratedCode]:
        """The programs whose generated code ran, by the code."""
        found: dict[CodeType, GeneratedCode] = {}
        roots = [root for _, root in self._roots] + [module for module, _ in self._below.values()]
        for module in dict.fromkeys([module for root in roots for module in root.modules()]):
            generated = GeneratedCode.of(module)
            if generated is not None:
                found[generated.code] = generated
        return found


class _Functions(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._call = watch.call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_guard(func):  # no call of the model's
            return func(*args, **(kwargs or {}))
        return self._call(func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._call = watch.call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._call(func, args, kwargs or {})


class GeneratedCode:
    """The code that a program runs as (ours, or one of torch.fx's form), and what its nodes say about their origin."""

    def __init__(self, code: CodeType, nodes: list[Any], numbers: dict[int, int | None], start: int) -> None:
        self.code = code
        self._nodes = nodes
        self._numbers = numbers
        self._start = start

    @classmethod
    def of(cls, module: torch.nn.Module) -> GeneratedCode | None:
        """That of a module, if it is a program and has run."""
        code = getattr(vars(type(module)).get("forward"), "__code__", None)
        nodes = getattr(getattr(module, "graph", None), "nodes", None)
        text = getattr(type(module), "_python_code", None) or module
        numbers = getattr(text, "_lineno_map", None)
        if code is None or nodes is None or numbers is None:
            return None
        return cls(code, list(nodes), numbers, getattr(text, "_prologue_start", 0))

    def origin(self, instruction: int) -> tuple[str, str]:
        """The module path and the user's line of an instruction, empty where the program does not know."""
        line = source_line(self.code, instruction)
        number = self._numbers.get(line.line - self._start) if line is not None else None
        if number is None or number >= len(self._nodes):
            return "", ""
        node = self._nodes[number]
        stack = node.meta.get("nn_module_stack") or {}
        # A module that the program calls is running, and knows its path itself.
        path = str([*stack.values()][-1][0]) if stack and node.op != "call_module" else ""
        return re.sub(r"^L\['self'\]\.?", "", path), str(source_of(node) or "")
