"""A process's rank, world size, device and collectives.

ranks.py starts and ends the ranks. Everything here works with one process and no process group, too.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.errors import ConfigError, ExpectedError

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
                error, raised.rank = raised, self.rank
        if (error := self.broadcast(error)) is not None:
            raise error
        return result

    def main_first(self, action: Callable[[], T]) -> T:
        """Collective: run `action` on the main process, then on the others."""
        result = self.main_only(action)
        return action() if result is None else result

    def average_buffers(self, model: nn.Module) -> None:
        """Collective: average every floating-point buffer (BatchNorm's statistics) over the ranks, in place."""
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        if self.world_size > 1 and buffers:
            flat = self.all_reduce(torch.cat([buffer.flatten() for buffer in buffers])) / self.world_size
            for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(mean.view_as(buffer))


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


def pin_near_gpu(world: World) -> list[str]:
    """Pin this process and its loader workers to the cores nearest its GPU; return lines for the log."""
    if world.world_size == 1 or world.device.type != "cuda":
        return []
    gpu: Any = torch.cuda.get_device_properties(world.device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    cores = cores_near(address) & os.sched_getaffinity(0)
    if not cores:
        return [f"the kernel lists no usable cores near GPU {address}; processes are not pinned"]
    os.sched_setaffinity(0, cores)
    return [f"rank {world.rank} is pinned to the {len(cores)} cores nearest GPU {address}"]


def cores_near(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Return the processor cores near a PCI device; empty if the kernel does not list them."""
    try:
        text = (devices / pci_address / "local_cpulist").read_text(encoding="ascii").strip()
    except OSError:
        return set()
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
