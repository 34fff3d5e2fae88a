"""The loader `torchvision`: worker processes that augment image by image."""

import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from utils.data.config import DataConfig
from utils.data.datasets.dataset import Split
from utils.data.loader import Loader
from utils.data.sampling import EpochPlan, IntArray
from utils.data.transforms.augment import Normalise, augment_each
from utils.data.workers import PREFETCHED, check_sockets, init_worker
from utils.errors import ExpectedError

DELAY_SECONDS = 0.1  # before workers are started
EXIT_SECONDS = 1.0  # for the signal of a worker's death, after its connection has broken
Batch = tuple[Tensor, Tensor, dict[str, str]]  # images, labels, unreadable files


class AugmentedImages(Dataset[Batch | ExpectedError]):
    """The dataset of a DataLoader worker: returns the augmented batch of (epoch, indices), its labels and unreadable
    files. An `ExpectedError` is returned, since a worker's exception would arrive as the text of a traceback.

    The images stay uint8 until they are on the device: a quarter of the bytes to copy.
    """

    def __init__(self, split: Split, plan: EpochPlan) -> None:
        self.split, self.plan = split, plan

    def __getitem__(self, epoch_and_indices: tuple[int, IntArray]) -> Batch | ExpectedError:
        epoch, indices = epoch_and_indices
        augmentation = self.plan.sample_augmentation(epoch, indices)
        crops = None if augmentation is None else augmentation.crop
        try:
            read = self.split.read(indices, crops, replace=self.plan.training)
        except ExpectedError as error:
            return error
        images = read.samples if augmentation is None else augment_each(read.samples, augmentation)
        labels = torch.from_numpy(self.split.labels[read.indices])
        return torch.from_numpy(np.ascontiguousarray(images)), labels, read.unreadable


class TorchvisionLoader(Loader):
    """Augments image by image with torchvision in worker processes; on CUDA, copies pinned batches without blocking."""

    def __init__(
        self, config: DataConfig, split: Split, plan: EpochPlan, normalise: Normalise, num_workers: int
    ) -> None:
        super().__init__(plan, normalise)
        check_sockets(num_workers)
        self.has_workers = False
        self.batches: list[tuple[int, IntArray]] = []  # (epoch, indices) of each, so that workers need no shared state
        self.loader = DataLoader(
            AugmentedImages(split, plan),
            batch_size=None,
            sampler=self.batches,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            prefetch_factor=PREFETCHED if num_workers else None,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=init_worker,
            generator=torch.Generator(),  # its own: DataLoader takes a number from it in each epoch
            # fork: workers share the images with this process, without copies
            multiprocessing_context="fork" if num_workers else None,
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.loader.num_workers and not self.has_workers:
            # Up to Python 3.11.9, a forked process hangs if another thread is entering Python (python/cpython#112275),
            # such as a thread of a collective that has just ended: wait until such threads are idle.
            time.sleep(DELAY_SECONDS)
            self.has_workers = True
        self.batches[:] = [(self.epoch, indices) for indices in self.plan.batches(self.epoch, self.first_batch)]
        batches = iter(self.loader)
        while True:
            try:
                batch = next(batches, None)
            except (EOFError, OSError) as error:  # the connection to a worker that has just died
                time.sleep(EXIT_SECONDS)  # PyTorch's SIGCHLD handler raises its RuntimeError here, not in a later line
                if not any(worker.exitcode for worker in getattr(batches, "_workers", ())):
                    raise
                raise RuntimeError(f"DataLoader worker is lost: {error!r}") from None
            if batch is None:
                return
            if isinstance(batch, ExpectedError):
                raise batch
            images, labels, unreadable = batch
            self.record_unreadable(unreadable, len(labels))
            on_device = images.to(self.device, non_blocking=True)
            yield self.normalise(on_device), labels.to(self.device, non_blocking=True)
