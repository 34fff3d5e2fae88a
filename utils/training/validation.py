"""Validation over a loader's images, in training and for a checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from utils.data.sampling import Sampler
from utils.distributed.world import World
from utils.errors import ExpectedError
from utils.training.learner import Classifier
from utils.training.metrics.sums import MetricSums

# Compiling ResNet50's forward pass takes about half a minute with a cold cache. It saved timm 43 microseconds per
# image, 15,473 instead of 9,320 images/s (huggingface/pytorch-image-models#2693), and so pays after this many.
MIN_COMPILED_IMAGES = 700_000
Batches = Iterable[tuple[Tensor, Tensor]]  # images [N, 3, H, W] and labels [N] on the device
Collector = Callable[[Tensor, Tensor], None]  # adds outputs [N, classes] and labels [N] of a batch to a metric


def compile_validation(classifier: Classifier, sampler: Sampler) -> None:
    """COMPILE: compile the prediction of the whole batches, where steps are compiled and all validations of the
    run together have `MIN_COMPILED_IMAGES` images and views of images on each rank.

    The whole run counts, not what a resume has left of it, so that a resumed run computes the same bits.
    """
    config = classifier.config
    validations = -(-config.max_epochs // config.validate_every_epochs)
    images = validations * config.test_time_views * sampler.shared_batches * sampler.batch_size
    if classifier.plan.compiled and images >= MIN_COMPILED_IMAGES:
        classifier.compile_prediction(sampler.batch_size)


def validate(
    classifier: Classifier, batches: Batches, world: World, collectors: Sequence[Collector] = (),
    after_batch: Callable[[int], None] = lambda number: None,
) -> MetricSums:  # fmt: skip
    """Sum loss and accuracy of this rank; `collectors` see every batch, `after_batch` its number, counted from 1."""
    sums = MetricSums(world.device)
    for number, (outputs, labels) in enumerate(classify(classifier, batches), start=1):
        sums.add(nn.functional.cross_entropy(outputs, labels), outputs, labels)
        for collector in collectors:
            collector(outputs, labels)
        after_batch(number)
    return sums


@torch.no_grad()
def classify(classifier: Classifier, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (float32 logits [N, classes], labels [N]) of each batch. Raises `ExpectedError` after the last batch if an
    output is not finite: its accuracy would count as a result."""
    classifier.validated.eval()
    finite = torch.ones((), dtype=torch.bool, device=next(classifier.validated.parameters()).device)
    for images, labels in batches:
        outputs = classifier.predict(images)
        finite &= outputs.isfinite().all()
        yield outputs, labels
    if not finite:
        raise ExpectedError("the network's outputs for some images are not finite; use an earlier checkpoint")
