"""The multi-layer perceptron that small examples and error messages are shown on: two linear layers and a ReLU.
Only the model lives here; names and example inputs are looked up in `torchgraft.zoo`.
"""

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear, ReLU, Linear."""

    def __init__(self, input_dim: int = 16, hidden_dim: int = 32, output_dim: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(input_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, output_dim)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.fc1(x))
        x = self.fc2(x)
        return x


def mlp_inputs(generator: torch.Generator, batch: int, input_dim: int = 16) -> tuple[Tensor, ...]:
    """A batch of random vectors."""
    return (torch.randn(batch, input_dim, generator=generator),)
