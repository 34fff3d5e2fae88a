"""The loaders behind the contract of `utils.data`: torchvision in worker processes, and batches on the device."""

import os
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from utils.data.augment import BatchAugmenter, Normalise, augment_each
from utils.data.datasets import ImageArrays
from utils.data.sampling import EpochPlan, IntArray


class AugmentedImages(Dataset[tuple[Tensor, Tensor]]):
    """What a DataLoader worker runs: the batch with these indices in this epoch, cut, flipped and rotated.

    The images stay uint8 until they are on the device: a quarter of the bytes to hand over and copy.
    """

    def __init__(self, arrays: ImageArrays, plan: EpochPlan) -> None:
        self.arrays, self.plan = arrays, plan

    def __getitem__(self, epoch_and_indices: tuple[int, IntArray]) -> tuple[Tensor, Tensor]:
        epoch, indices = epoch_and_indices
        images = self.arrays.images[indices]
        augmentation = self.plan.draw(epoch, indices)
        if augmentation is not None and self.plan.ranges is not None:
            images = augment_each(images, augmentation, self.plan.ranges.crop_padding)
        return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(self.arrays.labels[indices])


class BatchSampler(Sampler[tuple[int, IntArray]]):
    """A DataLoader's sampler: (epoch, indices) of one batch after the other, so that workers need no shared state."""

    def __init__(self, plan: EpochPlan) -> None:
        self.plan, self.epoch, self.first_batch = plan, 0, 0

    def __len__(self) -> int:
        return len(self.plan) - self.first_batch

    def __iter__(self) -> Iterator[tuple[int, IntArray]]:
        return iter([(self.epoch, indices) for indices in self.plan.batches(self.epoch, self.first_batch)])


class TorchvisionLoader:
    """Image by image with torchvision's transforms, in worker processes; pinned and copied without blocking on CUDA."""

    def __init__(
        self, arrays: ImageArrays, plan: EpochPlan, normalise: Normalise, device: torch.device, num_workers: int
    ) -> None:
        self.plan, self.normalise, self.device = plan, normalise, device
        self.sampler = BatchSampler(plan)
        self.loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
            AugmentedImages(arrays, plan),
            batch_size=None,
            sampler=self.sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # its own: each epoch begun would draw a number from the run's generator
        )

    def __len__(self) -> int:
        return len(self.plan)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        self.sampler.epoch, self.sampler.first_batch = epoch, first_batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self.loader:
            images_on_device = images.to(self.device, non_blocking=True)
            yield self.normalise(images_on_device), labels.to(self.device, non_blocking=True)


class DeviceLoader:
    """The whole uint8 dataset on the device; each batch is gathered, augmented and normalised there at once."""

    def __init__(self, arrays: ImageArrays, plan: EpochPlan, normalise: Normalise, device: torch.device) -> None:
        self.plan, self.normalise, self.device = plan, normalise, device
        self.images = torch.from_numpy(np.ascontiguousarray(arrays.images)).to(device)
        self.labels = torch.from_numpy(arrays.labels).to(device)
        self.augment = None
        if plan.ranges is not None:
            height, width = arrays.images.shape[2:]
            self.augment = BatchAugmenter(height, width, plan.ranges.crop_padding, device)
        self.epoch, self.first_batch = 0, 0

    def __len__(self) -> int:
        return len(self.plan)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        self.epoch, self.first_batch = epoch, first_batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in self.plan.batches(self.epoch, self.first_batch):
            on_device = self._to_device(indices)
            images, labels = self.images[on_device], self.labels[on_device]
            augmentation = self.plan.draw(self.epoch, indices)
            if self.augment is not None and augmentation is not None:
                angle = self._to_device(augmentation.angle.astype(np.float32)) if augmentation.angle.any() else None
                images = self.augment(
                    images,
                    self._to_device(augmentation.shift_y),
                    self._to_device(augmentation.shift_x),
                    self._to_device(augmentation.flip),
                    angle,
                )
            yield self.normalise(images), labels

    def _to_device(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def usable_cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
