"""The tutorial's augmentation: image by image with torchvision, or a whole batch in one gather, with the same bits.

After any loader, cutout, mixup and cutmix change whole batches on their device, also as functions of (seed, epoch,
sample index). Partners are neighbours in the epoch's order, images 2k and 2k + 1, on the same rank.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from utils.data.config import AugmentationConfig
from utils.data.sampling import Augmentation, IntArray, Sampler, uniform
from utils.errors import ConfigError

FIXED_POINT = 65536  # PIL rotates in 16.16 fixed-point arithmetic
# Streams of random numbers; utils.data.sampling uses the lower ones
(
    STREAM_MIXUP, STREAM_CUTMIX, STREAM_WHICH, STREAM_CUTMIX_Y, STREAM_CUTMIX_X, STREAM_CUTOUT_Y, STREAM_CUTOUT_X,
) = range(4, 11)  # fmt: skip


class Normalise:
    """uint8 [N, 3, H, W] -> float32 (x / 255 - mean) / std, in `memory_format`."""

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, memory_format: torch.memory_format
    ) -> None:
        self.device, self.memory_format = device, memory_format
        self.set_statistics(mean, std)

    def set_statistics(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean, self.std = mean, std
        # one product and one sum: half the passes over the batch
        exact_mean, exact_std = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (mean, std))
        self.scale = (1 / (255 * exact_std)).float().to(self.device)
        self.shift = (-exact_mean / exact_std).float().to(self.device)

    def __call__(self, images: Tensor) -> Tensor:
        # Arithmetic before the change of format: whole planes are contiguous, but channels_last has runs of three.
        normalised = images.float().mul_(self.scale).add_(self.shift)
        return normalised.contiguous(memory_format=self.memory_format)


def augment_each(images: np.ndarray, augmentation: Augmentation) -> np.ndarray:
    """Crop, flip and rotate each image with torchvision on PIL images; uint8 [N, 3, H, W] -> uint8 [N, 3, H, W]."""
    from PIL import Image
    from torchvision.transforms import functional

    height, width = images.shape[2:]
    result = np.empty_like(images)
    for row, pixels in enumerate(images):
        image = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
        top, left = int(augmentation.shift_y[row]), int(augmentation.shift_x[row])
        if top or left:
            image = functional.crop(image, top, left, height, width)  # black outside
        if augmentation.flip[row]:
            image = functional.hflip(image)
        if augmentation.angle[row]:
            image = functional.rotate(image, float(augmentation.angle[row]))
        result[row] = np.asarray(image).transpose(2, 0, 1)
    return result


def pixel_maps(augmentation: Augmentation, height: int, width: int) -> np.ndarray:
    """Return `BatchAugmenter`'s parameters of each image, int32 [N, 9].
    They combine rotation, flip and crop: output pixel (row, column) shows the source pixel whose column is
    (a * column + b * row + c) >> 16, counted from the first visible column; black if that is negative or above `last`.
    Rows likewise. The nine values are (a, b, c, last) for the column, the same for the row, and one plus the index of
    the first visible pixel in the flattened image.
    """
    # as PIL.Image.rotate and affine_fixed in its Geometry.c: nearest neighbour about the image's centre
    angle = -np.radians(np.mod(augmentation.angle, 360))
    cos, sin = np.round(np.cos(angle), 15), np.round(np.sin(angle), 15)
    centre_x, centre_y = width / 2, height / 2
    column = [cos, sin, centre_x - cos * centre_x - sin * centre_y + 0.5 * (cos + sin)]
    row = [-sin, cos, centre_y + sin * centre_x - cos * centre_y + 0.5 * (cos - sin)]
    column, row = ([np.floor(part * FIXED_POINT + 0.5).astype(np.int64) for part in parts] for parts in (column, row))
    # width - 1 - floor(x) = floor(width - x) unless x is whole: one unit less in fixed point
    mirrored = [-column[0], -column[1], width * FIXED_POINT - 1 - column[2]]
    column = [np.where(augmentation.flip, there, here) for there, here in zip(mirrored, column, strict=True)]
    values, first = [], np.int64(1)
    for parts, shift, size, stride in (
        (column, augmentation.shift_x, width, 1),
        (row, augmentation.shift_y, height, width),
    ):
        low, high = np.maximum(0, -shift), np.minimum(size, size - shift)
        values += [parts[0], parts[1], parts[2] - low * FIXED_POINT, high - low - 1]
        first = first + (low + shift) * stride
    return np.stack([*values, first], axis=1).astype(np.int32)


class BatchAugmenter:
    """Crops, flips and rotates a whole batch on its device, as one gather of pixels. Comparisons are slow on a CPU, and
    new memory costs as much as the arithmetic, so it uses int32, signs and permanent buffers."""

    def __init__(self, height: int, width: int, device: torch.device) -> None:
        self.width = width
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        self.rows = rows.reshape(1, -1).int().to(device)  # [1, H * W]
        self.columns = columns.reshape(1, -1).int().to(device)
        self.buffers = torch.empty(3, 0, height * width, dtype=torch.int32, device=device)

    def __call__(self, images: Tensor, maps: Tensor) -> Tensor:
        """uint8 [N, C, H, W] and `pixel_maps` [N, 9] on the same device -> uint8 [N, C, H, W]."""
        if len(images) != self.buffers.shape[1]:
            self.buffers = self.buffers.new_empty(3, len(images), self.buffers.shape[2])
        x, y, scratch = self.buffers.unbind()  # each [N, H * W]
        column, row, first = maps.t().unsqueeze(2).split([4, 4, 1])  # of [N, 1] values
        for position, (a, b, c, _) in ((x, column), (y, row)):
            torch.mul(self.columns, a, out=position)
            position.add_(torch.mul(self.rows, b, out=scratch)).add_(c).bitwise_right_shift_(16)
        # negative if the source lies outside on any of the four sides; the shift turns the sign into a mask
        outside = torch.sub(column[3], x, out=scratch).bitwise_or_(x).bitwise_or_(y)
        source = x.add_(y, alpha=self.width).add_(first[0])
        outside |= torch.sub(row[3], y, out=y)
        outside >>= 31
        source &= outside.bitwise_not_()
        # pixel 0 of the padded image is black
        padded = nn.functional.pad(images.flatten(2), (1, 0))
        return padded.gather(2, source.long().unsqueeze(1).expand(-1, images.shape[1], -1)).view(images.shape)


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
    """Return the quantiles at `probability`, in [0, 1), of Beta(alpha, alpha), to about 1e-6 from probability 1e-6 on.

    The density x^(alpha - 1) (1 - x)^(alpha - 1) is symmetric; on its lower half, t = x^alpha removes the pole at 0 for
    alpha below 1. For larger alpha it is scaled to 1 at x = 1/2, so that no power overflows."""
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

    def __init__(self, config: AugmentationConfig, sampler: Sampler) -> None:
        self.config, self.sampler = config, sampler
        self.pairs_images = bool(config.mixup_alpha or config.cutmix_alpha)
        if sampler.batch_size % 2 and self.pairs_images:
            why = f"mixup_alpha and cutmix_alpha pair images of a rank's batch, which has {sampler.batch_size} images"
            raise ConfigError(f"{why}; use an even number")
        self._epoch, self._batches = -1, list[IntArray]()

    def __call__(self, images: Tensor, labels: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        """Normalised [N, C, H, W] and int64 [N] -> mixed images in the same memory format, and targets, class weights
        as float32 [N, classes]; with cutout only, labels are unchanged. Without any of the three, the batch itself."""
        if not (self.config.cutout_size or self.pairs_images):
            return images, labels
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self.sampler.batches(epoch)
        height, width = images.shape[2:]
        mixing = sample_mixing(self.config, self.sampler.seed, epoch, self._batches[batch], height, width)
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
