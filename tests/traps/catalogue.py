"""All the traps together.
They are written in the files imported here.
"""

from __future__ import annotations

from tests.traps import (
    asked,
    branches,
    containers,
    differentiation,
    exported,
    flow,
    functions,
    hooks,
    layers,
    libraries,
    modes,
    mutation,
    numbers_read,
    outside,
    random_numbers,
    reads,
    regions,
    shapes,
    sizes,
    state,
    structures,
    surroundings,
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
    "hostile": [
        trap
        for file in (outside, asked, numbers_read, differentiation, surroundings, containers, flow, libraries, exported)
        for trap in file.TRAPS
    ],
}  # fmt: skip
TRAPS: list[Trap] = [trap for group in GROUPS.values() for trap in group]
