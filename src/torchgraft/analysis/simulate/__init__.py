"""How long a program takes, and how much memory, on a machine that need not be here.
`kernels.py` says what there is to do, `timing.py` and `clocks.py` how long that takes, `machines/` what machines can do.
"""

from torchgraft.analysis.simulate.calibration.calibrate import Calibration, calibrate_machine
from torchgraft.analysis.simulate.machine import Machine, machine_names
from torchgraft.analysis.simulate.parallel import Link, ParallelSimulation, SimulatedDevice, simulate_parallel
from torchgraft.analysis.simulate.profile import ProfileComparison
from torchgraft.analysis.simulate.report import SimulatedKernel, SimulatedNode, Simulation
from torchgraft.analysis.simulate.simulate import simulate
from torchgraft.analysis.simulate.what_if import WhatIf, WhatIfRow, what_if

__all__ = [
    "Calibration",
    "Link",
    "Machine",
    "ParallelSimulation",
    "ProfileComparison",
    "SimulatedDevice",
    "SimulatedKernel",
    "SimulatedNode",
    "Simulation",
    "WhatIf",
    "WhatIfRow",
    "calibrate_machine",
    "machine_names",
    "simulate",
    "simulate_parallel",
    "what_if",
]
