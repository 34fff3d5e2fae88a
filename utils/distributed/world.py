"""A process's rank, world size, device and collectives, and its part of a global batch.

ranks.py starts and ends the ranks. Everything here works with one process and no process group, too.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from utils.errors import ConfigError, ExpectedError
from utils.quotas import cpu_quota

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all ranks. Collective methods must be called by every rank."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def barrier(self) -> None:
        """Collective: wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Collective: sum `tensor` over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value: T) -> T:
        """Collective: return rank 0's `value`, a plain picklable object, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def all_gather(self, value: T) -> list[T]:
        """Collective: return every rank's `value`, a plain picklable object, in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[T] = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def main_only(self, action: Callable[[], T]) -> T | None:
        """Collective: run `action` on the main process while the others wait; all raise its `ExpectedError`."""
        result, error = None, None
        if self.is_main:
            try:
                result = action()
            except ExpectedError as raised:
                error = raised
                error.rank = self.rank
        if (error := self.broadcast(error)) is not None:
            raise error
        return result

    def count_cores(self) -> float:
        """Collective: return this rank's number of cores: its part of those it may use, and of its node's CPU quota."""
        places = self.all_gather((socket.gethostname(), sorted(os.sched_getaffinity(0))))
        node, cores = places[self.rank]
        sharing, on_node = places.count((node, cores)), [host for host, _ in places].count(node)
        return min(len(cores) / sharing, cpu_quota() / on_node)

    def average(self, tensors: list[Tensor]) -> None:
        """Collective: average the tensors over the ranks, in place."""
        if self.world_size > 1 and tensors:
            flat = self.all_reduce(torch.cat([tensor.flatten() for tensor in tensors])) / self.world_size
            for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(mean.view_as(tensor))


def choose_device(device: str, local_rank: int) -> torch.device:
    """Return the device of this process; `device` is auto, cpu or cuda."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("device: cuda was asked for, but PyTorch finds no usable GPU; use device: auto or cpu")
    if device == "cpu" or not available:
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        return torch.device("cuda", 0)  # with srun --gpus-per-task=1, each process sees only its own GPU
    if local_rank >= gpus:
        raise ConfigError(f"rank {local_rank} of this node has no GPU: {gpus} here; start one process per GPU")
    return torch.device("cuda", local_rank)


@dataclass(frozen=True)
class GlobalBatch:
    """batch_size = world_size x accumulation x micro_batch_size."""

    batch_size: int
    world_size: int
    accumulation: int
    micro_batch_size: int

    def __str__(self) -> str:
        parts = f"{self.world_size} rank(s) x {self.accumulation} accumulated x {self.micro_batch_size} images"
        return f"{self.batch_size} = {parts}"


def divide_batch(batch_size: int, world_size: int, micro_batch_size: int | None) -> GlobalBatch:
    """Split the global batch exactly; raise `ConfigError` if there is a remainder."""
    rank_batch_size, remainder = divmod(batch_size, world_size)
    if remainder or not rank_batch_size:
        nearest = max(1, round(batch_size / world_size)) * world_size
        remedy = f"use a multiple of {world_size}, for example {nearest}"
        raise ConfigError(f"batch_size {batch_size} cannot be split evenly over {world_size} ranks; {remedy}")
    micro = rank_batch_size if micro_batch_size is None else min(micro_batch_size, rank_batch_size)
    if rank_batch_size % micro:
        images = f"the {rank_batch_size} images of each of {world_size} ranks (batch_size {batch_size})"
        raise ConfigError(f"micro_batch_size {micro} does not divide {images}; use a divisor of {rank_batch_size}")
    return GlobalBatch(batch_size, world_size, rank_batch_size // micro, micro)
