"""Random networks of convolutions, norms, activations, sums, joins, poolings and moves, at every level and in every scheme:
the quantized programs are near the model, the native one near the reference form, and neither touches the model."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import torchgraft
from tests.quantize.test_flow import decibels
from torchgraft import QuantizeError
from torchgraft.quantize import calibrate, convert, join_layers, prepare, to_native

CHANNELS = 4
STEPS = [
    *("conv3", "conv1", "grouped", "norm", "relu", "relu_in_place", "silu", "selu", "gelu", "sigmoid", "hardswish"),
    *(
        "save",
        "add_saved",
        "add_saved_in_place",
        "cat_saved",
        "max_pool",
        "average",
        "permute",
        "dropout",
        "linear",
        "scale",
    ),
    *("flip", "slice", "transposed"),
]


class Network(nn.Module):
    """What a list of names says, one after the other."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        makers = {
            "conv3": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
            "conv1": lambda: nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False),
            "grouped": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=2),
            "transposed": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1),
            "norm": lambda: nn.BatchNorm2d(CHANNELS),
            "cat_saved": lambda: nn.Conv2d(2 * CHANNELS, CHANNELS, 1),
            "linear": lambda: nn.Linear(CHANNELS, CHANNELS),
        }
        self.layers = nn.ModuleDict({str(place): makers[name]() for place, name in enumerate(steps) if name in makers})
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.running_mean, -0.3, 0.3)
                nn.init.uniform_(module.running_var, 0.5, 2.0)

    def forward(self, x):
        saved = x
        for place, name in enumerate(self.steps):
            layer = self.layers[str(place)] if str(place) in self.layers else None
            if name == "save":
                saved = x
            elif name == "add_saved":
                x = x + saved
            elif name == "add_saved_in_place":
                x = x * 1
                x += saved
            elif name == "cat_saved":
                x = layer(torch.cat([x, saved], 1))
            elif name == "linear":
                x = layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            elif layer is not None:
                x = layer(x)
            elif name == "relu_in_place":
                x = F.relu(x * 1, inplace=True)
            elif name == "max_pool":
                x = F.max_pool2d(x, 3, 1, 1)
            elif name == "average":
                x = F.avg_pool2d(x, 3, 1, 1)
            elif name == "permute":
                x = x.permute(0, 1, 3, 2).contiguous()
            elif name == "dropout":
                x = F.dropout(x, 0.5, self.training)
            elif name == "scale":
                x = x * 1.5
            elif name == "flip":
                x = torch.flip(x, (2,))
            elif name == "slice":
                x = x[:, :, :, :]
            else:
                x = getattr(F, name)(x) if name != "sigmoid" else torch.sigmoid(x)
        return x.flatten(1)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(STEPS), min_size=1, max_size=9),
    st.sampled_from(["symbolic", "module", "function", "aten"]),
    st.sampled_from(
        ["static-int8", "static-int7", "static-int8-symmetric", "static-int8-per-tensor", "dynamic-int8", "weight-int8"]
    ),
)
def test_random_networks(steps, level, scheme):
    torch.manual_seed(len(steps))
    model = Network(["conv3", *steps, "conv1"]).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = [torch.randn(3, CHANNELS, 6, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    with torch.no_grad():
        program = (
            torchgraft.symbolic_trace(model) if level == "symbolic" else torchgraft.capture(model, data[0], level=level)
        )
        try:
            prepared = prepare(program, config=scheme)
        except QuantizeError as error:
            assert "is written in place by the program" in str(error)
            return
        assert torch.allclose(prepared(data[1]), model(data[1]), atol=1e-4)
        calibrate(prepared, data)
        reference = convert(prepared)
        native = to_native(reference)
        joined = join_layers(native)
        for x in (data[1], torch.cat([data[0], data[2]])[:4]):
            kept = x.clone()
            expected, close, found = model(x), reference(x), native(x)
            assert torch.equal(x, kept)
            assert expected.shape == close.shape == found.shape
            assert decibels(expected, close) > 14
            assert decibels(close, found) > 24
            assert torch.equal(native(x), found)
            assert all(torch.equal(joined(x), found) for _ in range(2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
