"""Validation: a loader's images seen by the network that is validated, in training and for a checkpoint later."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from utils.distributed.world import World
from utils.training.classifier import Classifier
from utils.training.metrics.sums import MetricSums

Batches = Iterable[tuple[Tensor, Tensor]]  # images [N, 3, H, W] and labels [N] on the device


class Collector(Protocol):
    """Something that is counted over all batches, on the device."""

    def add(self, outputs: Tensor, labels: Tensor) -> None: ...


def validate(
    classifier: Classifier,
    batches: Batches,
    world: World,
    collectors: Sequence[Collector] = (),
    after_batch: Callable[[int], None] = lambda number: None,
) -> MetricSums:
    """Loss and accuracy of this rank; each of `collectors` is given every batch too, and `after_batch` its number
    from 1 on."""
    sums = MetricSums(world.device)
    for number, (outputs, labels) in enumerate(classify(classifier, batches), start=1):
        sums.add(nn.functional.cross_entropy(outputs, labels), outputs, labels)
        for collector in collectors:
            collector.add(outputs, labels)
        after_batch(number)
    return sums


@torch.no_grad()
def classify(classifier: Classifier, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """(float32 logits [N, classes], labels [N]) of one batch after the other."""
    classifier.validated.eval()
    for images, labels in batches:
        yield classifier.predict(images), labels
