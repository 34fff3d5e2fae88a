"""Parts of recipes, each switched on by the name of the network, for `tools.bench paired`.

    PYTHONPATH=FOLDER_OF_THIS_FILE python -m tools.bench paired ... --set model=parts:plain --with model=parts:drop_path

A part that wins enters the trainer as a key; until then it is here, in its shortest form. Every random number follows
from the seed of the run, which PyTorch's generator has when the network is built.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock
from torchvision.transforms import ColorJitter, InterpolationMode, RandomErasing, TrivialAugmentWide
from utils.data.augment import BatchAugmenter
from utils.training.muon import Muon

from models.resnet import PlainResidual, ResNet9, SmallResNet

WIDTH = int(os.environ.get("PARTS_WIDTH", "1"))


# ---- data: CIFAR-100 as small as the first epochs of cifar100-cpu see it, and a third of the training images


def small(data_path: Path) -> dict[str, Any]:
    """Every third training image and all test images, as means of 2 x 2 pixels: 3 x 16 x 16."""
    arrays = {}
    for name, count in (("train", 50000), ("test", 10000)):
        raw = np.fromfile(data_path / "cifar-100-binary" / f"{name}.bin", np.uint8).reshape(count, 3074)
        raw = raw[::3] if name == "train" else raw
        pixels = raw[:, 2:].reshape(-1, 3, 16, 2, 16, 2).mean((3, 5))
        arrays[name] = np.round(pixels).astype(np.uint8), raw[:, 1].astype(np.int64)
    names = [str(number) for number in range(100)]
    return {
        "train": arrays["train"], "valid": arrays["test"], "class_names": names,
        "mean": [0.5071, 0.4865, 0.4409], "std": [0.2673, 0.2564, 0.2762],
    }  # fmt: skip


# ---- networks


def plain(num_classes: int) -> nn.Module:
    """The block's."""
    return ResNet9(num_classes, width=WIDTH)


def drop_path(num_classes: int) -> nn.Module:
    """Stochastic depth (Huang et al. 2016): a tenth of the images of a batch skip the last residual, half as many the
    first."""
    model = ResNet9(num_classes, width=WIDTH)
    for block, share in zip((b for b in model.modules() if isinstance(b, PlainResidual)), (0.05, 0.1), strict=True):
        block.register_forward_hook(_dropping(share))
    return model


def _dropping(share: float) -> Any:
    def hook(block: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        if not block.training:
            return output
        kept = (torch.rand(len(output), 1, 1, 1) >= share).float() / (1 - share)
        return torch.lerp(inputs[0], output, kept)

    return hook


def whole_last_stage(num_classes: int) -> nn.Module:
    """The last stage at twice the height and width."""
    model = ResNet9(num_classes, width=WIDTH)
    model.layer3[0] = nn.Sequential(*(part for part in model.layer3[0] if not isinstance(part, nn.MaxPool2d)))
    return model


def strided(num_classes: int) -> nn.Module:
    """He's network with 8 layers, whose shortcuts have a stride."""
    return SmallResNet(1, num_classes, width=WIDTH)


def resnet_d(num_classes: int) -> nn.Module:
    """The same, with a mean of 2 x 2 pixels before each 1x1 shortcut instead of its stride (He et al. 2018)."""
    model = SmallResNet(1, num_classes, width=WIDTH)
    for block in model.modules():
        if isinstance(block, BasicBlock) and block.stride != 1:
            block.downsample[0].stride = (1, 1)
            block.downsample = nn.Sequential(nn.AvgPool2d(2), *block.downsample)
    return model


# ---- augmentations: of a whole batch, behind crop and flip


def _behind_augmentation(change: Any) -> None:
    before = BatchAugmenter.__call__

    def call(self: BatchAugmenter, images: Tensor, maps: Tensor) -> Tensor:
        return change(before(self, images, maps))

    BatchAugmenter.__call__ = call  # type: ignore[method-assign]


def _of_each(change: Any) -> Any:
    return lambda images: torch.stack([change(image) for image in images])


class _Trivial(TrivialAugmentWide):
    """Shifts by up to an image's side in place of 32 pixels."""

    side = 16

    def _augmentation_space(self, num_bins: int) -> Any:
        space = super()._augmentation_space(num_bins)
        for name in ("TranslateX", "TranslateY"):
            space[name] = (torch.linspace(0.0, float(self.side), num_bins), True)
        return space


def trivial_augment(num_classes: int) -> nn.Module:
    """TrivialAugment, wide (Müller and Hutter 2021), torchvision's."""
    _behind_augmentation(_of_each(_Trivial(interpolation=InterpolationMode.NEAREST)))
    return plain(num_classes)


def colour_jitter(num_classes: int) -> nn.Module:
    """Brightness, contrast and saturation by up to 40 % either way, torchvision's."""
    _behind_augmentation(_of_each(ColorJitter(0.4, 0.4, 0.4)))
    return plain(num_classes)


def random_erasing(num_classes: int) -> nn.Module:
    """A rectangle of every second image is the mean colour (Zhong et al. 2017), torchvision's."""
    _behind_augmentation(_of_each(RandomErasing(p=0.5, value=(129, 124, 112))))
    return plain(num_classes)


# ---- optimizer


def decay_ends_at_zero(num_classes: int) -> nn.Module:
    """Muon's weight decay falls with the learning rate once that falls, so that their product falls as its square."""
    update, peak = Muon._update, 0.0

    def falling(self: Muon, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        nonlocal peak
        rate, decay = float(group["lr"]), group["weight_decay"]
        peak = max(peak, rate)
        update(self, group | {"weight_decay": decay * rate / peak if rate < peak else decay}, parameters, gradients)

    Muon._update = falling  # type: ignore[method-assign]
    return plain(num_classes)
