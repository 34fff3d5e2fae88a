"""The loader `synthetic`: repeats one random batch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from utils.data.config import DataConfig
from utils.data.datasets.dataset import Split
from utils.data.loader import Loader
from utils.data.sampling import EpochPlan
from utils.data.transforms.augment import Normalise


class SyntheticLoader(Loader):
    """Repeats one random batch on the device, to measure the cost of computing without input."""

    def __init__(
        self, config: DataConfig, split: Split, plan: EpochPlan, normalise: Normalise, num_workers: int
    ) -> None:
        super().__init__(plan, normalise)
        generator = torch.Generator().manual_seed(plan.seed)
        shape = (plan.batch_size, *split.image_shape)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.images = normalise(images.to(self.device))
        self.labels = torch.randint(0, config.num_classes, shape[:1], generator=generator).to(self.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in self.plan.batches(0, self.first_batch):
            yield self.images[: len(indices)], self.labels[: len(indices)]
