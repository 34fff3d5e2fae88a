"""A plain network without shortcuts, for the highest accuracy in few epochs of small images.

Its layout is that of airbench's (K. Jordan 2024, arXiv:2404.00498): three stages of two convolutions, a max-pool behind
the first of each. What differs: widths of 1, 3 and 6 in place of 1, 4 and 4, so that more of the work lies in small
maps, which makes a step shorter on a CPU; a stem that is trained and keeps the images' size, as even sizes make whole
tiles for Winograd's method; BatchNorm with weights; SiLU in place of GELU.
"""

from torch import Tensor, nn

from models.keys import ModelKeys
from models.resnet import LOGIT_SCALE, convolution


def build_airbench(keys: ModelKeys) -> nn.Module:
    """The network of this file."""
    return Airbench(keys.num_classes, width=keys.width)


class Airbench(nn.Module):
    """Images [N, 3, H, W], H and W at least 8 -> logits [N, num_classes]; `width` 4 begins with 64 channels, as
    airbench does: 2.50 M parameters for ten classes, 0.28 GFLOP per image of 32x32 and forward pass."""

    def __init__(self, num_classes: int, *, width: int) -> None:
        super().__init__()
        stem, *stages = (8 * width * factor for factor in (1, 2, 6, 12))
        layers = [convolution(3, stem, activation=nn.SiLU())]
        for before, channels in zip([stem, *stages], stages, strict=False):
            layers.append(convolution(before, channels, activation=nn.SiLU(), pool=True))
            layers.append(convolution(channels, channels, activation=nn.SiLU()))
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(stages[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.features(images).amax((2, 3))) * LOGIT_SCALE
