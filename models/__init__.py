"""Networks by name. Knows nothing of training. The table is in models/config.py."""

from importlib import import_module
from typing import TYPE_CHECKING

from models.config import ModelConfig, find_network

if TYPE_CHECKING:
    from torch import nn


def build_model(config: ModelConfig, image_side: int | None = None) -> "nn.Module":
    """The network that the model keys and `num_classes` ask for, freshly initialised from torch's generator.

    `image_side`: pixels of an image's side, for timm's networks that are built for images of one size."""
    network = find_network(config.model)
    module, _, function = network.builder.partition(":")
    build = getattr(import_module(module), function)
    return build(config, image_side) if network.from_elsewhere else build(config)
