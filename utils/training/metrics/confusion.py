"""How often each class is taken for another."""

from collections.abc import Sequence

import torch
from torch import Tensor

from utils.distributed.world import World

WORST_CLASSES = 10


class Confusion:
    """How often each class was taken for each other one, counted on the device without waiting for it."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.num_classes = num_classes
        self.counts = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=device)

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Outputs [N, classes] and labels [N] of one batch."""
        cells = labels * self.num_classes + outputs.argmax(1)
        self.counts.index_add_(0, cells, torch.ones_like(cells))

    def collect(self, world: World) -> Tensor:
        """Collective: counts over all ranks, int64 [true class, predicted class], on the CPU."""
        return world.sum(self.counts.clone()).view(self.num_classes, self.num_classes).cpu()


def rank_classes(counts: Tensor) -> list[tuple[int, float, int | None, float]]:
    """(class, its accuracy, what it is most often taken for, how often) for each class with images, the worst first.

    `counts`: [true class, predicted class]; shares in [0, 1]. None where it is never taken for another.
    """
    totals = counts.sum(1)
    accuracy = counts.diagonal() / totals.clamp(min=1)
    present = [label for label in range(len(counts)) if totals[label] > 0]
    rows = []
    for label in sorted(present, key=lambda label: (float(accuracy[label]), label)):
        others = counts[label].clone()
        others[label] = -1
        taken_for = int(others.argmax())
        share = float(others[taken_for] / totals[label])
        rows.append((label, float(accuracy[label]), taken_for if share > 0 else None, share))
    return rows


def worst_classes(counts: Tensor, names: Sequence[str]) -> list[tuple[str, float, str, float]]:
    """`rank_classes` with names, for the worst classes."""
    return [
        (names[label], accuracy, "-" if taken_for is None else names[taken_for], share)
        for label, accuracy, taken_for, share in rank_classes(counts)[:WORST_CLASSES]
    ]
