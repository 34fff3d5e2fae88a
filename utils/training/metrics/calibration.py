"""Top-k accuracy and calibration of a checkpoint, counted on the device without waiting for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from utils.distributed.world import World

NUM_BINS = 15  # as in Guo et al. 2017
Bin = dict[str, Any]


class TopCounts:
    """Counts images whose true class is among the `k` largest outputs."""

    def __init__(self, k: int, device: torch.device) -> None:
        self.k = k
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # correct images, all images

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Add outputs [N, classes] and labels [N] of one batch."""
        self.counts[0] += (outputs.topk(self.k, 1).indices == labels[:, None]).any(1).sum()
        self.counts[1] += labels.shape[0]

    def accuracy(self, world: World) -> float:
        """Collective: top-k accuracy over all images, in [0, 1]."""
        right, images = world.all_reduce(self.counts.clone()).tolist()
        return right / images


class Calibration:
    """Counts images by confidence, the probability of the predicted class, in bins of equal width (Guo et al. 2017,
    arXiv:1706.04599)."""

    def __init__(self, device: torch.device, num_bins: int = NUM_BINS) -> None:
        # per bin: images, correct predictions, summed confidence
        self.sums = torch.zeros(num_bins, 3, dtype=torch.float64, device=device)

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Add outputs [N, classes] and labels [N] of one batch."""
        confidence, predicted = outputs.double().softmax(1).max(1)
        bins = (confidence * len(self.sums)).ceil().long().clamp(1, len(self.sums)) - 1
        counted = torch.stack([torch.ones_like(confidence), (predicted == labels).double(), confidence], dim=1)
        self.sums.index_add_(0, bins, counted)

    def collect(self, world: World) -> list[Bin]:
        """Collective: return the bins (low, high] over all ranks: {"low", "high", "images", "confidence": its mean,
        "accuracy"}; without images the last two are 0."""
        sums = world.all_reduce(self.sums.clone()).tolist()
        return [
            {"low": number / len(sums), "high": (number + 1) / len(sums), "images": int(images),
             "confidence": confidence / max(images, 1), "accuracy": correct / max(images, 1)}
            for number, (images, correct, confidence) in enumerate(sums)
        ]  # fmt: skip


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Mean over all images of the difference between accuracy and confidence of their bin, in [0, 1]."""
    total = sum(part["images"] for part in bins)
    return sum(part["images"] * abs(part["accuracy"] - part["confidence"]) for part in bins) / total
