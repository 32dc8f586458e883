"""What the figures of the H200 give for kernels of every kind: its fit was measured once, and nothing may move it unseen.
The times are in `tests/golden/simulated/h200.json`; `python -m tests.analysis.simulate.test_timing` writes them anew.
"""

import json
from pathlib import Path

import pytest

from torchgraft.analysis.simulate.calibration.fitting import kernels_of_probe
from torchgraft.analysis.simulate.calibration.probes import probes
from torchgraft.analysis.simulate.kernels import Kernel
from torchgraft.analysis.simulate.machine import Machine
from torchgraft.analysis.simulate.timing import time_of

GOLDEN = Path(__file__).parents[2] / "golden" / "simulated" / "h200.json"
COUNTS = {
    "linear": 6, "bmm": 4, "convolution": 10, "grouped": 6, "other_convolution": 8, "attention": 5,
    "recurrent": 4, "elementwise": 5, "norm": 8, "memory": 14, "gradient": 6,
}  # fmt: skip


def kept():
    return json.loads(GOLDEN.read_text())


def kernel_of(row):
    return Kernel(**{**row, "sizes": tuple(row["sizes"])})


def seconds(kernel):
    machine = Machine.named("h200")
    return [time_of(kernel, machine, share * kernel.bytes).seconds for share in (0.0, 0.4, 1.0)]


def test_every_kernel_takes_what_it_took():
    rows = kept()
    assert len(rows) > 150 and len({row["kernel"]["kind"] for row in rows}) >= 9
    wrong = [
        (row["kernel"], row["seconds"], found)
        for row in rows
        if (found := seconds(kernel_of(row["kernel"]))) != pytest.approx(row["seconds"], rel=1e-6)
    ]
    assert not wrong, wrong[:3]


def main():
    """Write the times of kernels that are drawn at random, the same in each run."""
    rows = []
    for probe in probes(COUNTS, ("fp32", "tf32", "fp16"), seed=1):
        for kernel in kernels_of_probe(probe):
            rows.append({"kernel": kernel.to_dict(), "seconds": [float(f"{value:.9g}") for value in seconds(kernel)]})
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
