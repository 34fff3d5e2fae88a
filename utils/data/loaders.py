"""The loaders behind the contract of `utils.data`: torchvision in worker processes, batches on the device, and one
batch again and again."""

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from utils.data.augment import BatchAugmenter, Normalise, augment_each, gather_plan
from utils.data.datasets import ImageArrays, Split
from utils.data.sampling import EpochPlan, IntArray
from utils.errors import ConfigError, DataError

PREFETCHED = 2  # batches that each worker prepares ahead
DYING_SECONDS = 1.0  # between a worker's last word and its end
REST_SECONDS = 0.1  # before workers are started
PLANNED = 64  # batches whose augmentation the device loader draws, and brings to the device, at once
SHARED_MEMORY = Path("/dev/shm")


class AugmentedImages(Dataset[tuple[Tensor, Tensor, dict[str, str]]]):
    """What a DataLoader worker runs: the batch with these indices in this epoch, cut, flipped and rotated, with its
    labels and the files that could not be read.

    The images stay uint8 until they are on the device: a quarter of the bytes to hand over and copy.
    """

    def __init__(self, split: Split, plan: EpochPlan) -> None:
        self.split, self.plan = split, plan

    def __getitem__(self, epoch_and_indices: tuple[int, IntArray]) -> tuple[Tensor, Tensor, dict[str, str]]:
        epoch, indices = epoch_and_indices
        augmentation = self.plan.draw(epoch, indices)
        windows = None if augmentation is None else augmentation.window
        batch = self.split.read(indices, windows, replace=self.plan.training)  # type: ignore[arg-type]
        images = batch.images
        if augmentation is not None and self.plan.ranges is not None:
            images = augment_each(images, augmentation, self.plan.ranges.crop_padding)
        labels = self.split.labels[batch.indices]
        return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels), batch.unreadable


class BatchSampler(Sampler[tuple[int, IntArray]]):
    """A DataLoader's sampler: (epoch, indices) of one batch after the other, so that workers need no shared state."""

    def __init__(self, plan: EpochPlan) -> None:
        self.plan, self.epoch, self.first_batch = plan, 0, 0

    def __len__(self) -> int:
        return len(self.plan) - self.first_batch

    def __iter__(self) -> Iterator[tuple[int, IntArray]]:
        return iter([(self.epoch, indices) for indices in self.plan.batches(self.epoch, self.first_batch)])


def obey_only_the_trainer(worker: int) -> None:
    """What a worker process begins with.

    Slurm, torchrun and a terminal send a signal to every process of a run. The trainer answers it by saving, for which
    it may need more batches, so its workers go on until it ends them itself, which it does with SIGTERM.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait_for_the_trainer() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=wait_for_the_trainer, daemon=True).start()


class TorchvisionLoader:
    """Image by image with torchvision's transforms, in worker processes; pinned and copied without blocking on CUDA."""

    def __init__(
        self,
        split: Split,
        plan: EpochPlan,
        normalise: Normalise,
        device: torch.device,
        *,
        num_workers: int,
        fail_on_unreadable: bool,
    ) -> None:
        self.plan, self.normalise, self.device = plan, normalise, device
        self.fail_on_unreadable = fail_on_unreadable
        self.unreadable: dict[str, str] = {}
        self.has_workers = False
        self.sampler = BatchSampler(plan)
        self.loader = DataLoader(
            AugmentedImages(split, plan),
            batch_size=None,
            sampler=self.sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            prefetch_factor=PREFETCHED if num_workers else None,
            pin_memory=device.type == "cuda",
            worker_init_fn=obey_only_the_trainer if sys.platform == "linux" else None,
            generator=torch.Generator(),  # its own: each epoch begun would draw a number from the run's generator
            # fork: workers share the images with this process, where other ways would copy them to each
            multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
        )

    def __len__(self) -> int:
        return len(self.plan)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        self.sampler.epoch, self.sampler.first_batch = epoch, first_batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.loader.num_workers and not self.has_workers:
            # Up to 3.11.9 Python's fork hangs in the new process where another thread, such as one of a collective that
            # has just ended, is about to enter Python (python/cpython#112275): let them come to rest.
            time.sleep(REST_SECONDS)
            self.has_workers = True
        batches = iter(self.loader)
        while (batch := self._next(batches)) is not None:
            images, labels, unreadable = batch
            self.unreadable |= unreadable
            if unreadable and self.fail_on_unreadable:
                raise DataError(describe_unreadable(unreadable) + "; mend them, or --set fail_on_unreadable=false")
            if self.plan.training and len(labels) < self.plan.batch_size:
                raise DataError(f"not one training image can be read: {describe_unreadable(self.unreadable)}")
            images_on_device = images.to(self.device, non_blocking=True)
            yield self.normalise(images_on_device), labels.to(self.device, non_blocking=True)

    @staticmethod
    def _next(batches: Iterator[tuple[Tensor, Tensor, dict[str, str]]]) -> tuple[Tensor, Tensor, dict[str, str]] | None:
        try:
            return next(batches, None)
        except (RuntimeError, EOFError, OSError) as error:
            try:
                lost = find_lost_worker(batches, str(error))
            except RuntimeError as told:  # by PyTorch's handler, meanwhile
                lost = str(told)
            text = lost or str(error)
            # what a worker dies of when shared memory is full: SIGBUS, or ENOSPC from the system call
            if "bus error" in text.lower() or "shared memory" in text or "No space left" in text:
                raise ConfigError(
                    f"a data worker ran out of shared memory ({SHARED_MEMORY}).\n{SHARED_MEMORY_REMEDY}"
                ) from None
            if lost:
                raise RuntimeError(lost) from None
            raise


def find_lost_worker(batches: object, error: str) -> str:
    """How a worker process of a DataLoader's iterator died, in PyTorch's words; empty where none did.

    PyTorch tells how from its handler of SIGCHLD only; where this process was just receiving from the worker, it finds
    a connection that has ended, or a worker that is gone, instead.
    """
    workers = getattr(batches, "_workers", ()) if "in DataLoader worker process" not in error else ()
    until = time.monotonic() + DYING_SECONDS
    while workers and time.monotonic() < until:
        for worker in workers:
            if worker.exitcode:
                status = f"exited with status {worker.exitcode}"
                if worker.exitcode < 0:
                    status = f"is killed by signal: {signal.strsignal(-worker.exitcode)}"
                return f"DataLoader worker (pid {worker.pid}) {status}"
        time.sleep(0.01)
    return ""


def describe_unreadable(unreadable: dict[str, str]) -> str:
    """How many files could not be read, and the first of them."""
    path, reason = min(unreadable.items())
    others = f" and {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
    return f"cannot be read as an image: {path}{others} ({reason})"


SHARED_MEMORY_REMEDY = (
    "In a container: docker run --ipc=host, or --shm-size=8g; else fewer workers, "
    "--set num_data_workers=0 (no shared memory), or --set data_loader=device"
)


def check_shared_memory(batch_bytes: int, num_workers: int) -> None:
    """`ConfigError` where `num_workers` on this machine cannot keep their batches ahead in shared memory."""
    if not num_workers or not SHARED_MEMORY.is_dir():
        return
    needed = batch_bytes * num_workers * PREFETCHED
    status = os.statvfs(SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise ConfigError(
            f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free; {num_workers} data workers on this machine, each "
            f"{PREFETCHED} batches of {batch_bytes / 1e6:.1f} MB ahead, need {needed / 1e6:.0f} MB.\n"
            f"{SHARED_MEMORY_REMEDY}"
        )


class DeviceLoader:
    """The whole uint8 dataset on the device; each batch is gathered, augmented and normalised there at once.

    On a CPU the images are used where they are: for CIFAR-100, a memory map that all processes of a machine share.
    """

    def __init__(self, arrays: ImageArrays, plan: EpochPlan, normalise: Normalise, device: torch.device) -> None:
        self.plan, self.normalise, self.device = plan, normalise, device
        self.images = _place(arrays.images, device)
        self.labels = _place(arrays.labels, device)
        self.augment = None if plan.ranges is None else BatchAugmenter(*arrays.image_shape[1:], device)
        self.epoch, self.first_batch = 0, 0

    def __len__(self) -> int:
        return len(self.plan)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        self.epoch, self.first_batch = epoch, first_batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self.plan.batches(self.epoch, self.first_batch)
        for start in range(0, len(batches), PLANNED):
            planned = batches[start : start + PLANNED]
            indices = np.concatenate(planned)
            plans = self._gather_plan(indices)
            position = 0
            indices_on_device = self._to_device(indices)
            for batch in planned:
                rows = slice(position, position + len(batch))
                position += len(batch)
                chosen = indices_on_device[rows]
                images = self.images.index_select(0, chosen)
                if self.augment is not None and plans is not None:
                    images = self.augment(images, plans[rows])
                yield self.normalise(images), self.labels.index_select(0, chosen)

    def _gather_plan(self, indices: IntArray) -> Tensor | None:
        augmentation = self.plan.draw(self.epoch, indices)
        if augmentation is None or self.plan.ranges is None:
            return None
        height, width = self.images.shape[2:]
        return self._to_device(gather_plan(augmentation, height, width, self.plan.ranges.crop_padding))

    def _to_device(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def _place(values: np.ndarray, device: torch.device) -> Tensor:
    """On a CPU the array itself, never a copy; on another device a copy, made in parts to need little memory here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a read-only memory map, which nobody here writes to
        tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    placed = torch.empty(values.shape, dtype=tensor.dtype, device=device)
    for target, source in zip(placed.split(4096), tensor.split(4096), strict=True):
        target.copy_(source)
    return placed


class SyntheticLoader:
    """One random batch, already on the device, in the place of every other: what computing costs without input."""

    def __init__(self, split: Split, plan: EpochPlan, num_classes: int, normalise: Normalise) -> None:
        self.plan, self.first_batch = plan, 0
        device = normalise.scale.device
        generator = torch.Generator().manual_seed(plan.seed)
        shape = (plan.batch_size, *split.image_shape)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.images = normalise(images.to(device))
        self.labels = torch.randint(0, num_classes, shape[:1], generator=generator).to(device)

    def __len__(self) -> int:
        return len(self.plan)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        self.first_batch = first_batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in self.plan.batches(0, self.first_batch):
            yield self.images[: len(indices)], self.labels[: len(indices)]


def decode_all(split: Split, *, replace: bool) -> tuple[ImageArrays, dict[str, str]]:
    """The split as arrays in memory, for `DeviceLoader`, and the files that could not be read."""
    if isinstance(split, ImageArrays):
        return split, {}
    batch = split.read_all(replace=replace, num_threads=usable_cores())
    if not len(batch.indices):
        raise DataError(f"{split.root}: not one of its {len(split.labels)} images can be read")
    return ImageArrays(batch.images, split.labels[batch.indices]), batch.unreadable


def workers_of_a_rank(wanted: int, sharing: int) -> int:
    """`wanted` loader workers, but no more than a rank's part of the cores that `sharing` ranks may run on."""
    return min(wanted, max(1, usable_cores() // sharing))


def usable_cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
