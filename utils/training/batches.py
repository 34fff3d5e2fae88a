"""Batches between loader and step: prefetched, timed, mixed, resized."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from utils.data.loader import Loader
from utils.training.config import RecipeConfig
from utils.training.learner import Learner
from utils.training.plan import Plan
from utils.training.step import mark, side_stream

Batch = tuple[Tensor, Tensor]  # images [N, 3, H, W] and labels [N], or class fractions [N, classes]
Mix = Callable[[Tensor, Tensor, int, int], Batch]  # (images, labels, epoch, batch) -> mixed batch


def training_batches(
    learner: Learner, loader: Loader, mix: Mix, watch: Callable[[Iterator[Batch]], Iterator[Batch]], epoch: int,
    first_batch: int,
) -> Iterator[tuple[int, Batch]]:  # fmt: skip
    """Yield (number, batch) of the rest of an epoch, from `first_batch` on, ready for the step. `watch` times the wait
    for each batch. PROF: a batch's range includes the step that uses it."""
    loader.set_epoch(epoch, first_batch)
    size = training_size(learner.config, epoch)
    batches = watch(prefetch(learner.plan, iter(loader), loader.device))
    for number in range(first_batch, len(loader)):
        with mark(f"iteration {number}"):
            with mark("data"):
                images, labels = mix(*next(batches), epoch, number)
                images = resize(images, size)
            yield number, (images, labels)


def prefetch(plan: Plan, batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """PREFETCH: copy and augment the next batch on a side stream while the device trains on the current one."""
    if not plan.prefetched:
        yield from batches
        return
    stream = side_stream(device, "prefetch")
    while True:
        with torch.cuda.stream(stream):
            batch = next(batches, None)
        if batch is None:
            return
        torch.cuda.current_stream().wait_stream(stream)
        for tensor in batch:
            tensor.record_stream(torch.cuda.current_stream())  # else its memory could be reused during the step
        yield batch


def training_size(config: RecipeConfig, epoch: int) -> int | None:
    """Side in pixels of the training images in `epoch`, counted from 0; None: full size."""
    return next((size for size, end in config.progressive_image_sizes if epoch < round(end * config.max_epochs)), None)


def resize(images: Tensor, size: int | None) -> Tensor:
    """Resize images [N, 3, H, W] to [N, 3, size, size] with antialiasing, in the same memory format."""
    if size is None:
        return images
    return nn.functional.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
