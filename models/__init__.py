"""Networks by name. Knows nothing of training."""

import torchvision
from torch import nn

from models.resnet import BLOCKS_PER_STAGE, ResNet9, SmallResNet, large_resnet
from models.vgg import SMALL_VGGS, SmallVgg
from utils.config import Config


def build_model(config: Config) -> nn.Module:
    """The network that the model keys and `num_classes` ask for, freshly initialised from torch's generator."""
    name, num_classes = config.model, config.num_classes
    if name in BLOCKS_PER_STAGE:
        blocks, zero_init = BLOCKS_PER_STAGE[name], config.zero_init_residual
        return SmallResNet(blocks, num_classes, width=config.width, zero_init=zero_init)
    if name == "resnet9":
        return ResNet9(num_classes, width=config.width, zero_init=config.zero_init_residual)
    if name.startswith("resnet"):
        return large_resnet(name, num_classes, config.stem, zero_init=config.zero_init_residual)
    if config.stem == "imagenet":
        return getattr(torchvision.models, name)(num_classes=num_classes)
    return SmallVgg(num_classes, batch_norm=SMALL_VGGS[name])
