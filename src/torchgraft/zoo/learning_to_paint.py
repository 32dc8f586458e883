"""The actor of Learning to Paint (Huang, Heng and Zhou, 2019): from a canvas and a target, the strokes to paint next.
The renderer that turns strokes into pixels, the critic and the training are not here.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchgraft.zoo.resnet import BasicBlock, convolution, initialise, stage

# Canvas and target in colour, the step number, and the two coordinates of each pixel.
INPUT_CHANNELS = 3 + 3 + 1 + 2
STROKES = 5
# Three points, two radii, two transparencies and a colour make up one stroke, a quadratic curve.
STROKE_PARAMETERS = 3 * 2 + 2 + 2 + 3


class LearningToPaintActor(nn.Module):
    """A ResNet-18 that halves a 128x128 image in its stem and in every stage; outputs between 0 and 1."""

    def __init__(self, channels: int = INPUT_CHANNELS, outputs: int = STROKES * STROKE_PARAMETERS) -> None:
        super().__init__()
        self.conv1 = convolution(channels, 64, size=3, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = stage(BasicBlock, 64, 64, blocks=2, stride=2)
        self.layer2 = stage(BasicBlock, 64, 128, blocks=2, stride=2)
        self.layer3 = stage(BasicBlock, 128, 256, blocks=2, stride=2)
        self.layer4 = stage(BasicBlock, 256, 512, blocks=2, stride=2)
        self.fc = nn.Linear(512, outputs)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = F.avg_pool2d(x, 4)
        x = x.view(x.size(0), -1)
        return torch.sigmoid(self.fc(x))
