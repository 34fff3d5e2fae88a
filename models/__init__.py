"""Networks by name; their names and settings are in models/config.py. No training code here."""

from typing import TYPE_CHECKING, Any

from models.config import TORCHVISION_RESNETS, ModelConfig
from utils.user_code import TIMM, is_user_code

if TYPE_CHECKING:
    from torch import nn


def build_model(config: ModelConfig, image_side: int | None = None) -> "nn.Module":
    """Build the network of the settings `model` and `num_classes`, initialised from torch's random generator.

    `image_side`: side of an image in pixels, for timm's networks that are built for one image size."""
    from models.airbench import Airbench
    from models.external import build_imagenet, build_own, build_timm, build_vgg
    from models.resnet import ResNet9, SmallResNet, build_large_resnet

    if config.model.startswith(TIMM):
        return build_timm(config, image_side)
    if is_user_code(config.model):
        return build_own(config)
    builders: dict[str, Any] = dict.fromkeys(TORCHVISION_RESNETS, build_large_resnet)
    builders |= {"resnet9": ResNet9, "airbench": Airbench, "airbench96": Airbench}
    builders |= {"vgg16": build_vgg, "vgg16_bn": build_vgg, "alexnet": build_imagenet}
    return builders.get(config.model, SmallResNet)(config)
