"""The doors to torch.fx and torch.export, the two neighbours that speak almost the same language.
Programs cross them as a whole, metadata included; nothing outside this room knows that they exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchgraft.public_names import on_first_use

# Symbolic sizes, which exported programs have, bring sympy along, which takes longer to import than most programs take to cross.
if TYPE_CHECKING:
    from torchgraft.bridge.torch_export import from_export as from_export
    from torchgraft.bridge.torch_fx import from_fx as from_fx
    from torchgraft.bridge.torch_fx import to_fx as to_fx

__all__, __getattr__, __dir__ = on_first_use(__name__, __file__)
