"""Augmentations of a whole batch on its device, after any loader: cutout, mixup and cutmix.

They mix images across samples and so make soft targets; the loader contract knows nothing of them. What is drawn for a
sample, its partner included, is a function of (seed, epoch, sample index): the partner is the neighbour in the epoch's
order, images 2k and 2k + 1, and each rank's share of a batch holds whole pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from utils.data.config import AugmentationConfig
from utils.data.sampling import EpochPlan, IntArray, uniform
from utils.errors import ConfigError

# The streams of random numbers after those of utils.data.sampling
(
    STREAM_MIXUP, STREAM_CUTMIX, STREAM_WHICH, STREAM_CUTMIX_Y, STREAM_CUTMIX_X, STREAM_CUTOUT_Y, STREAM_CUTOUT_X,
) = range(4, 11)  # fmt: skip


@dataclass(frozen=True)
class Mixing:
    """Parameters of N images: first the hole of cutout, then what the partner contributes."""

    hole: IntArray  # int64 [N, 4]: top, left, bottom, right (exclusive); empty where top == bottom
    patch: IntArray  # int64 [N, 4]: this part comes from the partner (cutmix)
    share: np.ndarray  # float32 [N]: the image's own share in its pixels outside the patch (mixup)
    label_share: np.ndarray  # float32 [N]: its own share in the target


@dataclass(frozen=True)
class MixRanges:
    """What may be drawn; 0 switches an augmentation off. With both alphas, each image draws one of the two."""

    cutout_size: int
    mixup_alpha: float
    cutmix_alpha: float

    def draw(self, seed: int, epoch: int, indices: IntArray, height: int, width: int) -> Mixing:
        """The parameters of the images `indices` [N] in `epoch`."""

        def drawn(stream: int, size: int = 1) -> np.ndarray:
            return uniform(seed, epoch, indices, stream) * size

        hole = patch = np.zeros((len(indices), 4), np.int64)
        share = np.ones(len(indices))
        if self.cutout_size:  # DeVries and Taylor 2017 (arXiv:1708.04552): the centre anywhere, the rest may stick out
            top = drawn(STREAM_CUTOUT_Y, height).astype(np.int64) - self.cutout_size // 2
            left = drawn(STREAM_CUTOUT_X, width).astype(np.int64) - self.cutout_size // 2
            hole = np.stack([top, left, top + self.cutout_size, left + self.cutout_size], axis=1)
        if self.mixup_alpha:  # Zhang et al. 2017 (arXiv:1710.09412)
            share = symmetric_beta(drawn(STREAM_MIXUP), self.mixup_alpha)
        if self.cutmix_alpha:  # Yun et al. 2019 (arXiv:1905.04899)
            half = 0.5 * np.sqrt(1 - symmetric_beta(drawn(STREAM_CUTMIX), self.cutmix_alpha))
            half_height, half_width = (half * height).astype(np.int64), (half * width).astype(np.int64)
            y, x = drawn(STREAM_CUTMIX_Y, height).astype(np.int64), drawn(STREAM_CUTMIX_X, width).astype(np.int64)
            patch = np.stack([y - half_height, x - half_width, y + half_height, x + half_width], axis=1)
            if self.mixup_alpha:
                cut = drawn(STREAM_WHICH) < 0.5
                share, patch = np.where(cut, 1, share), np.where(cut[:, None], patch, 0)
        hole, patch = (np.clip(boxes, 0, (height, width, height, width)) for boxes in (hole, patch))
        patched = (patch[:, 2] - patch[:, 0]) * (patch[:, 3] - patch[:, 1]) / (height * width)
        label_share = share * (1 - patched)
        return Mixing(hole, patch, share.astype(np.float32), label_share.astype(np.float32))


def symmetric_beta(drawn: np.ndarray, alpha: float) -> np.ndarray:
    """Quantiles `drawn`, in [0, 1), of the Beta(alpha, alpha) distribution, to about 1e-6.

    The density x^(alpha - 1) (1 - x)^(alpha - 1) is symmetric; on its lower half, t = x^alpha takes away the pole at 0.
    """
    t = np.linspace(0, 0.5**alpha, 8193)
    density = (1 - t ** (1 / alpha)) ** (alpha - 1)
    cumulated = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    lower = np.minimum(drawn, 1 - drawn)
    x = np.interp(2 * lower, cumulated / cumulated[-1], t) ** (1 / alpha)
    return np.where(drawn < 0.5, x, 1 - x)


class BatchMix:
    """Mixes the batches of one training loader; called with each batch and its place in the run."""

    def __init__(self, ranges: MixRanges, plan: EpochPlan, num_classes: int) -> None:
        if plan.batch_size % 2 and (ranges.mixup_alpha or ranges.cutmix_alpha):
            raise ConfigError(
                f"mixup_alpha and cutmix_alpha pair images within a rank's share of a batch, here {plan.batch_size}; "
                "use an even share"
            )
        self.ranges, self.plan, self.num_classes = ranges, plan, num_classes
        self._epoch, self._batches = -1, list[IntArray]()

    def __call__(self, images: Tensor, labels: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        """Normalised [N, C, H, W] and int64 [N] -> mixed images in the same memory format, and the share of each class
        in each target, float32 [N, classes]; with cutout alone the labels stay as they are."""
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self.plan.batches(epoch)
        height, width = images.shape[2:]
        mixing = self.ranges.draw(self.plan.seed, epoch, self._batches[batch], height, width)
        device = images.device
        if self.ranges.cutout_size:  # zero, the mean of the training images
            images = torch.where(inside(mixing.hole, height, width, device), images.new_zeros(()), images)
        if not (self.ranges.mixup_alpha or self.ranges.cutmix_alpha):
            return images, labels
        own_share = torch.from_numpy(mixing.share).to(device, non_blocking=True).view(-1, 1, 1, 1)
        partners = _neighbours(images)
        mixed = images.lerp(partners, 1 - own_share)
        if self.ranges.cutmix_alpha:
            mixed = torch.where(inside(mixing.patch, height, width, device), partners, mixed)
        label_share = torch.from_numpy(mixing.label_share).to(device, non_blocking=True).view(-1, 1)
        own = (labels.view(-1, 1) == torch.arange(self.num_classes, device=device)).float()
        return mixed, own.lerp(_neighbours(own), 1 - label_share)


def _neighbours(values: Tensor) -> Tensor:
    """[N, ...] with rows 2k and 2k + 1 exchanged, in the same memory format."""
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def inside(boxes: IntArray, height: int, width: int, device: torch.device) -> Tensor:
    """bool [N, 1, H, W]: which pixels lie in each image's box."""
    top, left, bottom, right = torch.from_numpy(boxes).to(device, non_blocking=True).view(-1, 4, 1, 1, 1).unbind(1)
    rows = torch.arange(height, device=device).view(1, 1, -1, 1)
    columns = torch.arange(width, device=device).view(1, 1, 1, -1)
    return (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)


def leave_unmixed(images: Tensor, labels: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
    """The null object for `BatchMix`: the batch as it is."""
    return images, labels


def build_mix(
    config: AugmentationConfig, plan: EpochPlan
) -> Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]:
    """What `cutout_size`, `mixup_alpha` and `cutmix_alpha` ask for."""
    ranges = MixRanges(config.cutout_size, config.mixup_alpha, config.cutmix_alpha)
    return leave_unmixed if ranges == MixRanges(0, 0, 0) else BatchMix(ranges, plan, config.num_classes)
