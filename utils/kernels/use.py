"""Which of our own layers a network gets: the one function by which the rest of the code reaches these kernels."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from utils.errors import ConfigError
from utils.kernels.norm_relu import fuse_norms
from utils.kernels.stem import COLOURS, pad_stem
from utils.kernels.weight_products import use_products
from utils.kernels.winograd import use_winograd


def use_kernels(
    model: nn.Module, kernels: Mapping[str, bool], stem_channels: int, dtype: torch.dtype, device: torch.device
) -> dict[str, str]:
    """Replace layers of `model`, which computes in `dtype`, by ours; names and parameters stay.

    Returns {name of `kernels` that this network cannot use: reason}; `ConfigError` instead if its value is true.
    """
    if stem_channels != COLOURS:
        pad_stem(model, stem_channels)  # STEM: zero channels after the three colours
    skipped = {}
    for name, replace in (
        ("fuse_norm_relu", partial(fuse_norms, model, device)),
        ("winograd", partial(use_winograd, model)),
        ("weight_products", partial(use_products, model, dtype)),
    ):
        try:
            if name in kernels:
                replace()
        except ConfigError as error:
            if kernels[name]:
                raise
            skipped[name] = str(error)
    return skipped
