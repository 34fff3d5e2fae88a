"""What all loaders of the contract in `utils.data` have in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from utils.data.augment import Normalise
from utils.data.sampling import EpochPlan


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

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of one batch after the other."""
