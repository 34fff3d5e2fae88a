"""The base class of the loaders, and the list of images that they could not read."""

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
    """Batches of one split in the order of its plan, on the device of `normalise`; see the contract in `utils.data`."""

    def __init__(self, plan: EpochPlan, normalise: Normalise) -> None:
        self.plan, self.normalise, self.device = plan, normalise, normalise.device
        self.epoch, self.first_batch = 0, 0
        self.unreadable: dict[str, str] = {}  # file: reason, of the files skipped so far

    def __len__(self) -> int:
        return len(self.plan)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Set order, augmentation and the first batch."""
        self.epoch, self.first_batch = epoch, first_batch

    def record_unreadable(self, unreadable: dict[str, str], num_images: int) -> None:
        """Record the unreadable files of a batch of `num_images`; `DataError` if no image could replace them."""
        self.unreadable |= unreadable
        if self.plan.training and num_images < self.plan.batch_size:
            raise DataError(f"not one training image can be read: {describe_unreadable(self.unreadable)}")

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images and labels of each batch."""


def gather_unreadable(world: World, *loaders: Loader) -> dict[str, str]:
    """Collective: return {file: reason} of the files that these loaders could not read so far, on any rank."""
    mine = {path: reason for loader in loaders for path, reason in loader.unreadable.items()}
    return {path: reason for unreadable in world.all_gather(mine) for path, reason in unreadable.items()}


def report_unreadable(world: World, loaders: Iterable[Loader], folder: Path) -> list[str]:
    """Collective: add the files that any rank could not read so far to `folder`/unreadable.txt, which may have files
    from an earlier start of the run. Return a line for the log if any of them is new."""
    merged, path = gather_unreadable(world, *loaders), folder / "unreadable.txt"
    if not merged or not world.main_only(lambda: _add_to_list(merged, path)):
        return []
    return [f"{describe_unreadable(merged)}; replaced in training, skipped in validation; all: {path}"]


def _add_to_list(unreadable: dict[str, str], path: Path) -> bool:
    """Add lines "path, tab, reason" to a sorted file; return whether any line is new. The bytes of names are kept,
    except newlines."""
    listed = set[bytes]()
    with suppress(OSError), open_regular(path) as file:
        listed = {*file.read().splitlines()}
    rows = ((os.fsencode(name).replace(b"\n", b"\\n"), reason.encode()) for name, reason in unreadable.items())
    found = {name + b"\t" + reason for name, reason in rows}
    if found <= listed:
        return False
    write_atomically(path, b"".join(line + b"\n" for line in sorted(found | listed)))
    return True
