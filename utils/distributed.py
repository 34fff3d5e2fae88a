"""Where this process stands among the others: rank, world size, device; start-up, clean-up, collectives.

Every function here works with one process and no process group, so that callers need no second path.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.errors import ConfigError, ExpectedError

T = TypeVar("T")

# How launchers tell a process its place: (rank, world size, rank on this node), the first complete row counts.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
START_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Distributed:
    """This process's place. Collective methods must be called by every rank."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """The one process that writes files and to the screen."""
        return self.rank == 0

    def barrier(self) -> None:
        """Collective: wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier()

    def sum(self, tensor: Tensor) -> Tensor:
        """Collective: `tensor` summed over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value: T) -> T:
        """Collective: rank 0's `value`, a plain picklable object, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Collective: every rank's `value`, a plain picklable object, in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[T] = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def main_only(self, action: Callable[[], T]) -> T | None:
        """Collective: `action` on the main process while the others wait; its `ExpectedError` is raised on all."""
        result, error = None, None
        if self.is_main:
            try:
                result = action()
            except ExpectedError as raised:
                error = raised
        error = self.broadcast(error)
        if error is not None:
            raise error
        return result

    def main_first(self, action: Callable[[], T]) -> T:
        """Collective: `action` on the main process, then on the others."""
        result = self.main_only(action)
        return action() if result is None else result

    def average_buffers(self, model: nn.Module) -> None:
        """Collective: the mean over the ranks of every floating-point buffer, in place: BatchNorm's statistics, of
        which each rank has seen its own share."""
        if self.world_size > 1:
            buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
            flat = self.sum(torch.cat([buffer.flatten() for buffer in buffers])) / self.world_size
            for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(mean.view_as(buffer))


def find_place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world size, local rank) from the launcher's variables; (0, 1, 0) when started by plain python."""
    for launcher, names in LAUNCHERS.items():
        rank, world_size, local_rank = (environment.get(name) for name in names)
        # srun's variables are also set in an interactive allocation's shell, where only a step has a SLURM_STEP_ID
        if launcher == "srun" and "SLURM_STEP_ID" not in environment:
            continue
        if rank is not None and world_size is not None:
            return int(rank), int(world_size), int(local_rank or 0)
    if environment.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']} but RANK is not set; start with torchrun, or unset WORLD_SIZE"
        )
    return 0, 1, 0


@contextmanager
def process_group(device: str) -> Iterator[Distributed]:
    """Join the other processes, if any, for the length of a `with` block; NCCL on GPUs, gloo on CPUs."""
    rank, world_size, local_rank = find_place(os.environ)
    place = Distributed(rank, local_rank, world_size, _choose_device(device, local_rank))
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    if world_size == 1:
        yield place
        return
    backend = "cpu:gloo,cuda:nccl" if place.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=START_TIMEOUT)
    try:
        yield place
    finally:
        dist.destroy_process_group()


def _choose_device(device: str, local_rank: int) -> torch.device:
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("device: cuda was asked for, but PyTorch finds no usable GPU; use device: auto or cpu")
    if device == "cpu" or not available:
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local_rank} of this node has no GPU: {torch.cuda.device_count()} here; start one process per GPU"
        )
    return torch.device("cuda", local_rank)


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is shared: batch_size = world_size x accumulation x micro_batch_size."""

    batch_size: int
    world_size: int
    accumulation: int
    micro_batch_size: int

    @property
    def rank_batch_size(self) -> int:
        """Images of one rank in one optimizer step."""
        return self.accumulation * self.micro_batch_size

    def __str__(self) -> str:
        parts = f"{self.world_size} rank(s) x {self.accumulation} accumulated x {self.micro_batch_size} images"
        return f"{self.batch_size} = {parts}"


def split_batch(batch_size: int, world_size: int, micro_batch_size: int | None) -> BatchSplit:
    """The exact split of the global batch; `ConfigError` where there would be a remainder."""
    rank_batch_size, remainder = divmod(batch_size, world_size)
    if remainder or not rank_batch_size:
        raise ConfigError(
            f"batch_size {batch_size} cannot be split evenly over {world_size} ranks; "
            f"use a multiple of {world_size}, for example {max(1, round(batch_size / world_size)) * world_size}"
        )
    micro = rank_batch_size if micro_batch_size is None else min(micro_batch_size, rank_batch_size)
    if rank_batch_size % micro:
        raise ConfigError(
            f"micro_batch_size {micro} does not divide the {rank_batch_size} images of each of {world_size} ranks "
            f"(batch_size {batch_size}); use a divisor of {rank_batch_size}"
        )
    return BatchSplit(batch_size, world_size, rank_batch_size // micro, micro)
