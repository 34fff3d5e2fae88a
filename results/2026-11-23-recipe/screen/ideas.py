"""Parts of recipes on top of drop path, each switched on by the name of the network; beside parts.py of the day before.

What the runs used of their ideas.py and ideas2.py, set in lines: its hash is not the recorded one.
"""

from typing import Any

import torch
from parts import WIDTH, _dropping
from torch import Tensor, nn
from utils.data.augment import BatchAugmenter
from utils.training.muon import Muon

from models.resnet import PlainResidual, ResNet9


def base(num_classes: int) -> nn.Module:
    """resnet9; a tenth of the images of a batch skip the last residual, half as many the first."""
    model = ResNet9(num_classes, width=WIDTH)
    for block, share in zip((b for b in model.modules() if isinstance(b, PlainResidual)), (0.05, 0.1), strict=True):
        block.register_forward_hook(_dropping(share))
    return model


class SqueezeExcite(nn.Module):
    """Channels scaled by what a small network makes of their means (Hu et al. 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, channels // 8), nn.Linear(channels // 8, channels)

    def forward(self, features: Tensor) -> Tensor:
        scale = torch.sigmoid(self.up(self.down(features.mean((2, 3))).relu()))
        return features * (2 * scale)[:, :, None, None]


def se(num_classes: int) -> nn.Module:
    """The residuals' channels scaled."""
    model = base(num_classes)
    for block in (block for block in model.modules() if isinstance(block, PlainResidual)):
        block.conv2.append(SqueezeExcite(block.conv2[0].out_channels))
    return model


def silu(num_classes: int) -> nn.Module:
    """SiLU in place of every ReLU."""
    model = base(num_classes)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.SiLU())
    return model


def reflect(num_classes: int) -> nn.Module:
    """Crops beyond the border show the image reflected, not black."""

    def reflected(place: Tensor, last: Tensor) -> Tensor:
        return last - (last - place.abs()).abs()

    def call(self: BatchAugmenter, images: Tensor, maps: Tensor) -> Tensor:
        if len(images) != self.buffers.shape[1]:
            self.buffers = self.buffers.new_empty(3, len(images), self.buffers.shape[2])
        x, y, scratch = self.buffers.unbind()
        of_column, of_row, first = maps.t().unsqueeze(2).split([4, 4, 1])
        for position, (a, b, c, _) in ((x, of_column), (y, of_row)):
            torch.mul(self.columns, a, out=position)
            position.add_(torch.mul(self.rows, b, out=scratch)).add_(c).bitwise_right_shift_(16)
        source = reflected(x, of_column[3]) + reflected(y, of_row[3]) * self.width + first[0] - 1
        source = source.long().unsqueeze(1).expand(-1, images.shape[1], -1)
        return images.flatten(2).gather(2, source).view(images.shape)

    BatchAugmenter.__call__ = call  # type: ignore[method-assign]
    return base(num_classes)


def _adam(ratio: float) -> None:
    update = Muon._update

    def scaled(self: Muon, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        if not group["adapt"]:
            group = group | {"lr": float(group["lr"]) * ratio, "weight_decay": group["weight_decay"] / ratio}
        update(self, group, parameters, gradients)

    Muon._update = scaled  # type: ignore[method-assign]


def adam_third(num_classes: int) -> nn.Module:
    """A third of the learning rate for BatchNorm and the last layer, which AdamW updates; as much decay as before."""
    _adam(1 / 3)
    return base(num_classes)


def adam_double(num_classes: int) -> nn.Module:
    """Twice of it."""
    _adam(2)
    return base(num_classes)
