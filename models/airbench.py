"""Networks for the highest accuracy in few epochs of small images.

Their layout is that of airbench's (K. Jordan 2024, arXiv:2404.00498): three stages, a max-pool behind the first
convolution of each. `airbench` has two convolutions a stage, as for his 94 %; `airbench96` has three and a shortcut
around the last two, as for his 96 %, but one alone in the first stage, whose maps are large. What differs in both:
widths of 1, 3 and 6 in place of 1, 4 and 4, so that more of the work lies in small maps, which makes a step shorter on
a CPU; a stem that is trained and keeps the images' size, as even sizes make whole tiles for Winograd's method;
BatchNorm with weights; SiLU in place of GELU.
"""

from torch import Tensor, nn

from models.config import ModelConfig
from models.resnet import LOGIT_SCALE, PlainResidual, convolution, initialise


def build_airbench(config: ModelConfig) -> nn.Module:
    """`airbench` or `airbench96`."""
    return Airbench(config.num_classes, width=config.width, residual=config.model == "airbench96")


class Airbench(nn.Module):
    """Images [N, 3, H, W], H and W at least 8 -> logits [N, num_classes]; `width` 4 begins with 64 channels, as
    airbench does. With ten classes 2.50 M parameters, 0.28 GFLOP per image of 32x32 and forward pass; `residual` 4.12 M
    and 0.35."""

    def __init__(self, num_classes: int, *, width: int, residual: bool = False) -> None:
        super().__init__()
        stem, *stages = (8 * width * factor for factor in (1, 2, 6, 12))
        layers: list[nn.Module] = [convolution(3, stem, activation=nn.SiLU)]
        for before, channels in zip([stem, *stages], stages, strict=False):
            layers.append(convolution(before, channels, activation=nn.SiLU, pool=True))
            if not residual:
                layers.append(convolution(channels, channels, activation=nn.SiLU))
            elif before != stem:
                layers.append(PlainResidual(channels, nn.SiLU))
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(stages[-1], num_classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.features(images).amax((2, 3))) * LOGIT_SCALE
