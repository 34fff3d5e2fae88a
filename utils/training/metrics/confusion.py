"""Confusion matrix, and the classes with the lowest accuracy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from utils.distributed.world import World

WORST_CLASSES = 10


class Confusion:
    """Confusion matrix, counted on the device without waiting for it; 12,000 classes take 0.6 GB."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.num_classes = num_classes
        self.counts = torch.zeros(num_classes * num_classes, dtype=torch.int32, device=device)

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        cells = labels * self.num_classes + outputs.argmax(1)
        self.counts.index_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))

    def collect(self, world: World) -> Tensor:
        """Collective: return the counts over all ranks, int32 [true class, predicted class], on the CPU."""
        return world.all_reduce(self.counts.clone()).view(self.num_classes, self.num_classes).cpu()


def rank_classes(counts: Tensor) -> list[tuple[int, float, int | None, float]]:
    """Return (class, accuracy, most frequent wrong prediction, its fraction) for each class with images, worst first.

    `counts`: [true class, predicted class]. The wrong prediction is None if there is none.
    """
    totals, wrong, rows = counts.sum(1), counts.clone().fill_diagonal_(0), []
    for label in totals.nonzero().flatten().tolist():
        fraction, other = (wrong[label] / totals[label]).max(0)
        accuracy = float(counts[label, label] / totals[label])
        rows.append((label, accuracy, int(other) if fraction > 0 else None, float(fraction)))
    return sorted(rows, key=lambda row: (row[1], row[0]))


def worst_classes(counts: Tensor, names: Sequence[str]) -> list[tuple[str, float, str, float]]:
    """Return `rank_classes` with names, for the worst classes."""
    rows = rank_classes(counts)[:WORST_CLASSES]
    return [(names[label], right, "-" if wrong is None else names[wrong], part) for label, right, wrong, part in rows]
