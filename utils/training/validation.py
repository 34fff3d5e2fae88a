"""Validation: a loader's images seen by the network that is validated, in training and for a checkpoint later."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from utils.distributed.world import World
from utils.training.classifier import Classifier
from utils.training.metrics import MetricSums

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
    from 1 on. Collective with test_time_flip_within, which goes over the batches up to twice."""
    results, sums = classify(classifier, batches), MetricSums(world.device)
    if classifier.keys.test_time_flip_within is not None:
        results = _views_near_target(classifier, batches, world, after_batch)
    for number, (outputs, labels) in enumerate(results, start=1):
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


@torch.no_grad()
def _views_near_target(
    classifier: Classifier, batches: Batches, world: World, after_batch: Callable[[int], None]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Collective: what `classify` gives where the accuracy of the images as they are is near the target; else theirs.

    It follows from weights and images alone, so that a checkpoint that is evaluated later has the accuracy that
    training recorded. Keeps all logits on the device: 4 MB for CIFAR-100, 200 MB for ImageNet on one rank.
    """
    keys, kept = classifier.keys, list[tuple[Tensor, Tensor]]()
    counts = torch.zeros(2, dtype=torch.int64, device=world.device)  # hits and images
    classifier.validated.eval()
    for number, (images, labels) in enumerate(batches, start=1):
        outputs = classifier.predict_plain(images)
        counts[0] += (outputs.argmax(1) == labels).sum()
        counts[1] += len(labels)
        kept.append((outputs, labels))
        after_batch(number)
    hits, seen = world.sum(counts).tolist()
    assert keys.stop_at_accuracy is not None and keys.test_time_flip_within is not None
    if hits < (keys.stop_at_accuracy - keys.test_time_flip_within) * seen:
        yield from kept
        return
    for (outputs, _), (images, labels) in zip(kept, batches, strict=True):
        yield classifier.average_views(outputs, images), labels
