"""What CUDA graphs read and write. Recording one needs a GPU; what leads to it does not: here something stands for a graph."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import torchgraft
from torchgraft.backends import cudagraphs
from torchgraft.backends.backend import Options
from torchgraft.backends.graph_recording import record_graph


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The inputs of each recording. Like a graph, it computes with the memory and numbers of its recording, and with copies."""
    found: list[tuple[Any, ...]] = []

    class Recorded:
        def __init__(self, function: Any, inputs: tuple[Any, ...], written: list[int], strides: Any) -> None:
            found.append(inputs)
            self.function, self.written = function, written
            self.held = [
                item.clone() if isinstance(item, torch.Tensor) and index not in written else item
                for index, item in enumerate(inputs)
            ]

        def __call__(self, inputs: tuple[Any, ...]) -> Any:
            for index, (held, item) in enumerate(zip(self.held, inputs, strict=True)):
                if isinstance(item, torch.Tensor) and index not in self.written:
                    held.copy_(item)
            return self.function(*self.held)

    monkeypatch.setattr(cudagraphs, "_Recorded", Recorded)
    monkeypatch.setattr(cudagraphs.GraphOfPart, "_warm_up", lambda self, inputs, kind: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return found


def added(x: torch.Tensor, cache: torch.Tensor, number: float) -> torch.Tensor:
    """Writes one input, and takes a number."""
    cache.add_(x)
    return cache * number


def test_there_is_a_recording_for_each_place_that_is_written(recordings: list[Any]) -> None:
    run = cudagraphs.GraphOfPart(added, (torch.ones(2), torch.zeros(2), 1.0), [1], Options())
    caches = [torch.zeros(2) for _ in range(6)]
    for _ in range(2):
        for cache in caches:
            run(torch.ones(2), cache, 1.0)
    assert all(torch.equal(cache, torch.full((2,), 2.0)) for cache in caches)
    assert len(recordings) == 12 and len(run._graphs) == 4  # six in turn are more than are kept
    for _ in range(3):
        run(torch.ones(2), caches[0], 1.0)
    assert len(recordings) == 13


def test_a_place_that_is_laid_out_in_another_way_and_another_number_are_others(recordings: list[Any]) -> None:
    memory = torch.zeros(2, 2)
    run = cudagraphs.GraphOfPart(added, (torch.ones(2, 2), memory, 1.0), [1], Options())
    for cache, number in [(memory, 1.0), (memory.t(), 1.0), (memory, 2.0), (memory, 1.0)]:
        before = cache.clone()
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        assert torch.equal(run(x, cache, number), (before + x) * number)
    assert len(recordings) == 3


def test_an_input_that_is_written_under_another_name_is_not_copied(recordings: list[Any]) -> None:
    def both(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.add_(1.0)
        return x * 2

    run = cudagraphs.GraphOfPart(both, (torch.ones(2), torch.zeros(2)), [1], Options())
    assert torch.equal(run(torch.ones(2), torch.zeros(2)), torch.full((2,), 2.0))
    same = torch.ones(2)
    assert torch.equal(run(same, same), torch.full((2,), 4.0))


def test_tensors_on_several_devices_and_on_another_one_are_refused(recordings: list[Any]) -> None:
    with pytest.raises(ValueError, match="several devices"):
        cudagraphs.GraphOfPart(torch.add, (torch.ones(2), torch.ones(2, device="meta")), [], Options())
    run = cudagraphs.GraphOfPart(torch.relu, (torch.ones(2),), [], Options())
    with pytest.raises(RuntimeError, match="for tensors on cpu, and got one on meta"):
        run(torch.ones(2, device="meta"))


def test_results_that_are_inputs_are_known() -> None:
    x = torch.zeros(4, 4)
    assert cudagraphs.is_same_memory(x, x.view(4, 4)) and not cudagraphs.is_same_memory(x, x.t())
    assert not cudagraphs.is_same_memory(x, x[1:]) and not cudagraphs.is_same_memory(x, x.clone())


def test_without_memory_for_a_graph_kernels_are_launched_one_by_one(monkeypatch: Any) -> None:
    def full(*args: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cudagraphs, "_Recorded", full)
    monkeypatch.setattr(cudagraphs.GraphOfPart, "_warm_up", lambda self, inputs, kind: None)  # which needs a GPU
    run = cudagraphs.GraphOfPart(lambda x: x + 1, (torch.ones(2),), [], Options())
    with pytest.warns(UserWarning, match="no CUDA graph for lack of memory"):
        assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(run(torch.zeros(2)), torch.ones(2))


def test_what_a_part_writes() -> None:
    def model(x: Any, cache: Any, other: Any) -> Any:
        cache.index_copy_(0, torch.tensor([1]), x)
        return cache.sum(0) + other

    program = torchgraft.capture(model, (torch.ones(1, 3), torch.zeros(4, 3), torch.ones(3)))
    assert cudagraphs.written_inputs(program) == [1]
    program = torchgraft.capture(lambda x, y: x.view(-1)[1:].add_(y), (torch.ones(2, 2), torch.ones(3)))
    assert cudagraphs.written_inputs(program) == [0]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that are none, for what runs beside them."""
    for name in ("Stream", "current_stream", "device", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: mock.MagicMock())


def test_kernels_are_chosen_in_each_thread_and_for_each_layout_and_number(
    monkeypatch: pytest.MonkeyPatch, streams: None
) -> None:
    """Written inputs keep the layout of the caller, in which other kernels may run; the others are laid out as in the example."""
    seen: list[tuple[str, Any, Any, float]] = []

    def function(x: torch.Tensor, cache: torch.Tensor, number: float) -> torch.Tensor:
        seen.append((threading.current_thread().name, x.stride(), cache.stride(), number))
        return added(x, cache, number)

    class Recorded:
        def __init__(self, *args: Any) -> None:
            pass

        def __call__(self, inputs: Any) -> None:
            pass

    monkeypatch.setattr(cudagraphs, "_Recorded", Recorded)
    x, cache = torch.ones(2, 3), torch.zeros(2, 3)
    run = cudagraphs.GraphOfPart(function, (x, cache, 1.0), [1], Options())

    def calls() -> None:
        wide = torch.zeros(2, 5)
        for other in (torch.zeros(2, 3), wide[:, :3], wide[:, 2:]):
            run(torch.ones(3, 2).t(), other, 1.0)
        with torch.inference_mode():
            run(x, torch.zeros(2, 3), 1.0)
        run(x, cache, 2.0)
        assert not wide.any()

    calls()
    thread = threading.Thread(target=calls, name="other")
    thread.start()
    thread.join()
    kinds = list(dict.fromkeys(seen))
    assert kinds == [
        (name, (3, 1), strides, number)
        for name in ("MainThread", "other")
        for strides, number in (((3, 1), 1.0), ((5, 1), 1.0), ((3, 1), 2.0))
    ]
    assert len(seen) == 3 * 8 and not cache.any()  # with inference mode there are four kinds for each thread


class _Graph:
    """Stands for a CUDA graph; `broken` ones cannot be ended."""

    broken = False

    def __init__(self) -> None:
        self.ended = False

    def pool(self) -> None:
        if not self.ended:
            raise RuntimeError("CUDAGraph::pool() without a preceding successful capture")


@contextlib.contextmanager
def _graph(graph: _Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> Iterator[None]:
    """Does what torch's context manager does: where ending the recording fails, the stream stays."""
    before = torch.cuda.current_stream()
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        broken, _Graph.broken = _Graph.broken, False
        if broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        graph.ended = True
        torch.cuda.set_stream(before)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a device was told: the current stream, and calls by name."""
    said: dict[str, Any] = {"stream": mock.MagicMock(device=torch.device("cpu", 0)), "calls": []}

    def note(name: str) -> Any:
        return lambda *args: said["calls"].append(name)

    monkeypatch.setattr(_Graph, "broken", False)
    for name, value in {
        "CUDAGraph": _Graph, "graph": _graph, "graph_pool_handle": lambda: (0, 1), "synchronize": lambda *_: None,
        "current_stream": lambda *_: said["stream"], "set_stream": lambda stream: said.update(stream=stream),
        "Stream": lambda *_: mock.MagicMock(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("_cuda_clearCublasWorkspaces", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, note(name), raising=False)
    return said


def test_a_recording(device: dict[str, Any]) -> None:
    before = device["stream"]
    graph, result = record_graph(lambda: (device["stream"] is before, gc.isenabled()))
    assert graph.ended and result == (False, False) and gc.isenabled()
    assert device == {"stream": before, "calls": ["_cuda_clearCublasWorkspaces"] * 2}


def test_a_recording_that_cannot_be_ended_leaves_all_as_it_was(device: dict[str, Any]) -> None:
    before = device["stream"]

    def function() -> None:
        _Graph.broken = True
        raise ValueError("asked for a value")

    with pytest.raises(ValueError, match="asked for a value"):
        record_graph(function)
    assert device["stream"] is before and gc.isenabled()
    assert device["calls"] == [
        "_cuda_clearCublasWorkspaces",
        "_cuda_endAllocateToPool",
        "_cuda_releasePool",
        "_cuda_clearCublasWorkspaces",
    ]


def test_a_function_that_raises_while_it_is_recorded(device: dict[str, Any]) -> None:
    before = device["stream"]
    with pytest.raises(ZeroDivisionError):
        record_graph(lambda: 1 // 0)
    assert device == {"stream": before, "calls": ["_cuda_clearCublasWorkspaces"] * 2}  # it was ended in order


# ---- on a GPU ----


def cached(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Writes what it is given, and computes with a matrix product, which takes a workspace."""
    cache.add_(x @ x)
    return cache * 2


@pytest.mark.gpu
def test_a_recording_that_fails_on_a_gpu_leaves_all_as_it_was() -> None:
    x = torch.ones(4, device="cuda")
    before = torch.cuda.current_stream()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            record_graph(lambda: (x * 2).sum().item())
        assert torch.cuda.current_stream() == before
        assert torch.rand(4, device="cuda").min() >= 0  # which would be refused
        graph, result = record_graph(lambda: x * 3)
        graph.replay()
        assert result.tolist() == [3.0] * 4


@pytest.mark.gpu
def test_caches_come_and_go_on_a_gpu() -> None:
    """More places than there are graphs, caches that are gone when their place is used again, other graphs in between."""
    x = torch.randn(64, 64, device="cuda")
    fast = torchgraft.lower(cached, (x, torch.zeros(64, 64, device="cuda")), backend="cudagraphs")
    other = torchgraft.lower(lambda x: (x @ x).relu(), x, backend="cudagraphs")
    for _ in range(4):
        caches = [torch.zeros(64, 64, device="cuda") for _ in range(6)]
        for cache in [*caches, *caches, caches[5], caches[5]]:
            expected = cache.clone()
            torch.testing.assert_close(fast(x, cache), cached(x, expected))
            torch.testing.assert_close(cache, expected)
            torch.testing.assert_close(other(x), (x @ x).relu())
        del caches, cache, expected
        torch.cuda.empty_cache()


@pytest.mark.gpu
def test_calls_on_several_streams_and_in_several_threads_on_a_gpu() -> None:
    x = torch.randn(256, 256, device="cuda")
    expected = (x @ x).relu()
    fast = torchgraft.lower(lambda x: (x @ x).relu(), x, backend="cudagraphs")
    wrong: list[Any] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            for _ in range(50):
                if not torch.allclose(fast(x), expected, rtol=1e-3, atol=1e-3):
                    wrong.append(threading.current_thread().name)
        stream.synchronize()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not wrong


@pytest.mark.gpu
def test_a_module_that_is_recorded_by_its_caller_on_a_gpu() -> None:
    x = torch.randn(8, 8, device="cuda")
    fast = torchgraft.lower(lambda x: (x @ x).relu(), x, backend="cudagraphs")
    graph, result = record_graph(lambda: fast(x))
    x.fill_(1.0)
    graph.replay()
    assert torch.equal(result, torch.full((8, 8), 8.0, device="cuda"))
