"""The loader `torchvision`: image by image, in worker processes."""

import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from utils.data.config import DataConfig
from utils.data.datasets.dataset import Split
from utils.data.loader import Loader
from utils.data.sampling import EpochPlan, IntArray
from utils.data.transforms.augment import Normalise, augment_each
from utils.data.workers import PREFETCHED, SHARED_MEMORY, SHARED_MEMORY_REMEDY, find_lost_worker, obey_only_the_trainer
from utils.errors import ConfigError, ExpectedError

REST_SECONDS = 0.1  # before workers are started
Batch = tuple[Tensor, Tensor, dict[str, str]]  # images, labels, files that cannot be read


class AugmentedImages(Dataset[Batch | ExpectedError]):
    """What a DataLoader worker runs: the batch with these indices in this epoch, cut, flipped and rotated, with its
    labels and the files that could not be read. An `ExpectedError` is returned: raised in a worker, it would arrive as
    the text of a traceback.

    The images stay uint8 until they are on the device: a quarter of the bytes to hand over and copy.
    """

    def __init__(self, split: Split, plan: EpochPlan) -> None:
        self.split, self.plan = split, plan

    def __getitem__(self, epoch_and_indices: tuple[int, IntArray]) -> Batch | ExpectedError:
        try:
            return self._read(*epoch_and_indices)
        except ExpectedError as error:
            return error

    def _read(self, epoch: int, indices: IntArray) -> Batch:
        augmentation = self.plan.draw(epoch, indices)
        crops = None if augmentation is None else augmentation.crop
        read = self.split.read(indices, crops, replace=self.plan.training)  # type: ignore[arg-type]
        images = read.images
        if augmentation is not None and self.plan.ranges is not None:
            images = augment_each(images, augmentation, self.plan.ranges.crop_padding)
        labels = torch.from_numpy(self.split.labels[read.indices])
        return torch.from_numpy(np.ascontiguousarray(images)), labels, read.unreadable


class BatchSampler(Sampler[tuple[int, IntArray]]):
    """A DataLoader's sampler: (epoch, indices) of one batch after the other, so that workers need no shared state."""

    def __init__(self, plan: EpochPlan) -> None:
        self.plan, self.epoch, self.first_batch = plan, 0, 0

    def __len__(self) -> int:
        return len(self.plan) - self.first_batch

    def __iter__(self) -> Iterator[tuple[int, IntArray]]:
        return iter([(self.epoch, indices) for indices in self.plan.batches(self.epoch, self.first_batch)])


class TorchvisionLoader(Loader):
    """Image by image with torchvision's transforms, in worker processes; pinned and copied without blocking on CUDA."""

    def __init__(self, split: Split, plan: EpochPlan, normalise: Normalise, num_workers: int) -> None:
        super().__init__(plan, normalise)
        self.has_workers, self.sampler = False, BatchSampler(plan)
        self.loader = DataLoader(
            AugmentedImages(split, plan),
            batch_size=None,
            sampler=self.sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            prefetch_factor=PREFETCHED if num_workers else None,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=obey_only_the_trainer if sys.platform == "linux" else None,
            generator=torch.Generator(),  # its own: each epoch begun would draw a number from the run's generator
            # fork: workers share the images with this process, where other ways would copy them to each
            multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.loader.num_workers and not self.has_workers:
            # Up to 3.11.9 Python's fork hangs in the new process where another thread, such as one of a collective that
            # has just ended, is about to enter Python (python/cpython#112275): let them come to rest.
            time.sleep(REST_SECONDS)
            self.has_workers = True
        self.sampler.epoch, self.sampler.first_batch = self.epoch, self.first_batch
        batches = iter(self.loader)
        for images, labels, unreadable in iter(lambda: self._next(batches), None):
            self.count_unreadable(unreadable, len(labels))
            on_device = images.to(self.device, non_blocking=True)
            yield self.normalise(on_device), labels.to(self.device, non_blocking=True)

    @staticmethod
    def _next(batches: Iterator[Batch | ExpectedError]) -> Batch | None:
        try:
            batch = next(batches, None)
            if isinstance(batch, ExpectedError):
                raise batch
            return batch
        except (RuntimeError, EOFError, OSError) as error:
            try:
                lost = find_lost_worker(batches, str(error))
            except RuntimeError as told:  # by PyTorch's handler, meanwhile
                lost = str(told)
            text = lost or str(error)
            # what a worker dies of when shared memory is full: SIGBUS, or ENOSPC from the system call
            if "bus error" in text.lower() or "shared memory" in text or "No space left" in text:
                message = f"a data worker ran out of shared memory ({SHARED_MEMORY}).\n{SHARED_MEMORY_REMEDY}"
                raise ConfigError(message) from None
            if lost:
                raise RuntimeError(lost) from None
            raise


def build(config: DataConfig, split: Split, plan: EpochPlan, normalise: Normalise, num_workers: int) -> Loader:
    """The loader for one split."""
    return TorchvisionLoader(split, plan, normalise, num_workers)
