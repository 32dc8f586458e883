"""One program cut into several that run one after the other: by what a backend supports, by size, by cost, or as the caller says.
What may change places is known to `analysis/effects`; backends that take the parts live elsewhere.
"""

from torchgraft.splitting.split import Part, Split, split
from torchgraft.splitting.split_module import split_by_tags, split_module
from torchgraft.splitting.strategies import Size, Stages, Supported, parameter_bytes

__all__ = ["Part", "Size", "Split", "Stages", "Supported", "parameter_bytes", "split", "split_by_tags", "split_module"]
