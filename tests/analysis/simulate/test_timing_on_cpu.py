"""How long kernels run on a CPU: its terms, what one thread does alone, and what Python's call takes of an operator's time."""

import dataclasses

import pytest
import torch
from torch import nn

from torchgraft import Machine, simulate
from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.timing_on_cpu import GRAIN, class_on_cpu, seconds_on_cpu, units_of

FIGURES = {
    "elementwise": {"floor": 2e-6, "rate": 0.5, "near": 1.0, "far": 1.0},
    "matmul": {"floor": 2e-6, "rate": 1.0, "near": 1.0, "far": 1.0, "packed": 1e9},
    "matmul.vector": {"floor": 2e-6, "near": 1.0, "far": 1.0},
}
HOST = {"call": 1e-6, "view": 5e-7}
CPU = dataclasses.replace(
    Machine.named("epyc_turin_2_threads"),
    peak={"fp32": 1e11}, bandwidth=1e10, cache_bandwidth=1e11, cache_bytes=2**25, fresh_bandwidth=0.0, kernels=FIGURES, host=HOST,
)  # fmt: skip


def product(rows, columns=1000, depth=1000):
    read = 4 * (rows + columns) * depth
    sizes = (1, rows, columns, depth)
    return Kernel(
        "aten.addmm.default", "matmul", "fp32", 2 * rows * columns * depth, read, 4 * rows * columns, sizes, "nt"
    )


def test_a_product_with_a_vector_goes_through_its_matrix_once():
    one, two = product(1), product(2)
    assert [class_on_cpu(kernel, CPU) for kernel in (one, two, product(500, 1))] == ["vector", "fp32", "vector"]
    floor, compute, memory = seconds_on_cpu(one, CPU, 0.0)
    assert (floor, compute) == (2e-6, 0.0) and memory == pytest.approx(one.bytes / 1e10)
    assert seconds_on_cpu(two, CPU, 0.0)[1] == pytest.approx(
        two.flops / 1e11 + 1002 * 1000 / 2e9
    )  # packed by two threads


def test_machines_without_figures_for_vectors_take_those_of_products():
    without = dataclasses.replace(CPU, kernels={"elementwise": FIGURES["elementwise"], "matmul": FIGURES["matmul"]})
    assert seconds_on_cpu(product(1), without, 0.0)[1] > 0


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_what_is_too_little_to_divide_is_done_by_one_thread(threads):
    cpu = dataclasses.replace(CPU, units=threads)
    for elements in (100, GRAIN, 2 * GRAIN, 100 * GRAIN):
        kernel = Kernel(
            "aten.relu.default", "elementwise", "fp32", elements, elements * 4, elements * 4, elements=elements
        )
        used = min(max(elements // GRAIN, 1), threads)
        units = units_of(kernel, cpu)
        assert units["elements"] == used and units["rate"] == pytest.approx(1e11 * used / threads)
        assert units["near"] == pytest.approx(cpu.cache_bandwidth * used / threads) and units["far"] == cpu.bandwidth
    assert units_of(product(2), cpu)["packed"] == threads  # libraries divide products as they like


class Steps(nn.Module):
    """As many operators from one call as from several."""

    def __init__(self, from_python):
        super().__init__()
        self.from_python, self.cell = from_python, nn.RNN(4, 4, batch_first=True)

    def forward(self, x):
        if not self.from_python:
            return self.cell(x)[0]
        for _ in range(50):
            x = torch.tanh(x)
        return x


def test_what_an_operator_calls_is_not_called_by_python():
    x = torch.zeros(1, 50, 4)
    whole = simulate(Steps(False).eval(), x, machine=CPU)
    tanh = [kernel for kernel in whole.kernels if kernel.operator == "aten.tanh.default"]
    assert len(tanh) == 50 and all(kernel.seconds < 1.1e-6 for kernel in tanh)  # the floor without the call
    alone = simulate(Steps(True), x, machine=CPU)
    assert all(kernel.seconds > 2e-6 for kernel in alone.kernels) and len(alone.kernels) == 50


def test_operators_among_others_take_longer():
    other = dataclasses.replace(CPU, host={**HOST, "operator": 3e-6})
    before, after = (simulate(Steps(True), torch.zeros(1, 50, 4), machine=machine) for machine in (CPU, other))
    assert after.seconds - before.seconds == pytest.approx(50 * 3e-6)
    inner = [simulate(Steps(False).eval(), torch.zeros(1, 50, 4), machine=machine).seconds for machine in (CPU, other)]
    assert inner[1] - inner[0] < 10 * 3e-6  # not for those that an operator calls
