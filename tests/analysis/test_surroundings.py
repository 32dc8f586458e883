"""What a run changed is told by names, and put back by the one keeper of state."""

import random

import torch
from torch import nn

from torchgraft.analysis.surroundings import Surroundings


class Keeping(nn.Module):
    """Writes everything that a forward can write, and what it wrote last time stays if nobody restores."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.last = None
        self.shape = ()
        self.memo = {"calls": 0}
        self.sparse = torch.eye(2).to_sparse()

    def forward(self, x):
        self.seen += 1
        self.last = (x.detach() * 1, x.detach() + 1)
        self.shape = tuple(x.shape)
        self.memo["calls"] += 1
        self.sparse = self.sparse * 2
        return self.linear(x) + random.random() + torch.rand(2)


def test_changes_have_names_and_are_undone():
    model = Keeping()
    surroundings = Surroundings(model)
    with surroundings.restored(3):
        model(torch.ones(1, 2)).sum().backward()
        changed = surroundings.changes()
        drawn = random.random(), torch.rand(1)
    paths = {path.partition("[")[0] for path in changed}
    assert paths == {"seen", "last", "shape", "memo", "sparse"}
    assert model.last is None and model.shape == () and model.memo == {"calls": 0} and int(model.seen) == 0
    assert model.linear.weight.grad is None and torch.equal(model.sparse.to_dense(), torch.eye(2))
    with surroundings.restored(3):
        model(torch.ones(1, 2))
        assert (random.random(), torch.rand(1)) == drawn


def test_what_is_equal_again_is_no_change():
    model = Keeping()
    with torch.no_grad():
        model(torch.ones(1, 2))  # a tuple of tensors, which do not say whether they are equal, is there from now on
    surroundings = Surroundings(model)
    with surroundings.restored():
        model(torch.ones(1, 2))
        changed = surroundings.changes()
    assert not any(path.startswith("shape") for path in changed)
    assert any(path.startswith("last[") for path in changed)
