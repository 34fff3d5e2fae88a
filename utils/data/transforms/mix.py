"""Augmentations of a whole batch on its device, after any loader: cutout, mixup and cutmix.

They mix images and give soft targets; the loader contract does not include them. A sample's parameters and partner are
functions of (seed, epoch, sample index). Partners are neighbours in the epoch's order, images 2k and 2k + 1, and each
rank's part of a batch holds whole pairs.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from utils.data.config import AugmentationConfig
from utils.data.sampling import EpochPlan, IntArray, uniform
from utils.errors import ConfigError

# Streams of random numbers; utils.data.sampling uses the lower ones
(
    STREAM_MIXUP, STREAM_CUTMIX, STREAM_WHICH, STREAM_CUTMIX_Y, STREAM_CUTMIX_X, STREAM_CUTOUT_Y, STREAM_CUTOUT_X,
) = range(4, 11)  # fmt: skip


@dataclass(frozen=True)
class Mixing:
    """Parameters of N images: cutout comes first, then mixing with the partner."""

    hole: IntArray  # int64 [N, 4]: top, left, bottom, right (exclusive) of cutout; empty if top == bottom
    patch: IntArray  # int64 [N, 4]: the box that the partner fills (cutmix)
    weight: np.ndarray  # float32 [N]: the image's own weight in its pixels outside the patch (mixup)
    label_weight: np.ndarray  # float32 [N]: the own label's weight in the target


def sample_mixing(
    config: AugmentationConfig, seed: int, epoch: int, indices: IntArray, height: int, width: int
) -> Mixing:
    """Return the parameters of the images `indices` [N] in `epoch`."""

    def numbers(stream: int, size: int = 1) -> np.ndarray:
        return uniform(seed, epoch, indices, stream) * size

    hole = patch = np.zeros((len(indices), 4), np.int64)
    weight = np.ones(len(indices))
    if config.cutout_size:  # DeVries and Taylor 2017 (arXiv:1708.04552): the square may reach beyond the image
        top = numbers(STREAM_CUTOUT_Y, height).astype(np.int64) - config.cutout_size // 2
        left = numbers(STREAM_CUTOUT_X, width).astype(np.int64) - config.cutout_size // 2
        hole = np.stack([top, left, top + config.cutout_size, left + config.cutout_size], axis=1)
    if config.mixup_alpha:  # Zhang et al. 2017 (arXiv:1710.09412)
        weight = beta_quantile(numbers(STREAM_MIXUP), config.mixup_alpha)
    if config.cutmix_alpha:  # Yun et al. 2019 (arXiv:1905.04899)
        half = 0.5 * np.sqrt(1 - beta_quantile(numbers(STREAM_CUTMIX), config.cutmix_alpha))
        half_height, half_width = (half * height).astype(np.int64), (half * width).astype(np.int64)
        y, x = numbers(STREAM_CUTMIX_Y, height).astype(np.int64), numbers(STREAM_CUTMIX_X, width).astype(np.int64)
        patch = np.stack([y - half_height, x - half_width, y + half_height, x + half_width], axis=1)
        if config.mixup_alpha:
            cut = numbers(STREAM_WHICH) < 0.5
            weight, patch = np.where(cut, 1, weight), np.where(cut[:, None], patch, 0)
    hole, patch = (np.clip(boxes, 0, (height, width, height, width)) for boxes in (hole, patch))
    patched = (patch[:, 2] - patch[:, 0]) * (patch[:, 3] - patch[:, 1]) / (height * width)
    label_weight = weight * (1 - patched)
    return Mixing(hole, patch, weight.astype(np.float32), label_weight.astype(np.float32))


def beta_quantile(probability: np.ndarray, alpha: float) -> np.ndarray:
    """Return the quantiles at `probability`, in [0, 1), of the Beta(alpha, alpha) distribution.

    To about 1e-6 for probabilities from 1e-6 on. The density x^(alpha - 1) (1 - x)^(alpha - 1) is symmetric; on its
    lower half, t = x^alpha removes the pole at 0, which it has for alpha below 1. For larger alpha it is scaled to 1 at
    x = 1/2, so that no power overflows.
    """
    power = min(alpha, 1.0)
    t = np.linspace(0, 0.5**power, 8193)
    x = t ** (1 / power)
    density = (1 - x) ** (alpha - 1) if alpha < 1 else (4 * x * (1 - x)) ** (alpha - 1)
    cumulated = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    lower = np.minimum(probability, 1 - probability)
    x = np.interp(2 * lower, cumulated / cumulated[-1], t) ** (1 / power)
    return np.where(probability < 0.5, x, 1 - x)


class BatchMix:
    """Mixes the batches of one training loader; called with each batch, its epoch and its number."""

    def __init__(self, config: AugmentationConfig, plan: EpochPlan) -> None:
        self.config, self.plan = config, plan
        self.pairs_images = bool(config.mixup_alpha or config.cutmix_alpha)
        if plan.batch_size % 2 and self.pairs_images:
            why = f"mixup_alpha and cutmix_alpha pair images of a rank's batch, which has {plan.batch_size} images"
            raise ConfigError(f"{why}; use an even number")
        self._epoch, self._batches = -1, list[IntArray]()

    def __call__(self, images: Tensor, labels: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        """Normalised [N, C, H, W] and int64 [N] -> mixed images in the same memory format, and targets, class weights
        as float32 [N, classes]; with cutout only, labels are unchanged. Without any of the three, the batch itself."""
        if not (self.config.cutout_size or self.pairs_images):
            return images, labels
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self.plan.batches(epoch)
        height, width = images.shape[2:]
        mixing = sample_mixing(self.config, self.plan.seed, epoch, self._batches[batch], height, width)
        device = images.device
        if self.config.cutout_size:  # zero is the mean of the training images
            images = torch.where(box_mask(mixing.hole, height, width, device), images.new_zeros(()), images)
        if not self.pairs_images:
            return images, labels
        weight = torch.from_numpy(mixing.weight).to(device, non_blocking=True).view(-1, 1, 1, 1)
        partners = _swap_pairs(images)
        mixed = images.lerp(partners, 1 - weight)
        if self.config.cutmix_alpha:
            mixed = torch.where(box_mask(mixing.patch, height, width, device), partners, mixed)
        label_weight = torch.from_numpy(mixing.label_weight).to(device, non_blocking=True).view(-1, 1)
        own = (labels.view(-1, 1) == torch.arange(self.config.num_classes, device=device)).float()
        return mixed, own.lerp(_swap_pairs(own), 1 - label_weight)


def _swap_pairs(values: Tensor) -> Tensor:
    """Exchange rows 2k and 2k + 1 of [N, ...], in the same memory format."""
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def box_mask(boxes: IntArray, height: int, width: int, device: torch.device) -> Tensor:
    """Return which pixels lie in each image's box, bool [N, 1, H, W]."""
    top, left, bottom, right = torch.from_numpy(boxes).to(device, non_blocking=True).view(-1, 4, 1, 1, 1).unbind(1)
    rows = torch.arange(height, device=device).view(1, 1, -1, 1)
    columns = torch.arange(width, device=device).view(1, 1, 1, -1)
    return (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
