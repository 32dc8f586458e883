"""Quantization: from a captured program and some data to a program that computes with integers, and what became of each part.
Each name lives in a file of its own; nothing of torch.ao is needed.
"""

from __future__ import annotations

from torchgraft.quantize.calibrating import calibrate
from torchgraft.quantize.config import Config, default_config
from torchgraft.quantize.converting import convert
from torchgraft.quantize.equalizing import EqualizeLayers
from torchgraft.quantize.exchange import to_fake_quantize
from torchgraft.quantize.flow import quantize
from torchgraft.quantize.measuring import sqnr
from torchgraft.quantize.native import join_layers, to_native
from torchgraft.quantize.operators import dequantize_tensor, fake_quantize, quantize_tensor, scale_of_values
from torchgraft.quantize.preparing import prepare
from torchgraft.quantize.reporting import QuantizeReport, report
from torchgraft.quantize.schemes import Numbers, Scheme
from torchgraft.quantize.searching import SearchResult, Sensitivity, search, sensitivity
from torchgraft.quantize.speed import SpeedReport, explain_speed
from torchgraft.quantize.streaming import load_weights
from torchgraft.quantize.training import prepare_qat

__all__ = [
    "Config",
    "EqualizeLayers",
    "Numbers",
    "QuantizeReport",
    "Scheme",
    "SearchResult",
    "Sensitivity",
    "SpeedReport",
    "calibrate",
    "convert",
    "default_config",
    "dequantize_tensor",
    "explain_speed",
    "fake_quantize",
    "join_layers",
    "load_weights",
    "prepare",
    "prepare_qat",
    "quantize",
    "quantize_tensor",
    "report",
    "scale_of_values",
    "search",
    "sensitivity",
    "sqnr",
    "to_fake_quantize",
    "to_native",
]
