"""Batches on their way to the step."""

from collections.abc import Iterator

import torch
from torch import Tensor

from utils.config import Config

Batch = tuple[Tensor, Tensor]


def prefetch(config: Config, batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
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
