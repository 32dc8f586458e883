"""A program on several devices: in stages one after the other, in copies side by side, or both.
Times of nodes come from `simulate.py`; here they are put on devices, and what passes between devices is added.
"""

from torchgraft.analysis.simulate.parallel.links import Link
from torchgraft.analysis.simulate.parallel.parallel import simulate_parallel
from torchgraft.analysis.simulate.parallel.report import ParallelSimulation, SimulatedDevice

__all__ = ["Link", "ParallelSimulation", "SimulatedDevice", "simulate_parallel"]
