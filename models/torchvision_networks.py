"""torchvision's own networks, for 224-pixel images."""

import torchvision
from torch import nn

from models.keys import ModelKeys


def build(keys: ModelKeys) -> nn.Module:
    """torchvision's network of this name: images [N, 3, 224, 224] -> logits [N, num_classes]."""
    return getattr(torchvision.models, keys.model)(num_classes=keys.num_classes)
