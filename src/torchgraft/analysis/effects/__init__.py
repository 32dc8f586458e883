"""What a node may do beyond returning a value: write memory, draw random numbers, or something that cannot be known.
The answer is read off operator schemas and off the source of Python functions and modules; nothing is ever run.
"""

from torchgraft.analysis.effects.nodes import Effects, effects_of, is_impure
from torchgraft.analysis.effects.report import NodeEffects, ProgramEffects, effects

__all__ = ["Effects", "NodeEffects", "ProgramEffects", "effects", "effects_of", "is_impure"]
