"""VGG16 (Simonyan and Zisserman, arXiv:1409.1556) for 32x32 images; torchvision's VGG16 and AlexNet for 224x224."""

from collections import OrderedDict

import torchvision
from torch import nn
from torchvision.models.vgg import cfgs, make_layers

from models.config import ModelConfig
from models.resnet import initialise


def build_vgg(config: ModelConfig) -> nn.Module:
    """Build VGG16: images [N, 3, 32, 32] -> logits [N, num_classes]; 14.7 M parameters. Or torchvision's own with stem
    imagenet. The thirteen convolutions return [N, 512, 1, 1], so one linear layer replaces torchvision's three, whose
    120 M parameters are for 224-pixel images."""
    if config.stem == "imagenet":
        return build_imagenet(config)
    features = make_layers(cfgs["D"], batch_norm=config.model == "vgg16_bn")
    model = nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), fc=nn.Linear(512, config.num_classes)))
    initialise(model)
    return model


def build_imagenet(config: ModelConfig) -> nn.Module:
    """Build torchvision's VGG16 or AlexNet: images [N, 3, 224, 224] -> logits [N, num_classes]."""
    return getattr(torchvision.models, config.model)(num_classes=config.num_classes)
