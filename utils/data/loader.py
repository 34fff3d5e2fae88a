"""The base class of the loaders, and the list of images that they could not read."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from utils.data.datasets.image_files import describe_unreadable
from utils.data.sampling import EpochPlan
from utils.data.transforms.augment import Normalise
from utils.distributed.world import World
from utils.errors import DataError
from utils.files import write_atomically


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
    """Collective: add the files that any rank could not read so far to `folder`/unreadable.txt, sorted lines "path,
    tab, reason", with files from an earlier start of the run. Return a line for the log if any of them is new."""
    unreadable, path = gather_unreadable(world, *loaders), folder / "unreadable.txt"

    def add_to_list() -> bool:
        lines = (f"{name}\t{reason}".replace("\r", "\\r").replace("\n", "\\n") for name, reason in unreadable.items())
        found = {line.encode(errors="surrogateescape") for line in lines}
        listed = {*path.read_bytes().split(b"\n")} - {b""} if path.exists() else set[bytes]()
        if not found <= listed:
            write_atomically(path, b"".join(line + b"\n" for line in sorted(found | listed)))
        return not found <= listed

    if not unreadable or not world.main_only(add_to_list):
        return []
    return [f"{describe_unreadable(unreadable)}; replaced in training, skipped in validation; all: {path}"]
