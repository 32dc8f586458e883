"""Residual networks for images (He et al., 2015) with 18, 34, 50, 101 and 152 layers, and the blocks they are made of.
Attribute names follow torchvision's, so that its weights load here; there is no code to fetch them.
"""

from functools import partial

import torch
from torch import Tensor, nn


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the image size at stride 1 and leaves the bias to the normalisation after it."""
    return nn.Conv2d(inputs, outputs, kernel_size=size, stride=stride, padding=size // 2, bias=False)


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    """What a block's input passes through to be added to its output; None where the shapes agree already."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(convolution(inputs, outputs, size=1, stride=stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: the block of ResNet-18 and ResNet-34."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, width, size=3, stride=stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = convolution(width, width, size=3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones and a shortcut: the block of ResNet-50 and deeper."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = convolution(inputs, width, size=1)
        self.bn1 = nn.BatchNorm2d(width)
        # The paper strides in conv1; published weights expect the stride here, where it is more accurate.
        self.conv2 = convolution(width, width, size=3, stride=stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = convolution(width, outputs, size=1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


Block = type[BasicBlock] | type[Bottleneck]


def stage(block: Block, inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """Blocks of one width in a row; the first one changes the number of channels and the image size."""
    outputs = width * block.expansion
    first = block(inputs, width, stride)
    return nn.Sequential(first, *(block(outputs, width) for _ in range(blocks - 1)))


def initialise(model: nn.Module) -> None:
    """Draw the convolutions' weights for a network of ReLUs, as the paper does, and damp each block's own part."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        # Without training, every block would add as much as it is given: 152 layers overflow half precision.
        elif isinstance(module, BasicBlock):
            nn.init.constant_(module.bn2.weight, 0.25)
        elif isinstance(module, Bottleneck):
            nn.init.constant_(module.bn3.weight, 0.25)


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, an average over the image and a linear classifier."""

    def __init__(self, block: Block, blocks: tuple[int, int, int, int], classes: int = 1000, channels: int = 3) -> None:
        super().__init__()
        grown = block.expansion
        self.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = stage(block, 64, 64, blocks[0], stride=1)
        self.layer2 = stage(block, 64 * grown, 128, blocks[1], stride=2)
        self.layer3 = stage(block, 128 * grown, 256, blocks[2], stride=2)
        self.layer4 = stage(block, 256 * grown, 512, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * grown, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
resnet101 = partial(ResNet, Bottleneck, (3, 4, 23, 3))
resnet152 = partial(ResNet, Bottleneck, (3, 8, 36, 3))


def image_inputs(generator: torch.Generator, batch: int, channels: int = 3, size: int = 224) -> tuple[Tensor, ...]:
    """A batch of random square images."""
    return (torch.randn(batch, channels, size, size, generator=generator),)
