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
    outside,
    random_numbers,
    reads,
    regions,
    shapes,
    sizes,
    state,
    structures,
)
from tests.traps.trap import Trap

# What users asked for and complained about; and what a reader of the code tried in order to break it.
GROUPS: dict[str, list[Trap]] = {
    "asked": [
        trap
        for file in (
            branches, sizes, shapes, reads, structures, modes, regions, hooks, state, mutation, random_numbers, functions, layers,
        )
        for trap in file.TRAPS
    ],
    "hostile": [trap for file in (outside,) for trap in file.TRAPS],
}  # fmt: skip
TRAPS: list[Trap] = [trap for group in GROUPS.values() for trap in group]
