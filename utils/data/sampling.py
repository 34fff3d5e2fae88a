"""Which image comes when, and how it is augmented: pure functions of (seed, epoch, sample index).

They do not depend on rank, world size, worker or backend: an epoch is the same anywhere, also resumed in the middle.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from utils.data.config import AugmentationConfig

IntArray = np.ndarray  # int64 [N]

# Random resized crop, as in Szegedy et al. 2014 (arXiv:1409.4842) and torchvision.RandomResizedCrop
CROP_AREA = (0.08, 1.0)  # fraction of the image
CROP_RATIO = (3 / 4, 4 / 3)  # width to height
CROP_ATTEMPTS = 10

# Every purpose has its own stream of random numbers, so that switching one on leaves the others unchanged.
STREAM_SHIFT_Y, STREAM_SHIFT_X, STREAM_FLIP, STREAM_ANGLE = range(4)
STREAM_CROP = 16  # and the next 4 * CROP_ATTEMPTS - 1


@dataclass(frozen=True)
class Augmentation:
    """Parameters of N images, applied in this order: resized crop, padded crop, flip, rotate."""

    shift_y: np.ndarray  # int64 [N], rows from the image's top down to the crop's, -padding .. padding
    shift_x: np.ndarray  # int64 [N]
    flip: np.ndarray  # bool [N]
    angle: np.ndarray  # float64 [N], degrees counter-clockwise
    crop: np.ndarray | None = None  # float64 [N, CROP_ATTEMPTS, 4] in [0, 1), for `resized_crop_box`


def sample_augmentation(config: AugmentationConfig, seed: int, epoch: int, indices: IntArray) -> Augmentation:
    """Return the augmentation of the images `indices` [N] in `epoch`: the tutorial's RandomCrop, RandomHorizontalFlip
    and RandomRotation, a resized crop, and the alternating flip: an epoch mirrors exactly the images that the previous
    one did not (Jordan 2024, arXiv:2404.00498)."""
    padding = config.rnd_crop_padding
    if config.rnd_horizontal_flip == "alternating":
        flip = (uniform(seed, 0, indices, STREAM_FLIP) < 0.5) ^ bool(epoch % 2)
    else:
        flip = (uniform(seed, epoch, indices, STREAM_FLIP) < 0.5) & config.rnd_horizontal_flip
    crop = None
    if config.rnd_resized_crop:
        streams = range(STREAM_CROP, STREAM_CROP + 4 * CROP_ATTEMPTS)
        numbers = np.stack([uniform(seed, epoch, indices, stream) for stream in streams], axis=1)
        crop = numbers.reshape(-1, CROP_ATTEMPTS, 4)
    return Augmentation(
        shift_y=(uniform(seed, epoch, indices, STREAM_SHIFT_Y) * (2 * padding + 1)).astype(np.int64) - padding,
        shift_x=(uniform(seed, epoch, indices, STREAM_SHIFT_X) * (2 * padding + 1)).astype(np.int64) - padding,
        angle=(2 * uniform(seed, epoch, indices, STREAM_ANGLE) - 1) * config.rnd_rotation_angle, flip=flip, crop=crop,
    )  # fmt: skip


def resized_crop_box(attempts: np.ndarray, height: int, width: int) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of a random crop in an image of this size. `attempts`: the image's row of
    `Augmentation.crop`. The first attempt whose area and aspect ratio fit, else the largest central box."""
    low, high = math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])
    for area, ratio, top, left in attempts.tolist():
        pixels = height * width * (CROP_AREA[0] + area * (CROP_AREA[1] - CROP_AREA[0]))
        aspect = math.exp(low + ratio * (high - low))
        box_width, box_height = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            rows, columns = height - box_height + 1, width - box_width + 1
            return int(top * rows), int(left * columns), box_height, box_width
    box_width = min(width, round(height * CROP_RATIO[1]))
    box_height = min(height, round(width / CROP_RATIO[0]))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def epoch_order(seed: int, epoch: int, num_samples: int) -> IntArray:
    """Return a shuffle of range(num_samples), a pure function of seed and epoch."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_samples)


@dataclass(frozen=True)
class Sampler:
    """The images of each batch of an epoch on this rank, and their augmentation."""

    num_samples: int
    batch_size: int  # of this rank
    rank: int
    world_size: int
    training: bool
    seed: int = 0
    augmentation: AugmentationConfig | None = None
    limit: int | None = None  # maximum number of training batches
    chosen: IntArray | None = None  # indices of the validation images [num_samples]; None: 0, 1, 2, ...

    def __len__(self) -> int:
        if self.training:
            num_batches = self.num_samples // (self.batch_size * self.world_size)
            return num_batches if self.limit is None else min(num_batches, self.limit)
        return math.ceil(len(range(self.rank, self.num_samples, self.world_size)) / self.batch_size)

    @property
    def shared_batches(self) -> int:
        """Number of batches that every rank has; in validation some ranks have one more, the last rank never."""
        return len(replace(self, rank=self.world_size - 1))

    def batches(self, epoch: int, first_batch: int = 0) -> list[IntArray]:
        """Return the image indices of this rank's batches from `first_batch` on.
        Training: a global batch is a slice of the epoch's shuffle, and this rank's part is a contiguous slice of it. So
        one rank that accumulates over micro-batches sees the same micro-batches as several ranks.
        Validation: every world_size-th image; each is on exactly one rank, and the last batch may be short.
        """
        size = self.batch_size
        if self.training:
            order = epoch_order(self.seed, epoch, self.num_samples)
            first, step = self.rank * size, self.world_size * size
        else:
            images = np.arange(self.num_samples) if self.chosen is None else self.chosen
            order = images[self.rank :: self.world_size]
            first, step = 0, size
        starts = [first + batch * step for batch in range(first_batch, len(self))]
        return [order[start : start + size] for start in starts]

    def sample_augmentation(self, epoch: int, indices: IntArray) -> Augmentation | None:
        """Return the augmentation of the images `indices` [N] in `epoch`; None if there is none."""
        return None if self.augmentation is None else sample_augmentation(self.augmentation, self.seed, epoch, indices)


def uniform(seed: int, epoch: int, indices: IntArray, stream: int) -> np.ndarray:
    """Return float64 [N] in [0, 1), a hash of (seed, epoch, stream, index)."""
    key = np.zeros(1, np.uint64)
    for part in (seed, epoch, stream):
        key = _splitmix64(key + np.uint64(part))
    return (_splitmix64(_splitmix64(indices.astype(np.uint64)) ^ key) >> np.uint64(11)) * 2.0**-53


def _splitmix64(state: np.ndarray) -> np.ndarray:
    """Return one output of SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195) from each state."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
