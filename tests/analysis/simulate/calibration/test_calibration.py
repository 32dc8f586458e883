"""What `graft calibrate` tries, how it times it, and figures that are found again from the times of a machine."""

import dataclasses
import time

import pytest
import torch

from torchgraft import Machine
from torchgraft.analysis.simulate.calibration.calibrate import BATCHES, COUNTS, fitted
from torchgraft.analysis.simulate.calibration.fitting import Sample, fit_terms, kernels_of_probe
from torchgraft.analysis.simulate.calibration.measuring import least_seconds, measure_on_cpu
from torchgraft.analysis.simulate.calibration.probes import Probe, probes

CPU = Machine.named("epyc_turin_1_thread")


@pytest.mark.parametrize("kind", COUNTS)
def test_probes_of_every_kind_run_and_are_kernels(kind):
    for probe in probes({kind: 8}, ("fp32",), 0, BATCHES, 1e8, 1e6):
        with torch.no_grad():
            probe.run(probe.tensors("cpu"))
        assert kernels_of_probe(probe, gpu=False), probe
    first, again = (list(probes({kind: 5}, ("fp32",), 3, BATCHES, 1e8, 1e6)) for _ in range(2))
    assert first == again


def test_small_probes_are_small():
    for probe in probes({"small": 60}, ("fp32",)):
        assert probe.bytes < 2**16 and all(kernel.flops < 5e5 for kernel in kernels_of_probe(probe, gpu=False))


def test_figures_are_found_again_from_times():
    known = {"floor": 3e-6, "rate": 0.5, "near": 0.8, "far": 0.4, "packed": 2e9}
    machine = dataclasses.replace(CPU, kernels={"matmul": known})
    samples = []
    for rows in (2, 16, 200, 2000):
        for width in (16, 64, 256, 1024):
            kernels = kernels_of_probe(Probe("linear", ((rows, width), (width, width))), gpu=False)
            for hot in (True, False):
                sample = Sample(kernels, 1.0, hot)
                samples.append(dataclasses.replace(sample, seconds=sample.simulated(machine)))
    found = fit_terms(machine, samples)
    assert {name: found[name] for name in known} == pytest.approx(known, rel=0.02)
    disturbed = [
        dataclasses.replace(one, seconds=one.seconds * (1 + 4 * (place % 6 == 0))) for place, one in enumerate(samples)
    ]
    assert fit_terms(machine, disturbed)["rate"] == pytest.approx(0.5, rel=0.1)  # another job beside it, now and then


def test_vectors_have_a_table_of_their_own():
    pairs = []
    for rows in (1, 4):
        for width in (64, 128, 256, 512, 1024, 2048):
            kernels = kernels_of_probe(Probe("linear", ((rows, width), (width, width))), gpu=False)
            pairs.append((Sample(kernels, 1e-5 * rows, True), Sample(kernels, 2e-5 * rows, False)))
    assert {"matmul", "matmul.fp32", "matmul.vector"} <= set(
        fitted(dataclasses.replace(CPU, kernels={}), pairs).kernels
    )


def test_times_are_those_of_one_call():
    assert 0.002 <= least_seconds(lambda: time.sleep(0.002), 0.01) < 0.2  # however busy the machine is
    measured = measure_on_cpu(Probe("relu", ((1000,),)), 0.002)
    assert 0 < measured.hot < 1e-3 and 0 < measured.cold < 1e-2
    slow = measure_on_cpu(
        Probe("linear", ((512, 512), (512, 512))), 1e-4
    )  # longer than its time: two sets of inputs are enough
    assert slow.hot > 0 and slow.cold > 0
