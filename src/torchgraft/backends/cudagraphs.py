"""The backend `cudagraphs`: torch's kernels on a GPU, launched all at once as one CUDA graph for each size in use.
Which kernels there are is chosen in `prepacking.py`; what is cut into parts, and where guards run, in `parts.py`; one graph is
recorded in `graph_recording.py`.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchgraft.analysis.aliases import Aliases
from torchgraft.backends.backend import Backend, Options
from torchgraft.backends.graph_recording import record_graph, recording
from torchgraft.backends.native import make_direct
from torchgraft.codegen.graph_module import GraphModule
from torchgraft.ir.node import Node

# Runs before a graph is recorded: libraries choose kernels and take workspace in the first ones.
_WARM_UPS = 3
# Graphs that are kept for tensors which a part writes, by the place of those tensors.
_MOST_PLACES = 4
# Ways of calling that a thread remembers to have chosen kernels for.
_MOST_KINDS = 64


def on_gpu(inputs: tuple[Any, ...]) -> bool:
    """Whether inputs are on a CUDA device."""
    return any(isinstance(item, torch.Tensor) and item.is_cuda for item in inputs)


# How the written inputs of a call are laid out, and what numbers it is given; and with that, where in memory they are.
_Kind = tuple[Any, ...]
_Place = tuple[Any, ...]


class GraphOfPart:
    """A function on a GPU as CUDA graphs. Inputs are copied to where the graph reads them, but for those that the function
    writes: for these there is a graph of its own for each place in memory. Results are copies, which the next call does not
    change; one that is a written input is that input."""

    def __init__(
        self, function: Callable[..., Any], inputs: tuple[Any, ...], written: list[int], options: Options
    ) -> None:
        tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
        self._device = tensors[0].device
        if any(item.device != self._device for item in tensors):
            # The values of a tensor on the CPU would be those of the recording for ever.
            raise ValueError("a part that takes tensors from several devices is no CUDA graph")
        self._function, self._written, self._options = function, written, options
        self._copied = [
            index for index, item in enumerate(inputs) if isinstance(item, torch.Tensor) and index not in written
        ]
        self._plain = [index for index, item in enumerate(inputs) if not isinstance(item, torch.Tensor)]
        self._lock = threading.Lock()
        self._stream: Any = None
        self._graphs: dict[_Place, Callable[[tuple[Any, ...]], Any]] = {}
        # As the function was made for them; a caller may lay out tensors in another way.
        self._strides = [item.clone().stride() if isinstance(item, torch.Tensor) else () for item in inputs]
        self._in_thread = threading.local()
        self._warm_up(inputs, self._kind(inputs))

    def _kind(self, inputs: tuple[Any, ...]) -> _Kind:
        return (*[inputs[index].stride() for index in self._written], *[inputs[index] for index in self._plain])

    def _warm_up(self, inputs: tuple[Any, ...], kind: _Kind) -> None:
        """Run on copies, so that libraries have chosen their kernels before a graph is recorded. They do so for each
        thread, which has handles and plans of its own, and for each layout; torch.compile does for each number, and inside
        of inference mode. To do that while a graph is recorded is an error."""
        known = self._in_thread.__dict__.setdefault("known", set())
        kind = (torch.is_inference_mode_enabled(), *kind)
        if kind in known:
            return
        if len(known) >= _MOST_KINDS:
            known.clear()
        copies = [
            item.new_empty_strided(item.shape, item.stride() if index in self._written else strides).copy_(item)
            if isinstance(item, torch.Tensor)
            else item
            for index, (item, strides) in enumerate(zip(inputs, self._strides, strict=True))
        ]
        with torch.cuda.device(self._device.index):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), _best_kernels(self._options):
                for _ in range(_WARM_UPS):
                    self._function(*copies)
            torch.cuda.current_stream().wait_stream(stream)
            stream.synchronize()  # before the copies go, whose memory is another stream's
        known.add(kind)

    def _record(self, inputs: tuple[Any, ...], kind: _Kind) -> Callable[[tuple[Any, ...]], Any]:
        """A graph; where memory is short, the function itself, whose kernels are launched one by one."""
        try:
            self._warm_up(inputs, kind)
            with (
                _best_kernels(self._options),
                torch.cuda.device(self._device.index if self._device.index is not None else -1),
            ):
                return _Recorded(self._function, inputs, self._written, self._strides)
        except torch.cuda.OutOfMemoryError as error:
            warnings.warn(f"no CUDA graph for lack of memory, kernels are launched one by one: {error}", stacklevel=3)
            torch.cuda.empty_cache()
            return lambda given: self._function(*given)

    def __call__(self, *inputs: Any) -> Any:
        """Replay; what the graph computes with is this object's, so one call at a time, and one stream after the other."""
        given = inputs[(self._copied or self._written)[0]].device
        if given != self._device:
            raise RuntimeError(f"the CUDA graph is for tensors on {self._device}, and got one on {given}")
        written = [inputs[index] for index in self._written]
        addresses = [item.data_ptr() for item in written]
        if written and not set(addresses).isdisjoint([inputs[index].data_ptr() for index in self._copied]):
            return self._function(*inputs)  # an input is written under another name, too; a copy would not see it
        if given.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._function(*inputs)  # these kernels become part of the caller's own graph
        kind = self._kind(inputs)
        place = (*addresses, *kind)
        with self._lock:
            self._follow_stream()
            recorded = self._graphs.get(place)
            if recorded is None:
                if len(self._graphs) >= _MOST_PLACES:
                    with recording:
                        torch.cuda.synchronize(self._device)  # it may still be running
                    self._graphs.pop(next(iter(self._graphs)))
                recorded = self._graphs[place] = self._record(inputs, kind)
            return recorded(inputs)

    def _follow_stream(self) -> None:
        """A call on another stream than the last one's waits for that; both use the same memory."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
            for recorded in self._graphs.values():
                if isinstance(recorded, _Recorded):
                    recorded.used_by(stream)
        self._stream = stream


def is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    return (first.data_ptr(), first.shape, first.stride(), first.dtype) == (
        *(second.data_ptr(), second.shape, second.stride(), second.dtype),
    )


def written_inputs(part: GraphModule) -> list[int]:
    """The numbers of the inputs that a part writes, itself or through views of them."""
    memory = Aliases(part.graph)
    seen: set[Any] = set()
    pending = [item for effects in memory.effects.values() for item in effects.writes]
    while pending:
        item = pending.pop()
        if isinstance(item, Node) and item not in seen:
            seen.add(item)
            pending += memory.shares(item)
    placeholders = [node for node in part.graph.nodes if node.op == "placeholder"]
    return [number for number, node in enumerate(placeholders) if node in seen]


@contextlib.contextmanager
def _best_kernels(options: Options) -> Iterator[None]:
    """Let cuDNN try its kernels, and use TF32 where it is the precision: what is recorded stays chosen."""
    cudnn, is_tf32 = torch.backends.cudnn, options.precision == "tf32"
    before = torch.get_float32_matmul_precision()
    flags = cudnn.flags(
        enabled=cudnn.enabled,
        benchmark=True,
        deterministic=cudnn.deterministic,
        allow_tf32=is_tf32 or cudnn.allow_tf32,
    )
    with flags:
        if is_tf32:
            torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            if is_tf32:
                torch.set_float32_matmul_precision(before)


class _Recorded:
    """One CUDA graph, and the tensors that it reads and writes."""

    def __init__(
        self, function: Callable[..., Any], inputs: tuple[Any, ...], written: list[int], strides: list[tuple[int, ...]]
    ) -> None:
        is_copied = [isinstance(item, torch.Tensor) and index not in written for index, item in enumerate(inputs)]
        self._copied = [index for index, copied in enumerate(is_copied) if copied]
        held = list(inputs)
        with torch.inference_mode(False), torch.no_grad():  # else calls outside of inference mode could not copy there
            for index in self._copied:
                shape, options = inputs[index].shape, {"dtype": inputs[index].dtype, "device": inputs[index].device}
                held[index] = torch.empty_strided(shape, strides[index], **options).copy_(inputs[index])
        self._held = [held[index] for index in self._copied]
        self._graph, result = record_graph(lambda: function(*held))
        self._is_one = isinstance(result, torch.Tensor)
        self._results = [result] if self._is_one else list(result)
        # Results that are inputs which the graph writes, by the numbers of both.
        self._same = {
            number: index
            for number, found in enumerate(self._results)
            for index in written
            if isinstance(found, torch.Tensor) and is_same_memory(found, held[index])
        }
        # What the caller owns is not kept alive: a graph is replayed only for tensors that are where these are now, and a model
        # that was tried on copies of a cache would keep all of them.
        self._results = [None if number in self._same else item for number, item in enumerate(self._results)]

    def used_by(self, stream: Any) -> None:
        """Memory that belongs to the stream of the recording must not be given away while another one still uses it."""
        for item in self._held:
            item.record_stream(stream)

    def __call__(self, inputs: tuple[Any, ...]) -> Any:
        if len(self._held) == 1:
            self._held[0].copy_(inputs[self._copied[0]])
        elif self._held:
            torch._foreach_copy_(self._held, [inputs[index] for index in self._copied])
        self._graph.replay()
        results = [
            inputs[self._same[number]]
            if number in self._same
            else item.clone()
            if isinstance(item, torch.Tensor)
            else item
            for number, item in enumerate(self._results)
        ]
        return results[0] if self._is_one else tuple(results)


class CudaGraphs(Backend):
    """Records parts of programs as CUDA graphs."""

    name = "cudagraphs"
    devices = ("cuda",)
    takes_writes = True

    def problem(self) -> str | None:
        """It needs a GPU."""
        return None if torch.cuda.is_available() else "there is no CUDA device\n  use backend='native'"

    def compile(self, part: GraphModule, inputs: tuple[Any, ...], options: Options) -> Callable[..., Any]:
        """Record; where memory is short, run the kernels one by one."""
        if not on_gpu(inputs):
            raise ValueError("a part without tensors on a CUDA device")
        written = written_inputs(part)
        make_direct(part, inputs, options)
        try:
            return GraphOfPart(part.forward, inputs, written, options)
        except torch.cuda.OutOfMemoryError as error:
            warnings.warn(f"no CUDA graph for lack of memory, kernels are launched one by one: {error}", stacklevel=2)
            torch.cuda.empty_cache()
            return part.forward


BACKEND = CudaGraphs
