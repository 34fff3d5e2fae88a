"""airbench96 of width 2 with orthogonal ("Dirac") convolutions to begin with, or with a first layer that whitens and is
not trained (K. Jordan 2024, arXiv:2404.00498)."""

import numpy as np
import torch
from torch import Tensor, nn

from models.airbench import Airbench


def w2dirac(num_classes: int) -> nn.Module:
    model = Airbench(num_classes, width=2, residual=True)
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels > 3:
            with torch.no_grad():
                nn.init.dirac_(module.weight[: min(module.weight.shape[:2])])
    return model


def w2white(num_classes: int) -> nn.Module:
    model = Airbench(num_classes, width=2, residual=True)
    model.features[0] = nn.Sequential(Whitening(16), nn.SiLU())
    return model


class Whitening(nn.Module):
    """Convolution by the principal components of 3x3 patches of 5,000 training images, each with both signs."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        raw = np.fromfile("./data/cifar-100-binary/train.bin", np.uint8).reshape(-1, 3074)[:5000, 2:]
        images = torch.from_numpy(raw.reshape(-1, 3, 32, 32)).float() / 255
        images = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)
        patches = images.unfold(2, 3, 1).unfold(3, 3, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 27)[::7]
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        half = (vectors / (values + 5e-4).sqrt()).T.flip(0).reshape(-1, 3, 3, 3)[: channels // 2]
        self.register_buffer("weight", torch.cat([half, -half]))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, images: Tensor) -> Tensor:
        weight = self.weight.contiguous(memory_format=torch.channels_last)
        return nn.functional.conv2d(images, weight, self.bias, padding=1)
