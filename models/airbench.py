"""Networks for high accuracy in few epochs on small images, after airbench (K. Jordan 2024, arXiv:2404.00498).

Three stages, each with a max-pool after its first convolution. `airbench` has two convolutions per stage, as in
Jordan's 94 % network; `airbench96` three and a shortcut around the last two, as in his 96 % network, but only one in
the first stage, whose feature maps are large. Other than his: widths of 1, 3 and 6 instead of 1, 4 and 4, since small
feature maps are faster on a CPU; a trained stem that keeps the image size, since even sizes divide into whole tiles for
Winograd's method; BatchNorm with weights; SiLU instead of GELU.
"""

from torch import Tensor, nn

from models.config import ModelConfig
from models.resnet import LOGIT_SCALE, PlainResidual, convolution, initialise


class Airbench(nn.Module):
    """Images [N, 3, H, W], H and W at least 8 -> logits [N, num_classes]; with `width` 4 the first stage has 64
    channels, as in airbench. With ten classes: 2.50 M parameters and 0.28 GFLOP per 32x32 image and forward pass;
    airbench96 4.12 M and 0.35."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        stem, *stages = (8 * config.width * factor for factor in (1, 2, 6, 12))
        layers: list[nn.Module] = [convolution(3, stem, activation=nn.SiLU)]
        for before, channels in zip([stem, *stages], stages, strict=False):
            layers.append(convolution(before, channels, activation=nn.SiLU, pool=True))
            if config.model != "airbench96":
                layers.append(convolution(channels, channels, activation=nn.SiLU))
            elif before != stem:
                layers.append(PlainResidual(channels, nn.SiLU))
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(stages[-1], config.num_classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.features(images).amax((2, 3))) * LOGIT_SCALE
