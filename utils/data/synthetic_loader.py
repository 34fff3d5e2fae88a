"""The loader `synthetic`: one random batch again and again."""

from collections.abc import Iterator

import torch
from torch import Tensor

from utils.data.augment import Normalise
from utils.data.datasets import Split
from utils.data.keys import DataKeys
from utils.data.sampling import EpochPlan


class SyntheticLoader:
    """One random batch, already on the device, in the place of every other: what computing costs without input."""

    def __init__(self, split: Split, plan: EpochPlan, num_classes: int, normalise: Normalise) -> None:
        self.plan, self.first_batch = plan, 0
        device = normalise.device
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


def build(keys: DataKeys, split: Split, plan: EpochPlan, normalise: Normalise, num_workers: int) -> SyntheticLoader:
    """The loader in the place of one split."""
    return SyntheticLoader(split, plan, keys.num_classes, normalise)
