"""STEM: the first convolution's three input channels padded with zeros, to a number that suits tensor cores."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from utils.errors import ConfigError
from utils.training.config import SpeedConfig

COLOURS = 3


class ChannelPaddedConv2d(nn.Conv2d):
    """A convolution of 3 channels, zero-padded to `channels` of them. It shares the original's parameters,
    so names, shapes and the optimizer's state stay the same."""

    def __init__(self, convolution: nn.Conv2d, channels: int) -> None:
        like: Any = convolution  # its sizes are declared as tuples of any length
        super().__init__(
            like.in_channels, like.out_channels, like.kernel_size, like.stride, like.padding, like.dilation,
            bias=like.bias is not None, padding_mode=like.padding_mode, device="meta",
        )  # fmt: skip
        self.weight, self.bias = convolution.weight, convolution.bias
        self.added = channels - convolution.in_channels

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W] -> [N, out_channels, ...]."""
        zeros = (0, 0, 0, 0, 0, self.added)  # before and after columns, rows, channels
        return self._conv_forward(pad(images, zeros), pad(self.weight, zeros), self.bias)


def pad_stem(config: SpeedConfig, model: nn.Module) -> nn.Module:
    """Return `model` with its first convolution of 3 channels padded to `stem_channels`; `ConfigError` if none."""
    if config.stem_channels == COLOURS:
        return model
    for name, module in model.named_modules():
        if type(module) is nn.Conv2d and module.in_channels == COLOURS and module.groups == 1:
            if not name:
                return ChannelPaddedConv2d(module, config.stem_channels)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, ChannelPaddedConv2d(module, config.stem_channels))
            return model
    raise ConfigError(
        f"stem_channels {config.stem_channels}: the network has no plain convolution of {COLOURS} channels; "
        f"use {COLOURS}"
    )
