"""Networks by name; the table is in models/config.py. No training code here."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from models.config import ModelConfig, find_network

if TYPE_CHECKING:
    from torch import nn


def build_model(config: ModelConfig, image_side: int | None = None) -> "nn.Module":
    """Build the network of the settings `model` and `num_classes`, initialised from torch's random generator.

    `image_side`: side of an image in pixels, for timm's networks that are built for one image size."""
    network = find_network(config.model)
    build = resolve_name(network.builder)
    return build(config, image_side) if network.external else build(config)
