"""Networks by name. Knows nothing of training."""

from torch import nn

from models.resnet import BLOCKS_PER_STAGE, SmallResNet, large_resnet
from utils.config import Config


def build_model(config: Config) -> nn.Module:
    """The network that `model`, `stem` and `num_classes` ask for, freshly initialised from torch's generator."""
    if config.model in BLOCKS_PER_STAGE:
        return SmallResNet(BLOCKS_PER_STAGE[config.model], config.num_classes)
    return large_resnet(config.model, config.num_classes, config.stem)
