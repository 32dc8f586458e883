"""Workspaces: calls told apart by all but their values, run again for real, and entered where they are taken."""

import gc
import json
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchgraft
from benchmarks.allocations import taken_on_cpu, taken_on_gpu
from torchgraft import zoo
from torchgraft.analysis.fake import fake_mode_of, fakes_in_optimizers, is_fake, on_device
from torchgraft.analysis.memory import Call, memory, workspaces
from torchgraft.analysis.memory.peak import Storages
from torchgraft.capturing.patching.active import paused_collection
from torchgraft.errors import GraftError

aten = torch.ops.aten
MEGABYTE = 1_000_000


def is_convolution(call: Call) -> bool:
    return call.operator.overloadpacket in (aten.convolution, aten.convolution_backward)


class Measured:
    """What a call takes on the CPU, by the profiler's count."""

    def __init__(self) -> None:
        self.table: dict[Call, int] = {}

    def __call__(self, call: Call) -> int:
        if call not in self.table:
            with torch.no_grad():
                operands = call.operands()
                call.run(operands)
                self.table[call] = taken_on_cpu(lambda: call.run(operands))
        return self.table[call]


# ---- calls ----


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(0, 5), st.booleans(), st.booleans())
def test_operands_look_like_the_tensors_of_the_call(shape: list[int], offset: int, turned: bool, half: bool) -> None:
    room = torch.ones(200, dtype=torch.half if half else torch.float)
    x = room[offset : offset + torch.Size(shape).numel()].view(shape)
    x = x.t() if turned and x.dim() == 2 else x
    call = Call.of(aten.sum.dim_IntList, (x, [0]), {"keepdim": True})
    made, dims, keepdim = call.operands()
    assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)
    assert made.storage_offset() == x.storage_offset() and made.untyped_storage().nbytes() == room.nbytes
    assert torch.equal(call.run([made, dims, keepdim]), torch.zeros_like(x).sum(dim=0, keepdim=True))


def test_calls_are_told_apart_by_everything_but_values() -> None:
    x, y = torch.ones(4, 4), torch.zeros(4, 4)
    product = Call.of(aten.mm.default, (x, y), {})
    assert product == Call.of(aten.mm.default, (y, x), {}) and hash(product) == hash(
        Call.of(aten.mm.default, (y, x), {})
    )
    others = [
        Call.of(aten.mm.default, (x, x), {}),  # one memory
        Call.of(aten.mm.default, (x, y.t()), {}),
        Call.of(aten.mm.default, (x, y.double()), {}),
        Call.of(aten.mm.default, (x, torch.zeros(5, 4)[1:]), {}),
        Call.of(aten.bmm.default, (x, y), {}),
        Call.of(aten.mm.default, (x, y), {"out_dtype": torch.float}),
    ]
    assert len({product, *others}) == 7
    first, second = Call.of(aten.mm.default, (x, x.t()), {}).operands()
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata


def test_the_memory_of_a_call_is_free_once_it_is_done_with() -> None:
    call = Call.of(aten.mm.default, (torch.ones(2, 3), torch.ones(3, 4)), {})
    with paused_collection:
        assert not gc.isenabled()
        operands = call.operands()
        memory_of_first = weakref.ref(operands[0].untyped_storage())
        call.run(operands)
        assert memory_of_first() is not None
        del operands
        assert memory_of_first() is None
    assert gc.isenabled()


def test_tensors_without_strides_are_not_measured() -> None:
    sparse = torch.eye(4).to_sparse()
    assert not workspaces.takes_room(aten.mm.default, (sparse, torch.ones(4, 4)))
    assert not workspaces.takes_room(len, ())
    predicted = memory(lambda x: sparse @ x, torch.ones(4, 4), compute=True, measure=lambda call: MEGABYTE)
    assert predicted.peak < MEGABYTE


def test_nothing_is_measured_where_there_is_no_gpu_or_no_data() -> None:
    x = torch.ones(2, 2)
    assert workspaces.taken_on_gpu(Call.of(aten.mm.default, (x, x), {})) is None
    with fake_mode_of(x):
        assert workspaces.taken_on_gpu(Call.of(aten.mm.default, (x, x), {})) is None


# ---- in the books ----


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).relu()


def test_a_workspace_is_taken_while_its_operator_runs_and_no_longer() -> None:
    x = torch.ones(1, 3, 16, 16)
    made = 4 * 16 * 16 * 4

    def measure(call: Call) -> int:
        return made + MEGABYTE if is_convolution(call) and call.operands()[0].shape[1] == 4 else 0

    bare, predicted = memory(Two(), x), memory(Two(), x, measure=measure)
    assert predicted.workspaces == {"forward second": MEGABYTE}
    assert [moment.live for moment in predicted.timeline] == [moment.live for moment in bare.timeline]
    at_second = next(moment for moment in predicted.timeline if moment.node == "second")
    assert at_second.workspace == MEGABYTE
    assert predicted.peak == predicted.forward_peak == at_second.live + MEGABYTE
    assert predicted.peak_at == ("forward", "second")
    assert predicted.at_peak["workspace of forward second"] == MEGABYTE
    assert sum(predicted.at_peak.values()) == predicted.peak


def test_a_workspace_of_the_gradient_raises_the_peak_of_the_step_alone() -> None:
    x = torch.ones(1, 3, 16, 16)

    def measure(call: Call) -> int:
        return MEGABYTE if call.operator is aten.convolution_backward.default else 0

    bare = memory(Two(), x, training=True)
    predicted = memory(Two(), x, training=True, measure=measure)
    assert predicted.forward_peak == bare.forward_peak and predicted.peak > bare.peak
    assert list(predicted.workspaces) == ["backward first", "backward second"]
    # What a call makes is part of what it takes.
    assert all(MEGABYTE - 20_000 < size < MEGABYTE for size in predicted.workspaces.values())
    steps = memory(Two(), x, optimizer=torch.optim.SGD, measure=measure)
    assert steps.workspaces == predicted.workspaces


def test_less_than_the_results_is_no_workspace() -> None:
    x = torch.ones(1, 3, 16, 16)
    assert memory(Two(), x, measure=lambda call: 1).workspaces == {}
    assert memory(Two(), x).peak == memory(Two(), x, measure=lambda call: 0).peak


def test_what_cannot_be_measured_is_named() -> None:
    predicted = memory(Two(), torch.ones(1, 3, 16, 16), measure=lambda call: None)
    assert predicted.unmeasured == (("forward", "first"), ("forward", "second"))
    line = "not counted: workspaces that could not be measured, 2 (first: forward of first)"
    assert line in str(predicted).splitlines()
    assert memory(Two(), torch.ones(1, 3, 16, 16)).unmeasured == ()


def test_a_workspace_that_fakes_do_not_show_is_named() -> None:
    x = torch.ones(5, 2, 3)
    if not torch.backends.mkldnn.is_available():
        pytest.skip("the LSTM is not oneDNN's")
    predicted = memory(torch.nn.LSTM(3, 4), x, training=True)
    assert predicted.unmeasured == (("forward", "lstm"), ("backward", "lstm"))
    computed = memory(torch.nn.LSTM(3, 4), x, training=True, compute=True)
    assert computed.unmeasured == () and computed.saved["lstm"] > predicted.saved["lstm"]


def test_rows_json_and_text_have_a_place_for_workspaces() -> None:
    predicted = memory(Two(), torch.ones(1, 3, 16, 16), measure=lambda call: MEGABYTE)
    data = json.loads(predicted.to_json())
    assert data["workspaces"] == predicted.workspaces and data["device"] is None and data["unmeasured"] == []
    assert {row["workspace"] for row in predicted.rows()} == {0, *predicted.workspaces.values()}
    assert "largest workspace" in str(predicted) and "largest workspace" in predicted._repr_html_()
    assert "workspace" not in str(memory(Two(), torch.ones(1, 3, 16, 16)))


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_small_images_are_predicted_when_the_buffers_of_kernels_are_measured(training: bool) -> None:
    """On four images of 64 x 64 most of the memory of ResNet-18 is oneDNN's own."""
    program = torchgraft.symbolic_trace(zoo.create("resnet18"))
    args = zoo.example_inputs("resnet18", batch=4, size=64)

    def action() -> None:
        with torch.set_grad_enabled(training):
            result = program(*args)
        if training:
            result.backward(torch.ones_like(result))

    action()
    program.zero_grad()
    measured = Measured()
    predicted = memory(program, args, training=training, measure=measured)
    taken = taken_on_cpu(action)
    assert predicted.peak - predicted.resident == pytest.approx(taken, rel=0.01)
    assert len(measured.table) < len([moment for moment in predicted.timeline if moment.node is not None])
    if not training:
        assert memory(program, args).peak - predicted.resident < taken / 2


# ---- devices ----


def test_the_memory_of_one_device_is_counted() -> None:
    books = Storages(torch.device("meta"))
    books.note([torch.ones(5), torch.empty(7, device="meta")])
    assert [entry.size for entry in books.log] == [28]
    everywhere = Storages()
    everywhere.note([torch.ones(5), torch.empty(7, device="meta")])
    assert [entry.size for entry in everywhere.log] == [20, 28]


def test_a_gpu_hands_out_whole_pieces() -> None:
    mode = fake_mode_of()
    with mode:
        books = Storages(torch.device("cuda"))
        books.note([torch.empty(size, device="cuda") for size in (0, 1, 128, 129)])
    assert [entry.size for entry in books.log] == [0, 512, 512, 1024]


def test_a_model_is_asked_about_on_another_device() -> None:
    linear = nn.Linear(100, 100, bias=False)
    model, x = nn.Sequential(linear, linear), torch.ones(100, 100)
    before = linear.weight
    there = memory(model, x, training=True, device="meta")
    here = memory(model, x, training=True)
    assert there.device == "meta" and here.device is None
    assert (there.parameters, there.gradients, there.peak) == (here.parameters, here.gradients, here.peak)
    assert linear.weight is before and before.device.type == "cpu" and before.grad is None
    assert memory(torchgraft.symbolic_trace(model), x, device="meta").peak == memory(model, x).peak
    assert memory(lambda x: x + 1, x, device="meta").peak == 80_000
    assert memory(model, x, device="cpu", compute=True, training=True).peak == here.peak


def test_copies_for_another_device_are_real_when_values_are_computed() -> None:
    model = nn.Linear(2, 2)
    moved, (x,), kwargs = on_device(model, (torch.ones(1, 2),), None, torch.device("cpu"), True)
    assert not is_fake(moved.weight) and torch.equal(moved.weight, model.weight) and moved.weight is not model.weight
    assert isinstance(moved.weight, nn.Parameter) and torch.equal(x, torch.ones(1, 2)) and kwargs is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        GraftError, match="cannot ask about cuda: torch sees no GPU on this machine; leave `device` out"
    ):
        memory(nn.Linear(2, 2), torch.ones(1, 2), device="cuda")


def test_optimizers_take_fakes_for_what_they_stand_for() -> None:
    types: Any = torch.optim.Optimizer.__init__.__globals__["_foreach_supported_types"]
    before = list(types)
    with pytest.raises(RuntimeError), fakes_in_optimizers():
        assert len(types) == len(before) + 1
        raise RuntimeError
    assert types == before


# ---- on a GPU ----


@pytest.mark.gpu
def test_a_call_is_measured_once_for_each_way_that_libraries_are_set() -> None:
    x, weight = torch.ones(8, 64, 56, 56, device="cuda"), torch.ones(64, 64, 3, 3, device="cuda")
    call = Call.of(aten.convolution.default, (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {})
    workspaces._measured.clear()
    found = workspaces.taken_on_gpu(call)
    with torch.no_grad():
        operands = call.operands()
        assert found is not None and found == pytest.approx(taken_on_gpu(lambda: call.run(operands)), abs=1 << 20)
    assert workspaces.taken_on_gpu(call) == found and len(workspaces._measured) == 1
    with torch.backends.cudnn.flags(deterministic=True):
        assert workspaces.taken_on_gpu(call) is not None
    assert len(workspaces._measured) == 2


@pytest.mark.gpu
def test_what_does_not_fit_is_named() -> None:
    with torch.device("meta"):
        x = torch.empty(1 << 22, 1 << 22)
    predicted = memory(lambda x: x @ x, x, device="cuda")
    assert predicted.unmeasured == (("forward", "matmul"),)


@pytest.mark.gpu
def test_what_lies_on_the_cpu_is_not_on_the_gpu() -> None:
    predicted = memory(lambda x, y: x + y.cuda(), (torch.ones(1024, device="cuda"), torch.ones(1024)))
    assert (predicted.inputs, predicted.peak) == (4096, 3 * 4096)
