"""Small calls whose time is that of the host: what Python and torch take to issue one operator of each kind.
How they are timed is in `calibration/measuring.py`; which file they are written to is decided in `measure_gpu.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def host_calls() -> dict[str, Any]:
    """Small calls whose time is that of the host."""
    x, image, words = (
        torch.randn(8, 64, device="cuda"),
        torch.randn(1, 16, 8, 8, device="cuda"),
        torch.ones(4, 8, dtype=torch.long, device="cuda"),
    )
    wide, heads = torch.randn(2, 8, 64, device="cuda"), torch.randn(2, 4, 8, 16, device="cuda")
    modules: dict[str, tuple[nn.Module, Any]] = {
        "identity": (nn.Identity(), x),
        "sequential_of_3_identities": (nn.Sequential(*[nn.Identity() for _ in range(3)]), x),
        "linear": (nn.Linear(64, 64), x),
        "linear_3d": (nn.Linear(64, 64), wide),
        "linear_no_bias": (nn.Linear(64, 64, bias=False), wide),
        "conv": (nn.Conv2d(16, 16, 3, padding=1, bias=False), image),
        "conv_bias": (nn.Conv2d(16, 16, 3, padding=1), image),
        "depthwise": (nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), image),
        "batch_norm": (nn.BatchNorm2d(16), image),
        "layer_norm": (nn.LayerNorm(64), wide),
        "group_norm": (nn.GroupNorm(4, 16), image),
        "relu": (nn.ReLU(), x),
        "relu_inplace": (nn.ReLU(True), x.clone()),
        "gelu": (nn.GELU(), x),
        "dropout": (nn.Dropout(), x),
        "embedding": (nn.Embedding(100, 64), words),
        "max_pool": (nn.MaxPool2d(2), image),
        "adaptive_pool": (nn.AdaptiveAvgPool2d(1), image),
        "flatten": (nn.Flatten(), image),
        "lstm": (nn.LSTM(64, 64, batch_first=True), wide),
        "conv_transpose": (nn.ConvTranspose2d(16, 16, 2, 2), image),
        "multihead": (nn.MultiheadAttention(64, 4, batch_first=True), None),
        "encoder_layer": (nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), wide),
    }
    calls: dict[str, Any] = {}
    for name, (module, value) in modules.items():
        module = module.cuda().eval()
        calls[f"module {name}"] = (
            (lambda m=module: m(wide, wide, wide)) if value is None else (lambda m=module, v=value: m(v))
        )
    functions: dict[str, Any] = {
        "add": lambda: x + x,
        "mul_scalar": lambda: x * 2.0,
        "relu": lambda: torch.relu(x),
        "view": lambda: x.view(64, 8),
        "transpose": lambda: wide.transpose(1, 2),
        "reshape": lambda: wide.reshape(16, 64),
        "slice": lambda: wide[:, 1:],
        "unsqueeze": lambda: x.unsqueeze(0),
        "chunk": lambda: x.chunk(2, -1),
        "cat": lambda: torch.cat([x, x], 1),
        "matmul": lambda: wide @ wide.transpose(1, 2),
        "softmax": lambda: functional.softmax(wide, -1),
        "sdpa": lambda: functional.scaled_dot_product_attention(heads, heads, heads),
        "mean": lambda: wide.mean(-1),
        "linear": lambda: functional.linear(x, x),
        "contiguous": lambda: wide.transpose(1, 2).contiguous(),
        "to_half": lambda: x.to(torch.float16),
        "zeros": lambda: torch.zeros(8, device="cuda"),
        "arange": lambda: torch.arange(8, device="cuda"),
        "index": lambda: x[words[0]],
        "pad": lambda: functional.pad(image, (1, 1, 1, 1)),
        "where": lambda: torch.where(x > 0, x, x),
        "interpolate": lambda: functional.interpolate(image, scale_factor=2),
        "pow_mean_rsqrt": lambda: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        "shape": lambda: x.shape,
        "python_function": lambda: None,
        "permute": lambda: image.permute(0, 2, 3, 1),
        "expand": lambda: x.unsqueeze(0).expand(4, 8, 64),
        "add_": lambda: x.add_(0.0),
        "std": lambda: x.std(),
        "split": lambda: x.split(32, -1),
        "topk": lambda: x.topk(2),
        "bmm": lambda: torch.bmm(wide, wide.transpose(1, 2)),
        "masked_fill": lambda: x.masked_fill(x > 0, 0.0),
    }
    return calls | {f"function {name}": call for name, call in functions.items()}
