"""A solution of exercises/averaging.py."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> None:
    buckets: list[list[torch.Tensor]] = [[]]
    filled = 0
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        size = gradient.numel() * gradient.element_size()
        if buckets[-1] and filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(gradient)
        filled += size
    for bucket in buckets:
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, mean in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))
