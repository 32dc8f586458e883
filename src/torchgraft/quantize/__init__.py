"""Quantization: from a captured program and some data to a program that computes with integers, and what became of each part.
Each name lives in a file of its own; nothing of torch.ao is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchgraft.public_names import on_first_use

# Kernels bring torch's compiler along, and those who only ask whether a program is quantized need none.
if TYPE_CHECKING:
    from torchgraft.quantize.calibrating import calibrate as calibrate
    from torchgraft.quantize.config import Config as Config
    from torchgraft.quantize.config import default_config as default_config
    from torchgraft.quantize.converting import convert as convert
    from torchgraft.quantize.equalizing import EqualizeLayers as EqualizeLayers
    from torchgraft.quantize.exchange import to_fake_quantize as to_fake_quantize
    from torchgraft.quantize.flow import quantize as quantize
    from torchgraft.quantize.measuring import sqnr as sqnr
    from torchgraft.quantize.native import join_layers as join_layers
    from torchgraft.quantize.native import to_native as to_native
    from torchgraft.quantize.operators import dequantize_tensor as dequantize_tensor
    from torchgraft.quantize.operators import fake_quantize as fake_quantize
    from torchgraft.quantize.operators import quantize_tensor as quantize_tensor
    from torchgraft.quantize.operators import scale_of_values as scale_of_values
    from torchgraft.quantize.preparing import prepare as prepare
    from torchgraft.quantize.reporting import QuantizeReport as QuantizeReport
    from torchgraft.quantize.reporting import report as report
    from torchgraft.quantize.schemes import Numbers as Numbers
    from torchgraft.quantize.schemes import Scheme as Scheme
    from torchgraft.quantize.searching import SearchResult as SearchResult
    from torchgraft.quantize.searching import Sensitivity as Sensitivity
    from torchgraft.quantize.searching import search as search
    from torchgraft.quantize.searching import sensitivity as sensitivity
    from torchgraft.quantize.speed import SpeedReport as SpeedReport
    from torchgraft.quantize.speed import explain_speed as explain_speed
    from torchgraft.quantize.streaming import load_weights as load_weights
    from torchgraft.quantize.training import prepare_qat as prepare_qat

__all__, __getattr__, __dir__ = on_first_use(__name__, __file__)
