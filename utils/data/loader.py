"""What all loaders of the contract in `utils.data` have in common, and the images that they could not read."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from utils.data.datasets.image_files import describe_unreadable
from utils.data.sampling import EpochPlan
from utils.data.transforms.augment import Normalise
from utils.distributed.world import World
from utils.errors import DataError
from utils.files import open_regular, write_atomically


class Loader(ABC):
    """Batches of one split by its plan, on the device of `normalise`."""

    def __init__(self, plan: EpochPlan, normalise: Normalise) -> None:
        self.plan, self.normalise, self.device = plan, normalise, normalise.device
        self.epoch, self.first_batch = 0, 0
        self.unreadable: dict[str, str] = {}  # files that were passed over so far, and why

    def __len__(self) -> int:
        return len(self.plan)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Choose order and augmentation, and the batch to begin with."""
        self.epoch, self.first_batch = epoch, first_batch

    def count_unreadable(self, unreadable: dict[str, str], num_images: int) -> None:
        """Count the files that a batch of `num_images` could not show; `DataError` where none can take their place."""
        self.unreadable |= unreadable
        if self.plan.training and num_images < self.plan.batch_size:
            raise DataError(f"not one training image can be read: {describe_unreadable(self.unreadable)}")

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of one batch after the other."""


def gather_unreadable(world: World, *loaders: Loader) -> dict[str, str]:
    """Collective: {file: reason} of those that these loaders could not read so far, on any rank."""
    mine = {path: reason for loader in loaders for path, reason in loader.unreadable.items()}
    return {path: reason for unreadable in world.gather(mine) for path, reason in unreadable.items()}


def report_unreadable(world: World, loaders: Iterable[Loader], folder: Path) -> list[str]:
    """Collective: lists in `folder`/unreadable.txt what could not be read so far on any rank, beside what an earlier
    start of the run has found; a line for the log of the main process where something is new."""
    merged, path = gather_unreadable(world, *loaders), folder / "unreadable.txt"
    if not merged or not world.main_only(lambda: _list(merged, path)):
        return []
    return [f"{describe_unreadable(merged)}; replaced in training, left out in validation; all: {path}"]


def _list(unreadable: dict[str, str], path: Path) -> bool:
    """Add lines "path, tab, reason" to a file, in order; whether any is new. Names are written as the bytes they are,
    but for line ends."""
    listed = set[bytes]()
    with suppress(OSError), open_regular(path) as file:
        listed = {*file.read().splitlines()}
    rows = ((os.fsencode(name).replace(b"\n", b"\\n"), reason.encode()) for name, reason in unreadable.items())
    found = {name + b"\t" + reason for name, reason in rows}
    if found <= listed:
        return False
    write_atomically(path, b"".join(line + b"\n" for line in sorted(found | listed)))
    return True
