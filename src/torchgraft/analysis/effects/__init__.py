"""What a node may do beyond returning a value: write memory, draw random numbers, or something that cannot be known.
The answer is read off operator schemas; torch's own Python is tried on tensors without data, and no code of a user's is run.
"""

from torchgraft.analysis.effects.declared import pure
from torchgraft.analysis.effects.findings import Effects
from torchgraft.analysis.effects.nodes import effects_of, is_impure
from torchgraft.analysis.effects.report import NodeEffects, ProgramEffects, effects

__all__ = ["Effects", "NodeEffects", "ProgramEffects", "effects", "effects_of", "is_impure", "pure"]
