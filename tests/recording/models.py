"""Models that several tests of recording use."""

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    """Writes a buffer, draws, and has parameters."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        hidden = self.first(x).tanh()
        self.calls.add_(1)
        return self.second(F.dropout(hidden, 0.5, True))
