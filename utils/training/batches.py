"""An epoch's batches on their way to the step: prefetched, watched, mixed, resized."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from utils.data.loader import Loader
from utils.timing.profiler import Profiler
from utils.training.checks.stragglers import StepWatch
from utils.training.config import RecipeConfig, SpeedConfig, TrainingConfig

Batch = tuple[Tensor, Tensor]  # images [N, 3, H, W] and labels [N], or shares of the classes [N, classes]
Mix = Callable[[Tensor, Tensor, int, int], Batch]  # (images, labels, epoch, batch) -> mixed ones


class TrainingBatches:
    """The batches of a training loader, as the step takes them."""

    def __init__(
        self,
        config: TrainingConfig,
        loader: Loader,
        mix: Mix,
        watch: StepWatch,
        profiler: Profiler,
        device: torch.device,
    ) -> None:
        self.config, self.loader, self.mix = config, loader, mix
        self.watch, self.profiler, self.device = watch, profiler, device

    def __len__(self) -> int:
        return len(self.loader)

    def rest_of_epoch(self, epoch: int, first_batch: int) -> Iterator[tuple[int, Batch]]:
        """(number, batch) from `first_batch` on; PROF: the range of an iteration holds what is done with its batch."""
        self.loader.set_epoch(epoch, first_batch)
        size = training_size(self.config, epoch)
        batches = self.watch.batches(prefetch(self.config, iter(self.loader), self.device))
        for number in range(first_batch, len(self.loader)):
            with self.profiler.range(f"iteration {number}"):
                with self.profiler.range("data"):
                    images, labels = self.mix(*next(batches), epoch, number)
                    images = resize(images, size)
                yield number, (images, labels)


def prefetch(config: SpeedConfig, batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """PREFETCH: the next batch is copied and augmented on a side stream while the device trains on the present one.

    On a CPU there is nothing to overlap with: the batches come as they are.
    """
    if config.enable_prefetch is False or device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)
    while True:
        with torch.cuda.stream(stream):
            batch = next(batches, None)
        if batch is None:
            return
        torch.cuda.current_stream().wait_stream(stream)
        for tensor in batch:
            tensor.record_stream(torch.cuda.current_stream())  # else its memory could be given away during the step
        yield batch


def training_size(config: RecipeConfig, epoch: int) -> int | None:
    """The side in pixels that images are resized to in `epoch` (counted from 0); None: as they are."""
    for size, share in zip(config.progressive_image_sizes, config.progressive_image_shares, strict=True):
        if epoch < round(share * config.max_epochs):
            return size
    return None


def resize(images: Tensor, size: int | None) -> Tensor:
    """Images [N, 3, H, W] -> [N, 3, size, size], smoothed as far as they shrink, in the same memory format."""
    if size is None:
        return images
    return nn.functional.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
