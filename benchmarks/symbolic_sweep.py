"""The command `python -m benchmarks.symbolic_sweep`: traces every model of torchvision, timm and transformers that is asked
for with torch.fx and with torchgraft, and checks the programs against eager, bit for bit.
Timing of single operations is in the other benchmarks; this one asks whether real models come through unharmed.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import fnmatch
import gc
import importlib
import json
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.utils import _pytree as pytree

import torchgraft
from benchmarks.model_collections import COLLECTIONS, Case
from benchmarks.report import Environment

COLUMNS = {
    "name": "model",
    "fx": "torch.fx nodes",
    "ours": "torchgraft nodes",
    "code": "code",
    "output": "eval",
    "to_train": "eval, then .train()",
    "train": "train, gradients",
    "to_eval": "train, then .eval()",
    "dead_code": "dead code",
    "state": "model",
    "ratio": "speed",
    "note": "",
}
LEGEND = """\
Node counts, or why there is none (`refused`: TraceError that names a line of the model; `ERROR`: anything else). `code`:
whether `.code` is the same text, or else how many lines differ. `eval`: the traced program's outputs are eager's, bit for bit, from
the same random state. `.train()` and `.eval()`: the program, switched to the other mode, is eager in that mode or raises
GuardError (`guard`). `train, gradients`: traced in training mode; outputs, every gradient and every buffer afterwards are
eager's. `dead code`: how many nodes `eliminate_dead_code` removed with the result still the same. `model`: tracing left
attributes, buffers and random state as they were. `speed`: torch.fx's time for `symbolic_trace` and `.code` over ours."""
GOOD = ("", "same", "refused", "guard", "kept")


class TooSlow(Exception):
    """A step took longer than the limit."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooSlow in this thread when the block takes too long."""

    def stop(number: int, frame: Any) -> None:
        raise TooSlow(f"longer than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


# ---- comparing ----


def tensors_of(value: Any) -> list[Any]:
    """The leaves of an output; objects that are no containers of torch's are opened by their attributes."""
    leaves: list[Any] = []
    for leaf in pytree.tree_leaves(value):
        if leaf is None or isinstance(leaf, (torch.Tensor, int, float, str, bool)):
            leaves.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            leaves += tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        elif hasattr(leaf, "__dict__"):
            leaves += tensors_of(list(vars(leaf).values()))
    return leaves


def is_same(first: Any, second: Any) -> bool:
    """Whether two trees of values agree bit for bit, NaN being equal to NaN."""
    left, right = tensors_of(first), tensors_of(second)
    return len(left) == len(right) and all(map(_same_leaf, left, right))


def _same_leaf(first: Any, second: Any) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return bool(first == second)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())


def is_flat(value: Any) -> bool:
    """Whether an output says so little that comparing it proves little: constant, or not finite."""
    tensors = [leaf for leaf in tensors_of(value) if isinstance(leaf, torch.Tensor) and leaf.numel() > 1]
    return not any(bool(t.isfinite().all()) and bool((t != t.flatten()[0]).any()) for t in tensors)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that tracing must not change, by path."""
    result: dict[str, Any] = {"random": torch.get_rng_state().clone()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            result[f"{path}.{name}"] = list(value) if isinstance(value, (dict, list)) else value
        for name, buffer in module._buffers.items():
            result[f"{path}.{name}"] = None if buffer is None else buffer.clone()
    return result


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The paths at which two snapshots differ."""
    return [path for path in before.keys() | after.keys() if not _unchanged(before.get(path), after.get(path))]


def _unchanged(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first is second or _same_leaf(first, second)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_unchanged, first, second))
    return first is second or bool(type(first) is type(second) and first == second)


# ---- one model ----


@dataclasses.dataclass
class Row:
    """What was found out about one model."""

    collection: str
    name: str
    fx: str = ""
    ours: str = ""
    code: str = ""
    output: str = ""
    to_train: str = ""
    train: str = ""
    to_eval: str = ""
    dead_code: str = ""
    state: str = ""
    ratio: str = ""
    note: str = ""
    fx_error: str = ""
    ours_error: str = ""
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether nothing about it needs looking at."""
        checks = (self.output, self.to_train, self.train, self.to_eval, self.state)
        refused_alone = self.ours == "refused" and self.fx.isdigit()
        return not refused_alone and "ERROR" not in self.ours + self.dead_code and all(text in GOOD for text in checks)


class Examination:
    """All checks of one model, written into a row as they are made."""

    def __init__(self, case: Case, limit: float) -> None:
        self.case = case
        self.limit = limit
        self.row = Row(case.collection, case.name)

    def run(self) -> Row:
        started = time.perf_counter()
        try:
            self._examine()
        except TooSlow as error:
            self.row.note = f"stopped: {error}"
        self.row.seconds = round(time.perf_counter() - started, 2)
        return self.row

    def _examine(self) -> None:
        row = self.row
        with limited(self.limit):
            torch.manual_seed(0)
            model = self.case.build()
            size = sum(value.numel() * value.element_size() for value in model.parameters())
            if not self.case.is_large(size):
                _perturb(model)
            model.eval()
        before = snapshot(model)
        theirs, row.fx, row.fx_error, their_time = self._traced(torch.fx, model)
        if changes(before, snapshot(model)):  # torch.fx may have run what it could not record
            _restore(model, before)
        before = snapshot(model)
        ours, row.ours, row.ours_error, our_time = self._traced(torchgraft, model)
        changed = changes(before, snapshot(model))
        row.state = f"CHANGED: {changed[:3]}" if changed else "kept"
        if ours is None:
            return
        if theirs is not None:
            row.code = _difference(theirs.code, ours.code)
            row.ratio = f"{their_time / our_time:.1f}"
        if self.case.is_large(size):
            row.note = f"{size / 1e9:.1f} GB: traced without weights only"
            return
        self._compare(model, ours)

    def _compare(self, model: nn.Module, program: Any) -> None:
        row = self.row
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        with limited(self.limit):
            inputs, problem = self._inputs(model)
        if inputs is None:
            row.note = f"eager fails: {problem}"
            return
        with limited(3 * self.limit):
            expected = _outputs(model, inputs)
            if not is_same(expected, _outputs(model, inputs)):
                row.note = "eager differs from run to run"
                return
            row.note = "flat output" if is_flat(expected) else ""
            row.output = self._verdict(lambda: is_same(expected, _outputs(program, inputs)))
            row.dead_code = self._dead_code(program, inputs, expected)
        with limited(6 * self.limit):
            model.train()
            try:
                in_training = _training_step(model, model, weights, inputs)
            except TooSlow:
                raise
            except Exception as error:
                row.note = f"eager fails in training mode: {_short(error)}"
                return
            program.train()
            row.to_train = self._verdict(lambda: is_same(in_training, _training_step(program, model, weights, inputs)))
            model.load_state_dict(weights)
            self._trace_in_training(model, weights, inputs, expected, in_training)

    def _trace_in_training(self, model: nn.Module, weights: Any, inputs: Any, expected: Any, in_training: Any) -> None:
        row = self.row
        model.train()
        program, row.train, error, _ = self._traced(torchgraft, model)
        if program is None:
            row.ours_error = row.ours_error or error
            return
        row.train = self._verdict(lambda: is_same(in_training, _training_step(program, model, weights, inputs)))
        model.load_state_dict(weights)
        model.eval()
        program.eval()
        row.to_eval = self._verdict(lambda: is_same(expected, _outputs(program, inputs)))

    def _traced(self, library: Any, model: nn.Module) -> tuple[Any, str, str, float]:
        """(program or None, node count or verdict, error, seconds)."""
        seconds = []
        for _ in range(3):
            gc.collect()
            started = time.process_time()
            try:
                with limited(self.limit):
                    program = library.symbolic_trace(model)
                    code = program.code
            except TooSlow:
                raise
            except Exception as error:
                refused = isinstance(error, torchgraft.TraceError) and re.search(r"\.py:\d+", str(error))
                text = f"{type(error).__name__}: {error}"
                return None, "refused" if refused else "fails" if library is torch.fx else "ERROR", text, 0.0
            seconds.append(time.process_time() - started)
            if seconds[0] > 1:
                break
        return program, str(len(program.graph.nodes)), "" if code else "no code", min(seconds)

    def _verdict(self, check: Callable[[], bool]) -> str:
        try:
            return "same" if check() else "DIFFERS"
        except torchgraft.GuardError:
            return "guard"
        except TooSlow:
            raise
        except Exception as error:
            self.row.ours_error = self.row.ours_error or f"{type(error).__name__}: {error}"
            return f"ERROR {type(error).__name__}"

    def _dead_code(self, program: Any, inputs: Any, expected: Any) -> str:
        pruned = copy.deepcopy(program)
        before = len(pruned.graph.nodes)
        pruned.graph.eliminate_dead_code()
        verdict = self._verdict(lambda: is_same(expected, _outputs(pruned, inputs)))
        return str(before - len(pruned.graph.nodes)) if verdict == "same" else f"ERROR: {verdict}"

    def _inputs(self, model: nn.Module) -> tuple[Any, str]:
        """The first of the example inputs that the model accepts."""
        problem = "no inputs"
        for make in self.case.inputs:
            torch.manual_seed(1)
            inputs = make()
            try:
                _outputs(model, inputs)
            except TooSlow:
                raise
            except Exception as error:
                problem = _short(error)
            else:
                return inputs, ""
        return None, problem


def _outputs(module: Any, inputs: tuple[Any, ...]) -> Any:
    torch.manual_seed(2)
    arguments = copy.deepcopy(inputs)
    with torch.no_grad():
        result = module(*arguments)
    return result, arguments  # what a model does to its inputs counts too


def _training_step(module: Any, model: nn.Module, weights: dict[str, torch.Tensor], inputs: tuple[Any, ...]) -> Any:
    """Outputs, gradients and buffers of one forward and backward in training mode, starting from `weights`."""
    model.load_state_dict(weights)
    model.zero_grad()
    torch.manual_seed(2)
    outputs = module(*copy.deepcopy(inputs))
    leaves = [leaf for leaf in tensors_of(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if leaves:
        torch.stack([(leaf.float() ** 2).sum() for leaf in leaves]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in tensors_of(outputs)], gradients, {
        name: buffer.clone() for name, buffer in model.named_buffers()
    }


def _perturb(model: nn.Module) -> None:
    """Move every weight: many models start with zeros in places that would hide differences."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)


def _restore(model: nn.Module, before: dict[str, Any]) -> None:
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and before.get(f"{path}.{name}") is not None:
                buffer.data.copy_(before[f"{path}.{name}"])


def _difference(theirs: str, ours: str) -> str:
    if theirs == ours:
        return "same"
    left, right = theirs.splitlines(), ours.splitlines()
    return f"{len(set(left) ^ set(right))} lines"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]


# ---- the command ----


def table(rows: Sequence[Row]) -> str:
    """A Markdown table; also what is printed, because it reads well in a terminal too."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(str(getattr(row, name)).replace("|", "\\|") for name in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """What a reader wants to know first."""
    lines = []
    for collection in dict.fromkeys(row.collection for row in rows):
        own = [row for row in rows if row.collection == collection]
        both = sorted(float(row.ratio) for row in own if row.ratio)
        text = f"{collection}: {len(own)} models; torch.fx traces {sum(row.fx.isdigit() for row in own)}, torchgraft "
        text += f"{sum(row.ours.isdigit() for row in own)}; {sum(row.output == 'same' for row in own)} programs run in "
        text += f"eval and give eager's bits; {sum(not row.is_good for row in own)} need a look"
        lines.append(text + (f"; median speed {both[len(both) // 2]:.1f} times torch.fx's" if both else ""))
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.symbolic_sweep", description=__doc__)
    parser.add_argument("collections", nargs="*", help=f"of {', '.join(COLLECTIONS)} (default: all that are installed)")
    parser.add_argument("--only", metavar="PATTERN", action="append", help="models whose name holds or matches this")
    parser.add_argument("--limit", metavar="S", type=float, default=20.0, help="seconds for a trace or a run (default 20)")
    parser.add_argument("--rows", metavar="FILE", type=Path, help="keep results here, one JSON object a line; go on from it")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the tables as a page")
    return parser.parse_args(arguments)
