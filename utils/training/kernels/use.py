"""Which of our own layers a network gets: the one function by which the rest of the code reaches these kernels."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from utils.errors import ConfigError
from utils.training.config import Auto, SpeedConfig
from utils.training.kernels.norm_relu import fuse_norms
from utils.training.kernels.stem import COLOURS, pad_stem
from utils.training.kernels.weight_products import use_products
from utils.training.kernels.winograd import use_winograd
from utils.training.precision import Precision, has_bf16_kernels
from utils.training.step import compiles


def use_kernels(config: SpeedConfig, model: nn.Module, precision: Precision, device: torch.device) -> list[str]:
    """Replace layers of `model` by ours, as `stem_channels`, `fuse_norm_relu` and `cpu_kernels` ask; names and
    parameters stay. Return notes for the log.

    `auto` is for eager steps over NHWC memory on a CPU, and skips what cannot be. `ConfigError` if a setting demands
    what cannot be.
    """
    on_cpu, is_float32, compiled = device.type == "cpu", precision.level == "O0", compiles(config, device)
    if config.fuse_norm_relu is True and compiled:
        raise ConfigError(
            f"fuse_norm_relu is for eager steps, and enable_compile {str(config.enable_compile).lower()} compiles "
            "here, which also fuses; set one of them to false"
        )
    if config.stem_channels != COLOURS:
        pad_stem(model, config.stem_channels)  # STEM: zero channels after the three colours
    fast = on_cpu and config.enable_nhwc and not compiled
    fuses = fast and not config.enable_sync_bn and config.parallel != "dataparallel"
    fast_convolutions = fast and (is_float32 or has_bf16_kernels())
    dtype = torch.float32 if is_float32 else torch.bfloat16
    winograd, products = (on_cpu and config.cpu_kernel(name) for name in ("winograd", "weight_products"))
    replacements: list[tuple[Auto, bool, Callable[[], None]]] = [
        (config.fuse_norm_relu, fuses, partial(fuse_norms, model, precision, device)),
        (winograd, fast_convolutions, partial(use_winograd, model)),
        (products, fast_convolutions, partial(use_products, model, dtype)),
    ]
    notes = []
    for asked, fits, replace in replacements:
        try:
            if asked is True or (asked and fits):
                replace()
        except ConfigError as error:
            if asked is True:
                raise
            notes.append(f"skipped: {error}")
    return notes
