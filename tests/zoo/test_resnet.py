"""ResNets keep torchvision's attribute names, in torchvision's order, so that weights move between the two."""

import pytest
import torch
import torch.fx
from torch import nn

from torchgraft.zoo.resnet import BasicBlock, Bottleneck, resnet18, resnet50


def batch_norm(name):
    return [f"{name}.{part}" for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]


def block_keys(prefix, convolutions, downsample):
    keys = []
    for number in range(1, convolutions + 1):
        keys += [f"{prefix}.conv{number}.weight", *batch_norm(f"{prefix}.bn{number}")]
    if downsample:
        keys += [f"{prefix}.downsample.0.weight", *batch_norm(f"{prefix}.downsample.1")]
    return keys


@pytest.mark.parametrize(
    ("create", "blocks", "convolutions", "first_downsampled"),
    [(resnet18, (2, 2, 2, 2), 2, 2), (resnet50, (3, 4, 6, 3), 3, 1)],
)
def test_state_dict_keys(create, blocks, convolutions, first_downsampled):
    expected = ["conv1.weight", *batch_norm("bn1")]
    for stage, count in enumerate(blocks, start=1):
        for block in range(count):
            downsample = block == 0 and stage >= first_downsampled
            expected += block_keys(f"layer{stage}.{block}", convolutions, downsample)
    expected += ["fc.weight", "fc.bias"]
    with torch.device("meta"):
        assert list(create().state_dict()) == expected


def test_children_in_order():
    with torch.device("meta"):
        children = [name for name, _ in resnet18().named_children()]
    assert children == ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc"]


def test_resnet50_trace_has_the_calls_of_the_paper():
    with torch.device("meta"):
        graph = torch.fx.symbolic_trace(resnet50()).graph
    operations = [node.op for node in graph.nodes]
    assert operations.count("call_module") == 53 + 53 + 49 + 1 + 1 + 1  # convolution, norm, ReLU, two pools, linear
    assert operations.count("call_function") == 16 + 1  # one addition a block, flatten
    assert [node.target for node in graph.nodes if node.name == "flatten"] == [torch.flatten]


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_shortcut_only_where_the_shape_changes(block):
    same = block(16 * block.expansion, 16)
    strided = block(16 * block.expansion, 16, stride=2)
    x = torch.randn(2, 16 * block.expansion, 8, 8)
    assert same.downsample is None
    assert same(x).shape == x.shape
    assert isinstance(strided.downsample, nn.Sequential)
    assert strided(x).shape == (2, 16 * block.expansion, 4, 4)


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_block_is_the_sum_of_its_two_ways(block):
    module = block(8, 8, stride=2).eval()
    x = torch.randn(2, 8, 6, 6)
    before = x.clone()
    last = module.bn2 if block is BasicBlock else module.bn3
    summands = []
    last.register_forward_hook(lambda _module, _inputs, output: summands.append(output.clone()))
    result = module(x)
    assert torch.equal(x, before), "the ReLU in place must not reach the block's input"
    assert torch.equal(result, torch.relu(summands[0] + module.downsample(x)))


def test_other_sizes_of_input_and_output():
    model = resnet18(classes=10, channels=1).eval()
    assert model(torch.randn(2, 1, 64, 64)).shape == (2, 10)
