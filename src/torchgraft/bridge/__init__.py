"""The doors to torch.fx and torch.export, the two neighbours that speak almost the same language.
Programs cross them as a whole, metadata included; nothing outside this room knows that they exist.
"""

from torchgraft.bridge.torch_export import from_export
from torchgraft.bridge.torch_fx import from_fx, to_fx

__all__ = ["from_export", "from_fx", "to_fx"]
