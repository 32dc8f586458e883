"""The doors to torch.fx and torch.export, the two neighbours that speak almost the same language.
Programs cross them as a whole, metadata included; nothing outside this room knows that they exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchgraft.bridge.torch_fx import from_fx, to_fx

if TYPE_CHECKING:
    from torchgraft.bridge.torch_export import from_export

__all__ = ["from_export", "from_fx", "to_fx"]


def __getattr__(name: str) -> Any:
    # Symbolic sizes bring sympy along, which takes longer to import than most programs take to cross.
    if name == "from_export":
        from torchgraft.bridge.torch_export import from_export

        return from_export
    raise AttributeError(f"module 'torchgraft.bridge' has no attribute '{name}'")
