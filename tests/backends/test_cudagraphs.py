"""What CUDA graphs read and write. Recording one needs a GPU; what leads to it does not: here something stands for a graph."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import torchgraft
from torchgraft.backends import cudagraphs
from torchgraft.backends.backend import Options


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
    monkeypatch.setattr(cudagraphs.GraphOfPart, "_warm_up", lambda self, inputs: None)
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
    monkeypatch.setattr(cudagraphs.GraphOfPart, "_warm_up", lambda self, inputs: None)  # which needs a GPU
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


def test_each_thread_that_records_has_chosen_its_kernels(
    recordings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[str] = []

    def warm_up(self: Any, inputs: Any) -> None:
        if not getattr(self._in_thread, "is_warm", False):
            warmed.append(threading.current_thread().name)
            self._in_thread.is_warm = True

    monkeypatch.setattr(cudagraphs.GraphOfPart, "_warm_up", warm_up)
    run = cudagraphs.GraphOfPart(added, (torch.ones(2), torch.zeros(2), 1.0), [1], Options())
    caches = [torch.zeros(2) for _ in range(3)]
    thread = threading.Thread(target=lambda: [run(torch.ones(2), cache, 1.0) for cache in caches[:2]], name="other")
    thread.start()
    thread.join()
    run(torch.ones(2), caches[2], 1.0)
    assert warmed == ["MainThread", "other"] and len(recordings) == 3
