"""Which image comes when, and how it is augmented: pure functions of (seed, epoch, sample index).

Rank, world size, worker and backend do not enter, so the same epoch is drawn anywhere, and resuming in mid-epoch
starts at the right image without running through those before it.
"""

from dataclasses import dataclass

import numpy as np

IntArray = np.ndarray  # int64 [N]


@dataclass(frozen=True)
class Augmentation:
    """Parameters of N images, applied in this order: crop, flip, rotate."""

    shift_y: np.ndarray  # int64 [N], rows down from the padded image's top, 0 .. 2 * padding
    shift_x: np.ndarray  # int64 [N]
    flip: np.ndarray  # bool [N]
    angle: np.ndarray  # float64 [N], degrees counter-clockwise


@dataclass(frozen=True)
class AugmentationRanges:
    """What may be drawn: the tutorial's RandomCrop, RandomHorizontalFlip and RandomRotation."""

    crop_padding: int
    horizontal_flip: bool
    rotation_angle: float

    def draw(self, seed: int, epoch: int, indices: IntArray) -> Augmentation:
        """The augmentation of the images `indices` [N] in `epoch`."""
        uniform = [_uniform(seed, epoch, indices, stream) for stream in range(4)]
        num_shifts = 2 * self.crop_padding + 1
        return Augmentation(
            shift_y=(uniform[0] * num_shifts).astype(np.int64),
            shift_x=(uniform[1] * num_shifts).astype(np.int64),
            flip=(uniform[2] < 0.5) & self.horizontal_flip,
            angle=(2 * uniform[3] - 1) * self.rotation_angle,
        )


def epoch_order(seed: int, epoch: int, num_samples: int) -> IntArray:
    """A shuffle of range(num_samples), the same for everyone who asks for this seed and epoch."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_samples)


@dataclass(frozen=True)
class EpochPlan:
    """Which images this rank sees in each batch of an epoch, and how they are augmented."""

    num_samples: int
    batch_size: int  # of this rank
    rank: int
    world_size: int
    training: bool
    seed: int = 0
    ranges: AugmentationRanges | None = None
    limit: int | None = None  # at most this many batches

    def __len__(self) -> int:
        if self.training:
            num_batches = self.num_samples // (self.batch_size * self.world_size)
        else:
            num_batches = -(-len(range(self.rank, self.num_samples, self.world_size)) // self.batch_size)
        return num_batches if self.limit is None else min(num_batches, self.limit)

    def batches(self, epoch: int, first_batch: int = 0) -> list[IntArray]:
        """The image indices of this rank's batches from `first_batch` on.

        Training: global batch b is a slice of the epoch's shuffle and this rank's share a contiguous slice of that, so
        that one rank which accumulates over micro-batches sees the very micro-batches that several ranks would see.
        Validation: every world_size-th image, so that each is on exactly one rank; the last batch may be short.
        """
        if self.training:
            order = epoch_order(self.seed, epoch, self.num_samples)
            starts = [
                (batch * self.world_size + self.rank) * self.batch_size for batch in range(first_batch, len(self))
            ]
        else:
            order = np.arange(self.rank, self.num_samples, self.world_size)
            starts = [batch * self.batch_size for batch in range(first_batch, len(self))]
        return [order[start : start + self.batch_size] for start in starts]

    def draw(self, epoch: int, indices: IntArray) -> Augmentation | None:
        """The augmentation of the images `indices` [N] in `epoch`; None where there is nothing to do."""
        return None if self.ranges is None else self.ranges.draw(self.seed, epoch, indices)


def _uniform(seed: int, epoch: int, indices: IntArray, stream: int) -> np.ndarray:
    """float64 [N] in [0, 1): a hash of (seed, epoch, stream, index)."""
    key = np.zeros(1, np.uint64)
    for part in (seed, epoch, stream):
        key = _mix(key + np.uint64(part))
    return (_mix(_mix(indices.astype(np.uint64)) ^ key) >> np.uint64(11)) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    """One output of SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195) from each state."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
