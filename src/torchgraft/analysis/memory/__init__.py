"""How long values live, and how much memory a run or a training step needs at its peak.
`liveness.py` reads the program; `peak.py` runs it on fake tensors, `workspaces.py` measures
what kernels take for themselves, `report.py` is the answer.
"""

from torchgraft.analysis.memory.liveness import Lifetime, liveness
from torchgraft.analysis.memory.peak import memory
from torchgraft.analysis.memory.report import Memory
from torchgraft.analysis.memory.workspaces import Call

__all__ = ["Call", "Lifetime", "Memory", "liveness", "memory"]
