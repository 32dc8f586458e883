"""Copies to a device are started early, parameters kept on the CPU come layer by layer, and nothing else changes."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchgraft
from tests.schedule.test_overlap_remote_calls import fetch
from torchgraft.errors import PassError
from torchgraft.schedule import PrefetchCopies, overlaps

WIDTH = 7
COPIES: list[Any] = []
ALIVE: list[int] = []


class CopiesOfWeights(TorchDispatchMode):
    """Knows, weakly, the weights that were copied to the device while it was on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and tuple(result.shape) == (WIDTH, WIDTH):
            COPIES.append(weakref.ref(result))
        return result


@torchgraft.wrap
def probe(x: Any) -> Any:
    """How many weights that were copied to the device are still there."""
    ALIVE.append(sum(copy() is not None for copy in COPIES))
    return x * 1


torchgraft.pure(probe)


def kinds(program: Any) -> list[str]:
    names = [node.name.rstrip("_0123456789") for node in program.graph.nodes if node.op.startswith("call")]
    return [name for name in names if name not in ("guard", "getitem")]


def stack(depth: int) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)]).eval()


def prefetched(model: Any, *args: Any, **options: Any) -> Any:
    program = torchgraft.capture(model, args, level="function")
    PrefetchCopies(**options)(program)
    return program


def test_layers_come_one_ahead_of_what_computes() -> None:
    program = prefetched(stack(4), torch.ones(2, WIDTH), device="meta", max_in_flight=1)
    start, wait, layer = "start_copies", "wait_for_copies", "linear"
    assert kinds(program) == [start, *[wait, start, layer] * 3, wait, layer]
    program = prefetched(stack(4), torch.ones(2, WIDTH), device="meta")
    assert kinds(program) == [start, start, wait, start, layer, wait, start, layer, wait, layer, wait, layer]
    assert program(torch.ones(2, WIDTH, device="meta")).device.type == "meta"


@pytest.mark.parametrize("ahead", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_no_more_layers_are_on_the_device_than_were_asked_for(ahead: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack(6)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = probe(layer(x))
            return x

    program = prefetched(Model(), torch.ones(2, WIDTH), device="meta", max_in_flight=ahead)
    COPIES.clear(), ALIVE.clear()
    with torch.no_grad(), CopiesOfWeights():
        program(torch.ones(2, WIDTH, device="meta"))
    assert len(COPIES) == len(ALIVE) == 6 and max(ALIVE) <= ahead + 1, ALIVE


def test_bytes_under_way_are_bounded() -> None:
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    options = {"device": "meta", "max_in_flight": 4}
    program = prefetched(stack(4), torch.ones(2, WIDTH), max_bytes=2 * layer, **options)
    assert kinds(program)[:4] == ["start_copies", "start_copies", "wait_for_copies", "start_copies"]
    assert kinds(prefetched(stack(4), torch.ones(2, WIDTH), max_bytes=1, **options))[:3] == [
        *("start_copies", "wait_for_copies", "start_copies"),
    ]


class Mixed(nn.Module):
    """Parameters alone and twice, buffers that are read and that are written, constants, and what asks for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(1))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        self.seen.add_(1)
        zeros = torch.zeros(WIDTH, device=self.scale.device)
        y = self.dropout(self.norm(self.first(x))) * self.scale + zeros
        return self.second(y).to(self.scale.dtype) + self.scale.sum()


@pytest.mark.parametrize("training", [False, True])
def test_results_state_and_gradients_are_the_same_bit_for_bit(training: bool) -> None:
    torch.manual_seed(0)
    model = Mixed().train(training)
    other = copy.deepcopy(model)
    x = torch.randn(4, WIDTH)
    program = torchgraft.capture(model, x, level="function")
    PrefetchCopies(device="cpu")(program)
    assert "start_copies" in kinds(program)
    torch.manual_seed(1)
    ours = program(x)
    torch.manual_seed(1)
    theirs = other(x)
    assert torch.equal(ours, theirs)
    assert all(map(torch.equal, model.buffers(), other.buffers()))
    ours.sum().backward()
    theirs.sum().backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]


def test_gradients_come_back_to_the_parameters_on_the_cpu() -> None:
    model = stack(2)
    program = prefetched(model, torch.ones(2, WIDTH), device="cpu")
    program(torch.ones(2, WIDTH)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_is_written_or_returned_stays_and_is_said() -> None:
    model = Mixed().eval()
    program = torchgraft.capture(model, torch.ones(4, WIDTH), level="function")
    report = PrefetchCopies(device="meta")(program)
    assert any(note.startswith("seen stays where it is") for note in report.notes), report.notes
    assert not any(note.startswith("scale") for note in report.notes), report.notes
    weight = nn.Parameter(torch.ones(3))

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Any) -> Any:
            return x + 1, self.weight[1:]

    program = torchgraft.capture(Returns(), torch.ones(3), level="function")
    assert PrefetchCopies(device="meta")(program).changes == 0
    assert program(torch.ones(3))[1].data_ptr() == weight[1:].data_ptr()


@torchgraft.wrap
def unknown(x: Any) -> Any:
    return x * 1


@torchgraft.wrap
def unknown_write(weight: Any, x: Any) -> Any:
    weight.add_(1)
    return x * 1


def test_calls_that_may_do_anything_keep_what_they_are_given() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack(2)
            self.weight = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
            self.tied = self.weight

        def forward(self, x: Any) -> Any:
            y = unknown(self.layers[0](x))
            y = unknown_write(self.weight[2:], y)
            return self.layers[1](y * self.tied)

    model, x = Model().eval(), torch.randn(2, WIDTH)
    program = torchgraft.capture(model, x, level="function")
    other = copy.deepcopy(model)
    report = PrefetchCopies(device="cpu")(program)
    assert report.changes == 2
    assert {note.partition(" ")[0] for note in report.notes} <= {"weight", "tied"} and report.notes
    for _ in range(2):
        assert torch.equal(program(x), other(x))


def test_a_device_that_is_asked_for_is_the_one_that_computes() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Any) -> Any:
            return x + torch.zeros(3, device=self.weight.device) + self.weight

    program = prefetched(Asks(), torch.ones(3), device="meta")
    assert program(torch.ones(3, device="meta")).device.type == "meta"


def test_modules_that_are_one_call_are_refused() -> None:
    program = torchgraft.capture(stack(1), torch.ones(2, WIDTH))
    with pytest.raises(PassError, match=r'capture the program with level="function"'):
        PrefetchCopies(device="meta")(program)


def test_copies_in_the_program_are_started_first() -> None:
    def model(x: Any, y: Any) -> Any:
        z = x.sin().cos()
        return z.to("meta") + y.to(device="meta", dtype=torch.float64)

    program = torchgraft.capture(model, (torch.ones(2), torch.ones(2)))
    expected = program(torch.ones(2), torch.ones(2))
    assert PrefetchCopies()(program).changes == 2
    assert kinds(program)[0] == "start_copy" and kinds(program)[-1] == "add", kinds(program)
    found = program(torch.ones(2), torch.ones(2))
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    assert [call.wait_before for call in overlaps(program).calls] == ["add, which needs it"] * 2


def test_copies_by_the_device_of_another_and_copies_that_are_none() -> None:
    def model(x: Any, y: Any) -> Any:
        z = x.to(y.device)
        z.add_(1)  # `to` gave the tensor itself
        return x.sin() + z, y.to(torch.float32), y.to("cpu")

    x, y = torch.ones(2), torch.ones(2)
    program = torchgraft.capture(model, (x.clone(), y))
    PrefetchCopies()(program)
    for one, two in zip(program(x.clone(), y), model(x.clone(), y), strict=True):
        assert torch.equal(one, two)


def test_a_second_run_changes_nothing_and_copies_pickle() -> None:
    program = prefetched(stack(3), torch.ones(2, WIDTH), device="cpu")
    before = str(program.graph)
    assert PrefetchCopies(device="cpu")(program).changes == 0
    assert str(program.graph) == before
    x = torch.randn(2, WIDTH)
    for other in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert torch.equal(other(x), program(x))


@pytest.mark.parametrize(
    "text", ["prefetch-copies{device=cpu}, overlap-remote-calls", "overlap-remote-calls, prefetch-copies{device=cpu}"]
)
def test_beside_remote_calls_and_other_passes(text: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack(3)

        def forward(self, x: Any) -> Any:
            return self.layers(x) + fetch(x)

    x = torch.randn(2, WIDTH)
    model = Model().eval()
    program = torchgraft.capture(model, x, level="function")
    torchgraft.passes.Pipeline(f"{text}, merge-common, fold-constants, remove-dead-code, reorder-for-memory")(program)
    assert torch.equal(program(x), model(x))
    names = kinds(program)
    assert names.count("start_copies") == 3
    assert names.index("start_fetch") < names.index("linear") < names.index("wait_fetch")


@settings(max_examples=40, deadline=None)
@given(
    choices=st.lists(st.sampled_from("layer scale write buffer rand move".split()), max_size=10),
    ahead=st.integers(1, 3),
)
def test_random_programs_give_the_same(choices: list[str], ahead: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = stack(3)
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
            self.register_buffer("count", torch.zeros(WIDTH))

        def forward(self, x: Any) -> Any:
            values = [x * 1]
            for number, choice in enumerate(choices):
                value = values[-1]
                if choice == "layer":
                    values.append(self.layers[number % 3](value))
                elif choice == "scale":
                    values.append(value * self.scale[...])
                elif choice == "write":
                    self.scale[2:].mul_(1.5)
                elif choice == "buffer":
                    self.count.add_(1)
                    values.append(value + self.count)
                elif choice == "rand":
                    values.append(value + torch.rand(WIDTH))
                else:
                    values.append(value.to(x.device))
            return values

    model, x = Model(), torch.randn(2, WIDTH)
    other = copy.deepcopy(model)
    program = torchgraft.capture(model, x, level="function")
    PrefetchCopies(device="cpu", max_in_flight=ahead)(program)
    for _ in range(2):
        torch.manual_seed(1)
        ours = program(x)
        torch.manual_seed(1)
        assert all(map(torch.equal, ours, other(x)))
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_limits() -> None:
    with pytest.raises(ValueError, match="prefetch-copies: expected max_in_flight of at least 1, got 0"):
        PrefetchCopies(max_in_flight=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pins", [False, True])
def test_on_a_gpu_layers_come_by_a_stream_of_their_own(pins: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).eval()
    expected_model = copy.deepcopy(model).cuda()
    if pins:
        for parameter in model.parameters():
            parameter.data = parameter.data.pin_memory()
    program = torchgraft.capture(model, torch.ones(64, 1024), level="function")
    PrefetchCopies(device="cuda")(program)
    x = torch.randn(64, 1024, device="cuda")
    with torch.no_grad():
        expected = expected_model(x)
        for _ in range(20):
            assert torch.equal(program(x), expected)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        program(x)
        torch.cuda.synchronize()
        whole = sum(4 * parameter.numel() for parameter in model.parameters())
        assert torch.cuda.max_memory_allocated() - before < whole
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            program(x)
            torch.cuda.synchronize()
    # Copies and products are on two streams.
    events = [event for event in profile.profiler.kineto_results.events() if event.device_type().name == "CUDA"]
    copies = {event.device_resource_id() for event in events if "HtoD" in event.name()}
    products = {event.device_resource_id() for event in events if "Mem" not in event.name()}
    assert copies and products and copies.isdisjoint(products)


@pytest.mark.parametrize("option", [{"device": "nowhere"}, {"device": 3}, {"max_bytes": -1}])
def test_options_that_cannot_be(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="prefetch-copies: expected (a device such as 'cuda'|max_bytes of at least 0)"):
        PrefetchCopies(**option)
