"""Validation over a loader's images, in training and for a checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from utils.distributed.world import World
from utils.training.classifier import Classifier
from utils.training.metrics.sums import MetricSums

Batches = Iterable[tuple[Tensor, Tensor]]  # images [N, 3, H, W] and labels [N] on the device


class Collector(Protocol):
    """A metric that is counted over all batches, on the device."""

    def add(self, outputs: Tensor, labels: Tensor) -> None: ...


def validate(
    classifier: Classifier,
    batches: Batches,
    world: World,
    collectors: Sequence[Collector] = (),
    after_batch: Callable[[int], None] = lambda number: None,
) -> MetricSums:
    """Sum loss and accuracy of this rank; `collectors` see every batch too, and `after_batch` its number, counted from
    1."""
    sums = MetricSums(world.device)
    for number, (outputs, labels) in enumerate(classify(classifier, batches), start=1):
        sums.add(nn.functional.cross_entropy(outputs, labels), outputs, labels)
        for collector in collectors:
            collector.add(outputs, labels)
        after_batch(number)
    return sums


@torch.no_grad()
def classify(classifier: Classifier, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (float32 logits [N, classes], labels [N]) of each batch."""
    classifier.validated.eval()
    for images, labels in batches:
        yield classifier.predict(images), labels
