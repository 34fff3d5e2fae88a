"""ResNets for 32x32 images, built from torchvision's residual blocks, and torchvision's own ResNets for 224x224.

`resnet18` to `resnet152` are torchvision's networks with a stem for small images: stride 1 and no max-pool. With the
tutorial's 7x7 stem and 100 classes, resnet50 has 23,712,932 parameters and needs 2.61 GFLOP per image and forward pass
(a multiply-add counts as two). `resnet8`, `resnet20` and `resnet56` are the CIFAR networks of He et al. 2015
(arXiv:1512.03385, section 4.2): 6n+2 layers in three stages of 16, 32 and 64 channels. `resnet9` is the network of D.
Page's DAWNBench entry ("How to train your ResNet", 2018), made for few epochs: wide and shallow.
"""

from collections.abc import Callable
from functools import partial

import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from models.config import ModelConfig

BLOCKS_PER_STAGE = {"resnet8": 1, "resnet20": 3, "resnet56": 9}
LOGIT_SCALE = 0.125  # as in Page's network
ReLU = partial(nn.ReLU, inplace=True)


def build_large_resnet(config: ModelConfig) -> nn.Module:
    """Build torchvision's ResNet with the configured `stem`: images [N, 3, 32, 32], with stem imagenet
    [N, 3, 224, 224] -> logits [N, num_classes]."""
    build = getattr(torchvision.models, config.model)
    model = build(num_classes=config.num_classes, zero_init_residual=config.zero_init_residual)
    if config.stem != "imagenet":
        kernel_size = int(config.stem[0])
        model.conv1 = nn.Conv2d(3, 64, kernel_size, stride=1, padding=kernel_size // 2, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
        model.maxpool = nn.Identity()
    return model


class SmallResNet(nn.Module):
    """He's CIFAR ResNet: images [N, 3, 32, 32] -> logits [N, num_classes]; projection shortcuts (option B). `width`
    multiplies the number of channels, as in wide ResNets (arXiv:1605.07146)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        channels = [config.width * number for number in (16, 32, 64)]
        blocks_per_stage = BLOCKS_PER_STAGE[config.model]
        self.conv1 = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(channels[0], channels[0], blocks_per_stage, stride=1)  # [N, 16 x width, 32, 32]
        self.layer2 = _stage(channels[0], channels[1], blocks_per_stage, stride=2)  # [N, 32 x width, 16, 16]
        self.layer3 = _stage(channels[1], channels[2], blocks_per_stage, stride=2)  # [N, 64 x width, 8, 8]
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels[2], config.num_classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        features = self.relu(self.bn1(self.conv1(images)))
        features = self.layer3(self.layer2(self.layer1(features)))
        return self.fc(self.avgpool(features).flatten(1))


def _stage(in_channels: int, channels: int, num_blocks: int, stride: int) -> nn.Sequential:
    shortcut = None
    if stride != 1 or in_channels != channels:
        shortcut = nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
    first = BasicBlock(in_channels, channels, stride, shortcut)
    return nn.Sequential(first, *(BasicBlock(channels, channels) for _ in range(num_blocks - 1)))


class ResNet9(nn.Module):
    """Page's network: images [N, 3, H, W], H and W at least 8 -> logits [N, num_classes]; Page uses `width` 4.

    Each max-pool comes before BatchNorm and ReLU, as in airbench (arXiv:2404.00498): the same function as long as
    BatchNorm's weight is positive, with a quarter of the memory traffic."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        first, second, third, fourth = (16 * config.width * factor for factor in (1, 2, 4, 8))
        self.prep = convolution(3, first)
        self.layer1 = nn.Sequential(convolution(first, second, pool=True), PlainResidual(second))  # [N, 32w, 16, 16]
        self.layer2 = convolution(second, third, pool=True)  # [N, 64 x width, 8, 8]
        self.layer3 = nn.Sequential(convolution(third, fourth, pool=True), PlainResidual(fourth))  # [N, 128w, 4, 4]
        self.fc = nn.Linear(fourth, config.num_classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        features = self.layer3(self.layer2(self.layer1(self.prep(images))))
        # amax: AdaptiveMaxPool2d(1) with a backward that is deterministic on CUDA
        return self.fc(features.amax((2, 3))) * LOGIT_SCALE


class PlainResidual(nn.Module):
    """The input plus two convolutions of it, without activation after the sum: [N, channels, H, W] -> same."""

    def __init__(self, channels: int, activation: Callable[[], nn.Module] = ReLU) -> None:
        super().__init__()
        self.conv1 = convolution(channels, channels, activation=activation)
        self.conv2 = convolution(channels, channels, activation=activation)

    def forward(self, features: Tensor) -> Tensor:
        return features + self.conv2(self.conv1(features))


def convolution(
    in_channels: int, channels: int, *, pool: bool = False, activation: Callable[[], nn.Module] = ReLU
) -> nn.Sequential:
    """3x3 convolution, optional max-pool, BatchNorm, activation: [N, in_channels, H, W] -> [N, channels, H', W']."""
    conv = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
    pools = [nn.MaxPool2d(2)] if pool else []
    return nn.Sequential(conv, *pools, nn.BatchNorm2d(channels), activation())


def initialise(model: nn.Module) -> None:
    """Initialise all convolutions as He et al. and torchvision do."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
