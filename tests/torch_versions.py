"""The torch under the tests, for the few places where torch.fx, or torch itself, did something else in another release.
What torchgraft does is the same in all of them, so nothing here may excuse it.
"""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def torch_fx_since(*release: int) -> pytest.MarkDecorator:
    """For a test over both libraries whose answer torch.fx gives since this release: before it only torchgraft is asked."""
    libraries = ("torch.fx", "torchgraft") if release <= TORCH else ("torchgraft",)
    return pytest.mark.parametrize("fx", libraries, indirect=True)
