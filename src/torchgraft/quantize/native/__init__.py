"""torch's own integer kernels on plain tensors, put in the place of the reference form. Other runtimes take the reference form
as it is.
"""

from __future__ import annotations

from torchgraft.quantize.native.lowering import to_native
from torchgraft.quantize.native.replaying import join_layers

__all__ = ["join_layers", "to_native"]
