"""torch.fx's `passes.split_utils`: splitting by tags, and attributes by dotted path.
The work is in `splitting/split_module.py`.
"""

from __future__ import annotations

import functools
from typing import Any

from torchgraft.splitting.split_module import split_by_tags

__all__ = ["getattr_recursive", "setattr_recursive", "split_by_tags"]


def getattr_recursive(obj: Any, name: str) -> Any:
    """The attribute at a dotted path, or None.

    >>> import torch
    >>> getattr_recursive(torch.nn.Sequential(torch.nn.Linear(2, 3)), "0.out_features")
    3
    """
    return functools.reduce(lambda value, part: getattr(value, part, None), name.split("."), obj)


def setattr_recursive(obj: Any, attr: str, value: Any) -> None:
    """Set the attribute at a dotted path."""
    path, _, name = attr.rpartition(".")
    setattr(getattr_recursive(obj, path) if path else obj, name, value)
