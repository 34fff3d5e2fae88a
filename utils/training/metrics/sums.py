"""Sums on the device, confusion counts and throughput."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from utils.distributed.world import World
from utils.timing.clock import LOOP, Clock


class MetricSums:
    """Loss, correct predictions and images of an epoch, summed on the device without waiting for it.

    Averages are by image, so they do not depend on how an epoch was cut into batches or ranks.
    """

    def __init__(self, device: torch.device) -> None:
        # summed loss, correct predictions, images, batches before the first loss that is not finite
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.logged = [0.0] * 4  # totals over all ranks at the last log point

    def reset(self) -> None:
        """Start again at zero, in the same memory: a CUDA graph of the step keeps adding to it."""
        self.sums.zero_()
        self.logged = [0.0] * 4

    def load(self, sums: Tensor, logged: list[float]) -> None:
        """Go on from saved sums [4] and from what was logged of them."""
        self.sums.copy_(sums)
        self.logged = logged

    def set_finite_batches(self, batches: int) -> None:
        """All of the epoch's `batches` so far were finite: nothing else is ever saved."""
        self.sums[3] = batches

    def add(self, mean_loss: Tensor, outputs: Tensor, labels: Tensor) -> None:
        """Add one batch: its mean loss (scalar), outputs [N, classes] and labels [N], or the shares of the classes in
        mixed targets [N, classes], of which the largest counts."""
        num_images = labels.shape[0]
        if not num_images:  # a validation batch of which no file could be read: the mean of nothing is NaN
            return
        # few kernels, as this is done in every step: the product is exact in float64, so it may be rounded with the sum
        self.sums[0].add_(mean_loss, alpha=num_images)
        classes = labels if labels.dim() == 1 else labels.argmax(1)
        hits = torch.empty(num_images, dtype=self.sums.dtype, device=self.sums.device)
        self.sums[1] += torch.eq(outputs.argmax(1), classes, out=hits).sum()
        self.sums[2] += num_images
        self.sums[3] += self.sums[0] < math.inf  # cross entropy is above 0: what is not finite is inf or NaN

    def average(self, world: World) -> dict[str, float]:
        """Collective: {"loss", "acc1" (share in [0, 1]), "images"} over all ranks; waits for the device."""
        return self._average(self._totals(world), [0.0] * 4)

    def average_since_last(self, world: World) -> dict[str, float]:
        """Collective: like `average`, over what was added since the last call."""
        totals, before = self._totals(world), self.logged
        self.logged = totals
        return self._average(totals, before)

    def finite_batches(self) -> int:
        """Batches of this rank before the first with a loss that is not finite; waits for the device."""
        return int(self.sums[3].item())

    def _totals(self, world: World) -> list[float]:
        return world.sum(self.sums.clone()).tolist()

    @staticmethod
    def _average(totals: list[float], before: list[float]) -> dict[str, float]:
        loss, correct, images = (now - then for now, then in zip(totals[:3], before[:3], strict=True))
        return {"loss": loss / images, "acc1": correct / images, "images": images}


class Throughput:
    """Images per second over all ranks, between log points, in the loop over training batches.

    The first window of a process holds the start of workers, cuDNN's choice of algorithms and compilation, so `overall`
    leaves it out wherever there is another.
    """

    def __init__(self, world_size: int, clock: Clock) -> None:
        self.world_size, self.clock = world_size, clock
        self.windows: list[tuple[int, float]] = []  # images, seconds
        self.start()

    def start(self) -> None:
        """Begin a window now; the time since the last one does not count."""
        self.images, self.since = 0, self.clock.seconds(*LOOP)

    def add(self, images: int) -> None:
        """Count one more batch of this rank."""
        self.images += images * self.world_size

    def close_window(self) -> float:
        """Images per second since the window began, 0 for an empty one; begins the next. Call when the device has
        caught up."""
        if not self.images:
            return 0.0
        seconds = self.clock.seconds(*LOOP) - self.since
        window = (self.images, seconds)
        self.windows.append(window)
        self.start()
        return window[0] / seconds

    def images_in_all(self) -> int:
        """Images of all closed windows, over all ranks."""
        return sum(images for images, _ in self.windows)

    def overall(self) -> float:
        """Images per second over all windows but the first."""
        counted = self.windows[1:] or self.windows
        seconds = sum(window[1] for window in counted)
        return sum(window[0] for window in counted) / seconds if seconds else 0.0


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
