"""What a machine can do at most, measured in a moment: multiplications, memory, copies to the device, disk."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

SECONDS = 0.3  # of each measurement, after its warm-up


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def repeat(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the mean over at least SECONDS; the first calls, which allocate and choose, do not count."""
    for _ in range(2):
        action()
    synchronize(device)
    calls, started = 0, time.perf_counter()
    while True:
        for _ in range(4):
            action()
        synchronize(device)
        calls += 4
        elapsed = time.perf_counter() - started
        if elapsed >= SECONDS:
            return elapsed / calls


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second (a multiplication and an addition count as two) of a large matrix product."""
    size = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / repeat(lambda: left @ right, device)


def memory_rate(device: torch.device) -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**25, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / repeat(lambda: target.copy_(source), device)


def host_to_device_rate(device: torch.device) -> float:
    """Bytes per second from pinned memory of the host to a GPU."""
    source = torch.zeros(2**26, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=device)
    return source.numel() / repeat(lambda: target.copy_(source, non_blocking=True), device)


def write_rate(folder: Path, size: int = 2**26) -> float:
    """Bytes per second of writing a file of `size` bytes in `folder` to the disk; OSError where it cannot be."""
    path = folder / f".write-speed-{os.getpid()}"
    block = os.urandom(2**20)
    try:
        started = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(max(1, size // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return size / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)
