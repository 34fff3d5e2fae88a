"""VGG16 for 32x32 images, built from torchvision's layers (Simonyan and Zisserman, arXiv:1409.1556, configuration D),
and torchvision's own VGG16 and AlexNet for 224x224."""

from collections import OrderedDict

import torchvision
from torch import nn
from torchvision.models.vgg import cfgs, make_layers

from models.config import ModelConfig


def build_vgg(config: ModelConfig) -> nn.Module:
    """Build VGG16 for small images, or torchvision's own with stem imagenet."""
    if config.stem == "imagenet":
        return build_imagenet(config)
    return build_small(config.num_classes, batch_norm=config.model == "vgg16_bn")


def build_imagenet(config: ModelConfig) -> nn.Module:
    """Build torchvision's VGG16 or AlexNet: images [N, 3, 224, 224] -> logits [N, num_classes]."""
    return getattr(torchvision.models, config.model)(num_classes=config.num_classes)


def build_small(num_classes: int, *, batch_norm: bool) -> nn.Module:
    """Build VGG16: images [N, 3, 32, 32] -> logits [N, num_classes]; 14.7 M parameters.

    The thirteen convolutions return [N, 512, 1, 1], so one linear layer replaces torchvision's three, whose 120 M
    parameters are for 224-pixel images.
    """
    features = make_layers(cfgs["D"], batch_norm=batch_norm)
    model = nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), fc=nn.Linear(512, num_classes)))
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.bias is not None:  # as torchvision does
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return model
