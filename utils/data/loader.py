"""What all loaders of the contract in `utils.data` have in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from utils.data.augment import Normalise
from utils.data.image_files import describe_unreadable
from utils.data.sampling import EpochPlan
from utils.errors import DataError


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
