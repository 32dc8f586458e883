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
    leftovers,
    libraries,
    modes,
    mutation,
    numbers_read,
    outside,
    own_containers,
    places,
    random_numbers,
    reads,
    regions,
    shapes,
    sizes,
    state,
    structures,
    surroundings,
    switched,
)
from tests.traps.contract import DETECTED, OUTSIDE
from tests.traps.trap import Trap

# What users asked for and complained about; what a reader of the code tried in order to break it; what happens after a
# capture, in another mode or dtype or after other runs; what torch's own tracers get wrong without a word; and state in places
# where nobody looks, and in containers of somebody's own kind.
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
        for file in (
            outside, asked, numbers_read, differentiation, surroundings, containers, flow, libraries,
        )
        for trap in file.TRAPS
    ],
    "afterwards": [trap for file in (switched, leftovers) for trap in file.TRAPS],
    "exported": list(exported.TRAPS),
    "hidden": [trap for file in (places, own_containers) for trap in file.TRAPS],
}  # fmt: skip
TRAPS: list[Trap] = [trap for group in GROUPS.values() for trap in group]
DETECTED_TRAPS = [trap for trap in TRAPS if trap.name in DETECTED]
OUTSIDE_TRAPS = [trap for trap in TRAPS if trap.name in OUTSIDE]
# Everything else is promised: right or refused, and never wrong.
GROUPS = {name: [trap for trap in group if trap.name not in DETECTED | OUTSIDE] for name, group in GROUPS.items()}
PROMISED_TRAPS = [trap for group in GROUPS.values() for trap in group]
