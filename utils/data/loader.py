"""The loaders `torchvision`, `device` and `synthetic`, their base class, and the list of unreadable images."""

import os
import signal
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from utils.data.augment import BatchAugmenter, Normalise, augment_each, pixel_maps
from utils.data.config import DataConfig
from utils.data.datasets.dataset import ImageArrays, Split
from utils.data.datasets.image_files import ReadSamples, describe_unreadable
from utils.data.sampling import IntArray, Sampler
from utils.distributed.world import World
from utils.errors import DataError, ExpectedError, print_error
from utils.files import write_atomically
from utils.quotas import usable_cores

MOST_UNREADABLE = 0.01  # of the images of a split
BATCHES_AT_ONCE = 64  # batches whose augmentation is sampled, and copied to the device, at once
DELAY_SECONDS = 0.1  # before workers are started
EXIT_SECONDS = 1.0  # for the signal of a worker's death, after its connection has broken
WorkerBatch = tuple[Tensor, Tensor, dict[str, str]]  # images, labels, unreadable files


class Loader(ABC):
    """Batches of one split in the order of its sampler, on the device of `normalise`; contract: see `utils.data`."""

    def __init__(self, sampler: Sampler, normalise: Normalise) -> None:
        self.sampler, self.normalise, self.device = sampler, normalise, normalise.device
        self.epoch, self.first_batch = 0, 0
        self.unreadable: dict[str, str] = {}  # file: reason, of the files skipped so far

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Set order, augmentation and the first batch."""
        self.epoch, self.first_batch = epoch, first_batch

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images and labels of each batch."""


def gather_unreadable(world: World, loader: Loader) -> dict[str, str]:
    """Collective: return {file: reason} of the files that this loader could not read so far, on any rank."""
    return {path: reason for part in world.all_gather(loader.unreadable) for path, reason in part.items()}


def report_unreadable(world: World, loaders: Iterable[Loader], folder: Path) -> list[str]:
    """Collective: add the files that any rank could not read so far to `folder`/unreadable.txt, sorted lines "path,
    tab, reason", with files from an earlier start of the run. Return a line for the log if any of them is new.
    `DataError` if they are too many of one split."""
    found, path = [(loader, gather_unreadable(world, loader)) for loader in loaders], folder / "unreadable.txt"
    unreadable = {name: reason for _, part in found for name, reason in part.items()}

    def add_to_list() -> bool:
        lines = {f"{name}\t{reason}".replace("\r", "\\r").replace("\n", "\\n") for name, reason in unreadable.items()}
        listed = {*path.read_bytes().decode("utf-8", "surrogateescape").split("\n")} if path.exists() else {""}
        if not lines <= listed:
            content = "".join(f"{line}\n" for line in sorted(lines | listed) if line)
            write_atomically(path, content.encode("utf-8", "surrogateescape"))
        return not lines <= listed

    is_new = bool(unreadable) and world.main_only(add_to_list)
    for loader, part in found:
        if len(part) > MOST_UNREADABLE * (images := loader.sampler.num_samples):
            many = f"{len(part)} of {images} images, more than {MOST_UNREADABLE:.0%}"
            raise DataError(f"{many}: {describe_unreadable(part)}; repair or remove them; all: {path}")
    how = f"replaced in training, skipped in validation; all: {path}"
    return [f"{describe_unreadable(unreadable)}; {how}"] if is_new else []


class AugmentedImages(torch_data.Dataset[WorkerBatch | ExpectedError]):
    """The dataset of a DataLoader worker: returns the augmented batch of (epoch, indices) as uint8, a quarter of the
    bytes to copy, or an `ExpectedError`, since a worker's exception would arrive as the text of a traceback."""

    def __init__(self, split: Split, sampler: Sampler) -> None:
        self.split, self.sampler = split, sampler

    def __getitem__(self, epoch_and_indices: tuple[int, IntArray]) -> WorkerBatch | ExpectedError:
        epoch, indices = epoch_and_indices
        augmentation = self.sampler.sample_augmentation(epoch, indices)
        crops = None if augmentation is None else augmentation.crop
        try:
            read = self.split.read(indices, crops, replace=self.sampler.training)
        except ExpectedError as error:
            return error
        images = read.samples if augmentation is None else augment_each(read.samples, augmentation)
        labels = torch.from_numpy(self.split.labels[read.indices])
        return torch.from_numpy(np.ascontiguousarray(images)), labels, read.unreadable


class TorchvisionLoader(Loader):
    """Augments image by image with torchvision in worker processes; on CUDA, copies pinned batches without blocking."""

    def __init__(self, config: DataConfig, split: Split, sampler: Sampler, normalise: Normalise) -> None:
        super().__init__(sampler, normalise)
        num_workers, self.has_workers = config.num_data_workers, False
        self.batches: list[tuple[int, IntArray]] = []  # (epoch, indices) of each, so that workers need no shared state
        self.loader = torch_data.DataLoader(
            AugmentedImages(split, sampler), batch_size=None, sampler=self.batches, num_workers=num_workers,
            persistent_workers=num_workers > 0, pin_memory=self.device.type == "cuda", worker_init_fn=init_worker,
            generator=torch.Generator(),  # its own: DataLoader takes a number from it in each epoch
            # fork: workers share the images with this process, without copies
            multiprocessing_context="fork" if num_workers else None,
        )  # fmt: skip

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.loader.num_workers and not self.has_workers:
            # Up to Python 3.11.9, a forked process hangs if another thread is entering Python (python/cpython#112275),
            # such as a thread of a collective that has just ended: wait until such threads are idle.
            time.sleep(DELAY_SECONDS)
            self.has_workers = True
        self.batches[:] = [(self.epoch, indices) for indices in self.sampler.batches(self.epoch, self.first_batch)]
        batches = iter(self.loader)
        while True:
            try:
                batch = next(batches, None)
            except (EOFError, ConnectionError, RuntimeError) as error:  # such as a broken connection to a dead worker
                time.sleep(EXIT_SECONDS)  # PyTorch's SIGCHLD handler raises its RuntimeError here, not in a later line
                codes = [worker.exitcode for worker in getattr(batches, "_workers", ())]
                if isinstance(error, RuntimeError) and 24 not in codes:  # EMFILE, see `_end_worker`
                    raise
                raise RuntimeError(f"DataLoader worker is lost: {error!r}, exit codes {codes}") from None
            if batch is None:
                return
            if isinstance(batch, ExpectedError):
                raise batch
            images, labels, unreadable = batch
            self.unreadable |= unreadable
            on_device = images.to(self.device, non_blocking=True)
            yield self.normalise(on_device), labels.to(self.device, non_blocking=True)


def init_worker(worker: int) -> None:
    """Make a worker process ignore signals, except SIGTERM from its trainer. Slurm, torchrun or a terminal signal all
    processes of a run, and the trainer may need more batches before it saves."""
    # a batch that cannot be sent, as when /dev/shm is full, would be dropped, and the trainer would wait for ever
    Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait_for_the_trainer() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=wait_for_the_trainer, daemon=True).start()


def _end_worker(error: Exception, batch: object) -> None:
    print_error(f"a loader worker cannot send a batch: {error}")
    os._exit(24 if "Too many open files" in str(error) else 1)  # EMFILE, which the trainer explains


class DeviceLoader(Loader):
    """Holds the uint8 dataset on the device; gathers, augments and normalises each batch there. On a CPU it uses the
    images in place: for CIFAR-100, a memory map that all processes of a machine share."""

    def __init__(self, config: DataConfig, split: Split, sampler: Sampler, normalise: Normalise) -> None:
        assert isinstance(split, ImageArrays)
        super().__init__(sampler, normalise)
        self.arrays, self.unreadable = split, split.unreadable
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the memory map is read-only; no code writes to it
            self.images = torch.from_numpy(split.images).to(self.device)
        self.labels = torch.from_numpy(split.labels).to(self.device)
        self.augment = BatchAugmenter(*split.image_shape[1:], self.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self.sampler.batches(self.epoch, self.first_batch)
        for start in range(0, len(batches), BATCHES_AT_ONCE):
            batches_now = batches[start : start + BATCHES_AT_ONCE]
            sizes, indices = [len(batch) for batch in batches_now], np.concatenate(batches_now)
            augmentation = self.sampler.sample_augmentation(self.epoch, indices)
            maps: Iterable[Tensor | None] = [None] * len(sizes)
            if augmentation is not None:
                maps = self._copy(pixel_maps(augmentation, *self.images.shape[2:])).split(sizes)
            for chosen, part in zip(self._copy(indices).split(sizes), maps, strict=True):
                self.arrays.check_file()
                images = self.images.index_select(0, chosen)
                images = images if part is None else self.augment(images, part)
                yield self.normalise(images), self.labels.index_select(0, chosen)

    def _copy(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


class SyntheticLoader(Loader):
    """Repeats one random batch on the device, to measure the cost of computing without input."""

    def __init__(self, config: DataConfig, split: Split, sampler: Sampler, normalise: Normalise) -> None:
        super().__init__(sampler, normalise)
        generator = torch.Generator().manual_seed(sampler.seed)
        shape = (sampler.batch_size, *split.image_shape)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.images = normalise(images.to(self.device))
        self.labels = torch.randint(0, config.num_classes, shape[:1], generator=generator).to(self.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in self.sampler.batches(0, self.first_batch):
            yield self.images[: len(indices)], self.labels[: len(indices)]


def decode_all(split: Split, *, replace: bool) -> ImageArrays:
    """Return the split as arrays in memory, for `DeviceLoader`; see `ImageFiles.read_each`."""
    if isinstance(split, ImageArrays):
        return split
    parts = np.array_split(np.arange(len(split.labels)), max(1, len(split.labels) // 256))
    with ThreadPoolExecutor(usable_cores()) as pool:  # decoding releases the GIL
        batches = list(pool.map(lambda part: split.read(part, None, replace=replace), parts))
    samples = np.concatenate([batch.samples for batch in batches])
    indices = np.concatenate([batch.indices for batch in batches])
    unreadable = {path: reason for batch in batches for path, reason in batch.unreadable.items()}
    ReadSamples(samples, indices, unreadable).check_any()
    return ImageArrays(samples, split.labels[indices], unreadable)
