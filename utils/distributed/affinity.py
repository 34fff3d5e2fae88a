"""Processor cores near a GPU."""

import os
from pathlib import Path
from typing import Any

import torch

from utils.distributed.world import World


def pin_near_gpu(world: World) -> list[str]:
    """Pin this process and its loader workers to the cores nearest its GPU; returns lines for the log."""
    if world.world_size == 1 or world.device.type != "cuda":
        return []
    gpu: Any = torch.cuda.get_device_properties(world.device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    cores = cores_near(address) & os.sched_getaffinity(0)
    if not cores:
        return [f"the kernel names no usable cores near GPU {address}; left as is"]
    os.sched_setaffinity(0, cores)
    return [f"rank {world.rank} is pinned to the {len(cores)} cores nearest GPU {address}"]


def cores_near(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Processor cores on the socket of a PCI device; empty where the kernel does not name them."""
    try:
        text = (devices / pci_address / "local_cpulist").read_text(encoding="ascii").strip()
    except OSError:
        return set()
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
