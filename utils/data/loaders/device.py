"""The loaders `device`, with the whole dataset on the device, and `synthetic`, which repeats one random batch."""

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from utils.data.config import DataConfig
from utils.data.datasets.dataset import ImageArrays, Split
from utils.data.datasets.image_files import describe_unreadable
from utils.data.loader import Loader
from utils.data.sampling import EpochPlan
from utils.data.transforms.augment import BatchAugmenter, Normalise, pixel_maps
from utils.data.workers import usable_cores
from utils.errors import DataError

BATCHES_AT_ONCE = 64  # batches whose augmentation is sampled, and copied to the device, at once


class DeviceLoader(Loader):
    """Holds the uint8 dataset on the device; gathers, augments and normalises each batch there.

    On a CPU it uses the images in place: for CIFAR-100, a memory map that all processes of a machine share.
    """

    def __init__(
        self, config: DataConfig, arrays: Split, plan: EpochPlan, normalise: Normalise, num_workers: int = 0
    ) -> None:
        assert isinstance(arrays, ImageArrays)
        super().__init__(plan, normalise)
        self.unreadable |= arrays.unreadable
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the memory map is read-only; no code writes to it
            self.images = torch.from_numpy(arrays.images).to(self.device)
        self.labels = torch.from_numpy(arrays.labels).to(self.device)
        self.augment = BatchAugmenter(*arrays.image_shape[1:], self.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self.plan.batches(self.epoch, self.first_batch)
        for start in range(0, len(batches), BATCHES_AT_ONCE):
            batches_now = batches[start : start + BATCHES_AT_ONCE]
            sizes, indices = [len(batch) for batch in batches_now], np.concatenate(batches_now)
            augmentation = self.plan.sample_augmentation(self.epoch, indices)
            maps = iter(())
            if augmentation is not None:
                maps = iter(self._copy(pixel_maps(augmentation, *self.images.shape[2:])).split(sizes))
            for chosen in self._copy(indices).split(sizes):
                images = self.images.index_select(0, chosen)
                if augmentation is not None:
                    images = self.augment(images, next(maps))
                yield self.normalise(images), self.labels.index_select(0, chosen)

    def _copy(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


class SyntheticLoader(Loader):
    """Repeats one random batch on the device, to measure the cost of computing without input."""

    def __init__(
        self, config: DataConfig, split: Split, plan: EpochPlan, normalise: Normalise, num_workers: int
    ) -> None:
        super().__init__(plan, normalise)
        generator = torch.Generator().manual_seed(plan.seed)
        shape = (plan.batch_size, *split.image_shape)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.images = normalise(images.to(self.device))
        self.labels = torch.randint(0, config.num_classes, shape[:1], generator=generator).to(self.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in self.plan.batches(0, self.first_batch):
            yield self.images[: len(indices)], self.labels[: len(indices)]


def decode_all(split: Split, *, replace: bool) -> ImageArrays:
    """Return the split as arrays in memory, for `DeviceLoader`. An unreadable file is replaced by the next readable one
    with `replace`, else skipped."""
    if isinstance(split, ImageArrays):
        return split
    parts = np.array_split(np.arange(len(split.labels)), max(1, len(split.labels) // 256))
    with ThreadPoolExecutor(usable_cores()) as pool:  # decoding releases the GIL
        batches = list(pool.map(lambda part: split.read(part, None, replace=replace), parts))
    indices = np.concatenate([batch.indices for batch in batches])
    unreadable = {path: reason for batch in batches for path, reason in batch.unreadable.items()}
    if not len(indices) or (replace and len(indices) < len(split.labels)):
        found = f"{len(indices) or 'not one'} of {len(split.labels)} images can be read or replaced"
        raise DataError(f"{found}: {describe_unreadable(unreadable)}; check the disk")
    return ImageArrays(np.concatenate([batch.samples for batch in batches]), split.labels[indices], unreadable)
