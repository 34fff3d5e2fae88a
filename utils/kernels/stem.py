"""STEM: the first convolution's three input channels padded with zeros, to a number that suits tensor cores."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from utils.errors import ConfigError

COLOURS = 3


class ChannelPaddedConv2d(nn.Conv2d):
    """A convolution of 3 channels, with `added` channels of zeros. Its parameters have 3 channels."""

    added: int

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W] -> [N, out_channels, ...]."""
        if images.is_meta:  # to count the network's own FLOPs
            return super().forward(images)
        zeros = (0, 0, 0, 0, 0, self.added)  # before and after columns, rows, channels
        return self._conv_forward(pad(images, zeros), pad(self.weight, zeros), self.bias)


def pad_stem(model: nn.Module, channels: int) -> None:
    """Pad the input of the first convolution of 3 channels to `channels`; `ConfigError` if there is none."""
    for module in model.modules():
        if type(module) is nn.Conv2d and module.in_channels == COLOURS and module.groups == 1:
            padded: Any = module
            padded.__class__, padded.added = ChannelPaddedConv2d, channels - COLOURS
            return
    problem = f"the network has no plain convolution of {COLOURS} channels"
    raise ConfigError(f"stem_channels {channels}: {problem}; use {COLOURS}")
