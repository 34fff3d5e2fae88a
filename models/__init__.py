"""Networks by name. Knows nothing of training. The table is in models/keys.py."""

from importlib import import_module
from typing import TYPE_CHECKING

from models.keys import NETWORKS, ModelKeys

if TYPE_CHECKING:
    from torch import nn


def build_model(keys: ModelKeys) -> "nn.Module":
    """The network that the model keys and `num_classes` ask for, freshly initialised from torch's generator."""
    module, _, function = NETWORKS[keys.model].builder.partition(":")
    return getattr(import_module(module), function)(keys)
