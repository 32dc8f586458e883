"""One watched run of a model: what is put in place for it, and what is there to compare and to build a program of when it ends.
What is written down on the way is decided in `watcher.py`; how many runs there are, and what becomes of them, in `program.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from torchgraft.capturing.flowing.dtypes import DTYPE_PATCHES
from torchgraft.capturing.flowing.kinds import PARAMETER_PATCH, type_patches
from torchgraft.capturing.flowing.min_max import BUILTIN_PATCHES
from torchgraft.capturing.patching.active import CodePatch, acquire_all, active, release_all
from torchgraft.capturing.patching.module_patches import MODULE_GETATTR, MODULE_PATCHES, TENSOR_WRITE_PATCHES
from torchgraft.capturing.patching.packing import PACKING_PATCH
from torchgraft.capturing.patching.regions import remove_empty_regions
from torchgraft.capturing.patching.wrapping import SCRIPT_PATCH, Autowrap, program_patches, wrapped_patches
from torchgraft.capturing.user_code.comparisons import compared_variables
from torchgraft.capturing.user_code.plain_numbers import call_ours, number_patches
from torchgraft.capturing.watching.example import ExampleInputs
from torchgraft.capturing.watching.reruns import KeepWhole, RunAgain
from torchgraft.capturing.watching.results import changed_objects, result_argument, write_objects
from torchgraft.capturing.watching.same_program import Record
from torchgraft.capturing.watching.watcher import Watcher, WatchingMode
from torchgraft.ir.contexts import exit_context
from torchgraft.ir.graph import Graph
from torchgraft.ir.origin import source_line


class Run(NamedTuple):
    """What came of a watched run."""

    watcher: Watcher
    record: Record


_AUTOWRAP = Autowrap((), ())
# Those of torch's own functions and methods are for proxies, as are those of attributes and modes.
_PATCHES: list[Any] = [
    patch
    for patch in MODULE_PATCHES
    if getattr(patch, "holder", None) not in (torch, torch.Tensor, TorchFunctionMode) and patch is not MODULE_GETATTR
]
_PATCHES += [*TENSOR_WRITE_PATCHES, *BUILTIN_PATCHES, SCRIPT_PATCH, PARAMETER_PATCH, *DTYPE_PATCHES, PACKING_PATCH]


def watched_run(
    watcher: Watcher, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], choices: list[CodePatch]
) -> Run:
    """Run a model and write it down; the model and the world are left as the run leaves them."""
    inputs = ExampleInputs(watcher, function, args, kwargs)
    patches: list[Any] = [*_PATCHES, *wrapped_patches(), *program_patches(function), *_AUTOWRAP.library_patches()]
    if not watcher.is_plain:
        patches += [*type_patches(function, watcher.paths), *choices, *number_patches()]
    acquire_all(patches)
    previous, active.tracer = active.tracer, watcher
    try:
        with WatchingMode(watcher):
            result = inputs.call(function)
            # Checks come before anything that is made for the caller or given to it: whoever tries a program can then leave it.
            changes = watcher.unwatched(changed_objects, watcher)
            output = result_argument(watcher, result)
            watcher.unwatched(write_objects, watcher, changes)
            del result
    finally:
        active.tracer = previous
        release_all(patches)
    if watcher.flow.asking and call_ours(watcher.flow.asking.values()):
        raise RunAgain(lambda: None)
    if watcher.calls.recovered is not None:
        raise KeepWhole(*watcher.calls.recovered)
    if not watcher.is_plain:
        _guard_identities(watcher, inputs)
    watcher.create_node("output", "output", (output,), {})
    record = Record(watcher.graph, watcher.calls.nodes, output, watcher.flow.plain)
    if not watcher.is_plain:
        _tidy(watcher.graph)
    return Run(watcher, record)


def _guard_identities(watcher: Watcher, inputs: ExampleInputs) -> None:
    """Have the program check that its inputs are different tensors if a function that ran asks that (`query is key`)."""
    codes = {id(node._origin[0]): node._origin[0] for node in watcher.calls.nodes if node._origin and node._origin[0]}
    asking = next((code for code in codes.values() if compared_variables(code) is not None), None)
    if asking is not None:
        inputs.guard_identities(str(source_line(asking, compared_variables(asking)) or "an unknown line"))


def _tidy(graph: Graph) -> None:
    """Drop reads and numbers that nothing uses, and regions in which nothing happens."""
    for node in reversed(graph.nodes):
        is_read = node._op == "get_attr" or node._target in _READS
        if is_read and not node._users:
            graph.erase_node(node)
    if graph.find_nodes(op="call_function", target=exit_context):
        remove_empty_regions(graph)


_READS = frozenset({getattr, "size", "numel", "item"})
