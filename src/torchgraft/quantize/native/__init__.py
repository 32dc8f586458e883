"""torch's own integer kernels on plain tensors, put in the place of the reference form. Other runtimes take the reference form
as it is.
"""

from __future__ import annotations

from torchgraft.quantize.native.lowering import to_native

__all__ = ["to_native"]
