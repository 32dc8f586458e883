"""All the traps together.
They are written in the files imported here.
"""

from __future__ import annotations

from tests.traps import (
    branches,
    functions,
    hooks,
    layers,
    modes,
    mutation,
    random_numbers,
    reads,
    regions,
    shapes,
    sizes,
    state,
    structures,
)
from tests.traps.trap import Trap

_FILES = (
    branches, sizes, shapes, reads, structures, modes, regions, hooks, state, mutation, random_numbers, functions, layers,
)  # fmt: skip
TRAPS: list[Trap] = [trap for file in _FILES for trap in file.TRAPS]
