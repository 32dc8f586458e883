"""What a change does to a machine and to kernels, bytes by bytes."""

import dataclasses

import pytest
import torch
from torch import nn

from torchgraft import Machine
from torchgraft.analysis.simulate.changes import Change, changes_of, quantized_steps
from torchgraft.analysis.simulate.simulate import recorded
from torchgraft.errors import GraftError
from torchgraft.quantize.schemes import scheme

H200 = Machine.named("h200")


def steps_of(model, x, training=False):
    return recorded(model, (x,), {}, H200, None, training).steps


def layers_of(steps):
    return [step.kernel for step in steps if step.kernel is not None and step.kernel.kind in ("matmul", "convolution")]


def test_figures_are_multiplied():
    changed = Change("", {"bandwidth": 2.0, "compute": 3.0, "host": 4.0}).on_machine(H200)
    assert changed.bandwidth == 2 * H200.bandwidth and changed.cache_bandwidth == 2 * H200.cache_bandwidth
    assert changed.peak == {name: 3 * rate for name, rate in H200.peak.items()}
    assert changed.host == {name: seconds / 4 for name, seconds in H200.host.items()}
    assert Change("").on_machine(H200) == H200


@pytest.mark.parametrize(("name", "bits"), [("weight-int8", 8), ("weight-int4", 4)])
def test_only_weights(name, bits):
    steps = steps_of(nn.Linear(64, 32), torch.empty(16, 64, device="meta"))
    found, saved = quantized_steps(steps, scheme(name), H200)
    (before,), (after,) = layers_of(steps), layers_of(found)
    assert saved == before.read - after.read == 64 * 32 * (32 - bits) // 8
    assert (after.type, after.flops, after.written) == (before.type, before.flops, before.written)
    assert len(found) == len(steps)


def test_inputs_too():
    steps = steps_of(nn.Linear(64, 32), torch.empty(16, 64, device="meta"))
    found, _ = quantized_steps(steps, scheme("static-int8"), H200)
    (before,), (after,) = layers_of(steps), layers_of(found)
    assert after.type == "int8" and before.read - after.read == (64 * 32 + 16 * 64) * 3
    dynamic, _ = quantized_steps(steps, scheme("dynamic-int8"), H200)
    assert len(dynamic) == len(steps) + 1 and sum(s.kernel.kind == "reduction" for s in dynamic if s.kernel) == 1
    assert layers_of(quantized_steps(steps, scheme("float8"), H200)[0])[0].type == "fp8"


def test_products_of_values_have_no_weights():
    class Attention(nn.Module):
        def forward(self, x):
            return x @ x.transpose(-1, -2)

    steps = steps_of(Attention(), torch.empty(2, 8, 8, device="meta"))
    found, saved = quantized_steps(steps, scheme("static-int8"), H200)
    assert found == steps and saved == 0


def test_backward_stays_as_it_is():
    steps = steps_of(nn.Linear(64, 32), torch.empty(16, 64, device="meta", requires_grad=True), training=True)
    found, _ = quantized_steps(steps, scheme("static-int8"), H200)
    kinds = {
        (step.phase, step.kernel.type) for step in found if step.kernel is not None and step.kernel.kind == "matmul"
    }
    assert kinds == {("forward", "int8"), ("backward", "fp32")}


def test_a_machine_without_integers():
    machine = dataclasses.replace(H200, peak={"fp32": 1e12})
    steps = steps_of(nn.Linear(8, 8), torch.empty(1, 8, device="meta"))
    with pytest.raises(GraftError, match="NVIDIA H200 has no int8\nit has fp32"):
        quantized_steps(steps, scheme("static-int8"), machine)
    assert quantized_steps(steps, scheme("weight-int8"), machine)[1] == 8 * 8 * 3


def test_changes_alone_and_together():
    assert [change.name for change in changes_of({}, None, None)] == ["as it is"]
    assert [change.name for change in changes_of({"host": 2.0}, None, None)] == ["as it is", "host × 2"]
    found = changes_of({"host": 2.0, "compute": None}, "remove-dead-code", "weight-int4")
    assert [change.name for change in found] == [
        "as it is",
        "host × 2",
        "remove-dead-code",
        "weight-int4",
        "all of these",
    ]
    assert found[-1].factors == {"host": 2.0} and found[-1].passes and found[-1].quantize == scheme("weight-int4")
