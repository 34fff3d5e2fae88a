"""Loss and accuracy of an epoch, summed on the device."""

import math

import torch
from torch import Tensor

from utils.distributed.world import World
from utils.errors import DataError


class MetricSums:
    """Sums of loss, correct predictions and images of an epoch, on the device without waiting for it.

    Averages are per image, so they do not depend on the division of an epoch into batches or ranks.
    """

    def __init__(self, device: torch.device) -> None:
        # loss, correct predictions, images, micro-batches before the first non-finite loss
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.logged = [0.0] * 4  # totals over all ranks at the last log point

    def reset(self) -> None:
        """Set the sums to zero in the same memory, to which a CUDA graph of the step adds."""
        self.sums.zero_()
        self.logged = [0.0] * 4

    def load(self, sums: Tensor, logged: list[float], micro_batches: int) -> None:
        """Restore saved sums [4] and the totals of the last log point. All `micro_batches` so far had a finite loss, as
        checkpoints are saved only then."""
        self.sums.copy_(sums)
        self.sums[3], self.logged = micro_batches, logged

    def add(self, mean_loss: Tensor, outputs: Tensor, labels: Tensor) -> None:
        """Add one micro-batch: its mean loss (scalar), outputs [N, classes] and labels [N], or mixed targets
        [N, classes], whose largest class counts as the label."""
        num_images = labels.shape[0]
        if not num_images:  # a validation batch without readable files: its mean loss is NaN
            return
        # few kernels, as this runs in every step; the product is exact in float64, so one operation may do both
        self.sums[0].add_(mean_loss, alpha=num_images)
        classes = labels if labels.dim() == 1 else labels.argmax(1)
        hits = torch.empty(num_images, dtype=self.sums.dtype, device=self.sums.device)
        self.sums[1] += torch.eq(outputs.argmax(1), classes, out=hits).sum()
        self.sums[2] += num_images
        self.sums[3] += self.sums[0] < math.inf  # cross entropy is positive, so a non-finite sum is inf or NaN

    def average(self, world: World) -> dict[str, float]:
        """Collective: return {"loss", "acc1" in [0, 1], "images"} over all ranks; waits for the device."""
        return _average(world.all_reduce(self.sums.clone()).tolist(), [0.0] * 4)

    def average_since_last(self, world: World) -> dict[str, float]:
        """Collective: return `average` over the batches since the last call."""
        before, self.logged = self.logged, world.all_reduce(self.sums.clone()).tolist()
        return _average(self.logged, before)

    def finite_micro_batches(self) -> int:
        """Return this rank's number of micro-batches before the first non-finite loss; waits for the device."""
        return int(self.sums[3].item())


def _average(totals: list[float], before: list[float]) -> dict[str, float]:
    loss, correct, images = (now - then for now, then in zip(totals[:3], before[:3], strict=True))
    if not images:
        raise DataError("not one image can be read; check data_path, its permissions and the files' formats")
    return {"loss": loss / images, "acc1": correct / images, "images": images}
