"""Quantization: from a captured program and some data to a program that computes with integers, and what became of each part.
Each name lives in a file of its own; nothing of torch.ao is needed.
"""

from __future__ import annotations

from torchgraft.quantize.calibrating import calibrate
from torchgraft.quantize.config import Config, default_config
from torchgraft.quantize.converting import convert
from torchgraft.quantize.flow import quantize
from torchgraft.quantize.operators import dequantize_tensor, fake_quantize, quantize_tensor, scale_of_values
from torchgraft.quantize.preparing import prepare
from torchgraft.quantize.schemes import Numbers, Scheme
from torchgraft.quantize.training import prepare_qat

__all__ = [
    "Config",
    "Numbers",
    "Scheme",
    "calibrate",
    "convert",
    "default_config",
    "dequantize_tensor",
    "fake_quantize",
    "prepare",
    "prepare_qat",
    "quantize",
    "quantize_tensor",
    "scale_of_values",
]
