"""The MLP has the layers, names and order of the example it comes from."""

import torch.fx

from torchgraft.zoo.mlp import MLP


def test_trace_reads_as_the_forward():
    names = [node.name for node in torch.fx.symbolic_trace(MLP()).graph.nodes]
    assert names == ["x", "fc1", "relu", "fc2", "output"]


def test_sizes():
    shapes = {name: tuple(value.shape) for name, value in MLP(3, 5, 2).state_dict().items()}
    assert shapes == {"fc1.weight": (5, 3), "fc1.bias": (5,), "fc2.weight": (2, 5), "fc2.bias": (2,)}
